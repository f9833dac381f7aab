"""One prepare at a time, or its shares, writes an output."""

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.tokenizer import ByteTokenizer
from maxtext_lite.preparation.journal import Journal
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.preparation.tasks import find_inputs, split_into_tasks


@pytest.fixture
def open_journal(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    config = PrepareConfig(
        input=[str(tmp_path / "a.txt")], output=str(tmp_path / "out")
    )
    files = find_inputs(config.input)
    return lambda: Journal(
        config,
        files,
        split_into_tasks(files, task_bytes=10, field="text"),
        TextEncoder(config, ByteTokenizer()),
    )


def assert_in_use(journal, shared=False):
    with pytest.raises(UserError, match="in use"), journal.hold(shared=shared):
        pass


def test_a_second_prepare_is_refused_and_shares_are_not(open_journal):
    with open_journal().hold(shared=False):
        assert_in_use(open_journal())
        assert_in_use(open_journal(), shared=True)
    with open_journal().hold(shared=True), open_journal().hold(shared=True):
        assert_in_use(open_journal())
