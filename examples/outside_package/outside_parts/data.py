"""Rows of two documents that count by different steps, generated when read."""

import numpy as np

from maxtext_lite.config import DataConfig
from maxtext_lite.data.own_examples import own_examples
from maxtext_lite.data.sources import Opened


class Counting:
    """Example i depends on i only, so any host can read any example at any time."""

    def __init__(self, first: int, count: int, num_tokens: int, vocab_size: int):
        self.first, self.count, self.num_tokens, self.vocab_size = first, count, num_tokens, vocab_size
        self.fingerprint = f"counting:{first}:{count}:{num_tokens}:{vocab_size}"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        start, step = divmod(self.first + example_id, 7)
        cut = 1 + (self.first + example_id) % (self.num_tokens - 1)
        positions = np.concatenate([np.arange(cut), np.arange(self.num_tokens - cut)])
        segments = np.repeat([1, 2], [cut, self.num_tokens - cut])
        tokens = (start + (step + segments) * positions) % self.vocab_size
        targets = (start + (step + segments) * (positions + 1)) % self.vocab_size
        return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions}


def open_counting(config: DataConfig, tokenizer, *, key, path, eval_fraction=0.0, vocab_size=None) -> Opened:
    """Training and held-out examples; the arguments are those of `maxtext_lite.data.sources.open_text`."""
    sizes = {"num_tokens": config.max_target_length, "vocab_size": vocab_size or tokenizer.vocab_size}
    training, held_out = Counting(0, 4096, **sizes), Counting(4096, 64, **sizes)
    return own_examples(training, key=key, **sizes), own_examples(held_out, key=key, **sizes)
