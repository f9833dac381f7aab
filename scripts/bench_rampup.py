"""Times the steps at which a ramp changes the batch, with and without compiling the next stage in the background.

    python scripts/bench_rampup.py                            the default model on one device, four stages
    python scripts/bench_rampup.py --devices 8 --samples 2400 on 8 simulated devices where there is no accelerator

Prints two tables in Markdown: the steps at the changes beside their neighbours, and how often each way of ramping
compiled its train step. Each is a whole run of `maxtext_lite.train`, read from its metrics.jsonl: `background` is
what it does; `foreground` starts compiling a stage's step when the stage begins; `accumulation` ramps
gradient_accumulation_steps through the same global batches. Nothing is read from or written to the persistent
compilation cache. Key=value arguments are those of `maxtext_lite.train`.

On a CPU the compiler works on the cores that train, so that the steps after a change are slower while the stage after
it is compiled; on an accelerator it has the host to itself. A stage must last longer than compiling does, or its
successor waits: `--samples` makes the stages longer.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

NEIGHBOURS = 8  # steps on either side

RUN = ("dataset_type=synthetic", "learning_rate=1e-4", "enable_checkpointing=false", "eval_interval=-1",
       "steps=100000", "learning_rate_schedule=constant", "enable_rampup_batch_size=true")  # fmt: skip
RAMPS = {
    "per_device_batch_size": (
        "rampup_mode=per_device_batch_size", "per_device_batch_size_start=2", "per_device_batch_size_increment=2",
        "per_device_batch_size=8", "gradient_accumulation_steps=1",
    ),
    "gradient_accumulation_steps": (
        "rampup_mode=gradient_accumulation_steps", "per_device_batch_size_start=0.5",
        "per_device_batch_size_increment=0.5", "per_device_batch_size=2", "gradient_accumulation_steps=4",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ramped:
    """A run: its steps in metrics.jsonl, and the seconds of each compilation of its train step."""

    steps: list[dict[str, Any]]
    compilations: list[float]
    row_slots: set[int]


def ramped(mode: str, foreground: bool, overrides: Sequence[str]) -> Ramped:
    """Trains through a ramp and the steps after it that its last change is compared with."""
    import jax

    from maxtext_lite import make_plan
    from maxtext_lite.config import load_config
    from maxtext_lite.training import train

    jax.clear_caches()
    stated = [*RUN, *RAMPS[mode], *overrides]
    plan = make_plan(load_config(None, stated), num_devices=jax.device_count())
    steps = plan.stages[-1].first_step + NEIGHBOURS
    with (
        tempfile.TemporaryDirectory() as directory,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        _compiled_in_the_foreground() if foreground else contextlib.nullcontext(),
        _compilations() as seconds,
    ):
        result = train(load_config(None, [*stated, f"steps={steps}", f"base_output_directory={directory}"]))
        lines = (result.run_directory / "metrics.jsonl").read_text().splitlines()
    slots = {plan.slots_for(stage.micro_batch_to_train) for stage in plan.stages}
    return Ramped([json.loads(line) for line in lines], seconds, slots)


@contextlib.contextmanager
def _compiled_in_the_foreground() -> Iterator[None]:
    """Ignores requests for the next stage, which is compiled when its first step needs it."""
    from maxtext_lite.training import loop
    from maxtext_lite.training.compile import Executables

    class OnDemand(Executables):
        """Compiles a stage's step when it is needed."""

        def request(self, stage: Any) -> None:
            """Nothing."""

        def of(self, stage: Any) -> tuple[Any, float]:
            """The compiled step of a stage, and the seconds that compiling took."""
            super().request(stage)
            return self._compiled[self.slots(stage)].result()

    with mock.patch.object(loop, "Executables", OnDemand):
        yield


@contextlib.contextmanager
def _compilations() -> Iterator[list[float]]:
    """The seconds of each compilation of a train step in the block: XLA's part, without tracing."""
    import jax

    found: list[float] = []

    def listen(event: str, seconds: float, **facts: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and "train_step" in facts["fun_name"]:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def changes(steps: Sequence[dict[str, Any]]) -> list[int]:
    """Positions of the steps that begin a stage, except the first."""
    return [at for at in range(1, len(steps)) if steps[at]["examples"] != steps[at - 1]["examples"]]


def change_row(name: str, steps: Sequence[dict[str, Any]], at: int) -> list[str]:
    """A step at a change beside its neighbours, in time per example.

    A run's first two steps, which fill caches, are no neighbours.
    """
    per_example = [1e3 * step["step_seconds"] / step["examples"] for step in steps]
    before = per_example[max(at - NEIGHBOURS, 2) : at]
    after = per_example[at + 1 : at + 1 + NEIGHBOURS]
    around = before + after
    here, middle = per_example[at], statistics.median(around)
    return [
        name, f"{steps[at]['step']}", f"{steps[at - 1]['examples']} to {steps[at]['examples']}", f"{here:.1f}",
        f"{middle:.1f} ({min(around):.1f} .. {max(around):.1f})",
        f"{statistics.median(before):.1f}, {statistics.median(after):.1f}", f"{here / middle:.2f}",
        f"{(here - middle) * steps[at]['examples']:+,.0f}",
    ]  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows))


def main() -> None:
    """Runs the bench and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--samples", type=int, default=1200, help="examples in the ramp (global_rampup_samples)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    if arguments.devices > 1:
        flag = f"--xla_force_host_platform_device_count={arguments.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

    import jax
    from machine import machine

    from maxtext_lite.parallel import start_devices

    jax.config.update("jax_enable_compilation_cache", False)
    start_devices()
    overrides = [*arguments.overrides, f"global_rampup_samples={arguments.samples}"]
    runs = {
        "background": ramped("per_device_batch_size", False, overrides),
        "foreground": ramped("per_device_batch_size", True, overrides),
        "accumulation": ramped("gradient_accumulation_steps", False, overrides),
    }
    print(machine())
    print(f"\nSteps at a change of stage, beside the {NEIGHBOURS} before and the {NEIGHBOURS} after:\n")
    head = ("run", "step", "examples", "ms per example", "neighbours: median (range)", "before, after", "ratio",
            "excess, ms")  # fmt: skip
    print(table(head, [change_row(name, run.steps, at) for name, run in runs.items() for at in changes(run.steps)]))
    print("\nCompilations of the train step:\n")
    rows = [
        [name, len(changes(run.steps)) + 1, len(run.row_slots), len(run.compilations),
         ", ".join(f"{seconds:.1f}" for seconds in run.compilations)]
        for name, run in runs.items()
    ]  # fmt: skip
    print(table(("run", "stages", "numbers of row slots", "compilations", "seconds of each"), rows))


if __name__ == "__main__":
    main()
