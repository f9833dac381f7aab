"""One host of two cannot read or write, or is told to stop: what both say, how they end, and what is saved."""

import pytest

from tests.processes import quick_python, run_launched
from tests.run_directories import write_lines

# The process that WHO names fails; one that is killed is in tests/parallel/test_coordination.py.
PROGRAM = """
import errno, os, signal, sys
from maxtext_lite.console import command_signals
command_signals.install()
from maxtext_lite.cli import run_command
from maxtext_lite.config import UserError
from maxtext_lite.data import feed
from maxtext_lite.train import main
from maxtext_lite.training import saving, step_log

def change(owner, name, before):
    inner = getattr(owner, name)
    setattr(owner, name, lambda *arguments: before(*arguments) or inner(*arguments))

def read(reads, index):
    if how == "data" and index == 6:
        raise UserError("documents.jsonl: row 13 is damaged.")

def write(directory, *_):
    if how == "disk" and directory.name.endswith("-6"):
        raise OSError(errno.ENOSPC, "No space left on device", str(directory))

def add(log, step, *_):
    if how == "signal" and step == 4:
        os.kill(os.getpid(), signal.SIGTERM)

how, who = sys.argv.pop(1), sys.argv.pop(1)
if os.environ["JAX_PROCESS_ID"] == who:
    change(feed.HostReads, "__getitem__", read)
    change(saving, "write_checksums", write)
    change(step_log.StepLog, "add", add)
sys.exit(run_command(main))
"""
KEYS = """
base_emb_dim=16 base_num_query_heads=2 base_num_kv_heads=2 base_mlp_dim=16 head_dim=8 base_num_decoder_layers=1
max_target_length=16 per_device_batch_size=1 steps=60 warmup_steps=1 eval_interval=-1 checkpoint_period=3 log_period=1
optimizer=sgd log_to= run_name=run
"""


@pytest.mark.parametrize(
    ("how", "who", "code", "said"),
    [
        ("data", 1, 2, "documents.jsonl: row 13 is damaged."),
        ("disk", 0, 2, "unfinished-6 cannot be written: No space left on device."),
        ("signal", 1, 75, ""),
    ],
)
def test_both_end_with_one_code_and_the_other_says_who_and_why(
    how, who, code, said, tmp_path
):
    lines = [{"text": "to be " * (1 + n % 9)} for n in range(400)]
    text = write_lines(tmp_path / "documents.jsonl", lines)
    keys = [
        *KEYS.split(),
        f"dataset_path={text}",
        f"base_output_directory={tmp_path}",
    ]
    words = [*quick_python(), "-c", PROGRAM, how, str(who), *keys]
    ended = run_launched(words, "--grace", "60", processes=2, devices=1)
    assert ended.returncode == code, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if "error:" in line]
    checkpoints = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    if how == "signal":
        assert not errors
        assert "stopped by another host after step" in ended.stdout
        assert max(map(int, checkpoints)) < 60
        return
    own, other = sorted(errors, key=lambda line: "failed with exit code" in line)
    assert own.startswith(f"[{who}] error: ")
    assert said in own
    reason = own.partition("error: ")[2]
    assert other.startswith(f"[{1 - who}] error: process {who} ")
    assert other.endswith(f"has failed with exit code 2: {reason}")
    assert "3" in checkpoints
    assert ("The checkpoint of step 3 is safe" in own) == (how == "disk")
