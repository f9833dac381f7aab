"""Names that a config selects are found when used, and a missing part says so."""

from types import SimpleNamespace

import pytest

from maxtext_lite.config import UserError, registry


@pytest.fixture(autouse=True)
def table(monkeypatch):
    targets = {
        "here": "maxtext_lite.config.errors:UserError",
        "missing room": "maxtext_lite.no_such_room.module:thing",
    }
    monkeypatch.setattr(registry, "_BUILT_IN", {"kind": targets})
    registry._targets.cache_clear()
    yield
    registry._targets.cache_clear()


def test_a_name_is_imported_when_it_is_used():
    from maxtext_lite.config.errors import UserError

    assert registry.load("kind", "here") is UserError
    assert registry.names("other kind") == ()


def test_a_part_that_is_absent_is_said_to_be():
    assert not registry.is_installed("kind", "missing room")
    with pytest.raises(registry.NotInstalled):
        registry.load("kind", "missing room")


def test_only_what_is_installed_is_loaded(monkeypatch):
    monkeypatch.setattr(
        registry,
        "_BUILT_IN",
        {
            "kind": {
                "a": "maxtext_lite.no_room:x",
                "b": "maxtext_lite.config.errors:Refusal",
            }
        },
    )
    registry._targets.cache_clear()
    assert [item.__name__ for item in registry.load_installed("kind")] == ["Refusal"]


def test_a_package_that_an_installed_part_lacks_is_named_as_python_names_it(
    tmp_path, monkeypatch
):
    (tmp_path / "needs_more.py").write_text("import a_package_nobody_has\nthing = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_BUILT_IN", {"kind": {"broken": "needs_more:thing"}})
    registry._targets.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="a_package_nobody_has"):
        registry.load("kind", "broken")


def test_another_package_adds_names(monkeypatch):
    class Point:
        name = "theirs"
        value = "json:loads"

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()])
    registry._targets.cache_clear()
    import json

    assert registry.load("kind", "theirs") is json.loads


def test_what_is_installed_is_known_without_an_import():
    assert registry.installed_names("kind") == ("here",)


@pytest.mark.parametrize("value", ["json:no_such_name", "json"])
def test_an_entry_point_that_names_nothing_is_refused_by_its_name(value, monkeypatch):
    point = SimpleNamespace(name="theirs", value=value)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    registry._targets.cache_clear()
    with pytest.raises(UserError, match=value):
        registry.load("kind", "theirs")


def test_another_package_cannot_take_one_of_our_names(monkeypatch):
    point = SimpleNamespace(name="here", value="json:loads")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    registry._targets.cache_clear()
    with pytest.raises(UserError, match="json:loads"):
        registry.names("kind")
