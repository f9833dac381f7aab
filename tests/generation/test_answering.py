"""Several texts are printed when all are done; a conversation includes its earlier turns."""

import io
import json
import math

import jax
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.generation.answering import generate
from maxtext_lite.generation.requests import GenerateConfig
from maxtext_lite.generation.sampler import load_on_mesh
from maxtext_lite.training import train
from tests.training.conftest import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    keys = ["steps=2", "eval_interval=-1", "per_device_batch_size=1", f"base_output_directory={directory}"]
    run = train(load_config(None, [*TINY, *keys])).run_directory
    return run, load_config(run / "config.yml")


def ask(run, capsys, *, as_json=False, config=None, **asked):
    generate(run[0], config or run[1], GenerateConfig(temperature=0, **asked), as_json=as_json)
    return capsys.readouterr()


def test_several_texts_are_printed_when_all_are_done_and_each_is_what_it_is_alone(run, capsys):
    together = ask(run, capsys, prompts=["To be", "or"], max_new_tokens=5)
    alone = [ask(run, capsys, prompt=prompt, max_new_tokens=5).out for prompt in ("To be", "or")]
    assert together.out == "".join(f"---- {number}\n{text}" for number, text in enumerate(alone))
    assert together.err.startswith("10 tokens in ")


def test_text_is_left_out_of_json_where_tokens_are_asked_for(run, capsys):
    of_text, of_ids = (
        json.loads(ask(run, capsys, as_json=True, max_new_tokens=3, **prompt).out)[0]
        for prompt in ({"prompt": "AB"}, {"prompt_ids": [[65, 66]]})
    )
    assert of_text.keys() - of_ids.keys() == {"text"}
    assert of_text["tokens"] == of_ids["tokens"]


def test_each_line_of_a_conversation_is_answered_after_all_before_it(run, capsys, monkeypatch, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = run[1].model_copy(update={"chat_template": "~/t.jinja"})
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    said = ask(run, capsys, config=config, chat=True, system="S", max_new_tokens=4, stop_token_ids=[]).out
    first = ask(run, capsys, prompt="s:S;u:one;", max_new_tokens=4, stop_token_ids=[]).out
    answer = first.removeprefix("s:S;u:one;").removesuffix("\n")
    second = ask(run, capsys, prompt=f"s:S;u:one;a:{answer};u:two;", max_new_tokens=4, stop_token_ids=[]).out
    assert said == f"{answer}\n" + second.removeprefix(f"s:S;u:one;a:{answer};u:two;")


def test_as_many_tokens_are_added_as_the_learned_positions_allow(run, capsys, monkeypatch):
    """The last one is not fed back and needs no position."""
    monkeypatch.setattr("maxtext_lite.generation.answering.load_on_mesh", lambda *_: load_on_mesh(*run, {}))
    config = run[1].model_copy(update={"trainable_position_size": 20})

    def after(length, added):
        said = ask(run, capsys, as_json=True, config=config, prompt_ids=[[5] * length], max_new_tokens=added).out
        return len(json.loads(said)[0]["tokens"])

    for length, most in ((17, 4), (20, 1)):
        assert after(length, most) == most
        with pytest.raises(UserError, match=rf"20 learned positions\. Nearest that works: {most}\."):
            after(length, most + 1)
    with pytest.raises(UserError, match=r"a prompt of 21 tokens .* No max_new_tokens works: shorten the prompt\."):
        after(21, 1)


def test_a_conversation_ends_at_the_turn_that_goes_past_the_learned_positions(run, capsys, monkeypatch, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m['content'] }};{% endfor %}")
    config = run[1].model_copy(update={"chat_template": f"{tmp_path}/t.jinja", "trainable_position_size": 20})
    monkeypatch.setattr("sys.stdin", io.StringIO("one\nand two is too long\nthree\n"))
    monkeypatch.setattr("maxtext_lite.generation.answering.load_on_mesh", lambda *_: load_on_mesh(*run, {}))
    with pytest.raises(UserError, match=r"max_new_tokens=4 after a prompt of \d\d tokens goes past .* 20 learned"):
        ask(run, capsys, config=config, chat=True, max_new_tokens=4)
    assert capsys.readouterr().out.count("\n") == 1


def test_a_token_without_a_probability_ends_the_answers(run, capsys, monkeypatch):
    def damaged(*arguments):
        decoder, params, mesh = load_on_mesh(*arguments)
        return decoder, jax.tree.map(lambda x: x * math.nan, params), mesh

    monkeypatch.setattr("maxtext_lite.generation.answering.load_on_mesh", damaged)
    config = run[1].model_copy(update={"dtype": "float16"})
    for as_json in (True, False):
        with pytest.raises(UserError) as refusal:
            ask(run, capsys, as_json=as_json, config=config, prompts=["To", "be"], max_new_tokens=3)
        assert str(refusal.value) == (
            "the continuation of prompt 0 has the log-probability nan in dtype=float16: the activations overflow, or "
            "the parameters are not finite. Nearest that work: dtype=float32 or dtype=bfloat16."
        )


def test_what_is_wrong_with_prompts_and_mesh_is_said_at_once(run, capsys):
    with pytest.raises(UserError) as refusal:
        ask(run, capsys, prompt_ids=[[1, 264]], stop_token_ids=[-1], ici_tensor_parallelism=3)
    assert [problem.split(" ")[0] for problem in refusal.value.problems] == [
        "prompt_ids:", "stop_token_ids:", "ici_tensor_parallelism=3",
    ]  # fmt: skip
