"""Print batch size, learning rate, weight decay, warm-up and ramp from published laws. Needs no jax."""

import dataclasses
import functools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

from maxtext_lite.analysis.laws import BATCH_LAWS, RATE_LAWS, WIDENING, Interval, budget_of, timescale
from maxtext_lite.analysis.plan_view import short_number
from maxtext_lite.analysis.recommendation import UTILIZATION, Machine, Recommendation, measured_batch, recommend
from maxtext_lite.batching.devices import device_named
from maxtext_lite.cli import (
    ArgumentParser,
    bounded,
    config_arguments,
    local_path,
    machine_arguments,
    real_number,
    run_command,
)
from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.errors import rounded_text
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.records import json_text

_COUNT = bounded(real_number, 1, 1e21)  # of tokens or parameters


def main(argv: Sequence[str]) -> int:
    """Prints what published laws say for a config's model and a number of tokens; returns the exit code.

    Raises:
      UserError: with every problem of the config or the arguments.
    """
    parser = ArgumentParser(prog="maxtext-lite advise", description=__doc__)
    config_arguments(parser)
    tokens_help = "training tokens of the whole run, such as 100e9 (default: with --from, the run's)"
    parser.add_argument("--tokens", type=_COUNT, help=tokens_help)
    run_help = "a run directory: its config, and a schedule from its branches or its noise scale"
    parser.add_argument("--from", dest="run", type=local_path, metavar="RUN_DIR", help=run_help)
    parser.add_argument("--parameters", type=_COUNT, help="model size, such as 8e9 (default: the config's)")
    parser.add_argument("--loss", type=bounded(real_number, 0.01, 100), help="target loss of the run, for Kaplan's law")
    machine_arguments(parser, "memory and time")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse(argv)
    run: Path | None = arguments.run
    tokens: float | None = arguments.tokens
    config = load_config(arguments.config if run is None else run / "config.yml", arguments.overrides)
    if run is not None and tokens is None:
        tokens = read_object(run / "plan.json")["total_examples"] * config.tokens_per_example
    if tokens is None:
        raise UserError("--tokens is missing: the training tokens of the whole run, such as --tokens 100e9.")
    if config.run_kind == "rl":
        raise UserError("advise knows laws of pre-training, none of reinforcement learning. Use a config for train.")
    budget = budget_of(config, tokens=tokens, loss=arguments.loss)
    if arguments.parameters is not None:
        budget = dataclasses.replace(budget, parameters=arguments.parameters, non_embedding=arguments.parameters)
    device = None if arguments.device is None else device_named(arguments.device, option="--device")
    measured = None if run is None else measured_batch(run, config)
    found = recommend(config, budget, Machine(arguments.devices, arguments.hosts, device), measured)
    print(json_text(found.to_json(), indent=2, default=float) if arguments.json else _text(found))
    return 0


def _text(found: Recommendation) -> str:
    tokens = found.budget.tokens
    laws = (*BATCH_LAWS, *RATE_LAWS)
    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("maxtext_lite.analysis", ""), trim_blocks=True, lstrip_blocks=True
    )
    return pages.get_template("advice.txt").render(
        found=found,
        laws=laws,
        sources={law.name: law.source for law in laws},
        share_of=lambda start: Interval(100 * start.low / tokens, 100 * start.high / tokens),
        timescale=timescale,
        utilization=UTILIZATION,
        widening=WIDENING,
        count=functools.partial(short_number, digits=3, units="kMBT"),
        quoted=shlex.join,
        rounded=rounded_text,
        two_digits=functools.partial(rounded_text, digits=2),
        three_digits=functools.partial(rounded_text, digits=3),
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
