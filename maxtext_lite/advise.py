"""Print batch size, learning rate, weight decay, warm-up and ramp from published laws. Needs no jax."""

import dataclasses
import functools
import sys
from collections.abc import Sequence

import jinja2

from maxtext_lite.analysis.laws import BATCH_LAWS, RATE_LAWS, WIDENING, Interval, budget_of, timescale
from maxtext_lite.analysis.plan_view import short_number
from maxtext_lite.analysis.recommendation import UTILIZATION, Machine, Recommendation, recommend
from maxtext_lite.batching.devices import device_named
from maxtext_lite.cli import ArgumentParser, bounded, config_arguments, machine_arguments, real_number, run_command
from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.errors import rounded_text
from maxtext_lite.config.records import json_text

_COUNT = bounded(real_number, 1, 1e21)  # of tokens or parameters


def main(argv: Sequence[str]) -> int:
    """Prints what published laws say for a config's model and a number of tokens; returns the exit code.

    Raises:
      UserError: with every problem of the config or the arguments.
    """
    parser = ArgumentParser(prog="maxtext-lite advise", description=__doc__)
    config_arguments(parser)
    parser.add_argument("--tokens", type=_COUNT, required=True, help="training tokens of the whole run, such as 100e9")
    parser.add_argument("--parameters", type=_COUNT, help="model size, such as 8e9 (default: the config's)")
    parser.add_argument("--loss", type=bounded(real_number, 0.01, 100), help="target loss of the run, for Kaplan's law")
    machine_arguments(parser, "memory and time")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse(argv)
    config = load_config(arguments.config, arguments.overrides)
    if config.run_kind == "rl":
        raise UserError("advise knows laws of pre-training, none of reinforcement learning. Use a config for train.")
    budget = budget_of(config, tokens=arguments.tokens, loss=arguments.loss)
    if arguments.parameters is not None:
        budget = dataclasses.replace(budget, parameters=arguments.parameters, non_embedding=arguments.parameters)
    device = None if arguments.device is None else device_named(arguments.device, option="--device")
    found = recommend(config, budget, Machine(arguments.devices, arguments.hosts, device))
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
        rounded=rounded_text,
        two_digits=functools.partial(rounded_text, digits=2),
        three_digits=functools.partial(rounded_text, digits=3),
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
