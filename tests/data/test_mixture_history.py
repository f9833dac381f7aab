import dataclasses

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.history import MixtureComponent, continued, history_of
from maxtext_lite.data.mixture import MixtureSchedule, MixtureSource
from maxtext_lite.data.order import FILE_ORDER
from tests.mixture_trials import try_history


def part(name, weight="1", most=None):
    return MixtureComponent(name, f"rows of {name}", weight, most)


@pytest.mark.fast
@pytest.mark.parametrize("number", range(8))
def test_random_histories_agree_with_a_loop_with_counters(number):
    assert try_history(number) > 0


def test_a_source_at_its_limit_is_left_out_from_its_next_turn():
    parts = (part("a", most=2), part("b", most=3), part("c"))
    stream = MixtureSchedule(history_of(parts))
    ids = MixtureSource(parts, (range(100),) * 3, stream).ids_of_run(0, 12, FILE_ORDER)
    found = "".join("abc"[number] for number in ids // 100)
    assert found == "abcabcbccccc"
    assert ids[ids >= 200].tolist() == list(range(200, 207))
    assert stream.left_out == {"rows of a": 6, "rows of b": 8}
    ends = MixtureSchedule(history_of([part("a", most=2), part("b", most=3)]))
    assert ends.end == 5


def test_an_entry_is_added_only_where_the_mixture_changed():
    first = history_of([part("a", "3"), part("b", "1")])
    same = [part("a", "3/2"), part("b", "1/2")]
    assert continued(first, same, examples_seen=9, tokens_seen=1) == first
    for other in (
        [part("a", "2"), part("b", "1")],
        [part("a", "3"), part("b", "1", 7)],
    ):
        history = continued(first, other, examples_seen=9, tokens_seen=1)
        assert history[0] == first[0]
        assert (history[1].examples_seen, history[1].tokens_seen) == (9, 1)
    # Changed once more before its first row, it never was.
    changed = continued(history, [part("c")], examples_seen=9, tokens_seen=1)
    assert changed[1].parts == (part("c"),)


def test_a_source_is_known_by_its_rows_and_a_name_by_its_source():
    history = history_of([part("a"), part("b")])
    renamed = dataclasses.replace(part("a"), name="web")
    assert (
        continued(history, [renamed, part("b")], examples_seen=5, tokens_seen=5)
        == history
    )
    changed = dataclasses.replace(part("a"), fingerprint="other rows")
    with pytest.raises(UserError, match=r"dataset_path: .* a "):
        continued(history, [changed, part("b")], examples_seen=5, tokens_seen=5)


@pytest.mark.fast
def test_the_source_with_which_a_run_began_alone_keeps_the_order_and_hash_that_it_had():
    history = history_of([part("a")])
    stream = MixtureSchedule(
        continued(history, [part("a"), part("b")], examples_seen=7, tokens_seen=9)
    )
    assert stream.seed("rows of a", 5) == 5
    assert stream.salt("rows of a") == 0
    first = stream.segments[0]
    assert (first.sources, first.stop) == (("rows of a",), 7)
    of_several = MixtureSchedule(history_of([part("a"), part("b")]))
    seeds = {
        stream.seed("rows of b", 5),
        of_several.seed("rows of a", 5),
        of_several.seed("rows of a", 6),
        5,
        6,
    }
    assert len(seeds) == 5
    assert of_several.seed("rows of b", 5) == stream.seed("rows of b", 5)
    assert of_several.seed("rows of b", FILE_ORDER) == FILE_ORDER
