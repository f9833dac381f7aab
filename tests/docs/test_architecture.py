"""docs/architecture.md names files that exist, few of which a reader must open, and they are on the way to the loss."""

import contextlib
import inspect
import re
import sys
import threading

import pytest

from maxtext_lite.train import main
from maxtext_lite.training import loss
from tests.source_tree import PACKAGE, REPOSITORY
from tests.training.conftest import TINY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^\d+\. \[([\w/.]+)\]", PAGE.split("## What a reader must open")[1], re.MULTILINE)


class TracedError(Exception):
    """The loss of step 1 is traced."""


@pytest.fixture(scope="module")
def files_on_the_way(tmp_path_factory):
    """Files of the package of which a function runs, on any thread, between `main` and the loss of step 1."""
    found: set[str] = set()
    root = f"{PACKAGE}/"

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and code.co_flags & inspect.CO_NEWLOCALS:
            found.add(code.co_filename.removeprefix(root))

    def traced(*arguments):
        raise TracedError

    words = [*TINY, "dataset_type=synthetic", "steps=1", "warmup_steps=1", "eval_interval=-1",
             "enable_checkpointing=false", f"base_output_directory={tmp_path_factory.mktemp('run')}"]  # fmt: skip
    before = sys.getprofile()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(TracedError):
        patch.setattr(loss, "_tile_losses", traced)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            main(words)
        finally:
            sys.setprofile(before)
            threading.setprofile(None)
    return found


def test_a_reader_opens_at_most_fourteen_files_and_all_of_them_run(files_on_the_way):
    assert len(LISTED) == len(set(LISTED)) <= 14
    assert set(LISTED) <= files_on_the_way
