"""Plants the faults of `faults.yml` one at a time in a copy of the repository: each must fail the test that it names.

    python -m tests.mutants                  all
    python -m tests.mutants "mean of means"  those of these names

Prints a line for each, and exits with 1 where a test does not see its fault.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.faults import Fault, read_faults
from tests.source_tree import REPOSITORY

SECONDS = 600
SEEN = 1  # pytest's exit code where tests fail; others mean that none ran
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "runs", "build")


def is_seen(fault: Fault, copy: Path) -> bool:
    """Whether the test of a fault fails in a copy that has it."""
    before = fault.plant(copy)
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no"]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options, fault.seen_by],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            stdout=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    finally:
        (copy / fault.file).write_text(before)
    return ended.returncode == SEEN


def main(names: list[str]) -> int:
    """Returns the exit code."""
    faults = [fault for fault in read_faults() if not names or fault.name in names]
    num_seen = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        shutil.copytree(REPOSITORY, copy, ignore=NOT_COPIED)
        for fault in faults:
            seen = is_seen(fault, copy)
            num_seen += seen
            verdict = "seen by" if seen else "NOT SEEN by"
            print(f"{fault.area}: {fault.name}: {verdict} {fault.seen_by}", flush=True)
    print(f"{num_seen} of {len(faults)} seen")
    return int(num_seen < len(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
