"""What stands in files from elsewhere: a right JSON value with a few of its places changed, by hypothesis."""

import copy
from typing import Any

from hypothesis import strategies as st

NUMBERS = [2**31, -(2**63), 2**64, 10**30, 0.5, 1e300, 1e400, -0.0, float("nan")]
TEXTS = ["", "..", "../x", "/dev/null", "a/b", "\0", "\n", "null", "ö" * 200, "\ud800"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from([*NUMBERS, *TEXTS])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def changed(draw: st.DrawFn, right: Any) -> Any:
    """`right` with one to three places changed, left out, doubled or swapped for another of its values."""
    value = copy.deepcopy(right)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        if not places:
            return draw(VALUES)
        holder, key = draw(st.sampled_from(places))
        how = draw(st.integers(0, 5))
        if how == 0:
            del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[draw(st.text(max_size=6))] = copy.deepcopy(holder[key])
        elif how == 1:
            holder.append(copy.deepcopy(holder[key]))
        elif how == 2:
            other, elsewhere = draw(st.sampled_from(places))
            holder[key] = copy.deepcopy(other[elsewhere])
        else:
            holder[key] = draw(VALUES)
    return value


def _places(value: Any) -> Any:
    """Each holder in a value and each of its keys or positions."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])
