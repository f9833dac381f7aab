"""Plants the faults of `faults.yml` one at a time, and prints which test sees each.

    python -m tests.mutants                       the tests of this checkout
    python -m tests.mutants --checkout ../before  those of another
    python -m tests.mutants --only "mean of means"

The whole suite runs once on an instrumented copy of the source, which maps tests to the functions that they reach. For
each fault, the tests of up to five files that reach the function it changes then run on a copy with the fault: the
module's own and then the cheapest first, for at most two minutes, up to the first test that fails. The map and the
results are kept in DIR, so that a run that was stopped goes on.
"""

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from tests.mutants import given_order
from tests.mutants.faults import Fault, read_faults
from tests.mutants.reached import instrument
from tests.source_tree import REPOSITORY

FILES_OF_A_FAULT = 5
WHOLE = "tests/invariance/"
SECONDS_OF_A_FAULT = 120
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".jax_cache", ".mutants", "__pycache__", "runs", "build", "dist"
)


# ---- Which tests reach a function ----------------------------------------------------------------------------------


@dataclass
class Case:
    """A test with its parameters.

    Attributes:
      seconds: Of its setup, call and teardown.
      num_functions: How many functions of the library it reaches.
    """

    name: str
    fixtures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    setup_seconds: float = 0.0
    num_functions: int = 0
    passed: bool = True

    @property
    def file(self) -> str:
        """That it is in."""
        return self.name.partition("::")[0]


@dataclass(frozen=True)
class ReachMap:
    """Which tests reach which functions.

    Attributes:
      cases: By name.
      reached: By function, the tests and fixtures that reach it.
      users: By shared fixture, the tests that request it.
    """

    cases: dict[str, Case]
    reached: dict[str, set[str]]
    users: dict[str, list[Case]]

    def cases_of(self, function: str) -> list[Case]:
        """The passing tests that reach a function, by themselves or through a fixture."""
        found: dict[str, Case] = {}
        for label in self.reached.get(function, ()):
            if label in self.cases:
                found[label] = self.cases[label]
            for case in self.users.get(label, ()):
                found[case.name] = case
        return [case for case in found.values() if case.passed]

    def seconds(self, case: Case) -> float:
        """What the test takes when it runs alone: the setup of its fixtures may have been another test's.

        A setup that several fixtures share counts for the one that the fewest tests request.
        """
        setups = [case.setup_seconds]
        for fixture in case.fixtures:
            first = self.users[fixture][0]
            rarest = min(first.fixtures, key=lambda name: len(self.users[name]))
            if rarest == fixture:
                setups.append(first.setup_seconds)
        return case.seconds - case.setup_seconds + max(setups)


def read_map(path: Path) -> ReachMap:
    """Reads what the plugin of `reached.py` wrote."""
    cases: dict[str, Case] = {}
    reached: dict[str, set[str]] = collections.defaultdict(set)
    users: dict[str, list[Case]] = collections.defaultdict(list)
    num_functions: collections.Counter[str] = collections.Counter()
    with path.open() as lines:
        for line in lines:
            record = json.loads(line)
            if "reached" in record:
                labels = reached[record["reached"]]
                num_functions[record["by"]] += record["by"] not in labels
                labels.add(record["by"])
            elif "test" in record:
                case = cases[record["test"]] = Case(record["test"], record["fixtures"])
                for fixture in case.fixtures:
                    users[fixture].append(case)
            else:
                case = cases[record["ended"]]
                case.seconds += record["seconds"]
                if record["when"] == "setup":
                    case.setup_seconds = record["seconds"]
                case.passed = case.passed and record["outcome"] == "passed"
    for case in cases.values():
        case.num_functions = sum(
            num_functions[label] for label in [case.name, *case.fixtures]
        )
    return ReachMap(cases, reached, users)


def chosen_tests(reach: ReachMap, function: str) -> list[Case]:
    """The tests that are run for a fault in the function, in their order: those that reach it, of up to five files.

    The files are that of the function's module, by its name, those of whose tests the largest part reaches the
    function, and of those of whole runs and steps the one that says something the soonest. The first of these runs
    first, then the cheapest, and of a file the cheapest case of each test before their other cases.
    """
    of_file: dict[str, list[Case]] = collections.defaultdict(list)
    for case in reach.cases_of(function):
        of_file[case.file].append(case)
    sizes = collections.Counter(case.file for case in reach.cases.values())
    own = "/test_" + function.partition(":")[0].rpartition("/")[2]

    def rank(file: str) -> tuple[bool, float, float]:
        cases = of_file[file]
        functions = sum(case.num_functions for case in cases) / len(cases)
        return not file.endswith(own), -len(cases) / sizes[file], functions

    whole = [file for file in of_file if file.startswith(WHOLE)]
    others = sorted(of_file.keys() - set(whole), key=rank)
    whole.sort(key=lambda file: min(map(reach.seconds, of_file[file])))
    files = whole[:1] + others[: FILES_OF_A_FAULT - 1]
    files.sort(
        key=lambda file: (
            not file.endswith(own),
            sum(map(reach.seconds, of_file[file])),
        )
    )
    return [case for file in files for case in in_turn(of_file[file], reach)]


def in_turn(cases: list[Case], reach: ReachMap) -> list[Case]:
    """The cheapest case of each test function, then the others."""
    by_cost = sorted(cases, key=reach.seconds)
    firsts = {case.name.partition("[")[0]: case for case in reversed(by_cost)}
    first = [case for case in by_cost if firsts[case.name.partition("[")[0]] is case]
    return first + [case for case in by_cost if case not in first]


# ---- Running -------------------------------------------------------------------------------------------------------


def environment_of(copy: Path, cache: Path) -> dict[str, str]:
    """That of tests in a copy: the library is imported from there, and compiled programs are shared by all copies."""
    return os.environ | {
        "PYTHONPATH": str(copy),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
    }


def map_tests(checkout: Path, directory: Path, jobs: int) -> None:
    """Runs the whole suite on an instrumented copy, and writes DIRECTORY/reached.jsonl."""
    copy = directory / "instrumented"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(checkout, copy, ignore=NOT_COPIED)
    instrument(copy)
    log = directory / "reached.new"
    log.unlink(missing_ok=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "maxtext_lite._reached",
            "-p",
            "no:cacheprovider",
            "-n",
            str(jobs),
            "--dist",
            "loadscope",
            "--no-loadscope-reorder",
        ],
        cwd=copy,
        env=environment_of(copy, directory / "cache") | {"REACHED_LOG": str(log)},
        check=False,  # a test that fails on the copy sees no fault
    )
    log.rename(directory / "reached.jsonl")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What became of a fault: `seen_by` is a test, or empty where none of the `tests` that ran failed."""

    fault: str
    area: str
    function: str
    seen_by: str
    tests: int
    seconds: float
    note: str = ""


def run_fault(fault: Fault, copy: Path, reach: ReachMap, cache: Path) -> Seen:
    """Plants the fault in the copy, runs its tests up to the first that fails, and takes the fault out again."""
    began = time.monotonic()

    def seen(function: str, seen_by: str, tests: int, note: str = "") -> Seen:
        seconds = round(time.monotonic() - began, 1)
        return Seen(
            fault=fault.name,
            area=fault.area,
            function=function,
            seen_by=seen_by,
            tests=tests,
            seconds=seconds,
            note=note,
        )

    try:
        function = fault.target(copy)
        before = fault.plant(copy)
    except ValueError as error:
        return seen("", "", 0, str(error))
    try:
        names = [case.name for case in chosen_tests(reach, function)]
        if not names:
            return seen(function, "", 0, "no test reaches it")
        arguments = copy / "tests.txt"
        arguments.write_text("\n".join(names))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-rfE",
            "--tb=no",
            "-p",
            "given_order",
            f"@{arguments}",
        ]
        with subprocess.Popen(
            command,
            cwd=copy,
            env=environment_of(copy, cache) | {given_order.FILE: str(arguments)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=SECONDS_OF_A_FAULT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.communicate()
                return seen(
                    function,
                    "",
                    len(names),
                    f"not seen in {SECONDS_OF_A_FAULT} seconds",
                )
        failed = re.search(
            r"^(?:FAILED|ERROR) (\S+?::.*?|\S+)(?: - .*)?$", output, re.MULTILINE
        )
        if failed:
            return seen(function, failed[1], len(names))
        if process.returncode:
            return seen(
                function,
                "",
                len(names),
                f"pytest ended with {process.returncode}: {output[-300:]}",
            )
        return seen(function, "", len(names))
    finally:
        (copy / fault.file).write_text(before)


def run_faults(
    faults: list[Fault], checkout: Path, directory: Path, jobs: int, until: float
) -> None:
    """Runs those that have no result yet, and appends to DIRECTORY/table.jsonl, up to a time."""
    reach = read_map(directory / "reached.jsonl")
    copies: SimpleQueue[Path] = SimpleQueue()
    for job in range(jobs):
        copy = directory / f"copy{job}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(checkout, copy, ignore=NOT_COPIED)
        shutil.copy(given_order.__file__, copy)
        copies.put(copy)

    def run(fault: Fault) -> None:
        if time.monotonic() > until:
            return
        copy = copies.get()
        try:
            result = run_fault(fault, copy, reach, directory / "cache")
        finally:
            copies.put(copy)
        with (directory / "table.jsonl").open("a") as table:
            table.write(json.dumps(vars(result)) + "\n")
        print(
            f"{result.fault}: {result.seen_by or 'NOT SEEN'} {result.note} ({result.seconds} s)",
            flush=True,
        )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, faults))


def read_table(directory: Path) -> dict[str, dict]:
    """The last result of each fault."""
    path = directory / "table.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["fault"]: row for row in map(json.loads, lines)}


def main() -> int:
    """Returns 1 where a fault was not seen, or could not be planted."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--checkout", type=Path, default=REPOSITORY, help="whose library and tests"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="of the map and the results (default: CHECKOUT/.mutants)",
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="faults to run again, by name"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=90, help="no fault is begun after these"
    )
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.minutes * 60
    directory = (arguments.directory or arguments.checkout / ".mutants").absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "reached.jsonl").exists():
        map_tests(arguments.checkout, directory, arguments.jobs)
    known = read_table(directory)
    faults = read_faults()
    if arguments.only:
        waiting = [fault for fault in faults if fault.name in arguments.only]
    else:
        waiting = [fault for fault in faults if fault.name not in known]
    run_faults(waiting, arguments.checkout, directory, arguments.jobs, until)
    known = read_table(directory)
    print("| area | fault | seen by |\n|---|---|---|")
    num_seen = 0
    for fault in faults:
        row = known.get(fault.name, {"seen_by": "", "note": "not run"})
        num_seen += bool(row["seen_by"])
        print(
            f"| {fault.area} | {fault.name} | {row['seen_by'] or 'nothing. ' + row['note']} |"
        )
    print(f"{num_seen} of {len(faults)} seen")
    return int(num_seen < len(faults))


if __name__ == "__main__":
    sys.exit(main())
