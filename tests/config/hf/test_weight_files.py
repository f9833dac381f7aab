"""Which files are a directory's weights; an index that is none is refused."""

import json

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.hf.weight_files import INDEX, WHOLE, weight_files, weight_map


def names(directory):
    return [file.name for file in weight_files(directory)]


def test_an_index_or_one_file_goes_before_all(tmp_path):
    assert names(tmp_path) == []
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]
    (tmp_path / WHOLE).write_bytes(b"")
    assert names(tmp_path) == [WHOLE]
    assert weight_map(tmp_path) == {}
    (tmp_path / WHOLE).unlink()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "b.safetensors"}}))
    assert names(tmp_path) == ["b.safetensors"]
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks b\.safetensors, which model\.safetensors\.index\.json names"):
        weight_files(tmp_path)


def test_of_an_index_and_one_file_config_json_names_the_one_that_counts(tmp_path):
    """transformers reads the file, and others the index: without a name neither is taken silently."""
    for name in (WHOLE, "b.safetensors"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
    with pytest.raises(UserError, match=r"has model\.safetensors, which transformers reads, and model"):
        weight_files(tmp_path)
    for stated, found in ((WHOLE, WHOLE), (INDEX, "b.safetensors")):
        (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": stated}))
        assert names(tmp_path) == [found]
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "b.safetensors"}))
    with pytest.raises(UserError, match=r"config\.json: transformers_weights=b\.safetensors is not read: it must be"):
        weight_files(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": WHOLE}}))
    assert names(tmp_path) == [WHOLE]


@pytest.mark.parametrize(
    "text", ['{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ".."}}', "[]", "[" * 200_000, ""]
)
def test_an_index_that_names_no_files_is_refused(text, tmp_path):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json (is not|names)"):
        weight_files(tmp_path)
