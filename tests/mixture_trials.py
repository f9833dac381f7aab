"""Texts to mix; and random histories of a run, consumed host by host, beside a plain loop that decides row after row.

The loop shares nothing with the library but `example_ids`, which says in which order a source's own rows come.
"""

import heapq
import json
import pickle
import random
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np

from maxtext_lite.data.feed import TrainingReads
from maxtext_lite.data.mixture_history import (
    RowStream,
    SourcePart,
    continued,
    history_of,
)
from maxtext_lite.data.mixture_source import MixtureSource
from maxtext_lite.data.order import example_ids
from maxtext_lite.data.packing import DocumentRows, PackedRows
from maxtext_lite.data.sources import TextSource

SEED = 4


def write_texts(directory: Path, **most: int) -> Path:
    """Texts by name, each of 40 documents of random letters, fewer than the number given; returns the directory."""
    for number, (name, longest) in enumerate(most.items()):
        rng = np.random.default_rng(number)
        texts = [
            "".join(rng.choice(list("mixture "), length))
            for length in rng.integers(1, longest, 40)
        ]
        lines = [json.dumps({"text": text}) for text in texts]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def mixture_of(texts: Path, weights: Mapping[str, object]) -> str:
    """The override that mixes texts of a directory."""
    entries = [
        f"{{path: {texts}/{name}.jsonl, weight: {weight}}}"
        for name, weight in weights.items()
    ]
    return f"dataset_path=[{', '.join(entries)}]"


def text_source(rng: random.Random, name: str, *, packing: bool) -> TextSource:
    """A source of random documents, of 1 to about 100 rows."""
    lengths = [rng.randint(2, 30) for _ in range(rng.choice([1, 5, 50]))]
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    stream = (
        np.random.default_rng(rng.randint(0, 999))
        .integers(0, 99, int(starts[-1]))
        .astype(np.uint16)
    )
    layout = (PackedRows if packing else DocumentRows)(starts, 8)
    return TextSource(stream, starts, layout, 0, len(layout), name)


class TijdemansLoop:
    """The chairman assignment, as its paper has it: a scan of all sources for every row."""

    def __init__(self, shares):
        self.shares, self.given, self.n = shares, [0] * len(shares), 0
        self.slack = Fraction(1, max(2 * len(shares) - 2, 1))

    def next(self):
        self.n += 1
        owed = [
            self.n * share - given
            for share, given in zip(self.shares, self.given, strict=True)
        ]
        able = [s for s in range(len(owed)) if owed[s] >= self.slack]
        # The last row by which it must come: whole, as the paper's deadlines are.
        chosen = min(
            able,
            key=lambda s: (
                ((1 - self.slack + self.given[s]) / self.shares[s]).__floor__(),
                s,
            ),
        )
        self.given[chosen] += 1
        return chosen


class TreesLoop:
    """Huffman's tree, each node of which counts the rows that passed it."""

    def __init__(self, shares):
        heap = [(share, number, number) for number, share in enumerate(shares)]
        heapq.heapify(heap)
        order = len(heap)
        while len(heap) > 1:
            one, other = heapq.heappop(heap), heapq.heappop(heap)
            p = Fraction(round(one[0] / (one[0] + other[0]) * 2**64), 2**64)
            order += 1
            heapq.heappush(heap, (one[0] + other[0], order, [one[2], other[2], p, 0]))
        self.root = heap[0][2]

    def next(self):
        node = self.root
        while isinstance(node, list):
            left, right, p, passed = node
            node[3] += 1
            half = Fraction(1, 2)
            node = (
                left
                if ((passed + 1) * p + half).__floor__()
                > (passed * p + half).__floor__()
                else right
            )
        return node


def loop_of(weights):
    shares = [weight / sum(weights) for weight in weights]
    period = np.lcm.reduce([share.denominator for share in shares], dtype=object)
    return (TijdemansLoop if period <= 2**16 else TreesLoop)(shares)


class Counters:
    """The run as a loop: which row of which source comes next."""

    def __init__(self, sources, lone):
        self.sources, self.lone, self.given = sources, lone, dict.fromkeys(sources, 0)

    def mix(self, parts):
        self.live = sorted(parts, key=lambda part: part.fingerprint)
        self.loop = loop_of([Fraction(part.row_weight) for part in self.live])

    def next(self):
        while True:
            part = self.live[self.loop.next()]
            if part.most_rows is None or self.given[part.fingerprint] < part.most_rows:
                break
            self.live.remove(part)
            self.loop = loop_of([Fraction(part.row_weight) for part in self.live])
        position = self.given[part.fingerprint]
        self.given[part.fingerprint] += 1
        return part.fingerprint, position


def random_parts(rng, sources):
    parts, kind = [], rng.choice(["tokens", "whole", "extreme", "equal"])
    for number, name in enumerate(
        rng.sample(sorted(sources), rng.randint(1, len(sources)))
    ):
        source = sources[name]
        weight = {
            "whole": Fraction(rng.randint(1, 9)),
            "equal": Fraction(1),
            "extreme": Fraction(rng.choice(["1e-6", "0.999999", "0.5"])),
            "tokens": Fraction(str(rng.random() + 0.01))
            * len(source)
            / source.num_target_tokens,
        }[kind]
        most = (
            rng.randint(0, 3 * len(source)) if number and rng.random() < 0.4 else None
        )  # the first goes on
        parts.append(SourcePart(name, source.fingerprint, str(weight), most))
    return parts


def read_by_hosts(rng, source, first, *, batch, micro_batches, steps):
    """The ids of some steps in order, put together from what simulated hosts read, each load once, in any order."""
    hosts, loads = rng.randint(1, 4), rng.choice([1, 1, 2, 3])
    # A host may own none: it does not load.
    owner = np.array(
        [
            rng.randrange(hosts)
            for _ in range(batch // micro_batches + rng.randint(0, 3))
        ]
    )
    keys = {
        "num_steps": steps,
        "step_examples": batch,
        "loads_per_step": loads,
        "micro_batches": micro_batches,
    }
    found = np.full((steps, batch), -1, np.int64)
    for host in range(hosts):
        host_slots = np.flatnonzero(owner == host)
        reads = TrainingReads(
            source, host_slots=host_slots, first_example=first, seed=SEED, **keys
        )
        reads = pickle.loads(pickle.dumps(reads))  # as a reading process has it
        for index in rng.sample(range(len(reads)), len(reads)):
            ids, (micros, places), rows, *_ = reads[index]
            own = host_slots[places] * micro_batches + micros
            assert (found[index // loads, own] == -1).all(), "a row was read twice"
            found[index // loads, own] = ids[own]
            for row, example in enumerate(ids[own].tolist()):
                np.testing.assert_array_equal(
                    rows["tokens"][row], source[example]["tokens"]
                )
    assert (found >= 0).all(), "a row was not read"
    return found.reshape(-1).tolist()


def try_history(number: int) -> int:
    """Consumes one random history; raises where it is not as the loop has it. Returns how many rows it consumed."""
    rng = random.Random(number)
    packing = rng.random() < 0.5
    sources = {
        name: text_source(rng, name, packing=packing)
        for name in "abcdefg"[: rng.randint(1, 7)]
    }
    by_fingerprint = {source.fingerprint: source for source in sources.values()}
    history, counters, seen, consumed = (
        (),
        None,
        0,
        {name: [] for name in by_fingerprint},
    )
    for _ in range(rng.randint(1, 4)):
        parts = random_parts(rng, sources)
        if counters is None:
            history = history_of(parts)
            counters = Counters(
                by_fingerprint, lone=parts[0].fingerprint if len(parts) == 1 else None
            )
        else:
            history = continued(history, parts, examples_seen=seen, tokens_seen=0)
        if history[-1].examples_seen == seen:  # otherwise nothing changed
            counters.mix(parts)
        ordered = sorted(parts, key=lambda part: part.fingerprint)
        stream = RowStream(history)
        source = MixtureSource(
            tuple(ordered),
            tuple(by_fingerprint[part.fingerprint] for part in ordered),
            stream,
        )
        firsts = np.cumsum([0, *(len(each) for each in source.sources)])
        for _ in range(
            rng.randint(1, 3)
        ):  # stages of a ramp, or a restart with another batch
            micro_batches = rng.choice([1, 2, 3])
            batch, steps = micro_batches * rng.randint(1, 9), rng.randint(1, 8)
            ids = read_by_hosts(
                rng, source, seen, batch=batch, micro_batches=micro_batches, steps=steps
            )
            for example in ids:
                fingerprint, position = counters.next()
                place = int(np.searchsorted(firsts, example, side="right")) - 1
                assert ordered[place].fingerprint == fingerprint, (number, seen)
                seed = stream.seed(fingerprint, SEED)
                assert (seed == SEED) == (fingerprint == counters.lone)
                (row,) = example_ids(
                    position, 1, num_examples=len(source.sources[place]), seed=seed
                ).tolist()
                assert example - firsts[place] == row, (number, seen)
                consumed[fingerprint].append(row)
                seen += 1
            assert {name: n for name, n in stream.given(seen).items() if n} == {
                name: n for name, n in counters.given.items() if n
            }
    for fingerprint, rows in consumed.items():
        size = len(by_fingerprint[fingerprint])
        for start in range(0, len(rows), size):
            epoch = rows[start : start + size]
            assert len(set(epoch)) == len(epoch), "a row twice in an epoch"
            assert len(epoch) < size or sorted(epoch) == list(range(size)), (
                "a row left out of an epoch"
            )
    return seen
