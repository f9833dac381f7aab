"""docs/post_training.md: its lines are lines, its reward is one, its configs run."""

import contextlib
import json
import math
import re
import shlex

import pytest

from maxtext_lite.config import load_config
from maxtext_lite.data.tokenizer import load_tokenizer
from maxtext_lite.post_training.conversations import Renderer
from maxtext_lite.post_training.prompts import Prompt, open_prompts
from maxtext_lite.post_training.rewards import Completion, Rewards
from maxtext_lite.training import train
from tests.processes import RunFiles
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "post_training.md").read_text(encoding="utf-8")
BEFORE_RL, _, RL = PAGE.partition("\n## RL\n")
RL_FILE = "configs/post_train/rl.yml"


TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def test_every_line_of_the_tables_is_read(tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    template = f"chat_template={tmp_path / 't.jinja'}"
    config = load_config(None, ["dataset_type=sft", template])
    renderer = Renderer(config, load_tokenizer(config))
    lines = [
        json.loads(line)
        for line in re.findall(r"^\| `(\{.*?\})` \|", BEFORE_RL, re.MULTILINE)
    ]
    assert len(lines) == 8
    for line in lines:
        texts = (
            renderer.dpo_texts("here", line)
            if "chosen" in line
            else renderer.sft_texts("here", line)
        )
        for text in texts:
            (answer,) = text.answers
            answers = ("5", "05", "assistant:Hello.;", "assistant:No.;")
            assert text.text[slice(*answer)] in answers


def test_every_line_of_rl_is_the_prompt_and_the_answer_beside_it(tmp_path):
    (tmp_path / "t.jinja").write_text(
        TEMPLATE + "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    rows = re.findall(r"^\| `(\{.*?\})` \| (.*) \| (.*) \|$", RL, re.MULTILINE)
    assert len(rows) == 8
    (tmp_path / "d.jsonl").write_text("".join(f"{line}\n" for line, _, _ in rows))
    words = [
        f"dataset_path={tmp_path / 'd.jsonl'}",
        f"chat_template={tmp_path / 't.jinja'}",
        "eval_fraction=0.5",
    ]
    words += ["max_prefill_predict_length=30", "max_target_length=32"]
    parts = open_prompts(load_config(RL_FILE, words))
    found = [
        (prompt.text, prompt.fields["answer"])
        for part in parts
        if part
        for prompt in part
    ]
    assert found == [(text, answer) for _, text, answer in rows]


def test_the_config_of_dpo_runs_as_it_stands_and_logs_what_the_page_names(
    tmp_path, one_device
):
    words = ["steps=2", "warmup_steps=0", "base_num_decoder_layers=1"]
    words += ["base_emb_dim=64", "base_mlp_dim=128"]
    words += ["eval_interval=2", "eval_steps=1", f"base_output_directory={tmp_path}"]
    train(load_config("configs/post_train/dpo.yml", words))
    run = RunFiles(tmp_path / "dpo")
    first, last = run.steps
    assert last["loss"] < first["loss"] == pytest.approx(math.log(2), rel=1e-5)
    metrics = BEFORE_RL.partition("**Metrics**")[2]
    named = set(re.findall(r"`((?:eval_|reward_|pairs)\w*)`", metrics))
    assert {"pairs", "reward_margin", "eval_pairs"} <= named
    assert named <= {*first, *run.evaluations[0]}


def test_the_variants_and_the_template_of_the_page_are_configs():
    variants = re.findall(
        r"^\| (?:DAPO|Dr\. GRPO|GSPO).* \| `(.*)` \|$", RL, re.MULTILINE
    )
    assert len(variants) == 4
    for words in variants:
        load_config(RL_FILE, shlex.split(words))
    (word,) = re.findall(r"^`(prompt_template=.*)`\.$", RL, re.MULTILINE)
    assert (
        load_config(RL_FILE, shlex.split(word)).prompt_template
        == "Question: {prompt}\nAnswer:"
    )


def test_the_function_of_the_page_rewards_what_it_says(tmp_path, monkeypatch):
    ((name, code),) = re.findall(
        r"<!-- file: (.*) -->\n```python\n(.*?)```", RL, re.DOTALL
    )
    (tmp_path / name).write_text(code)
    command = (
        RL.partition("### Rewards")[2]
        .partition("maxtext_lite.train_rl")[2]
        .partition("```")[0]
    )
    words = re.findall(r"reward_\w+=[\w.,:]*\S", command)
    assert len(words) == 2
    asked = Prompt(0, "2+3=", (), {"answer": "5", "level": 1})
    monkeypatch.chdir(tmp_path)
    texts = ["5", "it's 5", "6"]
    rewards = Rewards(load_config(RL_FILE, words), ["answer", "level"])
    with contextlib.closing(rewards):
        scores = rewards.of([asked] * 3, [Completion(text, text, ()) for text in texts])
    assert scores.total.tolist() == pytest.approx([1.5, 0.5 / 6, 0])
    assert scores.errors == 0
