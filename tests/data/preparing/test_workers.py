"""Workers report what they make, pass errors on, and end with their parent."""

import multiprocessing
import os

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.data.tokenizer import ByteTokenizer
from maxtext_lite.preparation.dataset import run_in_processes
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.preparation.shards import Workshop
from maxtext_lite.preparation.tasks import find_inputs, split_into_tasks


def job(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    files = find_inputs([str(tmp_path / "a.jsonl")])
    tasks = split_into_tasks(files, task_bytes=40, field="text")
    workshop = Workshop(
        tmp_path, tmp_path, {file.path: file for file in files}, len(tasks), 0.0
    )
    config = PrepareConfig(num_workers=1)
    return tasks, workshop, config, TextEncoder(config, ByteTokenizer())


def test_a_worker_passes_errors_on(tmp_path, monkeypatch):
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    before = dict(os.environ)
    with pytest.raises(UserError, match=r"a\.jsonl: line at byte 0: not JSON"):
        list(run_in_processes(*job(tmp_path, "no\n")))
    assert dict(os.environ) == before


def test_a_killed_worker_is_reported(tmp_path):
    running = run_in_processes(*job(tmp_path, '{"text": "abc"}\n' * 1000))
    next(running)
    (child,) = multiprocessing.active_children()
    child.kill()
    with pytest.raises(RuntimeError, match="was killed"):
        list(running)
