"""What a compiled program does with an array that it is to change in place."""

import math
import re

_OPERATION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]\S* ([\w\-]+)\(", re.MULTILINE
)
# A fusion's own operations are listed too: one of nothing but these writes no more than an update.
_IN_PLACE = {
    "parameter",
    "get-tuple-element",
    "bitcast",
    "dynamic-update-slice",
    "scatter",
    "fusion",
    "while",
    "call",
}


def rewritten(hlo: str, least: int) -> list[str]:
    """The operations that give `least` elements or more, and are no update in place: copies, selects, slices, ..."""
    found = [
        (name, kind, math.prod(int(size) for size in sizes.split(",") if size))
        for name, sizes, kind in _OPERATION.findall(hlo)
    ]
    assert any(
        kind in ("dynamic-update-slice", "scatter") and size >= least
        for _, kind, size in found
    )
    return [
        f"{kind} {name}"
        for name, kind, size in found
        if size >= least and kind not in _IN_PLACE
    ]
