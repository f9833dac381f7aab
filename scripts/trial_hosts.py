#!/usr/bin/env python3
"""Trials of several hosts: runs that resume on other processes and devices, and damaged checkpoints.

  python scripts/trial_hosts.py elastic
  python scripts/trial_hosts.py damage

elastic: a run that is told to stop goes on with 4 processes of 2 devices, 2 of 2, 1 of 2 and 4 of 2 again, and is
compared with one that stayed on one device: the same examples in each step, losses to 1e-5.
damage: each file of the newest of three checkpoints is cut by a byte, has a bit flipped, is emptied or removed, and
four processes look for the newest that is whole; then whole restarts with a sample of each damage. Exit code 1 where
something is not as it should be.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from trial_hangs import MODEL, Run, compared, started

STAGES = ((4, 2), (2, 2), (1, 2), (4, 2))  # processes and devices of each
STEPS = 20
GLOBAL_BATCH = [
    "global_batch_size=16", "gradient_accumulation_steps=-1", "optimizer=adamw", f"steps={STEPS}", "warmup_steps=3",
    "checkpoint_period=2", "eval_interval=4", "log_period=1",
]  # fmt: skip
RAMP = [
    "enable_rampup_batch_size=true", "global_rampup_samples=64", "rampup_mode=per_device_batch_size",
    "per_device_batch_size=2", "per_device_batch_size_start=1", "per_device_batch_size_increment=1",
]  # fmt: skip


def texts(folder: Path, seed: int, count: int) -> Path:
    """Documents of 1 to 39 words."""
    words, draw = ["to", "be", "or", "not", "that", "is", "the", "question"], random.Random(seed)
    path = folder / f"texts{seed}.jsonl"
    documents = (" ".join(draw.choices(words, k=draw.randint(1, 39))) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def variants(folder: Path) -> dict[str, list[str]]:
    """The kinds of run, by name."""
    first, second = texts(folder, 0, 150), texts(folder, 1, 90)
    mixture = f"dataset_path=[{{path: {first}, weight: 0.7, name: a}}, {{path: {second}, weight: 0.3, name: b}}]"
    return {
        "fsdp": ["ici_fsdp_parallelism=-1"],
        "tensor": ["ici_fsdp_parallelism=-1", "ici_tensor_parallelism=2"],
        "uneven": ["dataset_type=text", mixture, "packing=false", "ici_fsdp_parallelism=-1", *RAMP],
    }


def elastic(folder: Path, names: list[str]) -> list[str]:
    """The differences between runs that moved and runs that did not."""
    found = []
    for name, words in variants(folder).items():
        if names and name not in names:
            continue
        words = [*(word for word in MODEL if word.split("=")[0] not in str(words)), *GLOBAL_BATCH, *words]
        one = [word if not word.startswith("ici_tensor") else "ici_tensor_parallelism=1" for word in words]
        straight, moved = Run(folder, f"{name}-straight", one), Run(folder, f"{name}-moved", words)
        straight.start()
        codes = [straight.end()]
        for number, (processes, devices) in enumerate(STAGES, 1):
            until = max(STEPS * number // len(STAGES), moved.last_line.get("step", 0) + 1)
            moved.start(processes, devices)
            while moved.runs and moved.last_line.get("step", 0) < until:
                time.sleep(0.05)
            time.sleep(0.3)  # its line appears a moment before a signal becomes a request to save
            for process in moved.processes if number < len(STAGES) else ():
                process.send_signal(signal.SIGTERM)
            codes.append(moved.end())
            said = f"{name}, {processes} x {devices} devices: {codes[-1]} after step {moved.last_line.get('step')}"
            print(said, flush=True)
        same, text = compared(straight, moved, "--tolerance=1e-5")
        print(text, flush=True)
        if not same or codes != [[0], [75] * 4, [75] * 2, [75], [0] * 4]:
            found.append(f"{name}: {codes}\n{text}{'' if same else moved.log}")
    return found


def flip(path: Path) -> None:
    """Changes one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def another_hosts(path: Path) -> None:
    """Replaces a host's checksums with those of the next host."""
    process, _, count = path.name.removeprefix("sha256.").partition("-of-")
    shutil.copyfile(path.with_name(f"sha256.{(int(process) + 1) % int(count)}-of-{count}"), path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": flip,
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: shutil.rmtree(path) if path.is_dir() else path.unlink(),
    "another host's": another_hosts,
}


def cases(newest: Path) -> list[tuple[str, str]]:
    """Each damage of each file, and each directory missing; where there is nothing to damage, there is none."""
    found = []
    for path in sorted(newest.rglob("*")):
        name = str(path.relative_to(newest))
        hows = ["missing"] if path.is_dir() else ["missing", *(["cut", "flipped", "empty"] * (path.stat().st_size > 0))]
        found += [(how, name) for how in hows + ["another host's"] * name.startswith("sha256.")]
    return found


def look(run: Path, scratch: Path, first_case: int = 0) -> None:
    """As one process of several: the effect of each damage, printed by the first process."""
    from maxtext_lite.config import load_config
    from maxtext_lite.parallel import exchange, start_devices
    from maxtext_lite.training.checkpoint import Checkpointer

    start_devices()
    import jax

    first, config = jax.process_index() == 0, load_config(None, [])
    steps = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
    wrong, all_cases = 0, {step: cases(run / "checkpoints" / str(step)) for step in steps}
    asked = [{steps[-1]: case} for case in all_cases[steps[-1]]]
    some = random.Random(0).choice
    asked += [{step: some(all_cases[step]) for step in steps[1:]} for _ in range(10)]  # two checkpoints at once
    for number, damaged in enumerate(asked[first_case:], first_case):
        copy = scratch / str(number)
        if first:
            shutil.copytree(run, copy)
            for step, (how, name) in damaged.items():
                DAMAGES[how](copy / "checkpoints" / str(step) / name)
        exchange("ready")
        said: list[str] = []
        checkpointer = Checkpointer(copy, config, {}, say=said.append)
        taken = exchange(checkpointer.latest_step())
        checkpointer.close()
        if first:
            there = {path.name for path in (copy / "checkpoints").iterdir()}
            wanted = {str(step) if step not in damaged else f"damaged-{step}" for step in steps}
            names = zip(said, reversed(damaged.items()), strict=False)  # of a directory, one of its files is
            named = all(f"step {step} is damaged: " in text and name in text for text, (step, (_, name)) in names)
            fine = set(taken) == {max(set(steps) - damaged.keys())} and there == wanted and named
            wrong += not fine
            print("" if fine else "WRONG ", damaged, taken, sorted(there), said[0], flush=True)
            shutil.rmtree(copy)
        exchange("looked")
    if first:
        names = {name for _, name in all_cases[steps[-1]]}
        print(
            f"{len(asked) - 10} damages of {len(names)} files and directories, and 10 of two checkpoints: {wrong} wrong"
        )
    sys.exit(int(wrong > 0))


def damage(folder: Path, names: list[str]) -> list[str]:
    """The damages that were not detected, or for which the checkpoint before was not used."""
    words = [*MODEL, "steps=6", "checkpoint_period=2", "eval_interval=-1", "global_batch_size=4"]
    whole = Run(folder, "whole", [*words, "ici_fsdp_parallelism=-1"])
    whole.start(4, 1)
    assert set(whole.end()) == {0}, whole.log
    looked = [str(Path(__file__).resolve()), "look", "--folder", str(folder)]
    ended = [process.wait() for process in started(folder, lambda _: looked, count=4, devices=1)]
    print((folder / "log0").read_text(), flush=True)
    found = [] if set(ended) == {0} else [f"looking ended with {ended}\n{whole.log}"]
    newest = whole.directory / "checkpoints" / "6"
    for number, how in enumerate(names or DAMAGES):
        name = random.Random(number).choice([name for each, name in cases(newest) if each == how])
        run = Run(folder, f"restart{number}", [*words, "ici_fsdp_parallelism=-1"])
        shutil.copytree(whole.directory, run.directory)
        DAMAGES[how](run.directory / "checkpoints" / "6" / name)
        run.start(4, 1)
        codes, log = run.end(), (folder / "log0").read_text()
        same, text = compared(whole, run)
        said = next((line for line in log.splitlines() if "is damaged" in line), "nothing")
        print(f"{how} {name}: {codes}, {said}\n{text}", flush=True)
        if set(codes) != {0} or not same or not (run.directory / "checkpoints" / "damaged-6").is_dir():
            found.append(f"{how} {name}: {codes}\n{text}{run.log}")
    return found


def main() -> int:
    """Runs the requested trial; returns 1 if it found something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", choices=("elastic", "damage", "look"), help="look: as one process of `damage`")
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(variants(Path('/tmp')))}; {', '.join(DAMAGES)}")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; default: they are removed")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if asked.trial == "look":
            look(folder / "whole", folder / "looked", *map(int, asked.names))
        found = {"elastic": elastic, "damage": damage}[asked.trial](folder, asked.names)
    print("\n".join(f"WRONG {each}" for each in found) or "all as it should be")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
