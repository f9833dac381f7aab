"""The page: one HTML file that needs no network.

Its charts are drawn by page.js: uPlot, at 50 kB, is five times as long and has neither error bands nor marks.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape as _e
from pathlib import Path
from typing import Any

from maxtext_lite.analysis.charts import AXES
from maxtext_lite.analysis.curves import FRAME, Json, color_class, make_board
from maxtext_lite.analysis.plan_view import long_number, memory_parts, plain, plan_rows
from maxtext_lite.analysis.run_data import Run
from maxtext_lite.analysis.summary import NONE, advice, status, summary
from maxtext_lite.config.errors import bytes_text

_FOLDER = Path(__file__).parent
_STAGE_KEYS = {
    "num_steps": "steps", "per_device_batch_size": "per device",
    "gradient_accumulation_steps": "accumulation", "global_batch_to_train": "global batch", "samples": "examples",
}  # fmt: skip
_DATA = {
    "documents": "documents", "tokens": "their tokens", "cut_documents": "documents split", "examples": "rows an epoch",
    "target_tokens": "target tokens an epoch", "slots_used": "slots with a target", "rows": "rows of the run",
    "token_share": "share of its tokens", "epochs": "its epochs",
}  # fmt: skip
_SAMPLE_LETTERS = 600
_PHASES = {"rollout": "rollout", "reward": "rewards", "train": "training"}


def render_page(runs: Sequence[Run]) -> str:
    """The report of one run, or of several in the same charts, as the text of an HTML file."""
    board = make_board(runs)
    heading = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    title = heading if len(runs) == 1 else f"{heading}: {', '.join(run.label for run in runs)}"
    data = json.dumps(board, separators=(",", ":"))
    # Inside a script element, only characters that could end it are escaped.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    sections = {
        "Batch size": _of_each(runs, [f"<p>{_e(text)}</p>" if (text := advice(run)) else "" for run in runs]),
        "Curves": _curves(runs, board),
        "Sampled responses": _of_each(runs, [_samples(run) for run in runs]),
        "Timeline": _of_each(runs, [_timeline(run) for run in runs]),
        "Plan": _plans(runs),
        "Data": _of_each(runs, [_data(run.plan) for run in runs]),
        "Config": _settings(runs),
        "Environment": _comparison(runs, [_environment(run) for run in runs]),
    }
    body = "".join(f"<section><h2>{name}</h2>{content}</section>\n" for name, content in sections.items() if content)
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
<header><p class="quiet">maxtext_lite run report</p><h1>{_e(heading)}</h1>{_headers(runs)}</header>
{_summary(runs)}
{body}</main>
<div id="readout" hidden></div>
<script type="application/json" id="data">{data}</script>
<script>
{(_FOLDER / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Writes the report of these runs to a file.

    Raises:
      OSError: the file cannot be written.
    """
    path.write_bytes(render_page(runs).encode(errors="replace"))  # JSON can contain what UTF-8 cannot


def _swatch(classes: str) -> str:
    """A short line in the style of the charts."""
    return f'<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true"><path class="line {classes}" d="M1,4H21"/></svg>'


def _name(number: int, runs: Sequence[Run]) -> str:
    """The swatch and the label of a run; empty for a single run."""
    return f"{_swatch(color_class(number, 0, len(runs)))}{_e(runs[number].label)}" if len(runs) > 1 else ""


def _of_each(runs: Sequence[Run], contents: Sequence[str]) -> str:
    """The content for each run that has any, below the run's name."""
    parts: list[str] = []
    for number, content in enumerate(contents):
        if content:
            parts.append((f"<h3>{_name(number, runs)}</h3>" if len(runs) > 1 else "") + content)
    return "".join(parts)


def _headers(runs: Sequence[Run]) -> str:
    lines: list[str] = []
    for number, run in enumerate(runs):
        when = f" · metrics of {run.last_written}" if run.last_written else ""
        name = f"<b>{_name(number, runs)}</b> · " if len(runs) > 1 else ""
        lines.append(f'<p class="quiet">{name}{_e(status(run))}{when} · <code>{_e(str(run.directory))}</code></p>')
        lines.append(f'<p class="quiet">{_e(run.goodput)}</p>' if run.goodput else "")
        lines.append(_notes(run.notes))
    return "".join(lines)


def _notes(texts: Sequence[object]) -> str:
    return "".join(f'<p class="note">{_e(str(text))}</p>' for text in texts)


def _cell(value: str, remark: str) -> str:
    return f"{_e(value)}<small>{_e(remark)}</small>" if remark else _e(value)


def _table(
    kind: str, heads: Sequence[str], rows: Mapping[str, Sequence[str]], differing: Sequence[str] = (), corner: str = ""
) -> str:
    """A table with a row for each name; heads and cells are HTML. The rows in `differing` are highlighted."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    head = f"<thead><tr><th>{corner}</th>{head}</tr></thead>" if head else ""
    body = ""
    for name, cells in rows.items():
        body += f"<tr{' class=differs' if name in differing else ''}><th scope=row>{_e(name)}</th>"
        body += "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return f'<div class="wide"><table class="{kind}">{head}<tbody>{body}</tbody></table></div>'


def _bar(share: float) -> str:
    return f'<div class="share"><i class="c0" style="width:{100 * share:.1f}%"></i></div>'


def _comparison(runs: Sequence[Run], tables: Sequence[Mapping[str, str]], *, sort: bool = False) -> str:
    """A table with a column for each run; cells are HTML. Differing rows are highlighted, and come first if sorted.

    A row without a value of any run is omitted.
    """
    rows: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        cells = [table.get(name, NONE) for table in tables]
        if set(cells) != {NONE}:
            rows[name] = cells
    differing = [name for name, cells in rows.items() if len(set(cells)) > 1]
    if sort:
        rows = {name: rows[name] for name in dict.fromkeys((*differing, *rows))}
    heads = [_name(number, runs) for number in range(len(runs))] if len(runs) > 1 else []
    return _table("compare" if heads else "plan", heads, rows, differing)


def _summary(runs: Sequence[Run]) -> str:
    tables = [summary(run) for run in runs]
    if len(runs) > 1:
        return _comparison(runs, [{name: _cell(*cell) for name, cell in table.items()} for table in tables])
    tiles = ""
    for name, cell in tables[0].items():
        if cell[0] != NONE:
            tiles += f"<div><dt>{name}</dt><dd>{_cell(*cell)}</dd></div>"
    return f'<dl class="tiles">{tiles}</dl>'


def _curves(runs: Sequence[Run], board: Json) -> str:
    if not board["charts"]:
        return "<p>Nothing to draw yet: no step has been recorded.</p>"
    figures = ""
    for chart in board["charts"]:
        title, unit = _e(chart["title"]), _e(chart["unit"])
        label = f"{title}, {unit}" if unit else title
        figures += (
            f"<figure><figcaption><h3>{title}</h3><span>{unit}</span>"
            f'<div class="keys">{_keys(chart, runs, board)}</div></figcaption>'
            f'<svg class="chart" viewBox="0 0 {FRAME["width"]} 460" role="img" tabindex="0" aria-label="{label}"></svg>'
            "</figure>"
        )
    averaged = any("first" in grid for grid in board["grids"])
    note = " Lines are means of several steps; bands span their lowest to highest values." if averaged else ""
    axes = "".join(
        f'<label><input type="radio" name="axis" value="{axis}"{" checked" if axis == "step" else ""}>{name}</label>'
        for axis, name in AXES.items()
        if any(axis in grid for grid in board["grids"])
    )
    legend = "".join(
        f'<button type="button" data-run="{number}" aria-pressed="true">{_name(number, runs)}</button>'
        for number in range(len(runs) if len(runs) > 1 else 0)
    )
    return f"""<noscript><p class="note">The charts need JavaScript.</p></noscript>
<div class="bar"><div id="controls" hidden><fieldset><legend>x-axis</legend>{axes}</fieldset>
<label>smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" value="0.6"></label>
<button type="button" id="reset" hidden>whole axis</button></div>{legend}</div>
<p class="quiet">Drag over a chart to zoom, double-click for the whole axis; keys: arrows, + and Esc.\
{" Click on a run to hide it." if legend else ""}{note}</p><div class="charts">{figures}</div>"""


def _keys(chart: Json, runs: Sequence[Run], board: Json) -> str:
    """The legend of a chart's lines and marks, with the last values of a single run."""
    found: dict[str, str] = {}
    several = len({line["label"] for line in chart["lines"]}) > 1
    for line in chart["lines"]:
        label = line["label"]
        found[label] = ""
        if several:
            found[label] = _swatch(line["color"] if len(runs) == 1 else f"any s{line['series']}") + _e(label)
        last = runs[0].last(line["metric"]) if len(runs) == 1 else None
        if last is not None:
            found[label] += f" <b>{long_number(last)}</b>"
    texts = [*found.values()]
    kinds = {mark["kind"] for mark in board["marks"]}
    if chart["skipped"] and "skip" in kinds:
        texts.append("× skipped")
    if "stage" in kinds:
        texts.append("┊ batch size")
    if chart["log"]:
        texts.append("log scale")
    return "".join(f"<span>{text}</span>" for text in texts)


def _samples(run: Run) -> str:
    """For reinforcement learning: some responses of the last batch that was written, with their rewards."""
    if not run.samples:
        return ""
    rows: dict[str, list[str]] = {}
    for number, sample in enumerate(run.samples, start=1):
        texts = [f"<pre>{_e(str(sample[key])[:_SAMPLE_LETTERS])}</pre>" for key in ("prompt", "response")]
        numbers = [_e(plain(sample[key])) for key in ("reward", "advantage", "tokens")]
        rows[str(number)] = [*texts, *numbers]
    table = _table("samples", ("prompt", "response", "reward", "advantage", "tokens"), rows)
    return f"<p>The first of step {run.samples[0]['step']:,}; all are in rollouts.jsonl.</p>{table}"


def _timeline(run: Run) -> str:
    """For reinforcement learning: when rollout, rewards and training were busy in the last steps, on one time axis."""
    if not run.timeline:
        return ""
    seconds = max((stop for phases in run.timeline.values() for _, _, _, stop in phases), default=0.0) or 1.0
    lines: list[str] = []
    for step, phases in run.timeline.items():
        lines.append(f"<h4>step {step:,}</h4>")
        for color, (phase, label) in enumerate(_PHASES.items()):
            bars = ""
            for name, chunk, start, stop in phases:
                if name == phase:
                    place = f"left:{100 * start / seconds:.2f}%;width:{100 * (stop - start) / seconds:.2f}%"
                    about = f"chunk {chunk}: {label} {stop - start:.3g} s"
                    bars += f'<i class="c{color}" style="{place}" title="{about}">{chunk}</i>'
            lines.append(f"<div><b>{label}</b><p>{bars}</p></div>")
    about = f"What was busy when in the last steps, over {seconds:.3g} seconds; numbers are chunks of the batch."
    return f'<p>{about}</p><div class="timeline">{"".join(lines)}</div>'


def _plans(runs: Sequence[Run]) -> str:
    tables = [plan_rows(run.plan) for run in runs]
    rest = [_notes(run.plan.get("warnings", ())) + _ramp(run.plan) + _memory(run) for run in runs]
    if len(runs) == 1:
        return _table("plan", (), {name: [_e(text) for text in row] for name, row in tables[0].items()}) + rest[0]
    compared: list[dict[str, str]] = []
    for table in tables:  # the meanings are the same for every run, but for two
        remarks = {key: table[key][1] for key in ("num_devices", "loading_hosts") if key in table}
        compared.append({key: _cell(value, remarks.get(key, "")) for key, (value, _) in table.items()})
    return _comparison(runs, compared) + _of_each(runs, rest)


def _ramp(plan: Mapping[str, Any]) -> str:
    """The stages of the ramp, each with a bar that shows its batch size."""
    ramp = plan.get("rampup")
    if ramp is None:
        return ""
    last = {**plan, "first_step": ramp["total_steps"] + 1, "num_steps": "the rest", "samples": NONE}
    rows: dict[str, list[str]] = {}
    for stage in (*ramp["stages"], last):
        share = stage["global_batch_to_train"] / plan["global_batch_to_train"]
        rows[plain(stage["first_step"])] = [*(_e(plain(stage[key])) for key in _STAGE_KEYS), _bar(share)]
    about = (
        f"{plain(ramp['num_increments'])} increments of {plain(ramp['samples_per_increment'])} "
        f"examples, {plain(ramp['total_steps'])} steps in all."
    )
    return f"<h3>Ramp-up</h3><p>{about}</p>{_table('stages', [*_STAGE_KEYS.values(), ''], rows, corner='first step')}"


def _data(plan: Mapping[str, Any]) -> str:
    """Counts for each source of text, and the lengths of all documents."""
    sources: dict[str, Json] = {}
    counts = Counter[int]()
    for about in (*(plan.get("data") or ()), *(plan.get("mixture") or ())):
        sources.setdefault(plain(about.get("name") or "all"), {}).update(about)
        counts.update(dict(enumerate(about.get("lengths", ()))))
    heads = {key: name for key, name in _DATA.items() if any(key in about for about in sources.values())}
    rows: dict[str, list[str]] = {}
    for name, about in sources.items():
        rows[name] = [_e(plain(about[key])) if key in about else NONE for key in heads]
    bars: dict[str, list[str]] = {}
    for power, count in counts.items():
        bars[f"{2**power:,} to {2 ** (power + 1) - 1:,}"] = [f"{count:,}", _bar(count / max(counts.values()))]
    return _table("sources", [*heads.values()], rows) + _table("lengths", ("documents by number of tokens", ""), bars)


def _memory(run: Run) -> str:
    sentence, parts = memory_parts(run.plan)
    if not parts:
        return ""
    sizes = [f"{sentence}, as planned"]
    for key, name in (("compiled_bytes", "by the compiler"), ("measured_bytes", "used by a device in the first step")):
        size = run.memory.get(key)
        if size is not None:
            sizes.append(f"{bytes_text(size)} {name}")
    bar = legend = ""
    for color, (name, text, share) in enumerate(parts):
        bar += f'<i class="c{color}" style="width:{100 * share:.2f}%"></i>'
        legend += f'<span><i class="c{color}"></i>{name} <b>{text}</b></span>'
    bar = f'<div class="memory" aria-hidden="true">{bar}</div><div class="keys">{legend}</div>'
    return f"<h3>Memory</h3><p>{'; '.join(sizes)}.</p>{bar}"


def _settings(runs: Sequence[Run]) -> str:
    """The keys that differ from base.yml; those that differ between several runs come first."""
    names = dict.fromkeys(key for run in runs for key, (value, base, _) in run.settings.items() if value != base)
    if len(runs) > 1:
        tables = [{key: _e(run.settings[key][0]) for key in names if key in run.settings} for run in runs]
        about = "<p>Keys whose value differs from base.yml in some run; those that differ between runs come first.</p>"
        return about + _comparison(runs, tables, sort=True) if names else ""
    rows = {key: [NONE if text is None else _e(text) for text in runs[0].settings[key]] for key in names}
    table = _table("settings", ("value", "base.yml", "from"), rows)
    return f"<p>Keys whose value differs from base.yml.</p>{table}" if runs[0].settings else ""


def _environment(run: Run) -> dict[str, str]:
    """environment.json without nesting: package versions beside the rest, without devices, which the summary has."""
    flat = {**run.environment, **run.environment.get("packages", {})}
    return {key: _e(plain(value)) for key, value in flat.items() if key not in ("devices", "packages")}
