"""Megatron's .bin and .idx: the same rows as from the same documents as text, and refusals."""

import pathlib
import pickle
import struct

import numpy as np
import pytest

from maxtext_lite.config import UserError
from tests.data.test_sources import opened as open_data
from tests.prepared import flipped
from tests.run_directories import write_lines

CODES = {"u1": 1, "<i4": 4, "<i8": 5, "<u2": 8}
TEXTS = ["one", "two words", "x" * 50, "the last", "another " * 9, "end"]
DOCUMENTS = [[*text.encode(), 256] for text in TEXTS]


def write_megatron(
    prefix: pathlib.Path, documents, *, dtype: str = "<u2", sequences_each: int = 1
) -> None:
    """Files as Megatron-LM's IndexedDatasetBuilder writes them, each document in one or several sequences."""
    parts = [
        part
        for document in documents
        for part in np.array_split(np.array(document, dtype), sequences_each)
    ]
    lengths = [len(part) for part in parts]
    prefix.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in parts))
    pointers = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    first = np.arange(len(documents) + 1) * sequences_each
    header = b"MMIDIDX\x00\x00" + struct.pack(
        "<QBQQ", 1, CODES[dtype], len(parts), len(documents) + 1
    )
    numbers = (
        np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + first.astype("<i8").tobytes()
    )
    prefix.with_suffix(".idx").write_bytes(header + numbers)


def opened(path, dataset_type="megatron", **changes):
    source, _ = open_data(path, dataset_type=dataset_type, vocab_size=257, **changes)
    return source


@pytest.mark.parametrize(
    ("packing", "dtype", "sequences_each"),
    [("concat", "<u2", 1), ("none", "<i4", 1), ("best_fit", "<i8", 3)],
)
def test_the_rows_are_those_of_the_same_text(tmp_path, packing, dtype, sequences_each):
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    write_megatron(
        tmp_path / "m.x", DOCUMENTS, dtype=dtype, sequences_each=sequences_each
    )
    text = opened(tmp_path / "a.jsonl", dataset_type="text", packing=packing)
    for suffix in (".bin", ".idx"):
        source = opened(tmp_path / f"m{suffix}", packing=packing)
        assert (len(source), source.num_target_tokens) == (
            len(text),
            text.num_target_tokens,
        )
        copy = pickle.loads(pickle.dumps(source))
        assert copy.fingerprint == source.fingerprint
        for number in range(len(text)):
            for name, values in text[number].items():
                np.testing.assert_array_equal(copy[number][name], values)


@pytest.mark.fast
def test_a_document_without_end_of_text_still_ends(tmp_path):
    write_megatron(tmp_path / "m.x", [[1, 2, 3], [], [4], [5, 6, 256]])
    source = opened(tmp_path / "m.bin")
    row = source[0]
    assert row["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 256, 0]
    assert row["targets"].tolist() == [
        2,
        3,
        0,
        0,
        6,
        256,
        0,
        0,
    ]  # none from another document
    assert row["segments"].tolist() == [1, 1, 1, 2, 3, 3, 3, 0]
    assert row["weights"].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert (source.num_documents, source.num_target_tokens, len(source.notes)) == (
        3,
        4,
        1,
    )


# 34 bytes of header, then lengths, pointers and documents.
DAMAGES = {
    "no index": ("m.idx", lambda content: b""),
    "floats": ("m.idx", lambda content: content[:17] + b"\6" + content[18:]),
    "a document": ("m.idx", lambda content: flipped(content, 106)),
    "cut tokens": ("m.bin", lambda content: content[:-2]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(tmp_path, damage):
    write_megatron(tmp_path / "m.x", DOCUMENTS)
    name, change = DAMAGES[damage]
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    with pytest.raises(UserError, match=name):
        opened(tmp_path / "m.bin")


@pytest.mark.parametrize(
    ("documents", "keys"),
    [
        ([[1, 2, 999, 256]], {}),  # beyond the vocabulary
        ([[256]] * 10, {"packing": "best_fit"}),
        (
            [[256]] * 40 + [[1, 2]],
            {"eval_fraction": 0.1, "eval_interval": 10},
        ),  # no target to train on
    ],
)
def test_data_without_a_target_or_beyond_the_vocabulary_are_refused(
    tmp_path, documents, keys
):
    write_megatron(tmp_path / "m.x", documents)
    with pytest.raises(UserError):
        opened(tmp_path / "m.bin", **keys)


def test_a_last_sequence_of_2_gib_has_its_size(tmp_path):
    write_megatron(tmp_path / "m.x", [[0]], dtype="<i8")
    index = tmp_path / "m.idx"
    content = index.read_bytes()
    index.write_bytes(content[:34] + struct.pack("<i", 2**28) + content[38:])
    with pytest.raises(UserError, match=f"{2**31:,}"):
        opened(tmp_path / "m.bin")
