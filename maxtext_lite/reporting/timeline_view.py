"""The timeline of reinforcement learning as SVG: who was busy when, a line for each of sampling, judging, training."""

import html
from collections.abc import Sequence

from maxtext_lite.reporting.run_data import TimelineStep
from maxtext_lite.reporting.scales import Scale, short_number

_LANES = {"rollout": "sampling", "reward": "judging", "train": "training"}
_WIDTH, _LEFT, _RIGHT = 960, 84, 948
_LANE, _BAR, _TOP, _TITLE = 26, 20, 8, 22
_CHARACTER = 7.0  # width of a digit, in pixels


def timeline_svg(steps: Sequence[TimelineStep]) -> str:
    """The steps below each other, over the same seconds."""
    seconds = max((stop for step in steps for _, _, _, stop in step.phases), default=0.0) or 1.0
    x = Scale(0.0, seconds, _LEFT, _RIGHT)
    block = _TITLE + len(_LANES) * _LANE + 10
    height = _TOP + len(steps) * block + 24
    parts = [f'<svg class="phases" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Who was busy when">']
    parts += [_tick(x, tick, height - 24) for tick in x.ticks()]
    for number, step in enumerate(steps):
        parts += _step(step, x, _TOP + number * block)
    return "".join([*parts, "</svg>"])


def _tick(x: Scale, tick: float, bottom: float) -> str:
    at = x.pixel(tick)
    return (
        f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{short_number(tick)} s</text>'
    )


def _step(step: TimelineStep, x: Scale, top: float) -> list[str]:
    parts = [f'<text class="name" x="{_LEFT}" y="{top + 15}">step {step.step:,}</text>']
    for lane, (name, label) in enumerate(_LANES.items()):
        y = top + _TITLE + lane * _LANE
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{label}</text>')
        for phase, chunk, start, stop in step.phases:
            if phase == name:
                parts.append(_bar(x.pixel(start), x.pixel(stop), y, lane, chunk, f"{label} {stop - start:.3g} s"))
    return parts


def _bar(left: float, right: float, y: float, lane: int, chunk: int, title: str) -> str:
    width = max(right - left, 1.0)
    number = ""
    if width > _CHARACTER * (len(str(chunk)) + 1):
        number = f'<text class="number" x="{left + width / 2:.1f}" y="{y + 15}" text-anchor="middle">{chunk}</text>'
    return (
        f'<g><title>chunk {chunk}: {html.escape(title)}</title><rect class="c{lane}" x="{left:.1f}" y="{y}" '
        f'width="{width:.1f}" height="{_BAR}" rx="2"/>{number}</g>'
    )
