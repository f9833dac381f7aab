"""docs/post_training.md: its lines are lines, its plan is the plan, its formula is the loss, its configs run."""

import json
import math
import re
import shlex
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite import plan
from maxtext_lite.config import RLRunConfig, load_config
from maxtext_lite.config.rl_rules import SHIPPED_REWARDS
from maxtext_lite.data.conversations import Renderer
from maxtext_lite.data.prompts import Prompt, open_prompts
from maxtext_lite.data.tokenizer import load_tokenizer
from maxtext_lite.rl.reward_functions import number_in
from maxtext_lite.rl.rewards import Rewards
from maxtext_lite.rl.rollout_steps import train_rl
from maxtext_lite.training import train
from maxtext_lite.training.preference import pair_losses
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "post_training.md").read_text(encoding="utf-8")
BEFORE_RL, _, RL = PAGE.partition("\n## RL\n")
DPO_METRICS = BEFORE_RL.partition("**Metrics**")[2]
RECORDED = RL.partition("### What is recorded")[2].partition("\n### ")[0]
REWARDS = RL.partition("### Rewards")[2].partition("\n### ")[0]


def test_every_line_of_the_tables_is_read(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    config = load_config(None, ["dataset_type=sft", f"chat_template={tmp_path / 't.jinja'}"])
    renderer = Renderer(config, load_tokenizer(config), begins_as_elsewhere=False)
    before_rl = PAGE.partition("\n## RL\n")[0]
    lines = [json.loads(line) for line in re.findall(r"^\| `(\{.*?\})` \|", before_rl, re.MULTILINE)]
    assert len(lines) == 6
    for line in lines:
        texts = renderer.dpo_texts("here", line) if "chosen" in line else (renderer.sft_text("here", line),)
        for text in texts:
            (answer,) = text.answers
            assert text.text[slice(*answer)] in ("5", "05", "assistant:Hello.;", "assistant:No.;")


@pytest.mark.fast
def test_the_plan_prints_what_the_page_says(capsys):
    ((command, output),) = re.findall(
        r"```bash\npython -m maxtext_lite.plan ([^\n]*)\n```\n<!-- output.*?```text\n(.*?)```", PAGE, re.DOTALL
    )
    assert plan.main(command.split()) == 0
    assert capsys.readouterr().out.startswith(output)


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_the_formula_is_the_loss(smoothing):
    (formula,) = re.findall(r"^loss = (.*)$", PAGE, re.MULTILINE)
    for margin in (-3.0, 0.0, 0.7):
        written = (
            formula.replace("log sigmoid(", "logsigmoid(").replace("e logs", "e * logs").replace(") logs", ") * logs")
        )
        names = {"e": smoothing, "b": 0.5, "m": margin, "logsigmoid": lambda x: -math.log1p(math.exp(-x))}
        value = eval(re.sub(r"\bb m\b", "b * m", written), names)
        found = pair_losses(jnp.float32(margin), beta=0.5, label_smoothing=smoothing)
        assert float(found) == pytest.approx(value, rel=1e-6)


SMALL = ["steps=3", "warmup_steps=0", "base_num_decoder_layers=1", "eval_interval=3", "enable_checkpointing=false"]


def test_the_configs_run_as_they_stand_one_after_the_other(tmp_path):
    for name, more in (("sft", []), ("dpo", [f"load_parameters_path={tmp_path / 'sft'}"])):
        keys = [*SMALL, f"base_output_directory={tmp_path}", *more]
        if name == "sft":
            keys.remove("enable_checkpointing=false")
        result = train(load_config(f"configs/post_train/{name}.yml", keys))
        lines = [json.loads(line) for line in (result.run_directory / "metrics.jsonl").read_text().splitlines()]
        assert result.run_directory.name == name
        first, last, evaluation = lines[0], lines[2], lines[3]
        assert last["loss"] < first["loss"]
        if name == "dpo":
            assert first["loss"] == pytest.approx(np.log(2), rel=1e-5)
            named = set(re.findall(r"`((?:eval_|reward_|pairs)\w*)`", DPO_METRICS))
            assert named <= {*first, *evaluation}
            assert {"pairs", "reward_margin", "eval_pairs"} <= named


def test_what_a_run_of_rl_records_is_what_the_page_names(tmp_path):
    keys = [*SMALL, f"base_output_directory={tmp_path}", "steps=2", "batch_size=2", "num_generations=2", "log_period=1",
            "max_prefill_predict_length=8", "max_target_length=12", "num_iterations=2", "grpo_beta=0.1",
            "rollout_correction=truncated",
            "eval_num_generations=4", "eval_sampling_temperature=1.0", "eval_steps=1", "eval_interval=2"]  # fmt: skip
    config = load_config("configs/post_train/rl.yml", keys)
    assert isinstance(config, RLRunConfig)
    directory = train_rl(config).run_directory
    files = re.findall(r"^\| `(\w+\.jsonl)` \|", RECORDED, re.MULTILINE)
    lines = {name: [json.loads(line) for line in (directory / name).read_text().splitlines()] for name in files}
    assert set(files) == {path.name for path in directory.glob("*.jsonl")}
    recorded = {key for line in lines["metrics.jsonl"] for key in line}
    rows = "".join(row.partition("|")[0] for row in re.findall(r"^\| (`.*)", RECORDED, re.MULTILINE))
    named = set(re.findall(r"`([\w/]+)`", rows.replace("NAME", "exact_answer")))
    assert {"reward", "rewards/exact_answer", "kl", "responses_hash"} <= named <= recorded
    evaluated = {name.replace("_k", "_2") for name in re.findall(r"`(eval_(?:accuracy|reward|pass)\w*)`", RECORDED)}
    assert {"eval_accuracy", "eval_pass_at_2"} <= evaluated <= recorded


def test_the_variants_of_the_page_are_configs():
    variants = [
        shlex.split(words) for words in re.findall(r"^\| (?:DAPO|Dr\. GRPO|GSPO).* \| `(.*)` \|$", RL, re.MULTILINE)
    ]
    assert len(variants) == 3
    for words in variants:
        load_config("configs/post_train/rl.yml", words)


def test_every_line_of_rl_is_the_prompt_and_the_answer_beside_it(tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    rows = re.findall(r"^\| `(\{.*?\})` \| (.*) \| (.*) \|$", RL, re.MULTILINE)
    assert len(rows) == 6
    (tmp_path / "d.jsonl").write_text("".join(f"{line}\n" for line, _, _ in rows))
    keys = [f"dataset_path={tmp_path / 'd.jsonl'}", f"chat_template={tmp_path / 't.jinja'}", "eval_fraction=0.5"]
    parts = open_prompts(
        load_config("configs/post_train/rl.yml", [*keys, "max_prefill_predict_length=30", "max_target_length=32"])
    )
    found = [(prompt.text, prompt.fields["answer"]) for part in parts if part for prompt in part]
    assert found == [(text, answer) for _, text, answer in rows]


def test_the_template_on_the_command_line_is_read():
    (word,) = re.findall(r"^`(prompt_template=.*)`\.$", RL, re.MULTILINE)
    (override,) = shlex.split(word)
    assert load_config("configs/post_train/rl.yml", [override]).prompt_template == "Question: {prompt}\nAnswer:"


def test_the_plan_of_made_problems_is_planned(capsys):
    (command,) = re.findall(r"```bash\npython -m maxtext_lite.plan (.*)\n```", RL)
    assert plan.main(command.split()) == 0
    assert "pairs_per_batch" in capsys.readouterr().out


def test_the_function_of_the_page_rewards_what_it_says(tmp_path, monkeypatch):
    ((name, code),) = re.findall(r"<!-- file: (.*) -->\n```python\n(.*?)```", RL, re.DOTALL)
    (tmp_path / name).write_text(code)
    keys = re.findall(r"reward_\w+=[\w.,:]*\S", REWARDS.partition("maxtext_lite.train_rl")[2].partition("```")[0])
    assert len(keys) == 2
    config = load_config("configs/post_train/rl.yml", keys)
    asked = Prompt(0, "2+3=", (), {"answer": "5", "level": 1})
    monkeypatch.chdir(tmp_path)
    with Rewards(config) as rewards:
        scores = rewards.of([asked] * 3, ["5", "it's 5", "6"])
    assert scores.total.tolist() == pytest.approx([1.5, 0.5 / 6, 0])
    assert scores.errors == 0


def test_the_functions_of_the_page_are_those_that_ship():
    assert tuple(re.findall(r"^\| `(\w+)` \| ", REWARDS, re.MULTILINE)) == SHIPPED_REWARDS
    for text, number in (
        (r"$1,234.50", Fraction("1234.5")),
        ("-3/4", Fraction(-3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
    ):
        assert f"`{text}`" in RL
        assert number_in(text) == number
