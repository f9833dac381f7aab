import os
import subprocess
import sys

import pytest

from maxtext_lite.cli import run_command
from maxtext_lite.report import main
from tests.run_directories import eval_line, step_line, write_run


@pytest.fixture
def runs(tmp_path):
    lines = [*(step_line(step) for step in range(1, 6)), eval_line(5, 3.5)]
    return [write_run(tmp_path / name, lines, ["steps=5", "warmup_steps=1"]) for name in "ab"]


def test_the_page_is_written_into_the_run_directory(runs, capsys):
    assert main([str(runs[0])]) == 0
    assert capsys.readouterr().out == f"wrote {runs[0]}/report.html\n"
    assert (runs[0] / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_go_into_the_first_ones_directory(runs, capsys):
    assert main([str(run) for run in runs]) == 0
    assert capsys.readouterr().out == f"wrote {runs[0]}/report.html\n"
    assert "<h1>2 runs</h1>" in (runs[0] / "report.html").read_text()
    assert not (runs[1] / "report.html").exists()


def test_output_says_where_to(runs, tmp_path, capsys):
    assert main(["--output", str(tmp_path / "x.html"), *map(str, runs)]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/x.html\n"
    assert not (runs[0] / "report.html").exists()


def test_a_run_that_is_given_twice_and_what_is_missing_are_said(runs, capsys):
    (runs[0] / "plan.json").unlink()
    assert main([str(runs[0]), f"{runs[1]}/../a"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 of the directories repeats a run",
        f"note: {runs[0]}: plan.json is missing.",
        f"wrote {runs[0]}/report.html",
    ]


def test_the_page_does_not_depend_on_when_it_is_written(runs):
    pages = []
    for _ in range(2):
        main([str(runs[0])])
        pages.append((runs[0] / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_mistakes_are_error_lines_and_exit_code_2(runs, tmp_path, capsys):
    def errors(*argv):
        assert run_command(main, list(map(str, argv))) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err.splitlines()

    none = "it has none of config.yml, plan.json, metrics.jsonl."
    near = f"Nearest that work: {tmp_path}/a or {tmp_path}/b."
    assert errors(tmp_path, tmp_path / "no", runs[0]) == [
        f"error: RUN_DIR={tmp_path} is not a run directory: {none} {near}",
        f"error: RUN_DIR={tmp_path}/no is missing; it must be a run directory.",
    ]
    assert not (runs[0] / "report.html").exists()
    output = tmp_path / "nowhere" / "x.html"
    assert errors(runs[0], "--output", output) == [
        f"error: --output={output} cannot be written: No such file or directory. "
        f"Nearest that works: {runs[0]}/report.html."
    ]
    assert errors() == [
        "error: the following arguments are required: RUN_DIR. `maxtext-lite report --help` lists all arguments."
    ]
    (runs[0] / "report.html").mkdir()
    assert errors(runs[0]) == [
        f"error: {runs[0]}/report.html cannot be written: Is a directory. Name another file with --output."
    ]


def test_it_imports_no_jax(runs):
    program = (
        "import sys; from maxtext_lite.report import main; code = main(sys.argv[1:]);"
        "sys.exit(code or any(name in sys.modules for name in ('jax', 'flax', 'optax', 'numpy')))"
    )
    command = [sys.executable, "-c", program, str(runs[0])]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr


def test_as_a_module_it_ends_with_the_exit_code(tmp_path):
    command = [sys.executable, "-m", "maxtext_lite.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [f"error: RUN_DIR={tmp_path} is not a run directory: it has none of config.yml, plan.json, metrics.jsonl."],
    )
