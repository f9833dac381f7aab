import json

from maxtext_lite.batching.ledger import LAYERS, PASSES, MemoryEstimate, MemoryLine, bytes_text

LINES = (
    MemoryLine("parameters", "params", 10, "a shard"),
    MemoryLine("optimizer state", "optimizer_state", 20, "two moments"),
    MemoryLine("kept of layers", "activations", 5, "inputs", PASSES),
    MemoryLine("mlp of a layer", "activations", 4, "hidden values", ("mlp",)),
    MemoryLine("attention of a layer", "activations", 3, "a tile", ("attention",)),
    MemoryLine("gradients", "gradients", 6, "one each", (*LAYERS, "update")),
    MemoryLine("logits", "logits", 9, "a tile", ("loss",)),
)


def test_the_peak_is_the_fullest_moment():
    """44 at the loss, 45 in an mlp, 44 in attention, 36 at the update."""
    memory = MemoryEstimate(LINES, None)
    assert (memory.peak, memory.total) == ("mlp", 45)
    assert (memory.activations, memory.logits, memory.held) == (9, 9, 30)
    assert [memory.at_peak(part) for part in ("params", "gradients", "activations", "logits")] == [10, 6, 9, 0]


def test_a_line_on_the_host_between_updates_is_not_held():
    there = MemoryLine("optimizer state", "optimizer_state", 20, "two moments", ("update",))
    memory = MemoryEstimate((LINES[0], there, *LINES[2:]), None, offloaded=20)
    assert (memory.peak, memory.total, memory.held) == ("update", 36, 10)


def test_json_has_parts_and_lines():
    found = json.loads(json.dumps(MemoryEstimate(LINES, 50, 7).to_json()))
    parts = {"params": 10, "optimizer_state": 20, "gradients": 6, "weights": 0, "activations": 9, "logits": 9}
    lines = found.pop("lines")
    assert found.pop("at_peak") == parts | {"logits": 0}
    assert found == parts | {"total": 45, "limit": 50, "offloaded": 7, "peak": "mlp"}
    assert list(lines[3].values()) == ["mlp of a layer", "activations", 4, "hidden values", ["mlp"]]


def test_bytes_are_shown_in_a_suitable_unit():
    assert [bytes_text(size) for size in (95_000_000_000, 1_500_000, 400)] == ["95.0 GB", "1.5 MB", "0.4 kB"]
