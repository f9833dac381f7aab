"""The page: one HTML file that asks the network for nothing."""

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxtext_lite.reporting.charts import AXES, Board, Chart, make_board
from maxtext_lite.reporting.plan_view import memory_parts, plain, plan_rows
from maxtext_lite.reporting.records import EVALUATION_METRICS
from maxtext_lite.reporting.run_data import Run
from maxtext_lite.reporting.scales import long_number
from maxtext_lite.reporting.summary import NONE, advice, status, summary
from maxtext_lite.reporting.svg import chart_svg, color_class
from maxtext_lite.reporting.timeline_view import timeline_svg

_FOLDER = Path(__file__).parent
_STAGE_KEYS = {
    "first_step": "first step",
    "num_steps": "steps",
    "per_device_batch_size": "per device",
    "gradient_accumulation_steps": "accumulation",
    "global_batch_to_train": "global batch",
    "samples": "examples",
}

_e = html.escape


def render_page(runs: Sequence[Run]) -> str:
    """The report of one run, or of several over each other, as the text of an HTML file."""
    board = make_board(runs)
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs: " + ", ".join(run.label for run in runs)
    data = json.dumps(board.to_json(), separators=(",", ":"))
    # Within a script element nothing is escaped but what could end it.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    body = [
        _header(runs, title),
        f'<section id="summary">{_summary(runs)}</section>\n',
        _section("Batch size", "advice", _advice(runs)),
        _section("Curves", "curves", _curves(runs, board)),
        _section("Timeline", "timeline", _timelines(runs)),
        _section("Plan", "plan", _plans(runs)),
        _section("Config", "config", _settings(runs)),
        _section("Environment", "environment", _environments(runs)),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{_e(title)} · maxtext_lite</title>
<style>
{(_FOLDER / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
{"".join(body)}</main>
<div id="readout" hidden></div>
<script type="application/json" id="data">{data}</script>
<script>
{(_FOLDER / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _section(title: str, name: str, content: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{content}</section>\n' if content else ""


def _header(runs: Sequence[Run], title: str) -> str:
    lines = []
    for number, run in enumerate(runs):
        when = f" · metrics of {run.last_written}" if run.last_written else ""
        name = "" if len(runs) == 1 else f"{_of_run(number, runs)}<b>{_e(run.label)}</b> · "
        lines.append(f'<p class="status">{name}{_e(status(run))}{when} · <code>{_e(str(run.directory))}</code></p>')
        lines += [f'<p class="note">{_e(note)}</p>' for note in run.notes]
    heading = title if len(runs) == 1 else f"{len(runs)} runs"
    return f'<header><p class="eyebrow">maxtext_lite run report</p><h1>{_e(heading)}</h1>{"".join(lines)}</header>\n'


def _swatch(classes: str) -> str:
    """A short piece of a line, as the charts draw it."""
    return f'<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true"><path class="line {classes}" d="M1,4H21"/></svg>'


def _of_run(number: int, runs: Sequence[Run]) -> str:
    """The swatch of a run."""
    return _swatch(color_class(number, 0, len(runs)))


def _summary(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        tiles = (
            f"<div><dt>{_e(name)}</dt><dd>{_e(value)}<small>{_e(remark)}</small></dd></div>"
            for name, value, remark in summary(runs[0])
            if value != NONE
        )
        return f'<dl class="tiles">{"".join(tiles)}</dl>'
    columns = [summary(run) for run in runs]
    rows = [
        (cells[0][0], [f"{_e(value)}<small>{_e(remark)}</small>" for _, value, remark in cells])
        for cells in zip(*columns, strict=True)
    ]
    return _comparison(runs, rows, lambda cells: False)


def _comparison(
    runs: Sequence[Run], rows: Iterable[tuple[str, Sequence[str]]], marked: Callable[[Sequence[str]], bool]
) -> str:
    """A table with a column for each run; cells are HTML. Rows for which `marked` is true stand out."""
    heads = "".join(f'<th scope="col">{_of_run(number, runs)}{_e(run.label)}</th>' for number, run in enumerate(runs))
    lines = "".join(
        f"<tr{' class=differs' if marked(cells) else ''}><th scope=row>{_e(name)}</th>"
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for name, cells in rows
    )
    return (
        f'<div class="wide"><table class="compare"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _differ(cells: Sequence[str]) -> bool:
    return len(set(cells)) > 1


def _advice(runs: Sequence[Run]) -> str:
    texts = [(number, run, advice(run)) for number, run in enumerate(runs)]
    return "".join(
        f'<p class="advice">{"" if len(runs) == 1 else _of_run(number, runs) + f"<b>{_e(run.label)}.</b> "}'
        f"{_e(text)}</p>"
        for number, run, text in texts
        if text
    )


def _curves(runs: Sequence[Run], board: Board) -> str:
    if not board.charts:
        return "<p>There is nothing to draw yet: no step has been recorded.</p>"
    figures = "".join(_figure(chart, runs, board) for chart in board.charts)
    axes = "".join(
        f'<label><input type="radio" name="axis" value="{name}"{" checked" if name == "step" else ""}>'
        f"{AXES[name]}</label>"
        for name in board.x
    )
    legend = "".join(
        f"<span>{_of_run(number, runs)}{_e(run.label)}</span>" for number, run in enumerate(runs) if len(runs) > 1
    )
    if any(mark.kind == "stage" for chart in board.charts for mark in chart.marks):
        legend += '<span><span class="bars">┊</span>the batch size changes</span>'
    note = ""
    if board.longest > 1:
        note = (
            f'<p class="remark">Lines are means of up to {board.longest:,} steps; the bands behind them reach from the '
            "lowest to the highest value of those steps, error bars included.</p>"
        )
    return (
        f'<div class="bar"><fieldset class="switch" hidden><legend>x-axis</legend>{axes}</fieldset>'
        f'<div class="legend">{legend}</div></div>{note}<div class="charts">{figures}</div>'
    )


def _figure(chart: Chart, runs: Sequence[Run], board: Board) -> str:
    spec, one = chart.spec, len(runs) == 1
    shown = {line.series: line for line in chart.lines}
    keys = []
    for series, line in sorted(shown.items()):
        column = (runs[0].evaluations if line.spec.metric in EVALUATION_METRICS else runs[0].steps).get(
            line.spec.metric, ()
        )
        last = next((value for value in reversed(column) if value is not None), None)
        value = f" <b>{long_number(last)}</b>" if one and last is not None else ""
        name = "" if len(shown) == 1 else _e(line.spec.label)
        swatch = "" if len(shown) == 1 else _swatch(color_class(0, series, 1) if one else f"any s{series}")
        keys.append(f"<span>{swatch}{name}{value}</span>")
    if any(mark.kind == "skip" for mark in chart.marks):
        keys.append('<span><span class="cross">×</span>skipped</span>')
    if chart.y.is_log:
        keys.append("<span>log scale</span>")
    index = board.charts.index(chart)
    return (
        f'<figure data-chart="{index}"><figcaption><h3>{_e(spec.title)}</h3><span class="unit">{_e(spec.unit)}</span>'
        f'<div class="keys">{"".join(keys)}</div></figcaption>{chart_svg(chart, board)}</figure>'
    )


def _timelines(runs: Sequence[Run]) -> str:
    """Of runs of reinforcement learning, who was busy when in their last steps."""
    parts = [
        f"<figure>{'' if len(runs) == 1 else f'<figcaption>{_of_run(number, runs)}{_e(run.label)}</figcaption>'}"
        f"{timeline_svg(run.timeline)}</figure>"
        for number, run in enumerate(runs)
        if run.timeline
    ]
    if not parts:
        return ""
    return (
        "<p>The last steps: what samples, what judges and what trains, each in a line. A number is that of the chunk "
        "of the batch that it was about.</p>" + "".join(parts)
    )


def _plans(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        plan = runs[0].plan
        if plan is None:
            return ""
        rows = "".join(
            f"<tr><th scope=row>{_e(row.name)}</th><td>{_e(row.value)}</td><td>{_e(row.meaning)}</td></tr>"
            for row in plan_rows(plan)
        )
        table = f'<div class="wide"><table class="plan"><tbody>{rows}</tbody></table></div>'
        return _warnings(runs[0]) + table + _ramp(runs[0]) + _memory(runs[0])
    tables = [{row.name: (row.value, row.meaning) for row in plan_rows(run.plan or {})} for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = []
    for name in names:
        cells = [table.get(name, (NONE, "")) for table in tables]
        meanings = name in ("num_devices", "loading_hosts")
        rows.append((name, [_e(value) + (f"<small>{_e(what)}</small>" if meanings else "") for value, what in cells]))
    parts = [_comparison(runs, rows, _differ)] if rows else []
    for number, run in enumerate(runs):
        inside = _warnings(run) + _ramp(run) + _memory(run)
        if inside:
            parts.append(f"<h3>{_of_run(number, runs)}{_e(run.label)}</h3>{inside}")
    return "".join(parts)


def _warnings(run: Run) -> str:
    warnings = (run.plan or {}).get("warnings")
    texts = warnings if isinstance(warnings, list) else []
    return "".join(f'<p class="note">{_e(str(text))}</p>' for text in texts)


def _ramp(run: Run) -> str:
    """The stages of the ramp, each with a bar as long as its batch is large."""
    plan = run.plan or {}
    ramp = plan.get("rampup")
    stages = ramp.get("stages") if isinstance(ramp, dict) else None
    if not isinstance(ramp, dict) or not isinstance(stages, list) or not stages:
        return ""
    target = plan.get("global_batch_to_train")
    total = ramp.get("total_steps")
    last = {key: plan.get(key) for key in _STAGE_KEYS} | {
        "first_step": total + 1 if isinstance(total, int) else None,
        "num_steps": "the rest",
        "samples": NONE,
    }
    lines = []
    for stage in (*(stage for stage in stages if isinstance(stage, dict)), last):
        size = stage.get("global_batch_to_train")
        share = size / target if isinstance(size, int) and isinstance(target, int) and target else 0
        cells = "".join(f"<td>{_e(plain(stage.get(key)))}</td>" for key in _STAGE_KEYS)
        lines.append(f'<tr>{cells}<td class="bar-cell"><span style="width:{100 * share:.1f}%"></span></td></tr>')
    heads = "".join(f'<th scope="col">{name}</th>' for name in _STAGE_KEYS.values())
    return (
        f"<h3>Ramp-up</h3><p>{_e(plain(ramp.get('num_increments')))} increments of "
        f"{_e(plain(ramp.get('samples_per_increment')))} examples, {_e(plain(total))} steps in all.</p>"
        f'<div class="wide"><table class="stages"><thead><tr>{heads}<th></th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _memory(run: Run) -> str:
    memory = memory_parts(run.plan or {})
    if memory is None:
        return ""
    sentence, parts = memory
    bar = "".join(
        f'<i class="c{index}" style="width:{100 * part.fraction:.2f}%"></i>' for index, part in enumerate(parts)
    )
    legend = "".join(
        f'<li><i class="c{index}"></i>{_e(part.name)} <b>{_e(part.text)}</b></li>' for index, part in enumerate(parts)
    )
    return (
        f'<h3>Memory</h3><p>{_e(sentence)}, as planned.</p><div class="memory" aria-hidden="true">{bar}</div>'
        f'<ul class="memory-parts">{legend}</ul>'
    )


def _settings(runs: Sequence[Run]) -> str:
    """The keys that differ from base.yml; of several runs, those that differ between them stand out."""
    if len(runs) == 1:
        settings = runs[0].settings
        if settings is None:
            return ""
        rows = "".join(
            f"<tr><th scope=row>{_e(key)}</th><td>{_e(setting.value)}</td>"
            f"<td>{NONE if setting.base is None else _e(setting.base)}</td><td>{_e(setting.origin)}</td></tr>"
            for key, setting in settings.items()
            if setting.differs
        )
        return (
            "<p>The keys whose value is not that of base.yml.</p>"
            '<div class="wide"><table class="settings"><thead><tr><th></th><th scope="col">value</th>'
            f'<th scope="col">base.yml</th><th scope="col">from</th></tr></thead><tbody>{rows}</tbody></table></div>'
        )
    tables = [run.settings or {} for run in runs]
    names = dict.fromkeys(key for table in tables for key, setting in table.items() if setting.differs)
    if not names:
        return ""
    rows = [(key, [_e(table[key].value) if key in table else NONE for table in tables]) for key in names]
    rows.sort(key=lambda row: not _differ(row[1]))
    return (
        "<p>The keys whose value is not that of base.yml in some run; first those that differ between the runs.</p>"
        + _comparison(runs, rows, _differ)
    )


def _environments(runs: Sequence[Run]) -> str:
    tables = [_flat(run.environment or {}) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [_e(table.get(name, NONE)) for table in tables]) for name in names]
    if not rows:
        return ""
    if len(runs) > 1:
        return _comparison(runs, rows, _differ)
    lines = "".join(f"<tr><th scope=row>{_e(name)}</th><td>{cells[0]}</td></tr>" for name, cells in rows)
    return f'<div class="wide"><table class="plan"><tbody>{lines}</tbody></table></div>'


def _flat(environment: Mapping[str, Any]) -> dict[str, str]:
    """environment.json without nesting: the versions of packages beside the rest, devices left to the summary."""
    rest = {key: value for key, value in environment.items() if key != "devices"}
    packages = rest.pop("packages") if isinstance(rest.get("packages"), dict) else {}
    return {key: plain(value) for key, value in (rest | packages).items()}
