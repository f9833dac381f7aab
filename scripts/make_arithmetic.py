"""Writes the sums that configs/post_train/sft.yml and rl.yml train on: python scripts/make_arithmetic.py OUT.jsonl.gz

Problems are sums and differences of numbers below 100 with results of 0 or more, each once, two thirds of them with a
carry or a borrow in the ones. `answer` is right; `completion` is a careless pupil's, who forgets two such carries and
borrows in three. Python's own generator draws everything, from seed 0, so that the text is always the same
(maxtext_lite/assets/ORIGIN.md has its hash).
"""

import argparse
import gzip
import json
import random
from pathlib import Path

COUNT = 9000
FORGOTTEN = 0.6667

Problem = tuple[int, str, int]


def carries(problem: Problem) -> bool:
    """Whether the ones carry, or borrow."""
    one, sign, other = problem
    return one % 10 + other % 10 > 9 if sign == "+" else one % 10 < other % 10


def lines() -> list[str]:
    """The problems as JSON, in their order."""
    draw = random.Random(0)
    sums: list[Problem] = [(one, "+", other) for one in range(100) for other in range(100)]
    differences: list[Problem] = [(one, "-", other) for one in range(100) for other in range(one + 1)]
    every = sums + differences
    hard = [problem for problem in every if carries(problem)]
    easy = [problem for problem in every if not carries(problem)]
    chosen = draw.sample(hard, COUNT * 2 // 3) + draw.sample(easy, COUNT // 3)
    draw.shuffle(chosen)
    found = []
    for problem in chosen:
        one, sign, other = problem
        right = said = one + other if sign == "+" else one - other
        if carries(problem) and draw.random() < FORGOTTEN:
            said += -10 if sign == "+" else 10
        found.append(json.dumps({"prompt": f"{one}{sign}{other}=", "completion": str(said), "answer": str(right)}))
    return found


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    text = "".join(line + "\n" for line in lines()).encode()
    with (
        parser.parse_args().output.open("wb") as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=9, mtime=0) as packed,
    ):
        packed.write(text)


if __name__ == "__main__":
    main()
