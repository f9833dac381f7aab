"""The summary of a conversion; and a model keeps its numbers there and back."""

import json
import shutil

import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.chat import ChatTemplate
from maxtext_lite.training import train
from maxtext_lite.training.conversion import export_directory
from tests.hf.test_carried import USER, save_words
from tests.training.conftest import TINY


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A directory in which a run, `first`, used a tokenizer and a template of its own; and its keys but for those."""
    directory = tmp_path_factory.mktemp("chatting")
    save_words(directory / "own", ["a", "b", "</s>"], ["</s>"])
    (directory / "t.jinja").write_text(
        "{% for m in messages %}a {{ m.content }} {% endfor %}"
    )
    turns = [*USER, {"role": "assistant", "content": "b"}]
    (directory / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 32)
    keys = [
        *TINY,
        "dataset_type=sft",
        "dataset_path=chats.jsonl",
        "base_output_directory=runs",
        "eval_interval=-1",
        "per_device_batch_size=1",
        "steps=1",
        "warmup_steps=0",
    ]
    own = ["tokenizer_type=huggingface", "tokenizer_path=own", "chat_template=t.jinja"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        train(load_config(None, [*keys, *own, "run_name=first"]))
    return directory, keys


def names_in(directory):
    return {file.name for file in directory.iterdir()}


def test_a_run_goes_out_with_its_own_tokenizer_and_template_from_any_directory(
    chatting, tmp_path, monkeypatch
):
    directory, _ = chatting
    run = shutil.copytree(directory / "runs" / "first", tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    export_directory(run, tmp_path / "out", [], merge_lora=None)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        directory / "own" / "tokenizer.json"
    ).read_bytes()
    assert ChatTemplate(tmp_path / "out").render(USER) == "a hi "
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
    )
    for name in ("tokenizer.json", "chat_template.jinja"):  # as of an older run
        (run / "hf" / name).unlink()
    _, *gone = export_directory(
        run, tmp_path / "bare", [], merge_lora=None
    ).splitlines()
    assert [line.split()[0] for line in gone] == [
        "tokenizer_path=own",
        "chat_template=t.jinja",
    ]
    assert names_in(tmp_path / "bare") == {"config.json", "model.safetensors"}
    assert (
        json.loads((tmp_path / "bare" / "config.json").read_text()).get("eos_token_id")
        is None
    )
    for word in ("tokenizer_path=owm", "chat_template=s.jinja"):
        with pytest.raises(UserError, match=word.partition("=")[0]):
            export_directory(run, tmp_path / "nothing", [word], merge_lora=None)
    assert not list((tmp_path / "nothing").glob("*"))
