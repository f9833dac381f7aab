"""Times the train step over the splits of one global batch, over the accumulation, and with and without noise scale.

    python scripts/bench_accumulation.py                      the default model on one device
    python scripts/bench_accumulation.py --devices 8          on 8 simulated devices where there is no accelerator
    python scripts/bench_accumulation.py --devices 2 --stages 2     the same batch through a pipeline
    python scripts/bench_accumulation.py --global-batch 64 --micro-batch 4 model_name=tinyllama-1.1b \\
        max_target_length=2048 dtype=bfloat16 remat_policy=minimal num_vocab_tiling=8       on an accelerator

Prints three tables in Markdown. Key=value arguments are those of `maxtext_lite.train`. Variants take turns within one
run, with compilation done before: in each round every variant trains the same number of examples, forwards in even
rounds and backwards in odd ones, and ratios are taken within a round, so that a slow minute of the machine falls on
all of them. The cost of the noise scale is that of the norms of the groups' gradients, found in two ways: a step with
them over the same step compiled without them, in alternation, in wall-clock and in CPU time (which others on the
machine disturb less); and the norms by themselves, once for each micro-batch, over a step without them. The latter is
the upper bound, since within a step they share the reading of the gradients.

With --stages S, the first table is over micro-batches, pipeline microbatches and both schedules on S stages.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np

from maxtext_lite.config.errors import number_text

RUN = ("dataset_type=synthetic", "learning_rate=1e-4", "enable_checkpointing=false", "eval_interval=-1")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a step.

    Attributes:
      norms: whether the step computes the norms that the noise scale is derived from.
      microbatches: pipeline microbatches of a micro-batch; 0: as many as stages.
    """

    per_device_batch_size: Fraction
    accumulation: int
    norms: bool = True
    microbatches: int = 0
    schedule: str = "gpipe"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A compiled variant.

    Attributes:
      run: runs one step and waits for it.
      norms: computes the norms of one micro-batch's gradients, and waits for them.
      examples: of a step.
      memory: by the compiler's own analysis, in bytes per device.
    """

    run: Callable[[], None]
    norms: Callable[[], None]
    examples: int
    memory: Any


def subjects(variants: Sequence[Variant], num_devices: int, overrides: Sequence[str]) -> dict[Variant, Subject]:
    """The train step of each variant, compiled; they share one state, because its layout is the same for all."""
    import jax

    from maxtext_lite import make_plan
    from maxtext_lite.config import load_config
    from maxtext_lite.parallel import sharding
    from maxtext_lite.training.optimizer import learning_rate_schedule
    from maxtext_lite.training.state import init_state, make_parts
    from maxtext_lite.training.step import TRAIN_BATCH_AXES, make_train_step

    holder: list[Any] = []
    found = {}
    for variant in variants:
        config = load_config(
            None,
            [
                *RUN,
                *overrides,
                f"per_device_batch_size={number_text(variant.per_device_batch_size)}",
                f"gradient_accumulation_steps={variant.accumulation}",
                f"num_pipeline_microbatches={variant.microbatches or -1}",
                f"pipeline_schedule={variant.schedule}",
            ],
        )
        plan = make_plan(config, num_devices=num_devices)
        parts = make_parts(config, plan, jax.devices()[:num_devices])
        mesh = parts.mesh
        if not holder:
            holder.append(init_state(parts, 0))
        batch = {
            name: jax.device_put(array, sharding(mesh, TRAIN_BATCH_AXES))
            for name, array in _batch(config, plan, variant.accumulation).items()
        }
        schedule = learning_rate_schedule(config, last=config.steps)
        step = make_train_step(parts, schedule)
        with jax.set_mesh(mesh), _norms(variant.norms), jax.default_matmul_precision(config.matmul_precision):
            compiled = step.lower(holder[0], batch, None).compile()
        found[variant] = Subject(
            _runner(compiled, holder, batch),
            _norms_alone(parts.decoder, mesh),
            plan.global_batch_to_train,
            compiled.memory_analysis(),
        )
    return found


def _norms(wanted: bool) -> Any:
    """A patch while a step is traced: it computes the norms of the groups' gradients, or does without them."""
    from maxtext_lite.training import gradients

    add_group = gradients._add_group if wanted else lambda sums, *_: sums
    return mock.patch.object(gradients, "_add_group", add_group)


def _batch(config: Any, plan: Any, accumulation: int) -> dict[str, np.ndarray]:
    """Random tokens in every row; slots that the plan leaves empty are zeros."""
    length = config.max_target_length
    shape = (accumulation, plan.micro_batch_slots, length)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (*shape[:2], length + 1), dtype=np.int32)
    used = np.zeros(shape, np.int32)
    used[:, : plan.micro_batch_to_train] = 1
    return {
        "tokens": tokens[..., :-1] * used,
        "targets": tokens[..., 1:] * used,
        "segments": used,
        "positions": np.arange(length, dtype=np.int32) * used,
        "weights": used.astype(np.float32),
    }


def _runner(compiled: Any, holder: list[Any], batch: Any) -> Callable[[], None]:
    import jax

    def run() -> None:
        holder[0], metrics = compiled(holder[0], batch, None)
        jax.block_until_ready((holder[0], metrics))

    return run


def _norms_alone(decoder: Any, mesh: Any) -> Callable[[], None]:
    import jax
    import jax.numpy as jnp

    from maxtext_lite.parallel import per_replica, sharding

    def ones(weight: Any, axes: Any) -> Any:
        where = per_replica(sharding(mesh, axes))
        return jnp.ones((mesh.shape["data"], *weight.shape), weight.dtype, device=where)

    def squares_R(gradient: Any) -> Any:
        return jnp.sum(jnp.square(gradient.astype(jnp.float32)), axis=tuple(range(1, gradient.ndim)))

    norms = jax.jit(lambda gradients: sum(map(squares_R, jax.tree.leaves(gradients))))
    gradients: list[Any] = []

    def run() -> None:
        if not gradients:
            gradients.append(jax.tree.map(ones, decoder.abstract_params, decoder.axes))
        jax.block_until_ready(norms(gradients[0]))

    return run


def time_in_turns(found: dict[Variant, Subject], repeats: int) -> dict[Variant, list[float]]:
    """Seconds per example of each variant in each round; a turn has as many steps as the largest batch takes."""
    most = max(subject.examples for subject in found.values())
    seconds: dict[Variant, list[float]] = {variant: [] for variant in found}
    for subject in found.values():
        subject.run()
    for round_number in range(repeats):
        for variant in list(found)[:: -1 if round_number % 2 else 1]:
            subject = found[variant]
            steps = max(most // subject.examples, 1)
            started = time.perf_counter()
            for _ in range(steps):
                subject.run()
            seconds[variant].append((time.perf_counter() - started) / (steps * subject.examples))
    return seconds


def norm_costs(with_norms: Subject, without: Subject, accumulation: int, repeats: int) -> dict[str, list[float]]:
    """The cost of the norms in each repeat, in percent of a step without them."""
    turns = {"with": with_norms.run, "without": without.run, "alone": with_norms.norms}
    for turn in turns.values():
        turn()
    costs: dict[str, list[float]] = {"wall-clock time": [], "CPU time": [], "by themselves": []}
    for repeat in range(repeats):
        wall, cpu = {}, {}
        for name in list(turns)[:: -1 if repeat % 2 else 1]:
            started, started_cpu = time.perf_counter(), time.process_time()
            turns[name]()
            wall[name], cpu[name] = time.perf_counter() - started, time.process_time() - started_cpu
        costs["wall-clock time"].append(100 * (wall["with"] / wall["without"] - 1))
        costs["CPU time"].append(100 * (cpu["with"] / cpu["without"] - 1))
        costs["by themselves"].append(100 * accumulation * wall["alone"] / wall["without"])
    return costs


def quartiles(values: Sequence[float], form: str) -> str:
    """Median and, in brackets, the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:{form}} ({low:{form}} .. {high:{form}})"


def ratios(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """The ratio of times measured in the same round."""
    return [a / b for a, b in zip(seconds, base, strict=True)]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows))


def split_table(splits: Sequence[Variant], found: dict[Variant, Subject], seconds: dict, length: int) -> str:
    """Time and memory over the splits of one global batch."""
    rows = []
    for variant in splits:
        subject, times = found[variant], seconds[variant]
        memory = [
            f"{size / 2**20:.1f}" for size in (subject.memory.temp_size_in_bytes, subject.memory.argument_size_in_bytes)
        ]
        rows.append([
            number_text(variant.per_device_batch_size), variant.accumulation,
            variant.microbatches or "-", variant.schedule if variant.microbatches else "-",
            quartiles([1e3 * subject.examples * t for t in times], ".0f"),
            f"{1e6 * statistics.median(times) / length:.2f}",
            quartiles(ratios(times, seconds[splits[0]]), ".3f"), *memory,
        ])  # fmt: skip
    head = (
        "per_device_batch_size",
        "A",
        "pipeline microbatches",
        "schedule",
        "step, ms",
        "us per token",
        "time / first row's",
        "temporaries, MiB per device",
        "arguments, MiB per device",
    )
    return table(head, rows)


def accumulation_table(same: Sequence[Variant], found: dict[Variant, Subject], seconds: dict, length: int) -> str:
    """Time per token as the accumulation grows at one micro-batch."""
    rows = [
        [
            variant.accumulation,
            found[variant].examples,
            quartiles([1e3 * found[variant].examples * t / variant.accumulation for t in seconds[variant]], ".1f"),
            f"{1e6 * statistics.median(seconds[variant]) / length:.2f}",
            quartiles(ratios(seconds[variant], seconds[same[0]]), ".3f"),
        ]
        for variant in same
    ]
    return table(("A", "global batch", "ms per micro-batch", "us per token", "time per token / A=1's"), rows)


def main() -> None:
    """Runs the bench and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--global-batch", type=int, default=16, help="examples of a step in the first table")
    parser.add_argument("--micro-batch", type=int, default=None, help="examples of a pass in the second; default: 1/8")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages, over which layers are passed once")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    if arguments.devices > 1:
        flag = f"--xla_force_host_platform_device_count={arguments.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

    from machine import machine

    from maxtext_lite.config import load_config
    from maxtext_lite.parallel import start_devices

    start_devices()
    config = load_config(None, arguments.overrides)
    micro = arguments.micro_batch or max(arguments.global_batch // 8, 1)

    def variant(micro_batch: int, accumulation: int, norms: bool = True) -> Variant:
        return Variant(Fraction(micro_batch, arguments.devices), accumulation, norms)

    counts = [a for a in (1, 2, 4, 8, 16) if arguments.global_batch % a == 0]
    splits = [variant(arguments.global_batch // a, a) for a in counts]
    if arguments.stages > 1:
        layers = config.base_num_decoder_layers // arguments.stages
        arguments.overrides += [
            f"ici_pipeline_parallelism={arguments.stages}",
            f"num_layers_per_pipeline_stage={layers}",
        ]
        splits = [
            dataclasses.replace(split, microbatches=microbatches, schedule=schedule)
            for split in splits
            for microbatches in (arguments.stages, 2 * arguments.stages, 4 * arguments.stages)
            for schedule in ("gpipe", "1f1b")
            if arguments.global_batch // split.accumulation % microbatches == 0
        ]
    same = [variant(micro, a) for a in (1, 2, 4, 8)]
    with_norms, without = variant(micro, 8), variant(micro, 8, norms=False)
    turns = list(dict.fromkeys([*splits, *same]))
    found = subjects([*turns, without], arguments.devices, arguments.overrides)
    seconds = time_in_turns({each: found[each] for each in turns}, arguments.repeats)

    length = config.max_target_length
    print(f"{machine()}; {arguments.repeats} rounds; medians (quartiles)")
    print(f"\nSplits of one global batch of {arguments.global_batch} x {length} tokens:\n")
    print(split_table(splits, found, seconds, length))
    print(f"\nAccumulation of micro-batches of {micro} x {length} tokens:\n")
    print(accumulation_table(same, found, seconds, length))
    costs = norm_costs(found[with_norms], found[without], 8, 3 * arguments.repeats)
    print(f"\nNoise scale: its norms, in % of a step of A = 8 micro-batches of {micro} x {length} tokens:\n")
    print(table(tuple(costs), [[quartiles(cost, "+.2f") for cost in costs.values()]]))


if __name__ == "__main__":
    main()
