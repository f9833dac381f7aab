"""Trains the default model on the shipped text with each `quantization`, and compares their held-out losses.

    python scripts/bench_eight_bits.py                                500 steps in bfloat16, three seeds of each
    python scripts/bench_eight_bits.py --seeds 1 steps=100            a shorter look

Prints a table in Markdown: the held-out loss after the last step for each seed of parameters and order of examples,
their mean, its ratio to that of the first of them, and the spread of the seeds, (largest - smallest) / mean. The seeds
take turns, so that a run that is cut short has compared something. Key=value arguments are those of
`maxtext_lite.train`. On a CPU the numbers of eight bits are the accelerators', the speed is not.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

RUN = ("dtype=bfloat16", "steps=500", "per_device_batch_size=4", "enable_checkpointing=false", "eval_interval=500")


def held_out_loss(quantization: str, seed: int, overrides: Sequence[str]) -> float:
    """Nats per token after a whole run."""
    from maxtext_lite.config import load_config
    from maxtext_lite.training import train

    with (
        tempfile.TemporaryDirectory() as directory,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        keys = (f"quantization={quantization}", f"seed={seed}", f"data_shuffle_seed={seed}")
        result = train(load_config(None, [*RUN, *overrides, *keys, f"base_output_directory={directory}"]))
    assert result.eval_loss is not None, "the last step has an evaluation"
    return result.eval_loss


def main() -> None:
    """Prints the table."""
    from machine import machine

    from maxtext_lite.config import Quantization

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    words = get_args(Quantization)
    parser.add_argument("--only", nargs="+", choices=words, default=words, help="these, beside the first of them")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of maxtext_lite.train")
    arguments = parser.parse_args()

    losses: dict[str, list[float]] = {word: [] for word in arguments.only}
    for seed in range(arguments.seeds):
        for word, of_word in losses.items():
            of_word.append(held_out_loss(word, seed, arguments.overrides))
            print(f"quantization={word} seed={seed}: held-out loss {of_word[-1]:.4f}", file=sys.stderr, flush=True)
    print(f"{machine()}\n")
    seeds = " | ".join(f"seed {seed}" for seed in range(arguments.seeds))
    print(f"| quantization | {seeds} | mean | / {arguments.only[0]} | spread |\n|{'---|' * (arguments.seeds + 4)}")
    plain = statistics.mean(losses[arguments.only[0]])
    for word, of_word in losses.items():
        mean = statistics.mean(of_word)
        each = " | ".join(f"{loss:.4f}" for loss in of_word)
        spread = (max(of_word) - min(of_word)) / mean
        print(f"| `{word}` | {each} | {mean:.4f} | {mean / plain:.4f} | {spread:.2%} |")


if __name__ == "__main__":
    main()
