"""Sources and objectives of other packages, and of parts of the library that are absent."""

import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config, registry
from maxtext_lite.config import keys as kinds
from maxtext_lite.data.sources import SyntheticSource, example_shape, open_sources
from maxtext_lite.training.objective import NextToken, objective_of

ROWS = kinds.SourceKind(f"{__name__}:open_rows", fields=("difficulty",))
HALVES = kinds.ObjectiveKind(f"{__name__}:Halves", "text", rows_per_example=2)


def open_rows(
    config, tokenizer, *, key, path, eval_fraction=0.0, vocab_size=None
):  # the arguments of `open_text`
    return SyntheticSource(len(path), 7, config.max_target_length, 5), None


class Halves(NextToken):
    def __init__(self, config):
        self.length = config.max_target_length


@pytest.fixture(autouse=True)
def forget():
    """What the tables had for another test."""
    cached = (
        registry._targets,
        kinds.source_kind,
        kinds.objective_kind,
        kinds.objective_name,
    )
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def package(monkeypatch):
    """A package with entry points."""
    points = {
        "maxtext_lite.source": ("rows", f"{__name__}:ROWS"),
        "maxtext_lite.objective": ("halves", f"{__name__}:HALVES"),
    }
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group: (
            [EntryPoint(*points[group], group=group)] if group in points else []
        ),
    )


@pytest.mark.usefixtures("package")
def test_a_package_adds_a_source_and_an_objective():
    keys = ["dataset_path=abc", "max_target_length=8"]
    config = load_config(None, ["dataset_type=rows", *keys])
    source, held_out = open_sources(config)
    assert source == SyntheticSource(3, 7, 8, 5)
    assert held_out is None
    assert example_shape(config) == (
        8,
        ("tokens", "targets", "segments", "positions", "weights", "difficulty"),
    )
    assert np.shape(source[0]["tokens"]) == (8,)
    assert type(objective_of(config)) is NextToken
    for kind in ("rows", "text"):
        config = load_config(None, [f"dataset_type={kind}", "objective=halves", *keys])
        assert config.rows_per_example == 2
        assert objective_of(config).length == 8
    with pytest.raises(UserError, match="Nearest that works: rows"):
        load_config(None, ["dataset_type=row", *keys])
    with pytest.raises(UserError, match="work: objective=dpo or dataset_type=text"):
        load_config(None, ["dataset_type=dpo", "objective=halves", *keys])


def test_a_source_whose_part_of_the_library_is_absent_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "maxtext_lite.post_training.kinds", None)
    with pytest.raises(UserError, match=r"^source 'dpo' is not installed: "):
        load_config(None, ["dataset_type=dpo", "dataset_path=abc"])
    with pytest.raises(UserError, match="is not installed"):
        load_config(None, ["objective=grpo"])
    assert load_config(None, []).rows_per_example == 1
