"""Whether a run depends on how its batch is split: a shrunk config, trained under every split of its batch."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from maxtext_lite.analysis.repeat import repeats_of
from maxtext_lite.analysis.short_runs import SHORT_RUNS
from maxtext_lite.batching import make_plan
from maxtext_lite.config import Config, UserError, load_config
from maxtext_lite.config.errors import setting_text
from maxtext_lite.config.keys import ModelConfig, source_kind
from maxtext_lite.hf.model_directory import config_of_run

DEVICES = 8

_TOKENS, _MOST_TOKENS = 64, 512
_AXES = ("data", "fsdp", "tensor", "context", "expert", "pipeline")


def shrunk(config: Config) -> dict[str, object]:
    """The changes that make a config train in seconds: layers, widths, vocabulary and tokens.

    Ratios of heads, layer patterns, windows as a share of the row, packing, losses, the optimizer and its schedule
    stay. Numbers are float32, which tells sums in another order from wrong sums.

    Raises:
      UserError: the config's result depends on how the batch is split.
    """
    if config.enable_diloco:
        raise UserError(
            "enable_diloco=true: each replica updates its own model, so another split is another run. Nearest that "
            "works: enable_diloco=false."
        )
    pretrains = source_kind(config.dataset_type).data == "text"
    num_tokens = _TOKENS if pretrains else min(config.max_target_length, _MOST_TOKENS)
    share = num_tokens / config.max_target_length
    dense = min(config.first_num_dense_layers, 1)
    rotated = 8 if config.partial_rotary_factor == 1 else 40  # any common share of 40 is an even number
    kv_heads = min(config.base_num_kv_heads, 2)
    changes: dict[str, object] = {
        **SHORT_RUNS["equiv"],
        "max_target_length": num_tokens,
        "base_emb_dim": 32,
        "base_mlp_dim": 64,
        "base_num_decoder_layers": dense + 2 * _period(config),
        "first_num_dense_layers": dense,
        "base_num_kv_heads": kv_heads,
        "base_num_query_heads": config.base_num_query_heads // config.base_num_kv_heads * kv_heads,
        "head_dim": rotated,
        "sliding_window_size": math.ceil(config.sliding_window_size * share),
        "chunk_attn_window_size": math.ceil(config.chunk_attn_window_size * share),
        "trainable_position_size": num_tokens if config.trainable_position_size else 0,
        "mtp_num_layers": min(config.mtp_num_layers, 2),
        "lora_rank": min(config.lora_rank, 4),
        "hidden_size_per_layer_input": min(config.hidden_size_per_layer_input, 8),
    }
    changes |= repeats_of(config).small_keys(config)
    if config.num_vocab_tiling > 1:
        changes["num_vocab_tiling"] = math.gcd(num_tokens, 4)
    if not pretrains and num_tokens < config.max_target_length:
        changes["long_examples"] = "truncate"
    if "offload" in config.remat_policy or config.remat_policy == "custom":
        changes |= {"remat_policy": "full", "remat_save": "", "remat_offload": ""}
    if config.mla:
        latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
        changes["mla"] = {"q_lora_rank": 16 if config.mla.q_lora_rank else 0, **latent}
        changes["head_dim"] = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
    if config.global_attention:
        own = config.global_attention.to_mapping()
        heads = kv_heads * (config.base_num_query_heads // config.base_num_kv_heads)
        if "global_num_query_heads" in own:
            own["global_num_query_heads"] = heads
        own["global_num_kv_heads"] = math.gcd(2, config.global_attention.global_num_kv_heads, heads)
        own["global_head_dim"] = 40 if "global_partial_rotary_factor" in own else 12
        changes["global_attention"] = own
    if config.shared_kv:
        changes["shared_kv"] = config.shared_kv.to_mapping() | {"num_kv_shared_layers": _period(config)}
    if config.rope_scaling and config.rope_scaling.short_factor:
        planes = 2 if config.mla else int(rotated * config.partial_rotary_factor) // 2
        changes["rope_scaling"] = _fewer_planes(config.rope_scaling.to_mapping(), planes)
    if config.num_experts > 1:
        groups = 2 if config.n_routing_groups > 1 else 1
        changes |= {
            "num_experts": min(config.num_experts, 8),
            "num_experts_per_tok": min(config.num_experts_per_tok, 2),
            "mlp_pattern": ",".join(_mlp_kinds(config)),
            "base_moe_mlp_dim": 16,
            "base_shared_mlp_dim": 24 if config.base_shared_mlp_dim > 0 else -1,
            "n_routing_groups": groups,
            "topk_routing_group": 1 if groups == 1 else min(config.topk_routing_group, groups),
        }
    return changes


def settings(config: Config, changes: Mapping[str, object]) -> list[str]:
    """Changes as `key=value`, after the config's own model, which may come from the files of load_parameters_path."""
    words: list[str] = []
    model = {key: getattr(config, key) for key in ModelConfig.model_fields}
    for key, value in {**model, **changes}.items():
        text = json.dumps(value) if isinstance(value, dict) else setting_text(value)
        words.append(f"{key}={text}")
    return words


def _fewer_planes(scaling: Mapping[str, Any], planes: int) -> dict[str, Any]:
    """A longrope scaling with one factor for each of so many planes, spread over those of the model."""
    fewer = dict(scaling)
    for name in ("short_factor", "long_factor"):
        factors = scaling[name]
        fewer[name] = [factors[len(factors) * plane // planes] for plane in range(planes)]
    return fewer


def _period(config: Config) -> int:
    """The pattern's period in layers; a scaled-down config has two periods, one per stage."""
    return math.lcm(len(config.pattern), len(_mlp_kinds(config)))


def _mlp_kinds(config: Config) -> tuple[str, ...]:
    """The pattern of layers with experts; of one that is written out for all layers, two rounds of layer_pattern."""
    kinds = config.mlp_kinds
    first = kinds[: 2 * len(config.pattern)]
    return first if len(kinds) >= config.base_num_decoder_layers and len({*first}) == len({*kinds}) else kinds


@dataclasses.dataclass(frozen=True)
class Split:
    """A way to split a step's examples.

    Attributes:
      name: its description.
      changes: to keys other than those of the batch.
      accumulation: micro-batches of a step.
      devices: of the whole mesh.
      restarts: the run stops after its first step and resumes from its checkpoint.
    """

    name: str
    changes: Mapping[str, object]
    accumulation: int = 1
    devices: int = DEVICES
    restarts: bool = False

    def keys(self, config: Config) -> dict[str, object]:
        """All changes to a config; every split keeps a step's examples."""
        keys: dict[str, object] = {f"{link}_{axis}_parallelism": 1 for link in ("ici", "dcn") for axis in _AXES}
        keys |= repeats_of(config).batch_keys(config, self.devices, self.accumulation)
        return keys | dict(self.changes)


def _mesh(**axes: int) -> dict[str, object]:
    return {f"ici_{axis}_parallelism": size for axis, size in axes.items()}


WHOLE = Split("one device, one micro-batch", {}, devices=1)
"""The reference for all others."""


def splits(config: Config) -> list[Split]:
    """Ways to split the batch of a shrunk config; the plan may refuse some."""
    found: list[Split] = []
    for way in SHORT_RUNS["splits"]:
        changes = _mesh(**way["mesh"]) | way.get("keys", {})
        if "pipeline" in way["mesh"]:
            changes["num_layers_per_pipeline_stage"] = _period(config)
        if "expert" not in way["mesh"] or config.num_experts > 1:
            restarts = way.get("restarts", False)
            found.append(Split(way["name"], changes, way.get("accumulation", 1), restarts=restarts))
    found += [Split(name, changes, accumulation) for name, changes, accumulation in repeats_of(config).splits(config)]
    own = _own_mesh(config)
    return [*found, Split(f"the config's own axes: {own[0]}", own[1])] if own else found


def _own_mesh(config: Config) -> tuple[str, dict[str, object]] | None:
    """The config's own axes, over its links, with two devices each; the other devices are fsdp."""
    names: list[str] = []
    mesh: dict[str, object] = {}
    left = DEVICES
    for link, axis in itertools.product(("dcn", "ici"), _AXES):
        key = f"{link}_{axis}_parallelism"
        is_own = axis != "pipeline" and key != "ici_fsdp_parallelism" and getattr(config, key) > 1
        if is_own and left > 1:
            names.append(f"{link} {axis} 2")
            mesh[key] = 2
            left //= 2
    return (" x ".join(names), mesh | {"ici_fsdp_parallelism": left}) if names else None


TOLERANCE = 1e-5
"""Relative, of losses, norms and each parameter array."""
_PLACES = ("dataset_path", "tokenizer_path", "chat_template")
"""Keys whose files may have moved with a run directory."""
_FROZEN = "frozen"
"""In the directory of all runs: what they share."""
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


def compare_splits(
    path: str | None, overrides: Sequence[str], directory: Path, say: Callable[[str], None]
) -> Iterator[Verdict]:
    """Runs a shrunk config on simulated devices, whole and split; yields the verdict of each split once it has run.

    Args:
      path: of a config, or of a run directory, whose recorded batches are used.
      directory: for the runs.
      say: takes a note on what they train on.
    Raises:
      UserError: the config is wrong, cannot be shrunk, or does not run with its batch whole.
    """
    run = Path(path) if path is not None and Path(path).is_dir() else None
    moved: dict[str, object] = {}
    if run is None:
        config = load_config(path, overrides)
    else:
        path = str(run / "config.yml")
        stated = load_config(path, overrides)
        config = config_of_run(run, overrides)
        moved = {key: getattr(config, key) for key in _PLACES if getattr(config, key) != getattr(stated, key)}
    frozen = directory / _FROZEN
    frozen.mkdir()
    keys, note = repeats_of(config).freeze(config, run, frozen)
    if note:
        say(note)
    small = shrunk(config) | moved | dict(keys)
    found = splits(config)
    yield from _compared(path, overrides, config, small | SHORT_RUNS["sgd"], found, directory / "sgd", "sgd")
    own = [split for split in found if any(part in split.name for part in _OWN_TOO)]
    if config.optimizer != "sgd" and own:
        yield from _compared(path, overrides, config, small, own, directory / "own", config.optimizer)


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
            elif difference := repeats_of(config).difference(directory.parent / _FROZEN, directory / name):
                yield Verdict(WHOLE.name, optimizer, difference=f"not as recorded: {difference}")


class _Run(NamedTuple):
    """A run to train: its name, its key=value words, and whether it is stopped and started again."""

    name: str
    words: list[str]
    restarts: bool


def _run_on(devices: int, path: str | None, runs: Sequence[_Run], directory: Path) -> Iterator[str]:
    """Trains in a new process with this many simulated devices; yields each run's name when it has ended.

    The process ends with the iterator; without its parent, at the end of a run.
    """
    context = multiprocessing.get_context("spawn")
    ended, ends = context.Pipe(duplex=False)
    process = context.Process(target=_train_all, args=(devices, path, runs, directory, ends), daemon=True)
    process.start()
    ends.close()  # the process has its own
    left = [run.name for run in runs]
    try:
        with contextlib.suppress(EOFError):  # the process has ended
            while left:
                name = ended.recv()
                left.remove(name)
                yield name
        yield from left
    finally:
        process.kill()
        process.join()


def _train_all(devices: int, path: str | None, runs: Sequence[_Run], directory: Path, ended: Connection) -> None:
    """Trains each run in a process whose jax has not started, with that many simulated devices; writes an error into
    the run's failed.txt.

    Args:
      ended: gets the name of each run.
    """
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*flags, *_QUICK, f"--xla_force_host_platform_device_count={devices}"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    from maxtext_lite.training.hooks import Callback

    class End(Callback):
        """Ends a run after its first step."""

        wants_state = True  # the second step is then not dispatched yet

        def after_step(self, step: int, record: Any, state: Any) -> bool:
            return step == 1

    for run in runs:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                config = load_config(path, run.words)
                for callbacks in [[End()]] * run.restarts + [[]]:
                    repeats_of(config).train(config, directory.parent / _FROZEN, callbacks)
        except Exception as error:  # noqa: BLE001 any error is this split's verdict; the others continue
            (directory / run.name).mkdir(parents=True, exist_ok=True)
            (directory / run.name / "failed.txt").write_text(f"{type(error).__name__}: {error}")
        ended.send(run.name)


def _failure(run: Path) -> str:
    """Why a run has no metrics to compare; "" if it has some."""
    failed = run / "failed.txt"
    if failed.exists():
        return failed.read_text().partition("\n")[0]
    return "" if (run / "metrics.jsonl").exists() else "the process ended"


def _verdict(split: str, optimizer: str, directory: Path, name: str) -> Verdict:
    from maxtext_lite.analysis.replay import (
        compare_checkpoints,
        compare_metrics,
        compare_recorded,
        is_around_0,
        lines_of,
    )

    failure = _failure(directory / name)
    if failure:
        return Verdict(split, optimizer, difference=f"it does not run: {failure}")
    runs = (directory / _WHOLE_RUN, directory / name)
    whole, other = (lines_of(run) for run in runs)
    largest = 0.0
    for key in whole.keys() & other.keys():
        expected, loss = whole[key].get("loss"), other[key].get("loss")
        if expected is not None and loss is not None:  # null where it is not finite
            size = 1.0 if is_around_0("loss", whole[key]) else abs(expected) or 1.0  # 0 in a step without targets
            largest = max(largest, abs(loss - expected) / size)
    compared = compare_metrics(runs, TOLERANCE)
    last, last_of_split = compared.last
    difference = ""
    if compared.difference is not None:
        field, (first, second) = next(iter(compared.difference.fields.items()))
        difference = f"step {compared.difference.step}: {field} {first} and {second}"
    elif last != last_of_split:
        return Verdict(split, optimizer, "", f"the run ends after step {last_of_split}, not {last}", largest)
    difference = compare_recorded(runs, TOLERANCE) or difference
    if optimizer != "sgd":
        return Verdict(split, optimizer, "", difference, largest)
    saved = compare_checkpoints(runs, TOLERANCE)[-1]  # both have saved their last step
    if saved.arrays and not difference:
        array = max(saved.arrays, key=lambda name: saved.arrays[name])
        difference = f"{array} after step {saved.step}: {saved.arrays[array]:.3g}"
    return Verdict(split, optimizer, "", difference, largest, saved.largest)
