"""A room whose folder is deleted stops its commands and those of the rooms that need it; the rest works."""

import os
import subprocess
import sys

import pytest

from maxtext_lite.cli import COMMANDS
from tests.source_tree import PACKAGE, REPOSITORY
from tests.test_layers import ROOMS

STOPPED = {
    "kernels": "",
    "operations": "branch report tune",
    "preparation": "prepare",
    "hf": "branch convert convert_config equiv evaluate generate harness replay",
    "inference": "evaluate generate harness",
    "post_training": "train_rl",
    "analysis": "advise branch compile equiv replay report tune verify_resume",
}
ARGUMENTS = {
    "convert": ["import", ".", "out"],
    "equiv": [],
    "compile": [],
    "replay": [".", "--step", "1"],
    "train_rl": [],
    "verify_resume": [".", "."],
}
"""What makes a command import its rooms; --help of the others does."""

WORKING = """
import importlib, sys
for command in sys.argv[1:]:
    try:
        importlib.import_module(f"maxtext_lite.{command}").main(["--help"])
    except SystemExit as end:
        assert end.code == 0
"""


def checkout_without(directory, *rooms):
    """A copy of the repository without some rooms."""
    package = directory / "maxtext_lite"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if path.name not in rooms:
            (package / path.name).symlink_to(path)
    (directory / "configs").symlink_to(REPOSITORY / "configs")
    return directory


def run(directory, *words):
    return subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("room", ROOMS)
def test_an_absent_room_stops_the_commands_that_need_it_by_name(room, tmp_path):
    checkout = checkout_without(tmp_path, room)
    stopped = STOPPED[room].split()
    for command in stopped:
        arguments = ARGUMENTS.get(command, ["--help"])
        ended = run(checkout, "-m", f"maxtext_lite.{command}", *arguments)
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr.startswith("error: "), ended.stderr
        assert f"maxtext_lite.{room}" in ended.stderr
        assert "Traceback" not in ended.stderr
    working = [command for command in COMMANDS if command not in stopped]
    helped = run(checkout, "-c", WORKING, *working)
    assert helped.returncode == 0, helped.stderr
    planned = run(checkout, "-m", "maxtext_lite.plan", "--json")
    assert planned.returncode == 0, planned.stderr


TINY = """
steps=1 vocab_size=264 base_emb_dim=16 base_num_query_heads=2 base_num_kv_heads=2 head_dim=8 base_mlp_dim=24
base_num_decoder_layers=1 max_target_length=32
"""


def test_the_command_train_needs_no_room(tmp_path):
    checkout = checkout_without(tmp_path, *ROOMS)
    ended = run(checkout, "-m", "maxtext_lite.train", *TINY.split())
    assert ended.returncode == 0, ended.stderr
    assert "1 step done" in ended.stdout
