import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.history import mixture_sentences, parts_of, steps_left
from maxtext_lite.data.mixture import MixtureSource
from maxtext_lite.data.sources import with_history
from tests.data.test_feed import NumberedSource

SIZES = {"a": 20, "b": 100}


def begun(*keys, a="max_epochs: 1.5", b=""):
    """A run of two equal halves: a has 20 examples, and with max_epochs of 1.5 gives 30."""
    entries = f"[{{path: a, weight: 1, {a}}}, {{path: b, weight: 1, {b}}}]"
    config = load_config(
        None,
        [f"dataset_path={entries}", "per_device_batch_size=8", "warmup_steps=0", *keys],
    )
    sources = [
        NumberedSource(size, fingerprint=f"rows of {name}")
        for name, size in SIZES.items()
    ]
    parts = parts_of(config, sources)
    assert [part.most_rows for part in parts] == [30 if a else None, 300 if b else None]
    source = MixtureSource(tuple(parts), tuple(sources))
    return config, make_plan(config, num_devices=1), with_history(config, source)[0]


def left(run, step=0, examples_seen=0):
    return steps_left(*run, step=step, examples_seen=examples_seen)


@pytest.mark.fast
def test_a_source_that_would_pass_its_max_epochs_is_refused_before_the_run():
    """a's row number 30 would be example 60 (rows 0, 2, ... are a's): 7 batches of 8 end before it, 8 do not."""
    assert left(begun("steps=7")) == 7
    with pytest.raises(
        UserError,
        match=r"a .* 60, .* steps=7, mixture_exhausted=stop, mixture_exhausted=drop or",
    ):
        left(begun("steps=8"))
    assert left(begun("steps=99", a="")) == 99


def test_a_run_that_stops_there_has_the_whole_batches_before_it():
    run = begun("steps=20", "mixture_exhausted=stop")
    assert left(run) == 7
    assert left(run, step=5, examples_seen=40) == 2
    assert left(run, step=9, examples_seen=56) == 0
    assert "example 60" in mixture_sentences(run[0], run[2], 0, 56)[2]
    with pytest.raises(UserError, match="Nearest that work: mixture_exhausted=drop"):
        left(begun("steps=10", "mixture_exhausted=stop", "per_device_batch_size=64"))
    ramp = "enable_rampup_batch_size=true per_device_batch_size_start=4 per_device_batch_size_increment=4"
    ramp += " global_rampup_samples=16"
    assert (
        left(begun("steps=20", "mixture_exhausted=stop", *ramp.split())) == 4 + 5
    )  # 4 x 4 + 5 x 8 = 56


def test_a_run_that_drops_it_continues_until_no_source_is_left():
    """a's 30 rows and b's 300: 330 examples, 41 whole batches of 8."""
    run = begun("steps=41", "mixture_exhausted=drop", b="max_epochs: 3")
    assert left(run) == 41
    assert run[2].stream.end == 330
    with pytest.raises(
        UserError, match=r"example 330, .* steps=41, mixture_exhausted=stop or"
    ):
        left(begun("steps=42", "mixture_exhausted=drop", b="max_epochs: 3"))
    assert len(mixture_sentences(run[0], run[2], 0, 60)) == 2
    assert "example 60" in mixture_sentences(run[0], run[2], 0, 61)[2]
    table = run[2].shares(0, 328)
    assert {row["name"]: (row["rows"], row["epochs"]) for row in table} == {
        "a": (30, 1.5),
        "b": (298, 2.98),
    }
    shares = [row["token_share"] for row in table]
    assert shares == pytest.approx([30 / 328, 298 / 328])
