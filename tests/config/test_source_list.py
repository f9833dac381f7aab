import pickle
from fractions import Fraction

import pytest

from maxtext_lite.config import SourceList, UserError, load_config, single_path, write_resolved
from maxtext_lite.config.source_list import is_source_list, name_of_path

TWO = (
    "dataset_path=[{path: data/web.jsonl.gz, weight: 0.7}, {path: 'a: b/c', weight: 1/3, max_epochs: 2, name: \"d é\"}]"
)
WRONG = {
    "[]": "has 0 sources; it must have 1 to 1,000.",
    "[{path: a}]": "is not a mixture: entry 1 lacks weight, which a source needs.",
    "[{weight: 1}]": "is not a mixture: entry 1 lacks path, which a source needs.",
    "[{path: a, weight: 0}]": "is not a mixture: entry 1 has weight=0, which must be above 0.",
    "[{path: a, weight: -0.1}]": "is not a mixture: entry 1 has weight=-0.1, which must be above 0.",
    "[{path: a, weight: x}]": "is not a mixture: entry 1 has weight=x, which is text, not a number.",
    "[{path: a, weight: .inf}]": "is not a mixture: entry 1 has weight=inf, which is not a finite number.",
    "[{path: '', weight: 1}]": "is not a mixture: entry 1 has path=, which must not be empty.",
    "[{path: a, weight: 1, max_epochs: 0}]": "is not a mixture: entry 1 has max_epochs=0, which must be above 0, or -1",
    "[{path: a, weight: 1, name: ''}]": "is not a mixture: entry 1 has name=, which must not be empty.",
    "[{path: a, wieght: 1}]": "entry 1 has wieght, which a source does not take; it takes path, weight, "
    "max_epochs, name. Did you mean 'weight'?",
    "[{path: a, weight: 1}, b.txt]": "is not a mixture: entry 2 is not a mapping, as {path: web.jsonl, weight: 0.7}.",
    "[{path: x/a.txt, weight: 1}, {path: a.jsonl, weight: 1}]": "has two sources named a: give each its own name.",
    "{path: a, weight: 1}": "is not a mixture: it must be a list, as [{path: web.jsonl, weight: 0.7}].",
    "[{path: a, weight: 1}": "is not YAML",
}


def test_a_list_of_sources_has_exact_weights_and_names_by_default():
    entries = load_config(None, [TWO]).dataset_path.entries
    assert [(each.path, each.weight, each.max_epochs, each.name) for each in entries] == [
        ("data/web.jsonl.gz", Fraction(7, 10), -1, "web"),
        ("a: b/c", Fraction(1, 3), 2, "d é"),
    ]


def test_texts_of_a_source_are_kept_as_written():
    entries = load_config(None, ["dataset_path=[{path: 007, weight: 0x2}, {path: a, weight: 1, name: 1.50}]"])
    assert [(each.path, each.weight, each.name) for each in entries.dataset_path.entries] == [
        ("007", 2, "007"),
        ("a", 1, "1.50"),
    ]


@pytest.mark.parametrize("value", WRONG)
def test_what_is_no_mixture_is_refused_in_a_line(value):
    with pytest.raises(UserError) as error:
        load_config(None, [f"dataset_path={value}"])
    (problem,) = error.value.problems
    assert problem.startswith("dataset_path=")
    assert WRONG[value] in problem


def test_a_list_in_a_file_and_in_a_resolved_config_reads_back(tmp_path):
    config = load_config(None, [TWO, "mixture_exhausted=drop"])
    write_resolved(config, tmp_path / "config.yml")
    again = load_config(tmp_path / "config.yml")
    assert again == config
    assert hash(again) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config
    (tmp_path / "own.yml").write_text(
        "dataset_path:\n  - path: a.txt\n    weight: 1e-6\n  - {path: b, weight: 0.999999}\n"
    )
    own = load_config(tmp_path / "own.yml").dataset_path
    assert [each.weight for each in own.entries] == [Fraction(1, 10**6), Fraction(999_999, 10**6)]
    (tmp_path / "own.yml").write_text("dataset_path: [a.txt, b.txt]\n")
    with pytest.raises(UserError, match="is not a mixture: entry 1 is not a mapping"):
        load_config(tmp_path / "own.yml")


@pytest.mark.parametrize("text", ["*.txt", "[ab]*.txt", "[ab]", "[a.txt]", "007"])
def test_a_path_is_as_it_was(text):
    config = load_config(None, [f"dataset_path={text}"])
    assert config.dataset_path == single_path(config.dataset_path) == text


def test_names_come_from_paths():
    names = {"data/web.jsonl.gz": "web", "data/web/": "web", "data/.hidden/": ".hidden", "a.b/c": "c", "/": "/"}
    assert {path: name_of_path(path) for path in names} == names
    assert [is_source_list(value) for value in ([{}], [], {}, ["a"], "a", None)] == [True] * 3 + [False] * 3
    assert isinstance(load_config(None, ["dataset_path=[{path: a, weight: 1}]"]).dataset_path, SourceList)
