"""A part that is absent is refused where a key asks for it, and otherwise left out."""

import pytest

from maxtext_lite.config import load_config, registry
from maxtext_lite.config.optional import load_asked

KEYS = ("log_to", "prometheus_port")


@pytest.fixture(autouse=True)
def table(monkeypatch):
    targets = {"absent": "maxtext_lite.no_such_room.module:thing"}
    monkeypatch.setattr(registry, "_BUILT_IN", {**registry._BUILT_IN, "hook": targets})
    registry._targets.cache_clear()
    yield
    registry._targets.cache_clear()


@pytest.mark.fast
def test_an_absent_part_is_left_out_unless_its_key_was_set():
    config = load_config(None, ["dataset_type=synthetic"])
    assert load_asked(config, "hook", "absent", *KEYS) is None
    config = load_config(None, ["dataset_type=synthetic", "prometheus_port=9000"])
    with pytest.raises(registry.NotInstalled, match=r"^prometheus_port=9000: "):
        load_asked(config, "hook", "absent", *KEYS)
