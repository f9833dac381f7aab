"""Times a batch of reinforcement learning with rollout and training one after the other, and beside each other.

    python scripts/bench_overlap.py                          8 simulated devices, where there is no accelerator
    python scripts/bench_overlap.py --chunks 8 --sampling-ms 300

Prints a table in Markdown. Each row is a way to run the same batches of `maxtext_lite.train_rl`, read from its
metrics.jsonl: `in turns` has all devices sample and then train; `one after the other` has half of the devices sample
and the other half train, and neither begins a chunk while the other is at one; `beside each other` is what train_rl
does with devices apart. The ways take turns, a whole run each, `--repeats` times; the first steps of a run, which
compile, are left out.

Simulated devices share the cores of the CPU, so that what runs beside each other there also takes from each other.
`--sampling-ms` adds a wait to the sampling of each chunk, in which those cores are free: what a rollout on other
hardware takes. Key=value arguments are those of train_rl.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

LEFT_OUT = 2  # steps of a run that compile and fill caches

RUN = (
    "dataset_type=arithmetic", "learning_rate=1e-4", "learning_rate_schedule=constant", "enable_checkpointing=false",
    "eval_interval=-1", "num_generations=4", "rollout_engine=local", "log_period=1000000",
)  # fmt: skip
APART = ("trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5")


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run a batch.

    Attributes:
      beside: sampling and training may run at the same time.
    """

    name: str
    keys: tuple[str, ...]
    beside: bool


WAYS = (
    Way("in turns", (), False),
    Way("one after the other", APART, False),
    Way("beside each other", APART, True),
)


def steps_of(way: Way, overrides: Sequence[str], sampling_seconds: float) -> list[dict[str, Any]]:
    """The steps of a run, without those that compile."""
    from maxtext_lite.config import load_config
    from maxtext_lite.post_training.keys import RLRunConfig
    from maxtext_lite.post_training.rollout_steps import train_rl

    with (
        tempfile.TemporaryDirectory() as directory,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        _sampled_elsewhere(sampling_seconds),
        _one_after_the_other(not way.beside),
    ):
        words = [*RUN, *way.keys, *overrides, f"base_output_directory={directory}"]
        config = load_config("configs/post_train/rl.yml", words)
        assert isinstance(config, RLRunConfig)
        result = train_rl(config)
        lines = (result.run_directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][LEFT_OUT:]


@contextlib.contextmanager
def _sampled_elsewhere(seconds: float) -> Iterator[None]:
    """Adds a wait to each call of the sampler."""
    from maxtext_lite.post_training.rollout import LocalEngine

    generate = LocalEngine.generate

    def slower(self: Any, *arguments: Any, **how: Any) -> Any:
        time.sleep(seconds)
        return generate(self, *arguments, **how)

    with mock.patch.object(LocalEngine, "generate", slower):
        yield


@contextlib.contextmanager
def _one_after_the_other(serial: bool) -> Iterator[None]:
    from maxtext_lite.post_training.rollout_steps import RolloutSteps

    made = RolloutSteps.__init__

    def make(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self.samples_beside = self.samples_beside and not serial

    with mock.patch.object(RolloutSteps, "__init__", make):
        yield


def row(way: Way, runs: Sequence[Sequence[dict[str, Any]]], serial: Sequence[float], predicted: float) -> list[str]:
    """One row of the table: medians over runs of the medians of their steps."""
    seconds = medians(runs, "step_seconds")
    ratios = [mine / theirs for mine, theirs in zip(seconds, serial, strict=True)]
    return [
        way.name,
        *(f"{1e3 * statistics.median(medians(runs, f'{name}_seconds')):,.0f}" for name in ("rollout", "train")),
        f"{1e3 * statistics.median(seconds):,.0f} ({1e3 * min(seconds):,.0f} .. {1e3 * max(seconds):,.0f})",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})",
        f"{predicted:.2f}",
        f"{statistics.median(medians(runs, 'overlap_fraction')):.2f}",
    ]


def medians(runs: Sequence[Sequence[dict[str, Any]]], metric: str) -> list[float]:
    """The median over the steps of each run."""
    return [statistics.median(step[metric] for step in steps) for steps in runs]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows))


def main() -> None:
    """Runs the bench and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches of a batch")
    parser.add_argument("--prompts", type=int, default=32, help="of a batch, with 4 responses each")
    parser.add_argument("--steps", type=int, default=8, help="of a run, without the first two")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way")
    parser.add_argument("--sampling-ms", type=float, default=0, help="a wait added to the sampling of each chunk")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={arguments.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

    from machine import machine

    from maxtext_lite.parallel import start_devices

    start_devices()
    pairs = 4 * arguments.prompts
    words = [f"batch_size={arguments.prompts}", f"micro_batch_size={pairs // arguments.chunks}",
             f"steps={arguments.steps + LEFT_OUT}", *arguments.overrides]  # fmt: skip
    runs: dict[Way, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    for _ in range(arguments.repeats):
        for way in WAYS:
            runs[way].append(steps_of(way, words, arguments.sampling_ms / 1e3))
    print(machine())
    print(f"\n{pairs} pairs in {arguments.chunks} chunks; a wait of {arguments.sampling_ms:g} ms in each rollout:\n")
    serial = medians(runs[WAYS[1]], "step_seconds")
    predicted = (arguments.chunks - 1) / arguments.chunks
    head = ("way", "rollout, ms", "training, ms", "whole step, ms", "of one after the other", "overlap planned",
            "overlap")  # fmt: skip
    print(table(head, [row(way, runs[way], serial, predicted if way.beside else 0) for way in WAYS]))


if __name__ == "__main__":
    main()
