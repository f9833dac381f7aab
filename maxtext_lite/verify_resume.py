"""Find the first step at which two runs differ, in which fields, and with which rows."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from maxtext_lite.cli import EXIT_FAILED, ArgumentParser, local_path, run_command, tolerance
from maxtext_lite.config.errors import counted
from maxtext_lite.config.records import json_text

if TYPE_CHECKING:
    from maxtext_lite.analysis.replay import Comparison, SavedDifference

_MOST_SHOWN = 16


def main(argv: Sequence[str]) -> int:
    """Compares two run directories; returns 0 if they are equal, 1 if they differ.

    Raises:
      UserError: a directory is not a run directory, or the runs have nothing to compare.
    """
    parser = ArgumentParser(prog="maxtext-lite verify_resume", description=__doc__)
    parser.add_argument("runs", nargs=2, type=local_path, metavar="RUN_DIR", help="two run directories")
    parser.add_argument(
        "--tolerance",
        type=tolerance,
        default=0.0,
        help="relative; 0 (default): equal to the bit; 1e-5: for runs that split their batches differently",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args(argv)
    runs, within = (arguments.runs[0], arguments.runs[1]), arguments.tolerance
    from maxtext_lite.analysis.replay import compare_checkpoints, compare_metrics, rows_of_step

    metrics = compare_metrics(runs, within)
    found = metrics.difference
    rows = None if found is None or found.evaluation else [rows_of_step(run, found.step) for run in runs]
    saved = [] if found is not None else compare_checkpoints(runs, within)
    same = found is None and not any(each.arrays for each in saved)
    if arguments.json:
        print(json_text(_as_json(metrics, saved, rows, same)))
    else:
        print("\n".join(_text(metrics, saved, rows, within)))
    return 0 if same else EXIT_FAILED


def _as_json(
    metrics: "Comparison", saved: "Sequence[SavedDifference]", rows: list[Any] | None, same: bool
) -> dict[str, Any]:
    found = metrics.difference
    return {
        "same": same,
        "steps": metrics.steps,
        "evaluations": metrics.evaluations,
        "last_steps": metrics.last,
        "first_difference": found and {
            "step": found.step, "evaluation": found.evaluation, "fields": found.fields, "rows": rows,
        },
        "checkpoints": [{"step": each.step, "arrays": each.compared, "differing": each.arrays} for each in saved],
    }  # fmt: skip


def _text(
    metrics: "Comparison", saved: "Sequence[SavedDifference]", rows: list[Any] | None, tolerance: float
) -> list[str]:
    how = "equal" if tolerance == 0 else f"equal within {tolerance:g}"
    last = " and ".join(f"{step:,}" for step in metrics.last)
    found = metrics.difference
    if found is None:
        compared = f"{counted(metrics.steps, 'step')} and {counted(metrics.evaluations, 'evaluation')}"
        lines = [f"{compared} in both runs (which end at {last}): {how}"]
        for each in saved:
            differ = f"{len(each.arrays)} of {each.compared} arrays differ" if each.arrays else how
            lines.append(f"checkpoints of step {each.step}, {each.compared} arrays: {differ}")
            for name, apart in list(each.arrays.items())[:_MOST_SHOWN]:
                lines.append(f"  {name}  relative difference {apart:.3g}")
        return lines if saved else [*lines, "no step has a checkpoint in both"]
    kind = "evaluation" if found.evaluation else "step"
    lines = [f"the first difference is at {kind} {found.step} (the runs end at {last}); all before it is {how}"]
    lines += [f"  {name:<28} {first} | {second}" for name, (first, second) in found.fields.items()]
    if rows is None:
        return lines
    if rows[0] == rows[1]:
        return [*lines, f"rows of step {found.step} in both: {_rows(rows[0])}"]
    return [
        *lines,
        *(f"rows of step {found.step} in run {number}: {_rows(each)}" for number, each in enumerate(rows, 1)),
    ]


def _rows(rows: list[Any] | str) -> str:
    if isinstance(rows, str):
        return f"unknown: {rows}"
    shown = ", ".join(":".join(map(str, row)) if isinstance(row, tuple) else str(row) for row in rows[:_MOST_SHOWN])
    return f"{shown} and {len(rows) - _MOST_SHOWN} more" if len(rows) > _MOST_SHOWN else shown


if __name__ == "__main__":
    sys.exit(run_command(main))
