"""The special tokens beside a tokenizer.json, against transformers'."""

import json

import pytest
import tokenizers

from maxtext_lite.data.chat import ChatTemplate
from maxtext_lite.data.special_tokens import special_tokens
from maxtext_lite.data.tokenizer import HuggingFaceTokenizer

transformers = pytest.importorskip("transformers")

TURNS = [{"role": "user", "content": "a"}]
PRINTS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
NONE = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "</s>"}


@pytest.mark.parametrize(("template", "config", "mapped"), [
    (PRINTS, {"bos_token": "a", "eos_token": None}, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}),
    (PRINTS, {"bos_token": "a", "eos_token": "</s>", "added_tokens_decoder": {}}, {"bos_token": "<s>"}),
    (PRINTS, NONE, None),
    ("{{ image_token }}" + PRINTS, NONE | {"extra_special_tokens": {"image_token": "<s>"}}, None),
    ("{{ mark_token }}" + PRINTS, NONE | {"mark_token": "<s>"}, None),
])  # fmt: skip
def test_special_tokens_are_those_that_transformers_reads(template, config, mapped, tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if mapped:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ChatTemplate(tmp_path).render(TURNS) == tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert HuggingFaceTokenizer(tmp_path / "tokenizer.json").end_of_text_id == tokenizer.eos_token_id == 2


def test_a_special_token_has_the_text_and_the_file_that_states_it(tmp_path):
    assert special_tokens(tmp_path) == {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": None, "legacy": True}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<b>"}}))
    assert special_tokens(tmp_path) == {
        "bos_token": ("<b>", tmp_path / "special_tokens_map.json"),
        "eos_token": (None, tmp_path / "tokenizer_config.json"),
    }
