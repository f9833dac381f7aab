"""The golden record: what the runs of runs.py give, written down, and whether they still give it.

    python -m tests.golden.record record [WORD ...]              writes record.json
    python -m tests.golden.record check [--tolerant] [WORD ...]  compares with it; exit code 1 where a run differs

of all runs, or of those whose name holds one of the words. README.md says what agrees with what.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401  (before jax: the devices, and how quickly XLA compiles)
from tests.golden.runs import HERE, RUNS, GoldenRun

RECORD = HERE / "record.json"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
# What a clock says, and what follows from the rest.
CLOCKS = ("seconds", "per_second", "tflops", "mfu", "overlap")
DERIVED = {
    "step",
    "tokens_seen",
    "epoch",
    "examples",
    "per_device_batch_size",
    "gradient_accumulation_steps",
}

SAME, WITHIN, DIFFERENT = "same bits", "within tolerance", "DIFFERENT"


def measure(run: GoldenRun, directory: Path) -> dict[str, Any]:
    """Does a run under `directory`, and gives what metrics.jsonl and the final parameters say, in lists by key."""
    import jax

    from maxtext_lite.config import load_config
    from maxtext_lite.training import train

    assert jax.device_count() == run.devices, f"{run.name} needs {run.devices} devices"
    for leg in run.legs:
        config = load_config(
            run.file, [*leg, f"base_output_directory={directory}", "run_name=run"]
        )
        if config.run_kind == "rl":
            from maxtext_lite.post_training.rollout_steps import train_rl

            result = train_rl(config)
        else:
            result = train(config)
    found: dict[str, Any] = {}
    for line in (result.run_directory / "metrics.jsonl").read_text().splitlines():
        for key, value in json.loads(line).items():
            if (
                value is not None
                and key not in DERIVED
                and not any(word in key for word in CLOCKS)
            ):
                found.setdefault(key, []).append(value)
    leaves = jax.tree_util.tree_leaves_with_path(
        jax.device_get(result.state.model_params)
    )
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")  # noqa: E731
    return {
        **found,
        "parameters": {name(path): _summary(leaf) for path, leaf in leaves},
    }


def _summary(leaf: Any) -> list[Any]:
    """The 2-norm of an array and the first digits of the checksum of its bytes."""
    import numpy as np

    norm = float(np.linalg.norm(np.asarray(leaf, np.float64)))
    return [norm, hashlib.sha256(np.ascontiguousarray(leaf).tobytes()).hexdigest()[:16]]


def compare(
    found: Mapping[str, Any], recorded: Mapping[str, Any], tolerance: float
) -> tuple[str, str]:
    """SAME, WITHIN or DIFFERENT, and the largest of the differences; what the record does not have is not compared."""
    if all(found.get(key) == value for key, value in recorded.items()):
        return SAME, ""
    worst, what = 0.0, "the bits of a parameter"
    for key, wanted in _numbers(recorded).items():
        here = _numbers(found).get(key, [])
        if len(here) != len(wanted):
            return DIFFERENT, f"{key}: {len(wanted)} values became {len(here)}"
        # Losses and rates; norms and the like, which AdamW moves further.
        allowed = (
            tolerance if "loss" in key or key == "learning_rate" else 10 * tolerance
        )
        for number, (a, b) in enumerate(zip(here, wanted, strict=True), start=1):
            excess = _excess(a, b, allowed)
            if excess > worst:
                worst, what = excess, f"{key}, number {number}: {b} became {a}"
    return (WITHIN if worst <= 1 else DIFFERENT), what


def _numbers(run: Mapping[str, Any]) -> dict[str, list[Any]]:
    """A run's values by key, with the norms of its parameters in place of their checksums."""
    norms = {
        f"norm of {name}": [norm]
        for name, (norm, _) in run.get("parameters", {}).items()
    }
    return {key: value for key, value in run.items() if key != "parameters"} | norms


def _excess(a: Any, b: Any, allowed: float) -> float:
    """A difference in units of the one that is allowed: none where a value is not a float."""
    if a == b:
        return 0.0
    if not (isinstance(a, float) and isinstance(b, float)):
        return float("inf")
    difference = abs(a - b) / (allowed * max(abs(a), abs(b)) + 1e-6)
    return difference if difference == difference else float("inf")


def this_machine() -> dict[str, str]:
    """What the bits of a run depend on besides the code."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else [platform.processor()]
    cpu = sorted(
        {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    )
    name = next(
        (
            line.partition(":")[2].strip()
            for line in cpu
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    flags = hashlib.sha256("\n".join(cpu).encode()).hexdigest()[:8]
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return {"cpu": f"{name} ({flags})", **versions}


def measure_all(runs: Iterable[GoldenRun]) -> dict[str, Any]:
    """What each run gives, by name; in one process for each number of devices, at the same time."""
    names: dict[int, list[str]] = {}
    for run in runs:
        names.setdefault(run.devices, []).append(run.name)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        started = []
        for devices, of_process in names.items():
            out = Path(directory) / f"{devices}.json"
            words = [
                sys.executable,
                "-m",
                "tests.golden.record",
                "measure",
                str(out),
                *of_process,
            ]
            environment = os.environ | {"SIMULATED_DEVICES": str(devices)}
            started.append(
                (out, subprocess.Popen(words, env=environment, cwd=HERE.parents[1]))
            )
        codes = [process.wait() for _, process in started]
        if any(codes):
            raise SystemExit("error: a run failed; the lines above say why.")
        for out, _ in started:
            found |= json.loads(out.read_text())
    return found


def _measure_here(out: Path, names: Sequence[str]) -> None:
    """Runs one after the other in this process; prints each name, and what the run prints only where it fails."""
    found = {}
    for name in names:
        printed = io.StringIO()
        try:
            with (
                tempfile.TemporaryDirectory() as directory,
                contextlib.redirect_stdout(printed),
            ):
                found[name] = measure(RUNS[name], Path(directory))
        except BaseException:
            print(printed.getvalue(), file=sys.stderr)
            print(f"{name} failed:", file=sys.stderr)
            raise
        print(f"  {name}", flush=True)
    out.write_text(json.dumps(found))


def read_record() -> dict[str, Any]:
    """The record: {"machine": what it was made on, "runs": what each run gave}."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def write_record(record: Mapping[str, Any]) -> None:
    """Writes it with a line for each key of a run and each leaf of its parameters, so that a diff can be read."""
    lines = ["{", f'"machine": {json.dumps(record["machine"])},', '"runs": {']
    for name, run in sorted(record["runs"].items()):
        values = [
            f"  {json.dumps(key)}: {json.dumps(value)}"
            for key, value in run.items()
            if key != "parameters"
        ]
        leaves = [
            f"    {json.dumps(key)}: {json.dumps(value)}"
            for key, value in run["parameters"].items()
        ]
        values.append('  "parameters": {\n' + ",\n".join(leaves) + "\n  }")
        lines.append(f"{json.dumps(name)}: {{\n" + ",\n".join(values) + "\n},")
    lines[-1] = lines[-1].removesuffix(",")
    RECORD.write_text("\n".join([*lines, "}", "}", ""]), encoding="utf-8")


def check(
    found: Mapping[str, Any], record: Mapping[str, Any], *, tolerant: bool
) -> bool:
    """Prints how each run compares with the record; whether all agree as they should on this machine."""
    here, there = this_machine(), record["machine"]
    differing = [
        f"{key} is {here[key]}, there {there.get(key)}"
        for key in here
        if here[key] != there.get(key)
    ]
    if differing:
        print(
            f"The record was made elsewhere, so that bits may differ: {'; '.join(differing)}."
        )
    counts = dict.fromkeys((SAME, WITHIN, DIFFERENT), 0)
    agree = True
    for name in sorted(found):
        verdict, what = DIFFERENT, "the record has no such run"
        if name in record["runs"]:
            verdict, what = compare(
                found[name], record["runs"][name], RUNS[name].tolerance
            )
        counts[verdict] += 1
        rounds = tolerant or bool(differing)
        agree = agree and (verdict == SAME or (verdict == WITHIN and rounds))
        print(f"{name:<40} {verdict:<18} {what}")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return agree


def main(argv: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    if argv[:1] == ["measure"]:  # this script, started by itself
        _measure_here(Path(argv[1]), argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.record", description=__doc__.splitlines()[0]
    )
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument(
        "words", nargs="*", help="only runs whose name holds one of these"
    )
    parser.add_argument(
        "--tolerant",
        action="store_true",
        help="bits may differ here too, within the tolerances",
    )
    arguments = parser.parse_args(argv)
    runs = [
        run
        for run in RUNS.values()
        if not arguments.words or any(word in run.name for word in arguments.words)
    ]
    if not runs:
        parser.error(
            f"no run is named like {' or '.join(arguments.words)}; they are: {', '.join(RUNS)}"
        )
    found = measure_all(runs)
    if arguments.what == "check":
        return 0 if check(found, read_record(), tolerant=arguments.tolerant) else 1
    old = read_record()["runs"] if RECORD.exists() else {}
    others = {
        name: run for name, run in old.items() if name in RUNS and name not in found
    }
    write_record({"machine": this_machine(), "runs": others | found})
    print(f"wrote {len(found)} runs to {os.path.relpath(RECORD)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
