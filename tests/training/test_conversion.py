"""The summary of a conversion; and a model keeps its numbers there and back."""

import json

import numpy as np
import pytest
import safetensors.numpy

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.chat import ChatTemplate
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


def test_a_run_goes_out_with_its_own_tokenizer_and_template_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = save_words(tmp_path / "own", ["a", "b", "</s>"], ["</s>"])
    (tmp_path / "t.jinja").write_text("{% for m in messages %}a {{ m.content }} {% endfor %}")
    turns = [*USER, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 32)
    keys = ["dataset_type=sft", "dataset_path=chats.jsonl", "tokenizer_type=huggingface", "tokenizer_path=own",
            "chat_template=t.jinja", "base_output_directory=runs", "eval_interval=-1", "per_device_batch_size=1",
            "steps=1", "warmup_steps=0"]  # fmt: skip
    run = train(load_config(None, [*TINY, *keys])).run_directory.resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    export_directory(run, tmp_path / "out", [], merge_lora=None)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == own.read_bytes()
    assert ChatTemplate(tmp_path / "out").render(USER) == "a hi "
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
    (run / "hf" / "tokenizer.json").unlink()  # as of an older run
    with pytest.raises(UserError, match=r"tokenizer_path='own': there is no file 'own'"):
        export_directory(run, tmp_path / "nothing", [], merge_lora=None)
    assert not (tmp_path / "nothing").exists()
