"""The command `report` writes one page into the first run's directory, or where it is told to."""

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.report import main
from tests.run_directories import eval_line, step_line, write_run


@pytest.fixture
def runs(tmp_path):
    lines = [*(step_line(step) for step in range(1, 6)), eval_line(5, 3.5)]
    return [
        write_run(tmp_path / name, lines, ["steps=5", "warmup_steps=1"])
        for name in "ab"
    ]


@pytest.mark.fast
def test_one_or_several_runs_become_one_page_that_does_not_depend_on_when_it_is_written(
    runs, capsys
):
    pages = []
    for _ in range(2):
        assert main([str(runs[0])]) == 0
        pages.append((runs[0] / "report.html").read_bytes())
    assert pages[0] == pages[1]
    assert pages[0].startswith(b"<!doctype html>")
    assert main([str(run) for run in runs]) == 0
    assert capsys.readouterr().out == f"wrote {runs[0]}/report.html\n" * 3
    assert "<h1>2 runs</h1>" in (runs[0] / "report.html").read_text()
    assert not (runs[1] / "report.html").exists()


def test_a_page_that_cannot_be_written_is_refused_and_output_says_where_else(
    runs, tmp_path
):
    (runs[0] / "report.html").mkdir()
    with pytest.raises(UserError, match="--output"):
        main([str(runs[0])])
    assert main(["--output", str(tmp_path / "x.html"), *map(str, runs)]) == 0
    assert (tmp_path / "x.html").exists()
