"""Workers report what they make, hand on what is wrong, and end when nobody listens to them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxtext_lite.config import UserError
from maxtext_lite.data.preparing import workers
from maxtext_lite.data.preparing.keys import PrepareConfig
from maxtext_lite.data.preparing.shards import Workshop
from maxtext_lite.data.preparing.tasks import cut, find_inputs
from maxtext_lite.data.preparing.workers import run_here, run_in_processes
from maxtext_lite.data.tokenizer import ByteTokenizer
from tests.source_tree import REPOSITORY


def job(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    files = find_inputs([str(tmp_path / "a.jsonl")])
    tasks = cut(files, task_bytes=40, field="text")
    workshop = Workshop(tmp_path, tmp_path, {file.path: file for file in files}, len(tasks), 0.0)
    return tasks, workshop, PrepareConfig()


def test_this_process_reports_tokens_and_entries(tmp_path):
    made = list(run_here(*job(tmp_path, '{"text": "abc"}\n' * 8), ByteTokenizer()))
    assert [each.entry.shard.tokens for each in made] == [each.tokens for each in made] == [12, 8, 12]


def test_a_worker_hands_on_what_is_wrong(tmp_path):
    with pytest.raises(UserError, match=r"a\.jsonl: line at byte 0: not JSON"):
        list(run_in_processes(*job(tmp_path, "no\n"), "byte", num_workers=1))
    assert workers._ONE_THREAD.keys() & os.environ.keys() <= {"OMP_NUM_THREADS"}


def test_a_worker_that_was_killed_is_told_of(tmp_path):
    running = run_in_processes(*job(tmp_path, '{"text": "abc"}\n' * 1000), "byte", num_workers=1)
    next(running)
    (child,) = [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()][-1:]
    os.kill(child, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with exit code -9"):
        list(running)


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 10)
    program = (
        "from maxtext_lite.data.preparing import documents, workers\n"
        "import time\n"
        "from tests.data.preparing.test_workers import job\n"
        "from pathlib import Path\n"
        f"job = job(Path({str(tmp_path)!r}), '{{\"text\": \"abc\"}}\\n' * 1000)\n"
        "if __name__ == '__main__':\n"
        "    for made in workers.run_in_processes(*job, 'byte', num_workers=1):\n"
        "        print(open('/proc/self/task/%d/children' % __import__('os').getpid()).read(), flush=True)\n"
        "        time.sleep(60)\n"
    )
    (tmp_path / "parent.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline().split()[-1])
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(300):
        try:
            gone = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except FileNotFoundError:
            gone = True
        if gone:
            break
        time.sleep(0.1)
    assert gone
