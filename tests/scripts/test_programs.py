"""The Python programs of scripts/: all say what they take, benches print whole tables, pictures are those shown."""

import importlib
import json
import os
import re
import runpy
import subprocess
from unittest import mock

import pytest

from tests.processes import environment, quick_python
from tests.source_tree import REPOSITORY
from tests.training.conftest import TINY

SCRIPTS = REPOSITORY / "scripts"
SOURCES = {
    path: path.read_text(encoding="utf-8") for path in sorted(SCRIPTS.glob("*.py"))
}
WITH_OPTIONS = [
    path
    for path, text in SOURCES.items()
    if "argparse" in text and "playwright" not in text
]


@pytest.fixture(autouse=True)
def _scripts_find_each_other(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.mark.parametrize("path", WITH_OPTIONS, ids=lambda path: path.stem)
def test_a_program_says_what_it_takes(path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(path), "--help"])
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def printed(*words, exit_code=0):
    """The cells of the lines that a bench prints."""
    command = [*quick_python(), *words]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in done.stdout.splitlines()
    ]


def test_points_compile_or_say_why_not(tmp_path):
    points = f"# NAME | TOPOLOGY | keys\none | 1 | {' '.join(TINY)}\n\nwrong | 1 | learning_rte=1  # no such key\n"
    (tmp_path / "points.txt").write_text(points)
    points, out = tmp_path / "points.txt", tmp_path / "out.jsonl"
    header, _, one, wrong = printed(
        "scripts/bench_aot.py", str(points), "--out", str(out), exit_code=1
    )
    cells = dict(zip(header, one, strict=True))
    assert cells["matmul TFLOP"].startswith("f32 ")
    assert (cells["GB sent"], cells["bound on MFU"]) == ("0", "not known")
    assert wrong[2].startswith("failed: error: unknown key 'learning_rte'")
    first, second = map(json.loads, out.read_text().splitlines())
    assert (first["point"], first["num_devices"]) == ("one", 1)
    assert (second["point"], second["exit_code"]) == ("wrong", 2)


def test_the_pictures_of_the_page_on_batch_size_are_what_the_script_draws(tmp_path):
    drawing = importlib.import_module("draw_batch_size")
    assert drawing.main([str(tmp_path)]) == 0
    committed, written = (
        {
            f"{name}.svg": (folder / f"{name}.svg").read_text(encoding="utf-8")
            for name in drawing.PICTURES
        }
        for folder in (drawing.IMAGES, tmp_path)
    )
    assert committed == written, "python scripts/draw_batch_size.py"
    page = (REPOSITORY / "docs" / "batch_size.md").read_text(encoding="utf-8")
    assert sorted(
        re.findall(r"^!\[[^\]]{40,}\]\(images/(\w+\.svg)\)$", page, re.MULTILINE)
    ) == sorted(written)
    # By hand: 8 devices x 1, 2, 3, 4 x A = 4: 32, 64, 96, 128. A third of 960 is 320: 10, 5 and (3.33 up to) 4 steps.
    for text in ("10 x 32 = 320", "5 x 64 = 320", "4 x 96 = 384", "128 a step"):
        assert f">{text}<" in written["rampup.svg"]


@pytest.mark.parametrize(
    ("page", "link", "target"),
    [
        ("docs/library.md", "../examples", "repository/examples/index.md"),
        ("README.md", "nothing.md", None),
    ],
)
def test_a_link_of_the_repository_has_its_place_on_the_site(page, link, target):
    assert (
        importlib.import_module("site_pages").target_of(REPOSITORY / page, link)
        == target
    )
