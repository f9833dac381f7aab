"""Rows as the model sees them, in lines of JSON: `train data_only=true rows=A:B`. Imports no jax."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import counted
from maxtext_lite.console import complain
from maxtext_lite.data.sources import open_sources
from maxtext_lite.data.tokenizer import Tokenizer, load_tokenizer


def row_lines(config: Config, first: int, stop: int) -> Iterator[str]:
    """Yields rows `first` to `stop - 1` of a run's training data as JSON lines, in the order of the data.

    A pair of DPO is two lines: the chosen row, then the rejected one. The data's notes, such as on what they drop, are
    printed to stderr.

    Raises:
      UserError: the data cannot be read, or have no row `first`.
    """
    source, _ = open_sources(config, vocab_size=config.vocab_size)
    tokenizer = load_tokenizer(config)
    for note in source.notes:
        complain(note)
    if first >= len(source):
        raise UserError(f"rows={first}:{stop}: the rows are 0:{len(source)}. Nearest that works: rows=0:{len(source)}.")
    if stop > len(source):
        complain(f"rows={first}:{stop}: there {'is' if len(source) == 1 else 'are'} {counted(len(source), 'row')}")
    for row in range(first, min(stop, len(source))):
        example = source[row]
        for part in range(config.rows_per_example):
            here = slice(part * config.max_target_length, (part + 1) * config.max_target_length)
            yield json.dumps(row_of({name: values[here] for name, values in example.items()}, tokenizer))


def row_of(arrays: Mapping[str, np.ndarray], tokenizer: Tokenizer) -> dict[str, Sequence[object]]:
    """The tokens of a row, without padding.

    Args:
      arrays: the row's, as from `Rows.build`.
    Returns:
      Lists of equal length: `ids`; `tokens`, as the vocabulary spells them; `weights`, the loss weight of each token as
      a target; `segments`, from 1. The last token of a segment is a target only, if it has a weight.
    """
    ids: list[int] = []
    weights: list[float] = []
    segments: list[int] = []
    for segment in range(1, int(arrays["segments"].max()) + 1):
        places = np.flatnonzero(arrays["segments"] == segment)
        learned = [int(weight) if weight == int(weight) else weight for weight in arrays["weights"][places].tolist()]
        inputs = arrays["tokens"][places].tolist()
        if learned[-1]:
            inputs.append(int(arrays["targets"][places[-1]]))
        else:
            del learned[-1]
        ids += inputs
        weights += [0, *learned]
        segments += [segment] * len(inputs)
    tokens = [tokenizer.spell(token) for token in ids]
    return {"ids": ids, "tokens": tokens, "weights": weights, "segments": segments}
