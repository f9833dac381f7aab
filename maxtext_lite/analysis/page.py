"""The page: one HTML file that needs no network, filled in from page.html.

Its charts are drawn by page.js: uPlot, at 50 kB, is five times as long and has neither error bands nor marks.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2

from maxtext_lite.analysis.charts import AXES
from maxtext_lite.analysis.curves import Json, color_class, make_board
from maxtext_lite.analysis.plan_view import long_number, memory_parts, plain, plan_rows
from maxtext_lite.analysis.run_data import Run
from maxtext_lite.analysis.summary import NONE, advice, status, summary
from maxtext_lite.config.errors import bytes_text, counted

_FOLDER = Path(__file__).parent
_STAGE = ("num_steps", "per_device_batch_size", "gradient_accumulation_steps", "global_batch_to_train", "samples")
_DATA = {
    "documents": "documents", "tokens": "their tokens", "cut_documents": "documents split", "examples": "rows an epoch",
    "target_tokens": "target tokens an epoch", "slots_used": "slots with a target", "rows": "rows of the run",
    "token_share": "share of its tokens", "epochs": "its epochs",
}  # fmt: skip

Cell = str | float | tuple[str, str]
"""The cell of a table: a text, a share shown as a bar, or a text and a remark."""
Rows = Mapping[str, Sequence[Cell]]


def render_page(runs: Sequence[Run]) -> str:
    """The report of one run, or of several in the same charts, as the text of an HTML file."""
    several = len(runs) > 1
    board = make_board(runs)
    grids = board["grids"]
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.ChainableUndefined
    )
    functions = (
        advice, bytes_text, counted, _differs, _last_second, _length_rows, long_number, memory_parts, plain,
        _source_rows, _stage_rows, status,
    )  # fmt: skip
    shared = cast("dict[str, Any]", pages.globals)  # pyright: ignore[reportUnknownMemberType]
    shared.update({function.__name__.lstrip("_"): function for function in functions})
    pages.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return pages.get_template("page.html").render(
        runs=runs,
        several=several,
        heading=f"{len(runs)} runs" if several else runs[0].label,
        colors={run.label: color_class(number, 0, len(runs)) for number, run in enumerate(runs)},
        board=board,
        axes={axis: name for axis, name in AXES.items() if any(axis in grid for grid in grids)},
        averaged=any("first" in grid for grid in grids),
        kinds={mark["kind"] for mark in board["marks"]},
        summary_rows=_beside([summary(run) for run in runs]),
        planned_rows=_planned_rows(runs),
        setting_rows=_setting_rows(runs),
        environment_rows=_beside([_environment(run) for run in runs]),
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        script=(_FOLDER / "page.js").read_text(encoding="utf-8"),
    )


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Writes the report of these runs to a file.

    Raises:
      OSError: the file cannot be written.
    """
    path.write_bytes(render_page(runs).encode(errors="replace"))  # JSON can contain what UTF-8 cannot


def _beside(tables: Sequence[Mapping[str, Cell]]) -> dict[str, list[Cell]]:
    """The rows of several tables, with a column for each table and without rows that are empty in all."""
    rows: dict[str, list[Cell]] = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(tables)):
        cells = [table.get(name, NONE) for table in tables]
        if any(cell not in (NONE, (NONE, "")) for cell in cells):
            rows[name] = cells
    return rows


def _differs(cells: Sequence[Cell]) -> bool:
    return len(set(cells)) > 1


def _last_second(run: Run) -> float:
    """The end of the last phase in the timeline, in seconds since its step began."""
    phases = itertools.chain.from_iterable(run.timeline.values())
    return max((stop for _, _, _, stop in phases), default=0.0) or 1.0


def _planned_rows(runs: Sequence[Run]) -> Rows:
    tables = [plan_rows(run.plan) for run in runs]
    if len(runs) == 1:
        return tables[0]
    compared: list[dict[str, Cell]] = []
    for table in tables:  # the meanings are the same for every run, but for two
        compared.append(
            {name: row if name in ("num_devices", "loading_hosts") else row[0] for name, row in table.items()}
        )
    return _beside(compared)


def _stage_rows(plan: Mapping[str, Any]) -> Rows:
    """The stages of the batch, each with its share of the largest batch."""
    ramp = plan["rampup"]
    last = ramp["target"] | {"num_steps": "the rest", "samples": NONE}
    stages = (*ramp["stages"], last)
    largest = max(stage["global_batch_to_train"] for stage in stages)
    rows: dict[str, list[Cell]] = {}
    for stage in stages:
        share = stage["global_batch_to_train"] / largest
        rows[plain(stage["first_step"])] = [*(plain(stage[key]) for key in _STAGE), share]
    return rows


def _sources(plan: Mapping[str, Any]) -> list[Json]:
    return [*(plan.get("data") or ()), *(plan.get("mixture") or ())]


def _source_rows(plan: Mapping[str, Any]) -> tuple[list[str], Rows]:
    """The heads and rows of the counts of each source of text."""
    sources: dict[str, Json] = {}
    for about in _sources(plan):
        sources.setdefault(plain(about.get("name") or "all"), {}).update(about)
    heads = {key: name for key, name in _DATA.items() if any(key in about for about in sources.values())}
    rows: dict[str, list[Cell]] = {}
    for name, about in sources.items():
        rows[name] = [plain(about[key]) if key in about else NONE for key in heads]
    return [*heads.values()], rows


def _length_rows(plan: Mapping[str, Any]) -> Rows:
    """The number of documents of each length."""
    counts = Counter[int]()
    for about in _sources(plan):
        lengths: Sequence[int] = about.get("lengths", ())
        counts.update(dict(enumerate(lengths)))
    rows: dict[str, list[Cell]] = {}
    for power, count in counts.items():
        rows[f"{2**power:,} to {2 ** (power + 1) - 1:,}"] = [f"{count:,}", count / max(counts.values())]
    return rows


def _setting_rows(runs: Sequence[Run]) -> Rows:
    """The keys that differ from base.yml; those that differ between several runs come first."""
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(key for key, (value, base, _) in run.settings.items() if value != base)
    if len(runs) == 1:
        return {key: [NONE if text is None else text for text in runs[0].settings[key]] for key in names}
    rows = _beside([{key: run.settings[key][0] for key in names if key in run.settings} for run in runs])
    first = [key for key, cells in rows.items() if _differs(cells)]
    return {key: rows[key] for key in dict.fromkeys((*first, *rows))}


def _environment(run: Run) -> dict[str, Cell]:
    """environment.json without nesting: package versions beside the rest, without devices, which the summary has."""
    flat = {**run.environment, **run.environment.get("packages", {})}
    return {key: plain(value) for key, value in flat.items() if key not in ("devices", "packages")}
