"""The command: text to the terminal, tokens as JSON, mistakes in one line each."""

import json

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.generate import main, parse_generate_config
from maxtext_lite.generation.requests import GenerateConfig
from maxtext_lite.training import train
from tests.training.conftest import TINY


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    return train(
        load_config(
            None,
            [*TINY, "steps=2", "eval_interval=-1", "per_device_batch_size=1", f"base_output_directory={directory}"],
        )
    ).run_directory


def test_text_goes_on_from_the_prompt(run, capsys):
    assert main([str(run), "prompt=To be: or", "max_new_tokens=12", "seed=1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("To be: or")
    assert len(text) > len("To be: or\n")
    assert main([str(run), "prompt=To be: or", "max_new_tokens=12", "seed=1"]) == 0
    assert capsys.readouterr().out == text


def test_json_of_prompt_ids_needs_no_tokenizer(run, capsys, monkeypatch):
    monkeypatch.setattr("maxtext_lite.generation.text_tokens.load_tokenizer", None)
    assert main([str(run), "prompt_ids=[[1,2,3],[4]]", "temperature=0", "max_new_tokens=4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [len(text["tokens"]) for text in answer] == [4, 4]
    assert all(len(text["log_probabilities"]) == 4 and max(text["log_probabilities"]) < 0 for text in answer)
    stop = answer[0]["tokens"][0]
    main(
        [
            str(run),
            "prompt_ids=[[1,2,3],[4]]",
            "temperature=0",
            "max_new_tokens=4",
            f"stop_token_ids=[{stop}]",
            "--json",
        ]
    )
    assert json.loads(capsys.readouterr().out)[0]["tokens"] == [stop]


def test_an_empty_prompt_starts_a_new_document(run, capsys):
    assert main([str(run), "max_new_tokens=3"]) == 0
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize(("arguments", "message"), [
    (["prompt_idz=[[1]]"], "unknown key 'prompt_idz' (command line). Did you mean 'prompt_ids'?"),
    (["temperature=-1"], "temperature=-1 must be at least 0 and at most 1000000. Nearest that works: 0."),
    (["temperature=1e-40"], "temperature=1e-40 must be at least 1e-06, or 0. Nearest that works: 1e-06."),
    (["top_p=0"], "top_p=0 must be above 0 and at most 1. Nearest that works: 1."),
    (["max_new_tokens=1.5"], "max_new_tokens=1.5 is not an integer. Nearest that work: 1 or 2."),
    (["max_new_tokens=0"], "max_new_tokens=0 must be at least 1. Nearest that works: 1."),
    (["seed=4294967296"], "seed=4294967296 must be at most 4294967295. Nearest that works: 4294967295."),
    (["dtype=float64"], "dtype=float64 is not one of float32, bfloat16, float16. Nearest that works: float16."),
    (["chat=1"], "chat=1 is not true or false. Nearest that work: true or false."),
    (["prompt_ids=[[1,a]]"], "prompt_ids.0.1=a must be a valid integer."),
    (["prompt_ids=[[1],[]]"], "prompt_ids has an empty prompt"),
    (["prompt=x", "prompt_ids=[[1]]"], "prompt and prompt_ids contradict each other"),
    (["prompt=x", "prompts=[y]"], "prompt and prompts contradict each other"),
    (["prompts=[]"], "prompts is empty"),
    (["prompt_ids=[[1]]", "--chat"], "chat and prompt_ids contradict each other"),
    (["--chat", "--json"], "--json needs a prompt: with chat and without one"),
    (["system=x"], "system has no effect without chat=true"),
    (["stop_strings=['']"], "stop_strings has an empty text"),
    (["prompt=x", "--chat"], "has no chat template: it did not come from a Hugging Face directory"),
    (["ici_fsdp_parallelism=3"], "ici_fsdp_parallelism=3 does not divide the model's embedding over 8 devices."),
    (["ici_data_parallelism=9"], "ici_data_parallelism=9 does not divide the model's copies over 8 devices."),
    (["prompt_ids=[[1,999]]"], "prompt_ids: token 999 is not in 0..263 (vocab_size). Nearest that works: 263."),
    (["ici_tensor_parallelism=3"], "ici_tensor_parallelism=3 does not divide"),
    (["max_new_tokens=10000000000"], "max_new_tokens=10000000000 must be at most 2147483647."),
])  # fmt: skip
def test_mistakes_are_named(arguments, message, run):
    with pytest.raises(UserError) as refusal:
        main([str(run), *arguments])
    assert any(message in problem for problem in refusal.value.problems)


def test_prompts_are_text_and_other_values_are_yaml():
    config = parse_generate_config(["prompt=1e3", "temperature=1e-1", "stop_token_ids=[1, 2]", "top_k=3", "top_k=4"])
    assert config == GenerateConfig(prompt="1e3", temperature=0.1, stop_token_ids=[1, 2], top_k=4)
