"""Repeat a step of a run and compare it with its record; optionally score each row alone."""

import dataclasses
import math
import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxtext_lite.cli import (
    EXIT_FAILED,
    ArgumentParser,
    run_command,
    run_path,
    tolerance,
    whole_number,
)
from maxtext_lite.config.errors import full_text
from maxtext_lite.config.keys import known_keys
from maxtext_lite.config.phases import status_line
from maxtext_lite.config.records import json_text
from maxtext_lite.console import complain

if TYPE_CHECKING:
    from maxtext_lite.analysis.replay import Replay

_ALWAYS_SHOWN = ("examples_hash", "examples_seen", "target_tokens", "learning_rate", "loss", "grad_norm", "param_norm")
_SHOWN_LETTERS = 60


def main(argv: Sequence[str]) -> int:
    """Repeats a step; returns 0 if it equals the run's record, otherwise 1. Writes nothing.

    Raises:
      UserError: with the problems of the arguments, or why the step cannot be repeated.
    """
    parser = ArgumentParser(prog="maxtext-lite replay", description=__doc__)
    parser.keys = known_keys
    parser.add_argument("directory", type=run_path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override its config, such as the kernel or mesh"
    )
    parser.add_argument("--step", type=whole_number, required=True, help="the step to repeat")
    parser.add_argument("--rows", action="store_true", help="also score each row alone: text, loss, gradient norm")
    parser.add_argument("--by", choices=("loss", "loss_sum", "grad_norm"), default="loss", help="order of the rows")
    parser.add_argument(
        "--tolerance", type=tolerance, help="relative; 0: equal to the bit, the default on the run's own machine"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args(argv)
    from maxtext_lite.analysis.replay import replayed

    found = replayed(
        arguments.directory,
        arguments.step,
        arguments.overrides,
        tolerance=arguments.tolerance,
        with_rows=arguments.rows,
        say=lambda text: complain(f"replay: {text}"),
    )
    if found.rows is not None:
        by = operator.attrgetter(arguments.by)
        rows = sorted(found.rows, key=lambda row: (math.isnan(by(row)), by(row)), reverse=True)
        found = dataclasses.replace(found, rows=rows)
    if status_line.is_first:  # of all processes
        print(json_text(_as_json(found)) if arguments.json else "\n".join(_text(found, arguments.by)))
    return EXIT_FAILED if _differing(found) else 0


def _differing(found: "Replay") -> list[str]:
    return [name for name, (_, _, same) in found.fields.items() if not same]


def _as_json(found: "Replay") -> dict[str, object]:
    differing = _differing(found)
    return {**dataclasses.asdict(found), "same": not differing, "first_field": differing[0] if differing else None}


def _text(found: "Replay", by: str) -> list[str]:
    differing, how = _differing(found), f"within {found.tolerance:g}" if found.tolerance else "to the bit"
    begin = f"the checkpoint of step {found.after:,}" if found.after else "the run's initial parameters"
    why = f" ({found.elsewhere})" if found.elsewhere else ""
    said = f"equal {how}"
    if differing:
        since = "" if found.first_difference == found.step else f"; step {found.first_difference:,} already differs"
        said = f"not equal {how}, first in {differing[0]}{since}"
    lines = [f"step {found.step:,}, from {begin}: {said}{why}", f"  {'':<28} {'run':<24} replay"]
    for name, (first, second, same) in found.fields.items():
        if name in _ALWAYS_SHOWN or not same:
            lines.append(f"{' ' if same else '!'} {name:<28} {first!s:<24} {second}")
    if found.rows is None:
        return lines
    lines.append(f"{len(found.rows)} rows, each by itself, by {by}; grad_norm of the row's part of the gradient")
    lines.append(f"  {'loss':>9} {'loss_sum':>11} {'grad_norm':>10} {'tokens':>7}  row")
    for row in found.rows:
        name = f"{row.source}:{row.row}" if row.source else str(row.row)
        text = full_text(row.text[:_SHOWN_LETTERS])
        numbers = f"{row.loss:>9.4f} {row.loss_sum:>11.2f} {row.grad_norm:>10.3g} {row.target_tokens:>7}"
        lines.append(f"  {numbers}  {name:<12} {text}")
    return lines


if __name__ == "__main__":
    sys.exit(run_command(main))
