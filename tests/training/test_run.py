"""A run before its first step, and its files other than checkpoints, on a file system and in a bucket."""

import http.server
import json
import threading

import jax
import numpy as np
import optax
import pytest
import tokenizers

from maxtext_lite.batching import flops_per_example, make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.bucket import names_below
from maxtext_lite.operations.step_memory import MemoryHook
from maxtext_lite.training.checkpoint import TrainProgress
from maxtext_lite.training.opening import open_run
from maxtext_lite.training.optimizer import Progress
from maxtext_lite.training.run_files import (
    RunFiles,
    try_to_write,
    write_json,
)
from maxtext_lite.training.startup import log_startup
from maxtext_lite.training.state import Overrides
from tests.run_directories import write_lines
from tests.training.conftest import TINY

KEYS = """
dataset_type=synthetic steps=6 eval_interval=-1 learning_rate_schedule=linear learning_rate_final_fraction=0
run_name=here
"""
RUN = [*TINY, *KEYS.split()]
WITHOUT = "enable_checkpointing=false"


def run_of(tmp_path, *overrides, **more):
    return open_run(
        load_config(None, [*RUN, f"base_output_directory={tmp_path}", *overrides]),
        **more,
    )


def start(run, counts):
    log_startup(run, counts, print)
    MemoryHook().start(run, None, counts, print)


class Forbidding(http.server.BaseHTTPRequestHandler):
    """A bucket whose objects may be read and not written."""

    def do_POST(self):
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "no storage.objects.create"}}')

    def log_message(self, *_):
        pass


def test_a_bucket_that_checkpoints_may_not_be_written_to_is_refused_in_one_line(
    monkeypatch,
):
    with http.server.HTTPServer(("127.0.0.1", 0), Forbidding) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(
            "TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}"
        )
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
        with pytest.raises(OSError, match=r"no storage.objects.create") as refused:
            try_to_write("gs://forbidden/run", 0)
        server.shutdown()
    assert "\n" not in refused.value.strerror


def test_the_object_that_tries_a_bucket_is_removed(bucket):
    try_to_write(bucket / "run", 0)
    assert names_below(bucket) == []


@pytest.mark.fast
def test_a_run_is_planned_for_its_devices_and_memory_and_one_that_cannot_be_leaves_no_directory(
    tmp_path,
):
    run = run_of(tmp_path, device_memory_gb=2.5)
    assert run.plan == make_plan(
        run.config,
        num_devices=8,
        platform="cpu",
        num_examples=len(run.source),
        device_memory_gb=2.5,
    )
    assert not list(tmp_path.iterdir())


def test_the_work_of_a_step_is_that_of_its_documents_each_alone(tmp_path):
    """Two documents share a row; one row is left out; padding and other documents take no work."""
    texts = ["a" * 20, "b" * 9, "c" * 30, "d" * 25]
    write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    keys = ["dataset_type=text", f"dataset_path={tmp_path}/texts.jsonl"]
    keys += ["packing=best_fit", "max_target_length=32", "eval_fraction=0"]
    run = run_of(tmp_path, *keys, "global_batch_size=8", "per_device_batch_size=1")
    rows = [run.source[number] for number in range(len(run.source))]
    counts = [np.unique(row["segments"], return_counts=True) for row in rows]
    lengths = [
        [n for segment, n in zip(*each, strict=True) if segment] for each in counts
    ]
    assert max(map(len, lengths)) == 2
    of = [sum(flops_per_example(run.config, n) for n in row) for row in lengths]
    run.excluded = {1: 0}
    ids = np.arange(len(rows))
    assert run.flops_of(ids, len(ids), 0) == pytest.approx(sum(of) - of[1])
    assert run.flops_of(np.array([1]), 1, 0) == 0
    assert run.flops_of(ids, len(ids), 0) < run.plan.flops_per_example * (len(rows) - 1)


def test_the_learning_rate_and_adams_decays_scale_with_the_batch(tmp_path):
    """From 2 examples to 8: by the root of 4, and to 4 times as far from 1."""
    words = (
        "learning_rate_scaling=sqrt",
        "base_global_batch_size=2",
        "scale_adam_with_batch=true",
        "per_device_batch_size=1",
    )
    run = run_of(tmp_path, WITHOUT, *words)
    rate = run.schedule(TrainProgress())(np.int32(2), Progress.start())
    assert float(rate) == pytest.approx(0.02)
    params = jax.tree.map(
        lambda x: np.ones(x.shape, x.dtype), run.decoder.abstract_params
    )
    optimizer = run.parts.optimizer
    _, state = jax.jit(optimizer.finish)(
        params, jax.jit(optimizer.init)(params), params, 1.0
    )
    moments = state.inner_opt_state[1]
    mu, nu = (np.max(jax.tree.leaves(tree)[-1]) for tree in (moments.mu, moments.nu))
    # Of gradients that are all the same (clipped), the first moments are (1 - b) g and (1 - b) g^2.
    assert mu**2 / nu == pytest.approx((4 * 0.1) ** 2 / (4 * 0.05), rel=1e-4)


def test_a_run_says_and_stores_that_the_end_of_its_answers_ends_texts(tmp_path, capsys):
    words = {word: number for number, word in enumerate(["</s>", "<turn>", "hi", "?"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.add_special_tokens(["</s>", "<turn>"])
    made.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content + '<turn>' }}{% endfor %}"
    about = {"eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    turns = [{"role": role, "content": "hi"} for role in ("user", "assistant")]
    write_lines(tmp_path / "d.jsonl", [{"messages": turns}] * 8)
    keys = ["dataset_type=sft", f"dataset_path={tmp_path}/d.jsonl", "packing=false"]
    keys += ["eval_fraction=0", "tokenizer_type=huggingface"]
    keys += [f"tokenizer_path={tmp_path}/tokenizer.json", "per_device_batch_size=1"]
    run = run_of(tmp_path, *keys)
    with run.opened(print):
        run.restore_or_init()
        start(run, TrainProgress())
    assert "answers end with <turn>" in capsys.readouterr().out
    stated = json.loads((tmp_path / "here/hf/generation_config.json").read_text())
    assert stated["eos_token_id"] == [0, 1]


def test_what_is_said_of_the_whole_text_is_said_once(tmp_path, capsys):
    """Of a text whose last rows are held out, the padding and the cut documents are those of all rows."""
    write_lines(tmp_path / "d.jsonl", [{"text": "a" * 40}] * 40)
    keys = ["dataset_type=text", f"dataset_path={tmp_path}/d.jsonl", "packing=best_fit"]
    keys += ["max_target_length=16", "eval_fraction=0.2"]
    run = run_of(tmp_path, *keys)
    with run.opened(print):
        run.restore_or_init()
        start(run, TrainProgress())
    said = [line for line in capsys.readouterr().out.split("\n") if "cut: 40" in line]
    assert [line.partition(":")[0] for line in said] == ["training and held-out data"]


def test_what_cannot_be_made_or_written_at_the_start_is_refused(tmp_path):
    run = run_of(tmp_path, WITHOUT)
    (tmp_path / "here").write_text("a file")
    with pytest.raises(UserError, match="run_name=here"), run.opened(print):
        pytest.fail("it was opened")
    (tmp_path / "here").unlink()
    for name in ("config.yml", "plan.json", "environment.json", "memory.json"):
        (tmp_path / "here" / name).mkdir(parents=True)
        run = run_of(tmp_path, WITHOUT)
        with (
            pytest.raises(UserError, match=f"{name} cannot be written"),
            run.opened(print),
        ):
            start(run, TrainProgress())
        (tmp_path / "here" / name).rmdir()
    (tmp_path / "here" / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(UserError, match=r"start .* over"):  # a run with checkpoints
        run_of(tmp_path, WITHOUT)


def test_a_resume_with_another_batch_moves_the_end_of_the_schedule_of_an_own_optimizer_too(
    tmp_path, capsys
):
    """64 rows: after 4 steps of 8, two of 16 are left."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n' * 64)
    keys = "dataset_type=text packing=none eval_fraction=0 warmup_steps=0 num_epochs=1 steps=-1 log_level=detail"
    keys = [
        *keys.split(),
        "per_device_batch_size=-1",
        f"dataset_path={tmp_path}/rows.jsonl",
    ]
    rates, ends = [], []

    def factory(rate, axes):
        rates.append([float(rate(step)) / 0.01 for step in (3, 4, 5)])
        return optax.sgd(rate)

    before, after = TrainProgress(), TrainProgress(step=4, examples_seen=32)
    for counts, batch in ((before, 8), (after, 16)):
        run = run_of(
            tmp_path,
            *keys,
            f"global_batch_size={batch}",
            own=Overrides(optimizer=factory),
        )
        with run.opened(print):
            state, found = run.restore_or_init()
            assert (found.step, found.examples_seen) == (
                counts.step,
                counts.examples_seen,
            )
            start(run, found)
            ends.append(
                json.loads((tmp_path / "here" / "plan.json").read_text())["steps"]
            )
            run.save(state, after)
    assert ends == [8, 6]
    assert "already done                 4: 32 examples" in (
        out := capsys.readouterr().out
    )
    assert out.count("schedule ends with this run, at step 6 instead of 8") == 1
    np.testing.assert_allclose(
        [rates[0], rates[-1]], [[4 / 8, 3 / 8, 2 / 8], [2 / 6, 1 / 6, 0]], atol=1e-6
    )


# ---- Files -------------------------------------------------------------------------------------


def test_what_a_kill_left_half_written_is_removed_and_json_is_replaced_whole(
    tmp_path, monkeypatch
):
    write_json(tmp_path / "plan.json", {"a": 1})
    (tmp_path / "hf").mkdir()
    for name in ("plan.json.1-abcd.partial", "hf/tokenizer.json.1-abcd.partial"):
        (tmp_path / name).write_text("{")
    RunFiles(tmp_path).fetch()
    monkeypatch.setattr("os.fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_json(tmp_path / "plan.json", {"a": 2})
    left = {
        path.name: json.loads(path.read_text())
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert left == {"plan.json": {"a": 1}}
