"""Plan batch sizes, pipeline, ramp-up and memory for any machine, or find the fastest split. Needs no jax."""

import argparse
import functools
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_lite.batching import (
    BatchPlan,
    Topology,
    format_plan,
    load_plan,
    make_plan,
    resumed,
    wants_solving,
)
from maxtext_lite.batching.devices import Device, device_named
from maxtext_lite.cli import (
    ArgumentParser,
    at_least_one,
    bounded,
    config_arguments,
    gigabytes,
    local_path,
    machine_arguments,
    real_number,
    run_command,
    whole_number,
)
from maxtext_lite.config import Config, SourceList, UserError, load_config, registry
from maxtext_lite.config.errors import divisors, settings_of, value_text
from maxtext_lite.config.hints import no_directory
from maxtext_lite.config.kernels import Accelerator
from maxtext_lite.config.load import read_config
from maxtext_lite.config.records import json_text
from maxtext_lite.console import complain

if TYPE_CHECKING:
    from maxtext_lite.analysis.ranking import RankedPlan

_MOST_DRAWN = 50_000


def main(argv: Sequence[str]) -> int:
    """Prints the plan of a config on a machine; returns the exit code.

    Raises:
      UserError: with every problem of the config or the arguments.
    """
    arguments = _parser().parse(argv)
    run: Path | None = arguments.run
    if run is not None:
        from maxtext_lite.analysis.elsewhere import read_plan

        if arguments.config is not None:
            raise UserError(f"--from={value_text(run)} has its own config; {arguments.config} is another one.")
        before = read_plan(run)
        arguments.config = str(run / "config.yml")
        if arguments.examples is None:
            arguments.examples = before["num_examples"]
    device = None if arguments.device is None else device_named(arguments.device, option="--device")
    if device and arguments.platform not in (None, device.platform):
        raise UserError(
            f"--platform={arguments.platform} contradicts --device={device.name}. Nearest that works: "
            f"--platform={device.platform}."
        )
    memory_gb = arguments.device_memory_gb
    if device and memory_gb is None:
        memory_gb = device.memory_bytes / 1e9
    machine: dict[str, Any] = {
        "num_devices": arguments.devices,
        "num_hosts": arguments.hosts,
        "device_memory_gb": memory_gb,
        "platform": arguments.platform or (device.platform if device else "gpu"),
    }
    asked = read_config(arguments.config, arguments.overrides).config
    missing = no_directory(asked.load_parameters_path, "load_parameters_path")
    if missing and run is None:
        raise UserError(missing)
    if wants_solving(asked):
        if run is not None:
            raise UserError(
                f"--from={value_text(run)} is compared with one plan: of per_device_batch_size=-1 and "
                "gradient_accumulation_steps=-1, state one."
            )
        return _solve(arguments, device, machine)
    if arguments.compile is not None:
        raise UserError("--compile checks the plans for per_device_batch_size=-1 gradient_accumulation_steps=-1.")
    kept: list[str] = []
    if run is not None:
        from maxtext_lite.analysis.elsewhere import kept_settings

        kept = kept_settings(run, asked, arguments.devices)
    num_examples = _count_examples if arguments.examples is None else arguments.examples
    config, plan = load_plan(arguments.config, [*arguments.overrides, *kept], num_examples=num_examples, **machine)
    _check_vocabulary(config)
    if arguments.draw or arguments.draw_to:
        return _draw(plan, arguments.draw_to)
    if run is not None:
        from maxtext_lite.analysis.elsewhere import changed_settings, done_in, moved, read_plan

        step, examples_seen = done_in(run)
        plan = resumed(config, plan, step=step, examples_seen=examples_seen)
        settings = changed_settings(read_config(arguments.config).config, config)
        move = moved(read_plan(run), plan, settings, may_end_before=_is_limited(config))
        print(json_text(move.to_json(), indent=2) if arguments.json else "\n".join(move.lines()))
        return 0
    mixture, sentences = _mixture(config, plan) if arguments.examples is None else ({}, [])
    figures, rows = _predict(config, plan, device, arguments.price)
    if arguments.json:
        print(json_text(plan.to_json() | mixture | {"prediction": figures}, indent=2))
        return 0
    if not plan.memory.fits and plan.rl is None:
        plan_of = functools.partial(make_plan, num_examples=plan.num_examples, **machine)
        sentences.append(_nearest_that_fits(config, plan, plan_of))
    print("\n".join([format_plan(plan, rows), *sentences]))
    return 0


def _predict(
    config: Config, plan: BatchPlan, device: Device | None, price: float | None
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The time of a step on a device, as JSON and as rows of the table; both empty without the analysis package."""
    if not registry.is_installed("estimate", "step"):
        return {}, []
    from maxtext_lite.analysis.expected import expected_rows

    figures = registry.load("estimate", "step")(config, plan, device, price)
    return figures, expected_rows(figures)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="maxtext-lite plan", description=__doc__)
    config_arguments(parser)
    machine_arguments(parser, "platform and memory")
    parser.add_argument(
        "--examples",
        type=whole_number,
        help="number of training examples (default: counted, for num_epochs and mixtures)",
    )
    parser.add_argument(
        "--device-memory-gb", type=gigabytes, help="memory of a device in GB (1e9 bytes); default: that of --device"
    )
    parser.add_argument(
        "--platform", choices=("cpu", "gpu", "tpu"), help="platform of the devices (default: that of --device, or gpu)"
    )
    price = "price of an hour of one device: with --device, that of each stage is printed"
    parser.add_argument("--price", type=bounded(real_number, 0), help=price)
    parser.add_argument("--json", action="store_true", help="print plan.json")
    parser.add_argument("--draw", choices=("pipeline",), help="show the pipeline's timetable, tick by tick")
    parser.add_argument(
        "--draw-to", type=local_path, metavar="FILE.svg", help="draw it to a file instead of the terminal"
    )
    parser.add_argument("--compile", type=at_least_one, metavar="N", help="compile the best N of the plans found")
    parser.add_argument(
        "--from",
        dest="run",
        type=local_path,
        metavar="RUN_DIR",
        help="plan a run's config and show what changes from its own plan",
    )
    return parser


def _solve(arguments: argparse.Namespace, device: Device | None, machine: dict[str, Any]) -> int:
    """Prints the best plans for a global batch, and the arguments of the first one."""
    from maxtext_lite.analysis.expected import MEASURED
    from maxtext_lite.analysis.ranking import check_machine, format_ranking, rank

    if device is None:
        raise UserError(
            "per_device_batch_size=-1 (auto) is chosen for a device: name it, as in --device=h200, or state "
            "per_device_batch_size."
        )
    if arguments.draw or arguments.draw_to:
        raise UserError("--draw shows one plan: use it with the arguments that plan prints as the best.")
    config = load_config(arguments.config, arguments.overrides)
    _check_vocabulary(config)
    topology = Topology(arguments.devices, arguments.hosts, Accelerator.planned(device.platform))
    check_machine(config, topology)
    num_examples = arguments.examples
    if num_examples is None and config.num_epochs:
        num_examples = _count_examples(config)
    plan_of = functools.partial(make_plan, num_examples=num_examples, **machine | {"platform": device.platform})
    found = rank(config, topology, device, plan_of)
    line = _arguments_of(found[0], arguments)
    outcome: dict[str, Any] = {"best": line, "plans": [each.to_json() for each in found]}
    if not arguments.json:  # before what may not compile
        print(f"{format_ranking(found)}\n\nbest: {line}", flush=True)
        ratios = f"{MEASURED[0]:.1f} to {MEASURED[1]:.1f}"
        complain(f"Times are lower bounds at the device's peaks: on an H200, steps took {ratios} times as long.")
    if arguments.compile is not None:
        from maxtext_lite.analysis.program_difference import compare, comparison_text  # imports jax

        outcome["compiled"] = compare(found[: arguments.compile], device)
        if not arguments.json:
            print(f"\n{comparison_text(outcome['compiled'])}")
    if arguments.json:
        print(json_text(outcome, indent=2))
    return 0


def _is_limited(config: Config) -> bool:
    """Whether the run's mixture has sources that give their rows a limited number of times, after which it ends."""
    sources = config.dataset_path
    limited = isinstance(sources, SourceList) and any(entry.max_epochs != -1 for entry in sources.entries)
    return limited and config.mixture_exhausted != "drop"


def _arguments_of(best: "RankedPlan", arguments: argparse.Namespace) -> str:
    """The config and `key=value` words of the best plan, for `plan` and `train`."""
    stated = [word for word in arguments.overrides if word.partition("=")[0] not in best.keys]
    file = [] if arguments.config is None else [str(arguments.config)]
    return shlex.join([*file, *stated, *best.settings])


def _draw(plan: BatchPlan, path: Path | None) -> int:
    if plan.num_pipeline_stages == 1:
        stages = divisors(plan.num_devices)[1:2]
        nearest = f"ici_pipeline_parallelism={stages[0]}" if stages else "--devices=2 ici_pipeline_parallelism=2"
        raise UserError(f"--draw pipeline has nothing to show with 1 pipeline stage. Nearest that works: {nearest}.")
    shape = plan.pipeline_shape
    schedule = plan.pipeline_schedule
    pieces = shape.num_stages * shape.num_repeats * shape.num_microbatches * shape.gradient_accumulation_steps
    if pieces > _MOST_DRAWN:
        raise UserError(f"--draw pipeline would draw {pieces:,} pieces of work, more than {_MOST_DRAWN:,}.")
    from maxtext_lite.analysis.pipeline_view import pipeline_svg, pipeline_text

    if path is None:
        print(pipeline_text(shape, schedule))
        return 0
    try:
        path.write_text(pipeline_svg(shape, schedule) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--draw-to {value_text(path)} cannot be written: {error.strerror}.") from None
    print(f"drew {path}")
    return 0


def _check_vocabulary(config: Config) -> None:
    """Refuses a vocab_size smaller than that of a tokenizer whose file is on this machine, as `train` does."""
    if config.tokenizer_type == "byte" or not Path(config.tokenizer_path).exists():
        return
    from maxtext_lite.data import check_vocabulary, load_tokenizer

    check_vocabulary(load_tokenizer(config), config.vocab_size)


def _nearest_that_fits(config: Config, plan: BatchPlan, plan_of: Callable[[Config], BatchPlan]) -> str:
    """The keys of a smaller step that fits and makes the same updates, in a sentence."""
    from maxtext_lite.analysis.smaller_step import smaller_step

    assert plan.memory.limit is not None
    keys = smaller_step(config, plan, plan_of, plan.memory.limit / plan.memory.total)
    changed = settings_of({key: value for key, value in keys.items() if value != getattr(config, key)})
    if not changed:
        return "Nothing that makes the same updates fits: use more devices to shard over."
    return f"This fits and makes the same updates: {' '.join(changed)}"


def _mixture(config: Config, plan: BatchPlan) -> tuple[dict[str, Any], list[str]]:
    """What the run reads from each source of a mixture, as JSON and in sentences; nothing without a mixture.

    Raises:
      UserError: a source is missing, or would exceed its max_epochs.
    """
    if not isinstance(config.dataset_path, SourceList):
        return {}, []
    from maxtext_lite.data.history import early_stop_note, mixture_sentences, steps_left
    from maxtext_lite.data.sources import with_history

    source, _ = with_history(config, _training_source(config))
    steps = steps_left(config, plan, source, step=0, examples_seen=0)
    end = plan.length.examples_after(steps, 0)
    sentences = mixture_sentences(config, source, 0, end) + early_stop_note(
        config, plan, steps=steps, examples_seen=end
    )
    return {"mixture": source.shares(0, end)}, sentences


def _count_examples(config: Config) -> int:
    return len(_training_source(config))


@functools.cache
def _training_source(config: Config) -> Any:
    from maxtext_lite.data import open_sources  # imports numpy and tokenizers, only where the data is needed

    return open_sources(config, vocab_size=config.vocab_size)[0]


if __name__ == "__main__":
    sys.exit(run_command(main))
