"""Texts to mix; and random histories of a run, beside a plain loop that decides row after row.

The loop shares nothing with the library but `example_ids`, which says in which order a source's own rows come.
"""

import heapq
import json
import random
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_lite.data.history import MixtureComponent, continued, history_of
from maxtext_lite.data.mixture import MixtureSchedule, MixtureSource
from maxtext_lite.data.order import example_ids

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
    parts, kind = [], rng.choice(["tokens", "whole", "extreme"])
    names = rng.sample(sorted(sources), rng.randint(1, len(sources)))
    for number, name in enumerate(names):
        weight = {
            "whole": Fraction(rng.randint(1, 9)),
            "extreme": Fraction(rng.choice(["1e-6", "0.999999", "0.5"])),
            "tokens": Fraction(str(rng.random() + 0.01)) / rng.randint(1, 30),
        }[kind]
        most = None
        if number and rng.random() < 0.4:  # the first goes on
            most = rng.randint(0, 3 * len(sources[name]))
        parts.append(MixtureComponent(name, name, str(weight), most))
    return parts


def try_history(number: int) -> int:
    """Goes through a random history; raises where it is not as the loop has it. Returns how many rows it consumed."""
    rng = random.Random(number)
    names = "abcdefg"[: rng.randint(1, 7)]
    sources: dict[str, Any] = {name: range(rng.choice([1, 9, 99])) for name in names}
    parts = random_parts(rng, sources)
    lone = parts[0].fingerprint if len(parts) == 1 else None
    counters = Counters(sources, lone)
    history, seen = history_of(parts), 0
    for _ in range(rng.randint(1, 4)):
        if seen:
            parts = random_parts(rng, sources)
            history = continued(history, parts, examples_seen=seen, tokens_seen=0)
        if history[-1].examples_seen == seen:  # otherwise nothing changed
            counters.mix(parts)
        parts = sorted(parts, key=lambda part: part.fingerprint)
        own = [sources[part.fingerprint] for part in parts]
        stream = MixtureSchedule(history)
        mixture = MixtureSource(tuple(parts), tuple(own), stream)
        count = rng.randint(1, 200)
        for example in mixture.ids_of_run(seen, count, SEED).tolist():
            fingerprint, position = counters.next()
            place = [part.fingerprint for part in parts].index(fingerprint)
            seed = stream.seed(fingerprint, SEED)
            assert (seed == SEED) == (fingerprint == lone)
            order = example_ids(position, 1, num_examples=len(own[place]), seed=seed)
            assert example == sum(map(len, own[:place])) + order[0], (number, seen)
            seen += 1
        given = {name: n for name, n in stream.given(seen).items() if n}
        assert given == {name: n for name, n in counters.given.items() if n}
    return seen
