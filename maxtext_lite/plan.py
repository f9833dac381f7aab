"""The command `plan`: everything about batch size for a machine that need not exist. Imports no jax."""

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext_lite.batching import BatchPlan, format_plan, load_plan
from maxtext_lite.batching.devices import device_named
from maxtext_lite.cli import ArgumentParser, config_arguments, local_path, real_number, run_command, whole_number
from maxtext_lite.config import Config, SourceList, UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.reporting.pipeline_view import pipeline_svg, pipeline_text

_MOST_DRAWN = 50_000


def main(argv: Sequence[str]) -> int:
    """Prints the plan of a config on a machine; returns the exit code.

    Raises:
      UserError: with every problem of the config or the arguments.
    """
    parser = ArgumentParser(prog="maxtext-lite plan", description=__doc__)
    config_arguments(parser)
    parser.add_argument("--devices", type=whole_number, default=1, help="devices of the mesh, all of them (default 1)")
    parser.add_argument("--hosts", type=whole_number, default=1, help="hosts that they are attached to (default 1)")
    parser.add_argument(
        "--examples",
        type=whole_number,
        help="training examples in the data (default: counted for num_epochs and for mixtures)",
    )
    parser.add_argument("--device", metavar="NAME", help="what they are, as v5e or h100: platform and memory follow")
    parser.add_argument(
        "--device-memory-gb", type=real_number, help="memory of a device in GB (1e9 bytes); default: that of --device"
    )
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="the devices (default: --device's, or gpu)")
    parser.add_argument("--json", action="store_true", help="print plan.json")
    parser.add_argument("--draw", choices=("pipeline",), help="show the pipeline's timetable, tick by tick")
    parser.add_argument(
        "--draw-to", type=local_path, metavar="FILE.svg", help="draw it into a file instead of on the terminal"
    )
    arguments = parser.parse(argv)
    device = None if arguments.device is None else device_named(arguments.device, option="--device")
    if device and arguments.platform not in (None, device.platform):
        raise UserError(
            f"--platform={arguments.platform} contradicts --device={device.name}. Nearest that works: "
            f"--platform={device.platform}."
        )
    memory_gb = arguments.device_memory_gb
    if device and memory_gb is None:
        memory_gb = device.memory_bytes / 1e9
    config, plan = load_plan(
        arguments.config,
        arguments.overrides,
        num_devices=arguments.devices,
        num_hosts=arguments.hosts,
        num_examples=_count_examples if arguments.examples is None else arguments.examples,
        device_memory_gb=memory_gb,
        platform=arguments.platform or (device.platform if device else "gpu"),
    )
    if arguments.draw or arguments.draw_to:
        return _draw(plan, arguments.draw_to)
    mixture, sentences = _mixture(config, plan) if arguments.examples is None else ({}, [])
    if arguments.json:
        print(json.dumps(plan.to_json() | mixture, indent=2))
        return 0
    print("\n".join([format_plan(plan), *sentences]))
    return 0


def _draw(plan: BatchPlan, path: Path | None) -> int:
    if plan.num_pipeline_stages == 1:
        raise UserError(
            "--draw pipeline has nothing to show with 1 pipeline stage. Nearest that works: ici_pipeline_parallelism=2."
        )
    shape, schedule = plan.pipeline_shape, plan.pipeline_schedule
    pieces = shape.num_stages * shape.num_repeats * shape.num_microbatches * shape.gradient_accumulation_steps
    if pieces > _MOST_DRAWN:
        raise UserError(f"--draw pipeline would draw {pieces:,} pieces of work, more than {_MOST_DRAWN:,}.")
    if path is None:
        print(pipeline_text(shape, schedule))
        return 0
    try:
        path.write_text(pipeline_svg(shape, schedule) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--draw-to {value_text(path)} cannot be written: {error.strerror}.") from None
    print(f"drew {path}")
    return 0


def _mixture(config: Config, plan: BatchPlan) -> tuple[dict[str, Any], list[str]]:
    """What the run takes of each source, as JSON and in sentences, where the config lists sources.

    Raises:
      UserError: a source is not there, or would pass its max_epochs.
    """
    if not isinstance(config.dataset_path, SourceList):
        return {}, []
    from maxtext_lite.data.mixture_of_run import in_run, mixture_sentences, mixture_table, steps_left

    source, _ = in_run(config, _training_source(config))
    end = plan.examples_after(steps_left(config, plan, source, step=0, examples_seen=0), 0)
    return {"mixture": mixture_table(source, 0, end)}, mixture_sentences(config, source, 0, end)


def _count_examples(config: Config) -> int:
    return len(_training_source(config))


@functools.cache
def _training_source(config: Config) -> Any:
    from maxtext_lite.data import open_mixture  # numpy and tokenizers, only where the data is asked for

    return open_mixture(config, vocab_size=config.vocab_size)[0]


if __name__ == "__main__":
    sys.exit(run_command(main))
