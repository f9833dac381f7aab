"""The summary of a conversion; and a model keeps its numbers there and back."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.hf.model_directory import config_of_run, hf_config
from maxtext_lite.data.chat import ChatTemplate, chat_template
from maxtext_lite.training import train
from maxtext_lite.training.conversion import export_directory, import_directory
from tests.hf.test_carried import USER, save_words
from tests.training.conftest import TINY

WITHOUT_TEXT = ("dataset_type=synthetic", "eval_interval=-1", "per_device_batch_size=1", "steps=2")


def test_a_run_goes_out_comes_in_and_goes_out_with_the_same_numbers(tmp_path):
    run = train(load_config(None, [*TINY, *WITHOUT_TEXT, f"base_output_directory={tmp_path / 'runs'}"])).run_directory
    said = export_directory(run, tmp_path / "hf", [], merge_lora=None)
    count = sum(x.size for x in safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors").values())
    assert said == f"{count:,} parameters in {tmp_path / 'hf'}, as llama in float32"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 256
    in_half = import_directory(tmp_path / "hf", tmp_path / "in", ["weight_dtype=bfloat16"])
    assert in_half == f"{count:,} parameters in {tmp_path / 'in'}, in bfloat16"
    import_directory(tmp_path / "hf", tmp_path / "whole", ["ici_tensor_parallelism=2"])
    export_directory(tmp_path / "whole", tmp_path / "again", [], merge_lora=None)
    one, other = (safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A directory in which a run, `first`, used a tokenizer and a template of its own; and its keys but for those."""
    directory = tmp_path_factory.mktemp("chatting")
    save_words(directory / "own", ["a", "b", "</s>"], ["</s>"])
    (directory / "t.jinja").write_text("{% for m in messages %}a {{ m.content }} {% endfor %}")
    turns = [*USER, {"role": "assistant", "content": "b"}]
    (directory / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 32)
    keys = [*TINY, "dataset_type=sft", "dataset_path=chats.jsonl", "base_output_directory=runs", "eval_interval=-1",
            "per_device_batch_size=1", "steps=1", "warmup_steps=0"]  # fmt: skip
    own = ["tokenizer_type=huggingface", "tokenizer_path=own", "chat_template=t.jinja"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        train(load_config(None, [*keys, *own, "run_name=first"]))
    return directory, keys


def test_a_run_goes_out_with_its_own_tokenizer_and_template_from_any_directory(chatting, tmp_path, monkeypatch):
    directory, _ = chatting
    run = shutil.copytree(directory / "runs" / "first", tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    export_directory(run, tmp_path / "out", [], merge_lora=None)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (directory / "own" / "tokenizer.json").read_bytes()
    assert ChatTemplate(tmp_path / "out").render(USER) == "a hi "
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
    for name in ("tokenizer.json", "chat_template.jinja"):  # as of an older run
        (run / "hf" / name).unlink()
    said = export_directory(run, tmp_path / "bare", [], merge_lora=None)
    assert [line.partition(" of the run is gone")[0] for line in said.splitlines()[1:]] == [
        "tokenizer_path=own",
        "chat_template=t.jinja",
    ]
    assert {file.name for file in (tmp_path / "bare").iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "bare" / "config.json").read_text()).get("eos_token_id") is None
    for word, said in (
        ("tokenizer_path=owm", r"tokenizer_path='owm': there is no file 'owm'"),
        ("chat_template=s.jinja", r"chat_template=s\.jinja cannot be read"),
    ):
        with pytest.raises(UserError, match=said):
            export_directory(run, tmp_path / "nothing", [word], merge_lora=None)
    assert not list((tmp_path / "nothing").glob("*"))


def test_adapters_of_a_run_after_another_name_it_as_their_base_and_say_how_to_make_it_one(
    chatting, tmp_path, monkeypatch
):
    directory, keys = chatting
    first = directory / "runs" / "first"
    monkeypatch.chdir(directory)
    config = load_config(None, [*keys, "load_parameters_path=runs/first", "lora_rank=2", "run_name=second"])
    second = train(config).run_directory
    assert (second / "hf" / "chat_template.jinja").read_text() == (directory / "t.jinja").read_text()
    said = export_directory(second, tmp_path / "out", [], merge_lora=None)
    assert said.endswith(
        f"\nTheir base is a run: convert export {first} BASE, and name BASE as base_model_name_or_path in "
        "adapter_config.json"
    )
    stated = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert stated == str(first)
    with pytest.raises(UserError, match=r"has no config\.json\. It is a run directory: convert export it"):
        hf_config(tmp_path / "out")


def test_adapters_go_out_with_a_template_of_their_own_and_are_read_with_it(chatting, tmp_path, monkeypatch):
    directory, keys = chatting
    monkeypatch.chdir(directory)
    export_directory(Path("runs/first"), tmp_path / "base", [], merge_lora=None)
    (tmp_path / "new.jinja").write_text("{% for m in messages %}new {{ m.content }} {% endfor %}")
    lora = [f"load_parameters_path={tmp_path / 'base'}", "lora_rank=2"]
    plain = train(load_config(None, [*keys, *lora, "run_name=plain"])).run_directory
    export_directory(plain, tmp_path / "plain", [], merge_lora=None)
    assert {file.name for file in (tmp_path / "plain").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    run = train(
        load_config(None, [*keys, *lora, f"chat_template={tmp_path / 'new.jinja'}", "run_name=new"])
    ).run_directory
    export_directory(run, tmp_path / "new", [], merge_lora=None)
    assert ChatTemplate(tmp_path / "new").render(USER) == "new hi "
    import_directory(tmp_path / "new", tmp_path / "merged", [])
    after = [f"load_parameters_path={tmp_path / 'plain'}", "run_name=after"]
    late = train(load_config(None, [*keys, *after])).run_directory
    (tmp_path / "base").rename(tmp_path / "gone")
    export_directory(late, tmp_path / "late", [], merge_lora=None)
    stated = json.loads((tmp_path / "late" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert stated == str(tmp_path / "base")
    assert ChatTemplate(tmp_path / "late").render(USER) == "a hi ", "no base has the template"
    (tmp_path / "gone").rename(tmp_path / "base")
    for path, text in (("plain", "a hi "), ("new", "new hi "), ("merged", "new hi ")):
        find = config_of_run if path == "merged" else hf_config
        assert chat_template(find(tmp_path / path)).render(USER) == text, path
