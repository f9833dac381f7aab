"""A text begins as in the model's training, and ends at the tokens in its files."""

import json

import numpy as np

from maxtext_lite.config import load_config
from maxtext_lite.data import load_tokenizer
from maxtext_lite.generation.text_tokens import TextTokens, stop_tokens

BYTES = load_config(None, ["vocab_size=264"])


def test_a_text_ends_at_what_the_models_files_name_and_at_end_of_text(tmp_path):
    tokenizer = load_tokenizer(BYTES)
    assert stop_tokens(None, tokenizer) == TextTokens.of(tmp_path, BYTES).stop_token_ids == (256,)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"eos_token_id": [2, 256]}))
    assert stop_tokens(tmp_path / "hf", tokenizer) == TextTokens.of(tmp_path, BYTES).stop_token_ids == (2, 256)


def test_a_text_is_encoded_with_what_its_own_tokenizer_puts_first(tmp_path):
    class Framed:
        end_of_text_id = 9

        def encode(self, text):
            return np.array([ord(letter) for letter in text], np.int32)

        def encode_with_special(self, text):
            return np.array([1, *self.encode(text)], np.int32)

    here, elsewhere = TextTokens(Framed(), None, (9,)), TextTokens(Framed(), tmp_path, (9,))
    assert here.encode("ab") == [97, 98]
    assert elsewhere.encode("ab") == [1, 97, 98]
    assert elsewhere.encode("ab", plain=True) == [97, 98]


def test_tokens_of_the_request_end_a_text_in_place_of_the_models(tmp_path):
    tokens = TextTokens.of(tmp_path, BYTES)

    def written(*stop):
        text = tokens.begin([], *stop)
        for token in [*b"ab", 256, *b"c"]:
            text.push(token)
        text.end()
        return text.text

    assert written() == "ab"
    assert written([ord("b")]) == "a"
