"""Times how soon a model from Hugging Face answers, and how fast it then writes, beside transformers.

    python scripts/bench_generate.py                        a random Llama of SmolLM2-135M's shape, bfloat16 and float32
    python scripts/bench_generate.py --model DIR            a directory with its config.json and model.safetensors
    python scripts/bench_generate.py --dtypes bfloat16 --batches 8 --repeats 1

Loading: each subject in processes of its own, in turn; since the process began, the medians of the seconds and of the
CPU seconds until its modules are imported, until the parameters are ready, and until there is a first token, and the
most memory that it has had by then. Parameters that transformers has from a file in the same dtype are the file's
pages, which count in its memory once they are read: by the first token all are. `ratio` is ours by theirs.

Generating: greedy, both in one process, in turn; medians over rounds of a round's median step, without the two that
compile. `ratio` is our tokens/s by theirs, and their CPU seconds by ours: more than 1 is faster. On a shared machine
trust the CPU seconds. What jax and torch take a thread for is one core, unless --cores says more.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SUBJECTS = ("ours", "transformers")
MARKS = ("imported", "ready", "first token")
PROMPT_TOKENS = 32
_LEFT_OUT = 2  # steps that compile

Times = list[tuple[float, float]]
"""Of each token, when it came, and the CPU seconds of the process by then."""


def main() -> int:
    """Prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; none: a random model, made anew")
    parser.add_argument("--layers", type=int, default=30, help="of the random model")
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16", "float32"], help="of the weights and the arithmetic"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="prompts at once")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of a prompt in each round")
    parser.add_argument("--repeats", type=int, default=5, help="processes that load, and rounds, of each subject")
    parser.add_argument("--vocabulary", type=int, default=49152, help="of the random model")
    parser.add_argument("--cores", type=int, default=1, help="that a process may use: more, where they are all its own")
    parser.add_argument("--part", nargs=3, metavar=("PART", "DIR", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        part, directory, dtype = arguments.part
        print(json.dumps(_part(part, Path(directory), dtype, arguments)))
        return 0
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-arguments.cores :])
    loads, steps = [], []
    for dtype in arguments.dtypes:
        with tempfile.TemporaryDirectory() as scratch:
            directory = arguments.model or Path(scratch)
            if arguments.model is None:
                _ask("make", directory, dtype)
            loads += _load_rows(directory, dtype, arguments.repeats)
            steps += _step_rows(_ask("steps", directory, dtype), dtype)
    from machine import machine

    print(machine(), end="\n\n")
    print(_table(("dtype", "subject", *(f"{mark}, {what}" for mark in MARKS for what in ("s", "CPU s", "MiB"))), loads))
    print()
    print(_table(("dtype", "batch", "ours, tokens/s", "transformers, tokens/s", "ratio", "ours, CPU ms a step",
                  "transformers, CPU ms a step", "ratio", "equal tokens"), steps))  # fmt: skip
    return 0


def _ask(part: str, directory: Path, dtype: str) -> Any:
    """The result of a part of the bench, run in a process of its own."""
    own = [word for word in sys.argv[1:] if word]
    command = [sys.executable, __file__, *own, "--part", part, str(directory), dtype]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def _part(part: str, directory: Path, dtype: str, arguments: argparse.Namespace) -> Any:
    if part == "make":
        return _make(directory, dtype, arguments)
    if part == "steps":
        return _steps(directory, dtype, arguments)
    return (_load_ours if part == "ours" else _load_theirs)(directory, dtype)


def _make(directory: Path, dtype: str, arguments: argparse.Namespace) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary, hidden_size=576, intermediate_size=1536, num_hidden_layers=arguments.layers,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True, initializer_range=0.04,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)


def _load_rows(directory: Path, dtype: str, repeats: int) -> list[list[str]]:
    found: dict[str, list[list[list[float]]]] = {subject: [] for subject in SUBJECTS}
    for _ in range(repeats):
        for subject in SUBJECTS:
            found[subject].append(_ask(subject, directory, dtype))
    medians = {subject: _medians([[*itertools.chain(*marks)] for marks in runs]) for subject, runs in found.items()}
    ratio = [ours / theirs for ours, theirs in zip(medians["ours"], medians["transformers"], strict=True)]
    return [
        *([dtype, subject, *(f"{value:,.{0 if place % 3 == 2 else 1}f}" for place, value in enumerate(values))]
          for subject, values in medians.items()),
        [dtype, "ratio", *(f"{value:.2f}" for value in ratio)],
    ]  # fmt: skip


def _mark() -> tuple[float, float, float]:
    """Seconds and CPU seconds since the process began, and its peak memory in MiB."""
    began = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    now, used = float(Path("/proc/uptime").read_text().split()[0]), resource.getrusage(resource.RUSAGE_SELF)
    return now - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def _load_ours(directory: Path, dtype: str) -> Any:
    from maxtext_lite.inference.decoding import Sampling
    from maxtext_lite.inference.sampler import Sampler  # noqa: F401

    marks = [_mark()]
    sampler = _our_sampler(directory, dtype)
    marks.append(_mark())
    next(sampler.stream([[1]], max_new_tokens=1, sampling=Sampling(0)))
    return [*marks, _mark()]


def _our_sampler(directory: Path, dtype: str) -> Any:
    import jax

    from maxtext_lite.hf.model_directory import directory_config
    from maxtext_lite.inference.sampler import Sampler, load_on_mesh

    sampler = Sampler(*load_on_mesh(directory, directory_config(directory, dtype), {}))
    jax.block_until_ready(sampler._params)
    return sampler


def _torch_device() -> str:
    """A GPU where torch sees one, because jax takes it too."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _load_theirs(directory: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    marks = [_mark()]
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(_torch_device())
    marks.append(_mark())
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    model.generate(token, attention_mask=token, max_new_tokens=1, do_sample=False)
    return [*marks, _mark()]


def _steps(directory: Path, dtype: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """For each batch, both subjects' rounds of (seconds, CPU seconds) of a step, and the number of equal tokens."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from maxtext_lite.inference.decoding import Sampling

    sampler = _our_sampler(directory, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(_torch_device())
    most = arguments.tokens

    def ours(prompts: Any) -> tuple[Times, list[list[int]]]:
        times: Times = []
        texts: list[list[int]] = [[] for _ in prompts]
        for number, token, _ in sampler.stream(prompts.tolist(), max_new_tokens=most, sampling=Sampling(0)):
            texts[number].append(token)
            if number == 0:
                times.append((time.perf_counter(), time.process_time()))
        return times, texts

    def theirs(prompts: Any) -> tuple[Times, list[list[int]]]:
        times: Times = []

        class Clock:
            """A streamer that looks at the clock: once for the prompts, then for each token."""

            def put(self, _: Any) -> None:
                times.append((time.perf_counter(), time.process_time()))

            def end(self) -> None:
                pass

        tokens = torch.tensor(prompts, device=model.device)
        how = {"max_new_tokens": most, "min_new_tokens": most, "do_sample": False}
        texts = model.generate(tokens, attention_mask=torch.ones_like(tokens), streamer=Clock(), **how)
        return times[1:], texts[:, prompts.shape[1] :].tolist()

    found = []
    for batch in arguments.batches:
        prompts = np.random.default_rng(0).integers(3, model.config.vocab_size, (batch, PROMPT_TOKENS))
        runs: list[Callable[[Any], tuple[Times, list[list[int]]]]] = [ours, theirs]
        texts = [run(prompts)[1] for run in runs]  # compiles
        rounds = [[_step(run(prompts)[0]) for run in runs] for _ in range(arguments.repeats)]
        equal = sum(a == b for pair in zip(*texts, strict=True) for a, b in zip(*pair, strict=True))
        found.append({"batch": batch, "rounds": rounds, "equal": equal / (batch * most)})
    return found


def _step(times: Times) -> list[float]:
    """Median seconds and CPU seconds of a step."""
    steps = [
        [now - before for before, now in zip(*pair, strict=True)] for pair in itertools.pairwise(times[_LEFT_OUT:])
    ]
    return _medians(steps)


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """The median of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _step_rows(found: list[dict[str, Any]], dtype: str) -> list[list[str]]:
    rows = []
    for each in found:
        ours, theirs = (_medians(side) for side in zip(*each["rounds"], strict=True))
        batch = each["batch"]
        rows.append([
            dtype, str(batch), f"{batch / ours[0]:,.1f}", f"{batch / theirs[0]:,.1f}", f"{theirs[0] / ours[0]:.2f}",
            f"{1e3 * ours[1]:,.1f}", f"{1e3 * theirs[1]:,.1f}", f"{theirs[1] / ours[1]:.2f}", f"{each['equal']:.0%}",
        ])  # fmt: skip
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    sys.exit(main())
