"""Runs of a small config with its batch split in different ways, compared with the run that does not split it."""

import contextlib
import gzip
import io
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from maxtext_lite.analysis.shrunk import DEVICES, WHOLE, Split, settings, shrunk, splits
from maxtext_lite.batching import make_plan
from maxtext_lite.config import Config, UserError, load_config, packaged_file

TOLERANCE = 1e-5
"""Relative, of losses, norms and each parameter array."""
_SGD = {"optimizer": "sgd", "sgd_momentum": 0.9, "learning_rate": 0.1, "weight_decay": 0.1}
"""Its parameters can be compared; AdamW turns the rounding of gradients near 0 into whole steps."""
_WHOLE_RUN = "0"  # the name of the run whose batch is not split
_OWN_TOO = ("ZeRO-1", "resumed", "fsdp 8", "gpipe")  # splits that shard or restore the optimizer's state

# Less optimization of machine code only: half the compile time, and the same collectives.
_QUICK = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")


@dataclass(frozen=True)
class Verdict:
    """A split of the batch compared with the whole batch.

    Attributes:
      optimizer: "sgd", whose parameters are compared too, or the config's own.
      refused: why the config does not allow the split; "" where it does.
      difference: the first difference, as a text; "" without one.
      loss: the largest relative difference of a step's loss; None if the split was not run.
      parameters: the largest relative difference of a parameter array after the last step, in 2-norm; None if they were
        not compared.
    """

    split: str
    optimizer: str
    refused: str = ""
    difference: str = ""
    loss: float | None = None
    parameters: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        return not self.difference


def verdicts(path: str | None, overrides: Sequence[str], directory: Path) -> Iterator[Verdict]:
    """Runs a shrunk config on simulated devices, whole and split; yields the verdict of each split once it has run.

    Args:
      directory: for the runs.
    Raises:
      UserError: the config is wrong, cannot be shrunk, or does not run with its batch whole.
    """
    config = load_config(path, overrides)
    small = shrunk(config)
    if small.get("dataset_type") == "text":
        small["dataset_path"] = str(_ragged_text(directory))
    found = splits(config)
    yield from _compared(path, overrides, config, small | _SGD, found, directory / "sgd", "sgd")
    own = [split for split in found if any(part in split.name for part in _OWN_TOO)]
    if config.optimizer != "sgd" and own:
        yield from _compared(path, overrides, config, small, own, directory / "own", config.optimizer)


def _ragged_text(directory: Path) -> Path:
    """The shipped text with every third paragraph split into words. Rows of whole plays would have equally many
    targets, and a mean of means would equal the mean."""
    packaged, path = packaged_file("assets", "shakespeare.jsonl.gz"), directory / "ragged.jsonl"
    assert packaged is not None
    with gzip.open(packaged, "rt", encoding="utf-8") as plays:
        paragraphs = json.loads(plays.readline())["text"].split("\n\n")
    texts = [text for i, each in enumerate(paragraphs) for text in (each.split() if i % 3 == 1 else [each])]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def _compared(
    path: str | None,
    overrides: Sequence[str],
    config: Config,
    keys: dict[str, object],
    ways: Sequence[Split],
    directory: Path,
    optimizer: str,
) -> Iterator[Verdict]:
    runs: dict[int, list[_Run]] = {1: [], DEVICES: []}
    for number, split in enumerate([WHOLE, *ways]):
        own = {**keys, **split.keys(config), "base_output_directory": str(directory), "run_name": str(number)}
        words = [*overrides, *settings(config, own)]
        try:
            make_plan(load_config(path, words), num_devices=split.devices, platform="cpu")
        except UserError as error:
            if split is WHOLE:
                raise
            yield Verdict(split.name, optimizer, refused=error.problems[0])
            continue
        runs[split.devices].append(_Run(str(number), words, split.restarts))
    for devices, each in runs.items():
        for name in _run_on(devices, path, each, directory):
            if name != _WHOLE_RUN:
                yield _verdict(ways[int(name) - 1].name, optimizer, directory, name)
            elif why := _failure(directory / name):
                raise UserError(f"the shrunk config does not run with its batch whole: {why}")


class _Run(NamedTuple):
    """A run to train: its name, its key=value words, and whether it is stopped and started again."""

    name: str
    words: list[str]
    restarts: bool


def _run_on(devices: int, path: str | None, runs: Sequence[_Run], directory: Path) -> Iterator[str]:
    """Trains in a process of its own that simulates this many devices; yields the name of each run once it has ended.

    The process ends with this one, and with the iterator.
    """
    before = {name: os.environ.get(name) for name in ("XLA_FLAGS", "JAX_PLATFORMS")}
    flags = [flag for flag in (before["XLA_FLAGS"] or "").split() if "host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*flags, *_QUICK, f"--xla_force_host_platform_device_count={devices}"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    context = multiprocessing.get_context("spawn")
    ended, ends = context.Pipe(duplex=False)
    process = context.Process(target=_with_parent, args=(_train_all, path, runs, directory, ends))
    try:
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    ends.close()  # the process has its own
    left = [run.name for run in runs]
    try:
        with contextlib.suppress(EOFError):  # the process has ended
            while left:
                yield left.pop(left.index(ended.recv()))
        yield from left
    finally:
        process.kill()
        process.join()


def _train_all(path: str | None, runs: Sequence[_Run], directory: Path, ended: Connection) -> None:
    """Trains each run, in the process that simulates devices; writes an error into the run's failed.txt.

    Args:
      ended: gets the name of each run.
    """
    from maxtext_lite.training.hooks import Callback
    from maxtext_lite.training.loop import train

    class End(Callback):
        """Ends a run after its first step."""

        wants_state = True  # so that no second one is under way

        def after_step(self, step: int, record: Any, state: Any) -> bool:
            return step == 1

    for name, words, restarts in runs:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                if restarts:
                    train(load_config(path, words), callbacks=[End()])
                train(load_config(path, words))
        except Exception as error:  # noqa: BLE001 any error is this split's verdict; the others go on
            (directory / name).mkdir(parents=True, exist_ok=True)
            (directory / name / "failed.txt").write_text(f"{type(error).__name__}: {error}")
        ended.send(name)


def _with_parent(function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function in a child process, which ends when its parent does."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
    function(*arguments)


def _failure(run: Path) -> str:
    """Why a run has no metrics to compare; "" if it has some."""
    failed = run / "failed.txt"
    if failed.exists():
        return failed.read_text().partition("\n")[0]
    return "" if (run / "metrics.jsonl").exists() else "the process ended"


def _verdict(split: str, optimizer: str, directory: Path, name: str) -> Verdict:
    from maxtext_lite.analysis.run_difference import compare_checkpoints, compare_metrics, lines_of

    if why := _failure(directory / name):
        return Verdict(split, optimizer, difference=f"it does not run: {why}")
    runs = directory / _WHOLE_RUN, directory / name
    compared = compare_metrics(runs, TOLERANCE)
    found, (last, last_of_split) = compared.difference, compared.last
    whole, other = (lines_of(run) for run in runs)
    pairs = [(whole[key].get("loss"), other[key].get("loss")) for key in whole.keys() & other.keys()]
    # A loss is null where it is not finite, and 0 in a step without targets.
    loss = max((abs(b - a) / (abs(a) or 1.0) for a, b in pairs if a is not None and b is not None), default=0.0)
    said = ""
    if found is not None:
        field, (first, second) = next(iter(found.fields.items()))
        said = f"step {found.step}: {field} {first} and {second}"
    elif last != last_of_split:
        said = f"the run ends after step {last_of_split}, not {last}"
        return Verdict(split, optimizer, difference=said, loss=loss)
    if optimizer != "sgd":
        return Verdict(split, optimizer, difference=said, loss=loss)
    saved = compare_checkpoints(runs, TOLERANCE)[-1]  # both have saved their last step
    if saved.arrays and not said:
        worst = max(saved.arrays, key=lambda array: saved.arrays[array])
        said = f"{worst} after step {saved.step}: {saved.arrays[worst]:.3g}"
    return Verdict(split, optimizer, difference=said, loss=loss, parameters=saved.largest)
