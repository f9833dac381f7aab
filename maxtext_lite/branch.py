"""Run briefly from one checkpoint at other batch sizes, to measure the critical batch."""

import argparse
import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from maxtext_lite.analysis.branches import WORSE, Branches, BranchResult, critical_batch
from maxtext_lite.analysis.page import write_page
from maxtext_lite.analysis.recommendation import BRANCHES_FILE
from maxtext_lite.analysis.run_data import read_runs
from maxtext_lite.cli import ArgumentParser, at_least_one, check_one_host, local_path, run_command, whole_number
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.records import json_text
from maxtext_lite.config.whole_file import write_whole
from maxtext_lite.train import finish

_MOST = 1024
_FACTOR = re.compile(r"[-+]?[\d./]{1,40}(e[-+]?\d{1,2})?", re.IGNORECASE)
"""A factor as text: Fraction("1e999999999") would take all memory."""


def _factors(text: str) -> list[Fraction]:
    """The factors in a comma-separated list.

    Raises:
      argparse.ArgumentTypeError: one is not a number in the allowed range.
    """
    found = list[Fraction]()
    for word in text.split(","):
        try:
            if not _FACTOR.fullmatch(word.strip()):
                raise ValueError
            found.append(Fraction(word))
        except (ValueError, ZeroDivisionError):
            raise argparse.ArgumentTypeError(f"{value_text(word)} is not a number") from None
        if not Fraction(1, _MOST) <= found[-1] <= _MOST:
            raise argparse.ArgumentTypeError(f"{word} must be from 1/{_MOST} to {_MOST}")
    return found


def main(argv: Sequence[str]) -> int:
    """Runs the unfinished branches and compares all; returns 0, or the exit code of a run that ended early.

    Raises:
      UserError: the run, its checkpoint or a factor is not suitable.
    """
    arguments = _parser().parse_intermixed_args(argv)
    from maxtext_lite.parallel import start_devices
    from maxtext_lite.training.loop import train
    from maxtext_lite.training.opening import machine_of

    run: Path = arguments.run
    output = arguments.output or run.with_name(f"{run.resolve().name}-branches-{arguments.step}")
    branches = Branches(run, arguments.step, arguments.factors, arguments.steps, arguments.scaling, output)
    machine = machine_of(start_devices())
    check_one_host(machine["num_hosts"], "branch")
    branches.prepare(machine)
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        for branch in branches.all:
            if code := finish(train, branch.config):
                return code
    results = [branches.result(branch) for branch in branches.all]
    losses = {each.batch: each.loss for each in results}
    by = "training loss"
    if all(each.eval_loss is not None for each in results):
        losses = {each.batch: each.eval_loss or 0.0 for each in results}
        by = "held-out loss"
    critical = critical_batch(losses)
    page = output / "report.html"
    write_page(read_runs([branch.directory for branch in branches.all]), page)
    rows = [dataclasses.asdict(each) for each in results]
    outcome = {"rule": branches.rule, "by": by, "critical_batch": critical, "branches": rows, "report": str(page)}
    about = {"step": arguments.step, "examples_seen": branches.examples_seen}
    write_whole(output / BRANCHES_FILE, json_text(outcome | about) + "\n")
    if arguments.json:
        print(json_text(outcome))
        return 0
    print("\n".join(_table(results, losses)))
    found = f"beyond {results[-1].batch}" if critical is None else f"about {critical:.0f} examples"
    how = f"{by} at equal tokens {WORSE:.0%} above the best; learning rate by {branches.rule}, then constant"
    print(f"critical batch ({how}): {found}")
    print(f"wrote {page}")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="maxtext-lite branch", description=__doc__)
    parser.add_argument("run", type=local_path, metavar="RUN_DIR", help="a run directory; it is not changed")
    parser.add_argument("--step", type=whole_number, required=True, help="step of the checkpoint")
    parser.add_argument(
        "--factors", type=_factors, default="0.5,1,2,4", help="batch sizes relative to the run's (default: 0.5,1,2,4)"
    )
    others = "steps of the branch with factor 1; the others see the same examples"
    parser.add_argument("--steps", type=at_least_one, required=True, help=others)
    rule = "learning rate by batch size (default: the run's own rule; if that is none: sqrt, or linear with sgd)"
    parser.add_argument("--scaling", choices=("none", "sqrt", "linear"), help=rule)
    parser.add_argument("--output", type=local_path, help="directory for the branches (default: RUN_DIR-branches-STEP)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


def _table(results: Sequence[BranchResult], losses: Mapping[int, float]) -> Iterator[str]:
    """A line for each branch, with its loss relative to that of factor 1."""
    first = next(losses[each.batch] for each in results if each.factor == 1)
    yield "   batch  learning rate   steps  target tokens      loss  held out  against 1"
    for each in results:
        shown = "-" if each.eval_loss is None else f"{each.eval_loss:.4f}"
        cells = f"{each.batch:>8} {each.learning_rate:>14.4g} {each.steps:>7} {each.tokens:>14,} {each.loss:>9.4f}"
        yield f"{cells} {shown:>9} {losses[each.batch] / first - 1:>+10.2%}"
    for each in results:
        if each.left_out:
            steps = f"{each.left_out:,} step{'' if each.left_out == 1 else 's'}"
            yield f"batch {each.batch}: the loss excludes {steps} with a non-finite loss"


if __name__ == "__main__":
    sys.exit(run_command(main))
