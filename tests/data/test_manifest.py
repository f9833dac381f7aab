"""The manifest of a prepared dataset: read back as it was written, and refused where it contradicts itself."""

import dataclasses
import hashlib
import json

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.manifest import (
    MANIFEST_FILE,
    Manifest,
    Shard,
    manifest_text,
    read_manifest,
    stored_shard,
    token_dtype,
)

SHARDS = (Shard("00000.array_record", 3, 100, "ab", "cd"), Shard("00001.array_record", 1, 50, "ef", "01"))
MANIFEST = Manifest("byte", 257, "uint16", 4096, SHARDS)


def test_a_manifest_is_read_back(tmp_path):
    (tmp_path / MANIFEST_FILE).write_text(manifest_text(MANIFEST))
    assert read_manifest(tmp_path) == MANIFEST
    assert (MANIFEST.documents, MANIFEST.tokens) == (4, 150)


def test_the_fingerprint_is_of_the_content_and_not_of_the_files():
    renamed = tuple(dataclasses.replace(shard, file=f"x{shard.file}", sha256="00") for shard in SHARDS)
    assert dataclasses.replace(MANIFEST, shards=renamed).fingerprint == MANIFEST.fingerprint
    others = [
        dataclasses.replace(MANIFEST, tokenizer="other"),
        dataclasses.replace(MANIFEST, shards=SHARDS[::-1]),
        dataclasses.replace(MANIFEST, shards=SHARDS[:1]),
        dataclasses.replace(MANIFEST, shards=(SHARDS[0], dataclasses.replace(SHARDS[1], content="02"))),
    ]
    assert len({other.fingerprint for other in [MANIFEST, *others]}) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format=2 is not known"),
        ({"tokens": 151}, "tokens=151 contradicts its shards, which make 150"),
        ({"fingerprint": ""}, "contradicts its shards"),
        ({"shards": [{}]}, "not a manifest of prepare"),
        ({"shards": None}, "not a manifest of prepare"),
    ],
)
def test_a_damaged_manifest_is_refused(change, message, tmp_path):
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(json.loads(manifest_text(MANIFEST)) | change))
    with pytest.raises(UserError, match=message):
        read_manifest(tmp_path)


def test_unknown_facts_of_a_shard_are_left_open(tmp_path):
    stated = json.loads(manifest_text(MANIFEST))
    for shard in stated["shards"]:
        del shard["bytes"], shard["ends"]
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(stated))
    assert read_manifest(tmp_path) == MANIFEST


def test_a_shards_entry_is_of_its_file(tmp_path):
    content = bytes(range(256)) * 40  # 10,240 bytes
    (tmp_path / "s").write_bytes(content)
    found = stored_shard(tmp_path, "s", documents=2, tokens=7, content="c")
    ends = hashlib.sha256(content[:4096] + content[-4096:]).hexdigest()
    assert found == Shard("s", 2, 7, hashlib.sha256(content).hexdigest(), "c", 10_240, ends)


def test_small_vocabularies_take_two_bytes():
    assert [token_dtype(size) for size in (257, 2**16, 2**16 + 1)] == ["uint16", "uint16", "int32"]
