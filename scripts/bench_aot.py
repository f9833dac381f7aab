"""Compiles a list of configs for machines that are not attached, and prints the compiler's figures for each.

    python scripts/bench_aot.py scripts/aot_points.txt           models at full width: minutes each
    python scripts/bench_aot.py scripts/aot_points_small.txt     every kind of layer and mesh: half a minute each
    python scripts/bench_aot.py scripts/aot_points_h100.txt      the same on eight GPUs: a minute or two each
    python scripts/bench_aot.py scripts/aot_points_ledger.txt    what the plan's memory is held against
    python scripts/bench_aot.py POINTS --only NAME NAME --out results.jsonl

A line of POINTS is `NAME | TOPOLOGY | key=value ...`, the topology as `compile --topology` takes it, or a number of
simulated CPU devices; # begins a comment. Each point is compiled by `maxtext_lite.compile --json` in a process of its
own, on synthetic data. Prints a table in Markdown, a row as soon as a point is done; --out appends a JSON line for
each. Exit code 1 where a point fails. Nothing is run on a device: there are no times here but the compiler's own.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER = ("point", "machine", "GB a device", "temporaries", "the plan's error", "matmul TFLOP", "GB sent",
           "asynchronous", "compiler, ms", "least, ms", "bound on MFU", "kernels", "largest array",
           "seconds")  # fmt: skip


def main() -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these points only")
    parser.add_argument("--out", type=Path, help="a file of JSON lines, to which results are added")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a point (default 1800)")
    arguments = parser.parse_args()
    points = list(read_points(arguments.points))
    unknown = set(arguments.only) - {name for name, _, _ in points}
    if unknown:
        parser.error(f"{arguments.points} has no point {', '.join(sorted(unknown))}")
    print(f"| {' | '.join(_HEADER)} |\n|{'---|' * len(_HEADER)}", flush=True)
    failed = 0
    for name, topology, keys in points:
        if arguments.only and name not in arguments.only:
            continue
        result = compile_point(topology, keys, arguments.timeout)
        failed += "error" in result
        print(f"| {' | '.join(row(name, topology, result))} |", flush=True)
        if arguments.out:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"point": name, "topology": topology, "keys": keys} | result) + "\n")
    return int(failed > 0)


def read_points(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """(name, topology, keys) of each line."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        parts = [part.strip() for part in line.partition("#")[0].split("|")]
        if parts == [""]:
            continue
        if len(parts) != 3:
            raise SystemExit(f"{path}:{number}: not of the form NAME | TOPOLOGY | key=value ...")
        yield parts[0], parts[1], parts[2].split()


def compile_point(topology: str, keys: list[str], timeout: float) -> dict[str, Any]:
    """What `compile --json` prints, without the parameters; or `error` and its last lines. Both with `seconds`."""
    machine = ["--devices", topology] if topology.isdigit() else ["--topology", topology]
    common = ["dataset_type=synthetic", "steps=1000"]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "maxtext_lite.compile", "--json", *machine, *common, *keys],
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout:g} seconds", "seconds": time.monotonic() - begin}
    seconds = time.monotonic() - begin
    if done.returncode:
        return {"error": reason(done.stderr), "exit_code": done.returncode, "seconds": seconds}
    found = json.loads(done.stdout)
    del found["parameters"]
    return found | {"seconds": seconds}


def reason(stderr: str) -> str:
    """The lines that say why a compilation failed, at most three."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in ("rror:", "RESOURCE_EXHAUSTED", "Check failed"))]
    return " ".join((telling or lines)[-3:])[:600]


def row(name: str, topology: str, result: dict[str, Any]) -> list[str]:
    """The cells of a point."""
    if "error" in result:
        said = result["error"].replace("|", "/")
        return [name, topology, f"failed: {said}", *[""] * (len(_HEADER) - 4), f"{result['seconds']:.0f}"]
    memory, roof = result["memory"], result["roofline"]
    matmuls = result["flops"]["matmuls_per_device_by_dtype"]
    runs = [(c["times"], c["async_times"]) for c in result["collectives"]]
    times, async_times = (sum(each or 0 for each in column) for column in zip(*runs, strict=True)) if runs else (0, 0)
    slowest = {part: roof[f"{part}_seconds"] for part in ("matmul", "memory", "link")}
    least = max((seconds for seconds in slowest.values() if seconds is not None), default=None)
    kernels = ", ".join(f"{kernel['name']} {kernel['times']}" for kernel in result["kernels"])
    return [
        name,
        topology,
        f"{memory['total'] / 1e9:.2f}",
        f"{memory['temporaries'] / 1e9:.2f}",
        f"{memory['plan_error_percent']['total']:+.1f} %",
        " + ".join(f"{dtype} {_scaled(flops, 1e12)}" for dtype, flops in matmuls.items()),
        _scaled(result["sent_bytes"], 1e9),
        f"{async_times / times:.0%}" if times else "none cross",
        _scaled(result["compiler"]["seconds"], 1e-3),
        _scaled(least, 1e-3),
        _bound(roof),
        kernels or "none",
        ", ".join(f"{array['type']} {array['num_bytes'] / 1e9:.2f} GB" for array in result["largest_arrays"][:1]),
        f"{result['seconds']:.0f}",
    ]


def _bound(roof: dict[str, Any]) -> str:
    if roof["most_mfu"] is None:
        return "not known"
    return "none" if roof["most_mfu"] == 1 else f"{roof['most_mfu']:.1%}, {roof['bound_by']}"


def _scaled(amount: float | None, unit: float) -> str:
    return "not known" if amount is None else f"{amount / unit:.4g}"


if __name__ == "__main__":
    sys.exit(main())
