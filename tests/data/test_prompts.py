"""Prompts from lines in every form, by hand; generated problems; prompts held out, dropped and refused."""

import re

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.sources import open_sources
from maxtext_lite.post_training.prompts import open_prompts
from tests.run_directories import write_lines

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be"}
HO, HA = {"role": "assistant", "content": "Ho"}, {"role": "assistant", "content": "Ha"}
HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}
GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 1,024"


def opened(*overrides):
    return open_prompts(load_config("configs/post_train/rl.yml", overrides))


@pytest.fixture
def lines(tmp_path):
    """Writes lines; returns the overrides that open all of them, with a chat template."""
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    keys = f"chat_template={tmp_path / 't.jinja'} eval_fraction=0 eval_interval=-1"
    keys += " max_prefill_predict_length=100 max_target_length=200"

    def write(*values, name="d.jsonl"):
        return [f"dataset_path={write_lines(tmp_path / name, values)}", *keys.split()]

    return write


def decoded(prompt):
    return bytes(token for token in prompt.token_ids).decode()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("line", "text", "added"),
    [
        ({"prompt": "2+3=", "answer": "5", "level": 3}, "2+3=", {}),
        ({"prompt": "2+3=", "answer": 1e-05}, "2+3=", {"answer": "0.00001"}),
        ({"prompt": "2+3=", "completion": "5"}, "2+3=", {"answer": "5"}),
        ({"prompt": "é", "completion": "5", "answer": "6"}, "é", {}),
        (
            {"question": "q", "answer": GSM8K},
            "q",
            {"answer": "1,024", "solution": GSM8K},
        ),
        (
            {"messages": [SYSTEM, USER, HO, USER], "answer": "x"},
            "s:Be;u:Hi;a:Ho;u:Hi;a:",
            {},
        ),
        ({"messages": [USER, HO], "answer": "x"}, "u:Hi;a:", {}),
        ({"prompt": [USER], "completion": [HO, USER, HA]}, "u:Hi;a:", {"answer": "Ho"}),
        ({"prompt": [HUMAN], "answer": "x"}, "u:Hi;a:", {}),
        ({"conversations": [HUMAN, GPT]}, "u:Hi;a:", {"answer": "Ho"}),
        (
            {
                "system": "Be",
                "conversations": [HUMAN, GPT, HUMAN],
                "answer": "x",
                "prompt": None,
            },
            "s:Be;u:Hi;a:Ho;u:Hi;a:",
            {},
        ),
        (
            {"instruction": "Greet.", "input": "Hi", "output": "Ho"},
            "u:Greet.\nHi;a:",
            {"answer": "Ho"},
        ),
        (
            {"instruction": "Hi", "system": "Be", "answer": 5},
            "s:Be;u:Hi;a:",
            {"answer": "5"},
        ),
    ],
)
def test_a_line_is_a_prompt(line, text, added, lines):
    (prompt,), held_out = opened(*lines(line))
    assert held_out is None
    assert (prompt.number, prompt.text, dict(prompt.fields)) == (0, text, line | added)
    assert decoded(prompt) == text


def test_prompt_templates_surround_the_users_text(lines):
    keys = lines(
        {"prompt": "2+3=", "answer": "5"},
        {"messages": [SYSTEM, USER, HO, USER], "answer": "x"},
        {"conversations": [HUMAN], "answer": "x"},
    )
    keys.append('prompt_template="Sum:\\n{prompt}!"')
    last = "s:Be;u:Hi;a:Ho;u:Sum:\nHi!;a:"
    of_sharegpt = "u:Sum:\nHi!;a:"
    rendered = ["Sum:\n2+3=!", last, of_sharegpt]
    assert [prompt.text for prompt in opened(*keys)[0]] == rendered
    both = opened(*keys, "apply_chat_template=true")[0]
    assert [prompt.text for prompt in both] == ["u:Sum:\n2+3=!;a:", last, of_sharegpt]
    assert [decoded(prompt) for prompt in both] == [prompt.text for prompt in both]


def test_the_same_lines_are_held_out_as_in_sft():
    """The shipped sums: with the same eval_fraction, SFT and RL train on the same lines."""
    sft = load_config(
        "configs/post_train/sft.yml", ["eval_fraction=0.29", "packing=false"]
    )
    answers = open_sources(sft)
    for prompts, examples, count in zip(
        opened("eval_fraction=0.29"), answers, (6390, 2610), strict=True
    ):
        assert len(prompts) == len(examples) == count
        for number in (0, 1, count - 1):
            row = examples[number]
            text = bytes(
                int(token) for token in row["tokens"][row["segments"] > 0]
            ).decode()
            assert text == prompts[number].text + prompts[number].fields["completion"]


def test_long_prompts_are_dropped_and_counted_or_refused(lines):
    """By lines: the one line in four that is held out is the last, though the first of all is dropped."""
    keys = lines(
        *(
            {"prompt": text, "answer": "5"}
            for text in ["x" * 11, "y" * 10, "z" * 60, "last"]
        )
    )
    keys = [keys[0], "max_prefill_predict_length=10", "eval_fraction=0.25"]
    source, held_out = opened(*keys)
    assert [(prompt.number, prompt.text) for prompt in source] == [(0, "y" * 10)]
    assert source.notes[0].startswith("2 of 3 lines")
    assert ([prompt.text for prompt in held_out], held_out.notes) == (["last"], ())
    with pytest.raises(UserError, match="max_prefill_predict_length=10") as refused:
        opened(*keys, "long_examples=refuse")
    nearest = re.findall(r"max_\w+=\d+", str(refused.value))[1:]
    assert nearest == ["max_prefill_predict_length=60", "max_target_length=74"]
    assert len(opened(*keys, "long_examples=refuse", *nearest)[0]) == 3
    with pytest.raises(UserError, match="dataset_path="):
        opened(keys[0], "max_prefill_predict_length=3", "eval_fraction=0.25")


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": [USER, HO], "answer": "x"},  # the last turn is not the user's
        {"prompt": "x"},  # no answer, which reward_functions=exact_answer compares
        {
            "prompt": "x",
            "answer": "x",
            "completions": 1,
        },  # an argument of every reward function
        {
            "prompt": [USER],
            "answer": "x",
            "tools": [{"name": "add"}],
        },  # would not be rendered
    ],
)
def test_an_invalid_prompt_is_refused_with_its_line(line, lines):
    with pytest.raises(UserError, match=r"d\.jsonl:2: "):
        opened(*lines({"prompt": "a", "answer": "1"}, line))


def test_every_problem_occurs_once():
    keys = [
        "dataset_type=arithmetic",
        "arithmetic_operations=*+-",
        "arithmetic_largest=12",
        "eval_fraction=0.29",
    ]
    source, held_out = opened(*keys)
    found = {
        prompt.text: prompt.fields["answer"]
        for part in (source, held_out)
        for prompt in part
    }
    calculated = {
        f"{a}{op}{b}=": str(eval(f"{a}{op}{b}"))
        for op in "*+-"
        for a in range(13)
        for b in range(13)
    }
    assert found == calculated
    assert (len(source), len(held_out)) == (507 - 147, 147)  # floor(0.29 x 507)
    assert all(decoded(prompt) == prompt.text for prompt in held_out)
    assert len({re.split("[*+-]", prompt.text)[0] for prompt in held_out}) == 13
