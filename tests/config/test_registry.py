"""Names that a config selects are found when used; a part that is absent says so where a key asks for it."""

import json
from types import SimpleNamespace

import pytest

from maxtext_lite.config import UserError, load_config, registry
from maxtext_lite.config.load import load_asked

ABSENT = "maxtext_lite.no_such_room.module:thing"


@pytest.fixture(autouse=True)
def kinds(table):
    targets = {"here": "maxtext_lite.config.errors:UserError", "absent": ABSENT}
    table(kind=targets, hook={"absent": ABSENT})


@pytest.fixture
def add(monkeypatch):
    """A function that has another package add a name to every kind."""

    def add_name(name, value):
        point = SimpleNamespace(name=name, value=value)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])
        registry._targets.cache_clear()

    return add_name


def test_a_name_is_imported_when_it_is_used_and_an_absent_part_is_said_to_be():
    assert registry.load("kind", "here") is UserError
    assert registry.names("other kind") == ()
    assert registry.installed_names("kind") == ("here",)
    assert [*registry.load_installed("kind")] == [UserError]
    with pytest.raises(registry.NotInstalled):
        registry.load("kind", "absent")


@pytest.mark.fast
def test_an_absent_part_is_left_out_unless_its_key_was_set():
    keys = ("log_to", "prometheus_port")
    config = load_config(None, ["dataset_type=synthetic"])
    assert load_asked(config, "hook", "absent", *keys) is None
    config = load_config(None, ["dataset_type=synthetic", "prometheus_port=9000"])
    with pytest.raises(registry.NotInstalled, match=r"^prometheus_port=9000: "):
        load_asked(config, "hook", "absent", *keys)


def test_a_package_that_an_installed_part_lacks_is_named_as_python_names_it(
    tmp_path, monkeypatch, table
):
    (tmp_path / "needs_more.py").write_text("import a_package_nobody_has\nthing = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    table(kind={"broken": "needs_more:thing"})
    with pytest.raises(ModuleNotFoundError, match="a_package_nobody_has"):
        registry.load("kind", "broken")


def test_another_package_adds_names(add):
    add("theirs", "json:loads")
    assert registry.load("kind", "theirs") is json.loads


@pytest.mark.parametrize(
    ("name", "value"),
    [("theirs", "json:no_such_name"), ("theirs", "json"), ("here", "json:loads")],
)
def test_an_entry_point_that_names_nothing_or_one_of_our_names_is_refused(
    name, value, add
):
    add(name, value)
    with pytest.raises(UserError, match=value):
        registry.load("kind", name)
