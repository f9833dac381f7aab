"""docs/post_training.md: its lines are lines, its plan is the plan, its formula is the loss, its configs run."""

import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite import plan
from maxtext_lite.config import load_config
from maxtext_lite.data.conversations import Writer
from maxtext_lite.data.tokenizer import load_tokenizer
from maxtext_lite.training import train
from maxtext_lite.training.preference import pair_losses
from tests.source_tree import REPOSITORY

PAGE = (REPOSITORY / "docs" / "post_training.md").read_text(encoding="utf-8")


def test_every_line_of_the_tables_is_read(tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    config = load_config(None, ["dataset_type=sft", f"chat_template={tmp_path / 't.jinja'}"])
    writer = Writer(config, load_tokenizer(config), begins_as_elsewhere=False)
    lines = [json.loads(line) for line in re.findall(r"^\| `(\{.*?\})` \|", PAGE, re.MULTILINE)]
    assert len(lines) == 6
    for line in lines:
        texts = writer.compared("here", line) if "chosen" in line else (writer.answered("here", line),)
        for text in texts:
            (answer,) = text.answers
            assert text.text[slice(*answer)] in ("5", "05", "assistant:Hello.;", "assistant:No.;")


def test_the_plan_prints_what_the_page_says(capsys):
    ((command, output),) = re.findall(
        r"```bash\npython -m maxtext_lite.plan (.*?)\n```\n<!-- output.*?```text\n(.*?)```", PAGE, re.DOTALL
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
            named = set(re.findall(r"`((?:eval_|reward_|pairs)\w*)`", PAGE.partition("**Metrics**")[2]))
            assert named <= {*first, *evaluation}
            assert {"pairs", "reward_margin", "eval_pairs"} <= named
