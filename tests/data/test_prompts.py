"""Prompts from lines in every form, by hand; generated problems; prompts held out, dropped and refused."""

import gzip
import json
import re

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.answers import open_answers
from maxtext_lite.data.prompts import num_problems, open_prompts
from maxtext_lite.data.tokenizer import ByteTokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 1,024"


def opened(*overrides, **how):
    return open_prompts(load_config("configs/post_train/rl.yml", overrides), **how)


@pytest.fixture
def file(tmp_path):
    def write(*lines, name="d.jsonl"):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return tmp_path / name

    return write


@pytest.fixture
def turns(tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    return f"chat_template={tmp_path / 't.jinja'}"


def decoded(prompt):
    return bytes(token for token in prompt.token_ids).decode()


ALL = "eval_fraction=0"
NEVER = "eval_interval=-1"
WIDE = ("max_prefill_predict_length=100", "max_target_length=200")

USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be"}
HO, HA = {"role": "assistant", "content": "Ho"}, {"role": "assistant", "content": "Ha"}


@pytest.mark.parametrize(("line", "text", "fields"), [
    ({"prompt": "2+3=", "answer": "5", "level": 3}, "2+3=", {"prompt": "2+3=", "answer": "5", "level": 3}),
    ({"prompt": "2+3=", "answer": 5}, "2+3=", {"prompt": "2+3=", "answer": "5"}),
    ({"prompt": "2+3=", "answer": 0.5}, "2+3=", {"prompt": "2+3=", "answer": "0.5"}),
    ({"prompt": "2+3=", "answer": 1e-05}, "2+3=", {"prompt": "2+3=", "answer": "0.00001"}),
    ({"prompt": "2+3=", "answer": 1e16}, "2+3=", {"prompt": "2+3=", "answer": "10000000000000000"}),
    ({"prompt": "2+3=", "completion": "5"}, "2+3=", {"prompt": "2+3=", "completion": "5", "answer": "5"}),
    ({"prompt": "é", "completion": "5", "answer": "6"}, "é", {"prompt": "é", "completion": "5", "answer": "6"}),
    ({"prompt": "x", "answer": "a #### 5"}, "x", {"prompt": "x", "answer": "a #### 5"}),
    ({"question": "q", "answer": GSM8K}, "q", {"question": "q", "answer": "1,024", "solution": GSM8K}),
    ({"question": "q", "answer": "7"}, "q", {"question": "q", "answer": "7"}),
    ({"messages": [USER], "answer": "x"}, "u:Hi;a:", {"messages": [USER], "answer": "x"}),
    ({"messages": [SYSTEM, USER, HO, USER], "answer": "x"}, "s:Be;u:Hi;a:Ho;u:Hi;a:",
     {"messages": [SYSTEM, USER, HO, USER], "answer": "x"}),
    ({"messages": [USER, HO]}, "u:Hi;a:", {"messages": [USER, HO], "answer": "Ho"}),
    ({"messages": [USER, HO], "answer": "x"}, "u:Hi;a:", {"messages": [USER, HO], "answer": "x"}),
    ({"prompt": [USER], "completion": [HO, USER, HA]}, "u:Hi;a:",
     {"prompt": [USER], "completion": [HO, USER, HA], "answer": "Ho"}),
])  # fmt: skip
def test_a_line_is_a_prompt(line, text, fields, file, turns):
    source, held_out = opened(f"dataset_path={file(line)}", turns, ALL, NEVER, *WIDE)
    (prompt,) = source
    assert held_out is None
    assert (prompt.number, prompt.text, dict(prompt.fields)) == (0, text, fields)
    assert decoded(prompt) == text
    assert (len(source), source.notes) == (1, ())


def test_prompt_templates_surround_the_users_text(file, turns):
    path = file({"prompt": "2+3=", "answer": "5"}, {"messages": [SYSTEM, USER, HO, USER], "answer": "x"})
    keys = (f"dataset_path={path}", 'prompt_template="Sum:\\n{prompt}!"', turns, ALL, NEVER, *WIDE)
    last = "s:Be;u:Hi;a:Ho;u:Sum:\nHi!;a:"
    assert [prompt.text for prompt in opened(*keys)[0]] == ["Sum:\n2+3=!", last]
    both = opened(*keys, "apply_chat_template=true")[0]
    assert [prompt.text for prompt in both] == ["u:Sum:\n2+3=!;a:", last]
    assert [decoded(prompt) for prompt in both] == [prompt.text for prompt in both]


def test_an_empty_prompt_comes_after_the_end_of_another_text(file):
    (prompt,) = opened(f"dataset_path={file({'prompt': '', 'answer': '5'})}", ALL, NEVER)[0]
    assert (prompt.text, prompt.token_ids) == ("", (ByteTokenizer.end_of_text_id,))


def test_the_same_lines_are_held_out_as_in_sft():
    """The shipped sums: with the same eval_fraction, SFT and RL train on the same lines."""
    source, held_out = opened("eval_fraction=0.29")
    sft = load_config("configs/post_train/sft.yml", ["eval_fraction=0.29", "packing=false"])
    answers = open_answers(sft, ByteTokenizer(), begins_as_elsewhere=False)
    for prompts, examples in zip((source, held_out), answers, strict=True):
        assert len(prompts) == len(examples)
        for number in (0, 1, len(prompts) - 1):
            prompt, row = prompts[number], examples[number]
            assert prompt.number == number
            text = bytes(int(token) for token in row["tokens"][row["segments"] > 0]).decode()
            assert text == prompt.text + prompt.fields["completion"]
    assert held_out is not None
    assert len(held_out) == 9000 * 29 // 100


def test_long_prompts_are_dropped_and_counted_or_refused(file):
    """By lines: the one line in four that is held out is the last, though the first of all is dropped."""
    texts = ["x" * 11, "y" * 10, "z" * 60, "last"]
    path = file(*({"prompt": text, "answer": "5"} for text in texts))
    keys = (f"dataset_path={path}", "max_prefill_predict_length=10", "eval_fraction=0.25")
    source, held_out = opened(*keys)
    assert [prompt.text for prompt in source] == ["y" * 10]
    assert source[0].number == 0
    assert source.notes == (
        f"2 of 3 lines have prompts longer than max_prefill_predict_length=10 and were dropped, as that of {path}:1 "
        "with 11 tokens.",
    )
    assert ([prompt.text for prompt in held_out], held_out.notes) == (["last"], ())
    with pytest.raises(UserError) as refused:
        opened(*keys, "long_examples=refuse")
    message = (
        f"{path}:1: the prompt has 11 tokens, more than max_prefill_predict_length=10 (2 of 3 lines have more than "
        "that). Nearest that work: max_prefill_predict_length=60 max_target_length=74 or long_examples=drop."
    )
    assert str(refused.value) == message
    assert len(opened(*keys, "long_examples=refuse", *re.findall(r"max_\w+=\d+", message)[1:])[0]) == 3
    with pytest.raises(UserError, match=r"dataset_path='.*' has no prompt\. 3 of 3 lines have prompts longer than"):
        opened(keys[0], "max_prefill_predict_length=3", "eval_fraction=0.25")


def test_held_out_lines_may_have_a_file_of_their_own(file):
    one = file({"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, name="one.jsonl.gz")
    two = file({"prompt": "c", "answer": "3"}, name="two.jsonl")
    for kind, count in (("prompts", 2), ("arithmetic", 2 * 100**2)):
        source, held_out = opened(f"dataset_type={kind}", f"dataset_path={one}", f"eval_dataset_path={two}")
        assert len(source) == count
        assert [prompt.text for prompt in held_out] == ["c"]


@pytest.mark.parametrize(("line", "message"), [
    ({"text": "x"}, 'not a JSON object with "prompt", "question" or "messages", a text or a list of turns.'),
    ({"prompt": 5}, 'not a JSON object with "prompt", "question" or "messages", a text or a list of turns.'),
    ({"messages": "x"}, 'not a JSON object with "prompt", "question" or "messages", a text or a list of turns.'),
    ({"messages": []}, '"messages" is not a list of turns'),
    ({"messages": [HO]}, '"messages" is not a list of turns'),
    ({"prompt": [USER, HO], "answer": "x"}, "the last turn of \"prompt\" is the assistant's, not the user's."),
    ({"prompt": "x"}, 'there is no text or number as "answer", which reward_functions=exact_answer compares'),
    ({"prompt": "x", "answer": ["x"]}, 'there is no text or number as "answer", which'),
    ({"prompt": "x", "answer": True}, 'there is no text or number as "answer", which'),
    ({"prompt": "x", "answer": "x", "completions": 1},
     '"completions" is the name of an argument of every reward function. Rename that key of the line.'),
    ({"prompt": [USER], "answer": "x", "tools": [{"name": "add"}]},
     '"tools" would not be rendered: templates get turns alone. Rename that key of the line if it is for reward'),
    ({"prompt": "x", "answer": "x", "documents": ["a"]}, '"documents" would not be rendered'),
])  # fmt: skip
def test_an_invalid_prompt_is_refused_with_its_line(line, message, file, turns):
    path = file({"prompt": "a", "answer": "1"}, line)
    with pytest.raises(UserError) as refused:
        opened(f"dataset_path={path}", turns, ALL, NEVER)
    assert str(refused.value).startswith(f"{path}:2: {message}")


def test_an_answer_is_needed_where_a_function_compares_with_it(file):
    path = file({"prompt": "a"}, {"prompt": "b", "answer": {"any": 1}})
    source, _ = opened(f"dataset_path={path}", ALL, NEVER, "reward_functions=format,m:f", "reward_format=.*")
    assert [dict(prompt.fields) for prompt in source] == [{"prompt": "a"}, {"prompt": "b", "answer": {"any": 1}}]


def test_files_without_a_prompt_are_refused(file, tmp_path):
    with pytest.raises(UserError, match=r"dataset_path='.*' has no line and thus no prompt"):
        opened(f"dataset_path={file()}")
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(UserError, match=r"prompts are read from \.jsonl files, not '.*x\.txt'"):
        opened(f"dataset_path={tmp_path / 'x.txt'}")
    with pytest.raises(UserError, match=r"eval_fraction=0\.05 holds out 1 of 1 lines and leaves none to train on"):
        opened(f"dataset_path={file({'prompt': 'a', 'answer': '1'})}")
    with pytest.raises(UserError, match=r"vocab_size=200 is smaller than the tokenizer's 257 tokens"):
        opened(vocab_size=200)
    with pytest.raises(IndexError, match=r"prompt -1 of "):
        opened()[0][-1]


def test_fingerprints_follow_the_prompts(file, turns):
    lines = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    path, same = file(*lines), file(*lines, name="same.jsonl")
    keys = (ALL, NEVER, turns)

    def print_of(path, *more):
        return opened(f"dataset_path={path}", *keys, *more)[0].fingerprint

    others = [
        print_of(path, "prompt_template=Q{prompt}"),
        print_of(path, "apply_chat_template=true"),
        print_of(path, "max_prefill_predict_length=15"),
        print_of(file(*reversed(lines), name="reversed.jsonl")),
        print_of(file(lines[0], lines[1] | {"answer": "3"}, name="other.jsonl")),
        print_of(file(lines[0], lines[1] | {"level": 3}, name="more.jsonl")),
        print_of(path, "dataset_type=arithmetic"),
        print_of(path, "dataset_type=arithmetic", "arithmetic_operations=-+"),
        print_of(path, "dataset_type=arithmetic", "arithmetic_largest=98"),
        print_of(path, "dataset_type=arithmetic", "apply_chat_template=true"),
    ]
    assert print_of(path) == print_of(same)
    assert print_of(path, "data_shuffle_seed=5") == print_of(same)
    assert len({print_of(path), *others}) == len(others) + 1


def test_every_problem_occurs_once():
    source, held_out = opened("dataset_type=arithmetic", "arithmetic_operations=*+-", "arithmetic_largest=12",
                              "eval_fraction=0.29")  # fmt: skip
    found = {prompt.text: prompt.fields["answer"] for part in (source, held_out) for prompt in part}
    calculated = {f"{a}{op}{b}=": str(eval(f"{a}{op}{b}")) for op in "*+-" for a in range(13) for b in range(13)}
    assert found == calculated
    assert (len(source), len(held_out)) == (507 - 147, 147)  # floor(0.29 x 507)
    assert num_problems(load_config("configs/post_train/rl.yml", ["dataset_type=arithmetic"])) == 20_000
    assert [prompt.number for prompt in held_out] == list(range(147))
    for prompt in held_out:
        assert decoded(prompt) == prompt.text
    # Spread: each operation has about its third, and each first operand some.
    assert {sum(op in prompt.text for prompt in held_out) // 20 for op in "*+-"} <= {1, 2, 3}
    assert len({re.split("[*+-]", prompt.text)[0] for prompt in held_out}) == 13
    with pytest.raises(IndexError, match="prompt 147 of 147"):
        held_out[147]


def test_held_out_problems_do_not_depend_on_the_shuffle():
    texts = [
        [prompt.text for prompt in opened("dataset_type=arithmetic", "arithmetic_largest=3", *keys)[1]]
        for keys in ((), ("data_shuffle_seed=7",), ("data_shuffle_seed=-1",))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_huge_numbers_of_problems_are_generated_on_demand():
    keys = ("dataset_type=arithmetic", "arithmetic_largest=1000000", "arithmetic_operations=+-*", "eval_steps=1")
    source, held_out = opened(*keys, "max_prefill_predict_length=16")
    assert len(source) + len(held_out) == 3 * 1_000_001**2
    some = [part[number] for part in (source, held_out) for number in range(0, len(part), len(part) // 50)]
    assert len({prompt.text for prompt in some}) == len(some)
    for prompt in some:
        assert eval(prompt.text[:-1]) == int(prompt.fields["answer"])


def test_a_problem_that_is_too_long_is_refused_at_once(turns):
    keys = ("dataset_type=arithmetic", "arithmetic_largest=1000000", "eval_steps=1")
    with pytest.raises(UserError) as refused:
        opened(*keys, "max_prefill_predict_length=15")
    assert str(refused.value) == (
        "dataset_type=arithmetic: the prompt of 1000000+1000000= has 16 tokens, more than "
        "max_prefill_predict_length=15. Use a smaller arithmetic_largest or prompt_template. Nearest that works: "
        "max_prefill_predict_length=16."
    )
    assert opened(*keys, turns, "apply_chat_template=true", "max_prefill_predict_length=21")[0][0].text.endswith("=;a:")
    with pytest.raises(UserError, match=r"arithmetic problem 0\+0=: turns of a conversation need a chat template"):
        opened(*keys, "apply_chat_template=true")
