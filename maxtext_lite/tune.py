"""Time short runs of every way to split one global batch on these devices."""

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maxtext_lite.analysis.expected import least_step
from maxtext_lite.analysis.page import write_page
from maxtext_lite.analysis.run_data import read_runs
from maxtext_lite.analysis.tuning import Candidate, Timing, tune
from maxtext_lite.batching import wants_solving
from maxtext_lite.batching.devices import Device, device_of_kind
from maxtext_lite.batching.table import aligned
from maxtext_lite.cli import (
    ArgumentParser,
    at_least_one,
    check_one_host,
    config_arguments,
    gigabytes,
    local_path,
    run_command,
)
from maxtext_lite.config import UserError, load_config, write_resolved
from maxtext_lite.config.errors import bytes_text, setting_text, settings_of
from maxtext_lite.config.records import json_text


def main(argv: Sequence[str]) -> int:
    """Times the splits, prints a table, writes the best config and a page; returns 0, or 1 where nothing fits.

    Raises:
      UserError: the config cannot be trained on these devices or this data.
    """
    arguments = _parser().parse(argv)
    config = load_config(arguments.config, arguments.overrides)
    if config.run_kind == "rl":
        raise UserError("a config of reinforcement learning is not for tune, which times configs of train.")
    import jax

    from maxtext_lite.analysis.tuning import measured
    from maxtext_lite.training.opening import open_data, plan_on_devices
    from maxtext_lite.training.run_files import run_directory

    if wants_solving(config):  # all splits are tried, beginning with this one
        config = config.model_copy(update={"gradient_accumulation_steps": 1})
    plan, _ = open_data(config, device_memory_gb=arguments.device_memory_gb)
    check_one_host(plan.num_hosts, "tune")
    output: Path = arguments.output or Path(f"{run_directory(config)}-tune")

    def directory(candidate: Candidate) -> Path:
        return output / "-".join(setting_text(value).replace("/", "of") for value in candidate.keys.values())

    def measure(candidate: Candidate) -> Timing:
        limits = {"warm_up": arguments.warm_up, "steps": arguments.steps}
        timing = measured(candidate, directory(candidate), **limits, device_memory_gb=arguments.device_memory_gb)
        took = "does not fit" if timing.seconds == math.inf else f"{1e3 * timing.seconds:.1f} ms a step"
        print(f"{' '.join(settings_of(candidate.keys))}: {took}", flush=True)
        return timing

    device = device_of_kind(jax.devices()[0].device_kind)
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        found = tune(config, plan_on_devices(plan), measure, full=arguments.full)
    ran = [directory(candidate) for candidate, timing in found if timing.seconds < math.inf]
    if not ran:
        print("error: no way to split the batch fits on a device.", file=sys.stderr)
        return 1
    best = output / "best.yml"
    page = output / "report.html"
    origins = {**config.origins, **dict.fromkeys(found[0][0].keys, "tune")}
    write_resolved(config.model_copy(update=found[0][0].keys).with_origins(origins), best)
    write_page(read_runs(ran[:8]), page)
    ways = [_to_json(*each, device) for each in found]
    if arguments.json:
        print(json_text({"ways": ways, "best": str(best), "report": str(page)}))
        return 0
    print("\n".join(["", *_table(ways)]))
    print(f"wrote {best} and {page}")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="maxtext-lite tune", description=__doc__)
    config_arguments(parser)
    parser.add_argument("--steps", type=at_least_one, default=8, help="timed steps of each split (default: 8)")
    parser.add_argument("--warm-up", type=at_least_one, default=2, help="warm-up steps before them (default: 2)")
    parser.add_argument("--full", action="store_true", help="time every split with every remat_policy")
    parser.add_argument(
        "--device-memory-gb", type=gigabytes, help="memory limit of a train step per device, in GB (1e9 bytes)"
    )
    parser.add_argument("--output", type=local_path, help="directory for the results (default: RUN_DIR-tune)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


def _to_json(candidate: Candidate, timing: Timing, device: Device | None) -> dict[str, Any]:
    """Seconds per step, and the least by the plan, tokens per second on all devices, bytes per device."""
    planned = candidate.plan.memory.total
    compiled = timing.compiled_bytes
    seconds = None if timing.seconds == math.inf else timing.seconds
    least = least_step(candidate.config, candidate.plan, device)
    return {
        "keys": {key: setting_text(value) for key, value in candidate.keys.items()},
        "step_seconds": seconds,
        "least_step_seconds": None if least is None else least.seconds,
        "tokens_per_second": seconds and candidate.plan.tokens_per_step / seconds,
        "planned_bytes": planned,
        "compiled_bytes": compiled,
        "error_of_plan_to_compiled": None if compiled is None else planned / compiled - 1,
    }


def _table(ways: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each split, as in the JSON, the fastest first; the time also relative to the fastest."""
    rows = [["step, ms", "at least", "tokens/s", "against best", "by the plan", "compiled", "error", "settings"]]
    for way in ways:
        seconds = way["step_seconds"]
        rows.append(
            [
                _text(seconds, lambda value: f"{1e3 * value:.1f}"),
                _text(way["least_step_seconds"], lambda value: f"{1e3 * value:.1f}"),
                _text(way["tokens_per_second"], "{:,.0f}".format),
                "no room" if seconds is None else f"{seconds / ways[0]['step_seconds']:.3f}",
                bytes_text(way["planned_bytes"]),
                _text(way["compiled_bytes"], bytes_text),
                _text(way["error_of_plan_to_compiled"], "{:+.0%}".format),
                " ".join(f"{key}={value}" for key, value in way["keys"].items()),
            ]
        )
    return aligned(rows, right=range(7))


def _text(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


if __name__ == "__main__":
    sys.exit(run_command(main))
