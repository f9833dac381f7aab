"""Your own data: additions in digits, generated when read; only the sum is a target.

python examples/own_data.py steps=100 max_target_length=16
"""

import sys

import numpy as np

from maxtext_lite import load_config
from maxtext_lite.training import train

FIRST, COUNT = {"train": 0, "eval": 900_000}, {"train": 900_000, "eval": 256}


class Additions:
    """Example i depends on the digits of i only, so any host can read any example at any time."""

    def __init__(self, part: str, num_tokens: int):
        self.part, self.num_tokens = part, num_tokens
        self.fingerprint = f"additions:{part}:{num_tokens}"  # a run resumes only with the same examples

    def __len__(self) -> int:
        return COUNT[self.part]

    def __getitem__(self, example_id: int) -> dict[str, np.ndarray]:
        a, b = divmod(FIRST[self.part] + example_id, 1000)
        question, answer = f"{a}+{b}=", f"{a + b}."
        text = (question + answer).encode().ljust(self.num_tokens + 1, b"\0")
        place = np.arange(self.num_tokens)
        is_answer = (place >= len(question) - 1) & (place < len(question + answer) - 1)
        token_ids = np.frombuffer(text, np.uint8)
        return {"tokens": token_ids[:-1], "targets": token_ids[1:], "weights": is_answer}


if __name__ == "__main__":
    config = load_config(None, ["run_name=own_data", *sys.argv[1:]])
    sources = (Additions(part, config.max_target_length) for part in ("train", "eval"))
    train(config, **dict(zip(("source", "eval_source"), sources, strict=True)))
