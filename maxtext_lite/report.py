"""Write RUN_DIR/report.html, one self-contained page of a run, or of several overlaid."""

import sys
from collections.abc import Sequence
from pathlib import Path

from maxtext_lite.analysis.page import write_page
from maxtext_lite.analysis.run_data import read_runs
from maxtext_lite.cli import ArgumentParser, local_path, run_command, run_path
from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import storage_errors


def main(argv: Sequence[str]) -> int:
    """Writes the report and prints its path; returns the exit code.

    Raises:
      UserError: a directory is not a run directory, or the page cannot be written.
    """
    parser = ArgumentParser(prog="maxtext-lite report", description=__doc__)
    parser.add_argument(
        "run_directories", nargs="+", type=run_path, metavar="RUN_DIR", help="a run directory, finished or not"
    )
    parser.add_argument(
        "--output", type=local_path, metavar="PATH", help="the file to write (default: RUN_DIR/report.html)"
    )
    arguments = parser.parse_intermixed_args(argv)
    runs = read_runs(arguments.run_directories)
    output: Path = arguments.output or runs[0].directory / "report.html"
    try:
        with storage_errors(output):
            write_page(runs, output)
    except OSError as error:
        if arguments.output:
            where = f"--output={output}"
            hint = f"Nearest that works: {runs[0].directory / 'report.html'}."
        else:
            where = str(output)
            hint = "Name another file with --output."
        raise UserError(f"{where} cannot be written: {error.strerror}. {hint}") from None
    repeated = len(arguments.run_directories) - len(runs)
    if repeated:
        print(f"{repeated} of the directories repeat{'s' if repeated == 1 else ''} a run")
    for run in runs:
        for note in run.notes:
            print(f"note: {run.directory}: {note}")
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
