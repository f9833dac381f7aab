"""Files that go with a model, and the tokens after which its texts end."""

import json

import pytest
import tokenizers

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data import load_tokenizer
from maxtext_lite.hf.carried import (
    carry_own_tokens,
    carry_tokens,
    new_ends,
    store_files,
)
from maxtext_lite.hf.chat import ChatTemplate
from maxtext_lite.hf.stop_tokens import stop_ids_of, stop_tokens

LLAMA = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": [3, 2],
}
USER = [{"role": "user", "content": "hi"}]


def save_words(directory, words, special):
    """A tokenizer.json of whole words, of which `special` are special tokens and the first of those end-of-text."""
    directory.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: i for i, word in enumerate(words)}, unk_token="a"
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(special)
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": special[0], "chat_template": "theirs"})
    )
    return directory / "tokenizer.json"


@pytest.fixture
def model(tmp_path):
    """A Hugging Face directory, without weights, whose texts end at 2, `</s>`, or 3, `<end>`."""
    directory = tmp_path / "model"
    save_words(directory, ["a", "<s>", "</s>", "<end>"], ["</s>", "<s>", "<end>"])
    (directory / "config.json").write_text(json.dumps(LLAMA))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 2, "temperature": 0.6})
    )
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def stored(tmp_path, *words, learned=()):
    """What a run with these keys stores, as text by name."""
    out, where = (
        tmp_path / "run" / "hf",
        [f"base_output_directory={tmp_path}", "run_name=run"],
    )
    store_files(
        load_config(
            None,
            [
                "dataset_type=sft",
                "dataset_path=x.jsonl",
                "vocab_size=264",
                *where,
                *words,
            ],
        ),
        out,
        learned=learned,
    )
    return (
        {file.name: file.read_text() for file in out.iterdir()} if out.exists() else {}
    )


@pytest.mark.fast
def test_stop_tokens_are_those_of_both_files_and_what_is_none_is_named_with_its_file(
    tmp_path,
):
    generation = tmp_path / "generation_config.json"
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert stop_ids_of(tmp_path) == [5]
    for value, expected in (([7, 5], [7, 5]), (None, [5])):
        generation.write_text(json.dumps({"eos_token_id": value}))
        assert stop_ids_of(tmp_path) == expected
    for value in ("x", -1, 2.5, True, [[2]], {"a": 1}):
        generation.write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id="):
            stop_ids_of(tmp_path)


def test_a_run_stores_its_model_and_tokenizer_as_they_are(model, tmp_path):
    (model / "modeling.py").write_text("")
    (tmp_path / "run" / "hf").mkdir(parents=True)
    (tmp_path / "run" / "hf" / "merges.txt").write_text("of an earlier start")
    files = stored(tmp_path, f"load_parameters_path={model}")
    assert files == {
        file.name: file.read_text()
        for file in model.iterdir()
        if file.suffix == ".json"
    }
    again = [
        "tokenizer_type=huggingface",
        f"tokenizer_path={tmp_path / 'run/hf/tokenizer.json'}",
    ]
    (tmp_path / "run/checkpoints/3").mkdir(parents=True)
    assert stored(tmp_path, *again) == files, (
        "its own files, and a resumed run need not name its model"
    )
    (tmp_path / "run/checkpoints/3").rename(tmp_path / "run/checkpoints/unfinished-3")
    files = stored(tmp_path, *again)
    assert "tokenizer.json" in files
    assert not files.keys() & {"config.json", "generation_config.json"}, (
        "it starts over, from scratch"
    )
    (model / "merges.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"merges\.txt"):
        stored(tmp_path, f"load_parameters_path={model}")


@pytest.mark.parametrize(
    ("words", "special", "first", "ends"),
    [
        (
            ["</s>", "a", "G", "<end>"],
            ["</s>"],
            None,
            0,
        ),  # another vocabulary, in which 2 and 3 are words
        (
            ["a", "<s>", "</s>", "<end>", "<new>"],
            ["<new>", "<s>", "</s>", "<end>"],
            1,
            [2, 3, 4],
        ),  # an extended one
    ],
)
def test_texts_end_at_the_special_tokens_of_the_tokenizer_that_the_run_used(
    words, special, first, ends, model, tmp_path
):
    own = save_words(tmp_path / "own", words, special)
    keys = ["tokenizer_type=huggingface", f"tokenizer_path={own}"]
    files = stored(tmp_path, f"load_parameters_path={model}", *keys)
    assert files["tokenizer.json"] == own.read_text()
    fields = json.loads(files["config.json"])
    assert fields == {
        **LLAMA,
        "bos_token_id": first,
        "eos_token_id": ends,
        "pad_token_id": None,
    }
    assert json.loads(files["generation_config.json"])["eos_token_id"] == ends
    tokenizer = load_tokenizer(load_config(None, [*keys, "vocab_size=264"]))
    at = list(stop_tokens([model], tokenizer))
    assert at == (ends if isinstance(ends, list) else [ends]), (
        "while it samples at its first start"
    )


def test_the_template_of_a_run_is_stored_in_place_of_its_tokenizers(tmp_path):
    own = save_words(tmp_path / "own", ["a", "</s>"], ["</s>"])
    (own.parent / "chat_template.json").write_text('{"chat_template": "old"}')
    (tmp_path / "new.jinja").write_text("new {{ messages[0].content }}")
    keys = ["tokenizer_type=huggingface", f"tokenizer_path={own}"]
    stored(tmp_path, *keys, f"chat_template={tmp_path / 'new.jinja'}")
    config = load_config(None, [*keys, "vocab_size=264"])
    carry_tokens(
        config.model_copy(update={"tokenizer_path": str(tmp_path / "run/hf")}),
        tmp_path / "run",
        tmp_path / "out",
    )
    for out in (tmp_path / "run" / "hf", tmp_path / "out"):
        assert ChatTemplate(out).render(USER) == "new hi"
        assert "theirs" not in (out / "tokenizer_config.json").read_text()
        assert not (out / "chat_template.json").exists()
        assert (out / "tokenizer.json").read_bytes() == own.read_bytes()
    with pytest.raises(UserError, match=r"^chat_template=.*gone\.jinja"):
        stored(tmp_path, f"chat_template={tmp_path / 'gone.jinja'}")


def test_an_export_in_the_place_of_what_a_run_stores_is_left_as_it_is(model, tmp_path):
    keys = [f"load_parameters_path={model}", "steps=1"]
    before = stored(tmp_path, *keys)
    (tmp_path / "run" / "hf" / "model.safetensors").write_bytes(b"")
    (tmp_path / "run" / "hf" / "vocab.json").write_text("{}")
    after = stored(tmp_path, *keys)
    assert after == before | {"model.safetensors": "", "vocab.json": "{}"}
    (tmp_path / "run" / "hf" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"run/hf holds an export.*tokenizer_config\.json"
    ):
        stored(tmp_path, *keys)
    assert (tmp_path / "run" / "hf" / "tokenizer_config.json").read_text() == "{}"


def test_a_byte_tokenizer_has_no_file_and_a_template_of_its_own_is_stored(
    model, tmp_path
):
    assert stored(tmp_path) == {}
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    template = f"chat_template={tmp_path / 't.jinja'}"
    assert stored(tmp_path, template) == {
        "chat_template.jinja": "{{ messages[0].content }}"
    }
    assert stored(tmp_path) == {}, "which is no longer in use"
    files = stored(tmp_path, f"load_parameters_path={model}", "tokenizer_type=byte")
    assert set(files) == {"config.json", "generation_config.json"}
    assert json.loads(files["config.json"])["eos_token_id"] == 256


def test_tokens_that_end_learned_answers_end_the_texts_of_all_that_comes_from_a_run(
    model, tmp_path
):
    """Of a run, one that starts from it, its exports and those of its adapters; also of a model from scratch."""
    save_words(
        model, ["a", "<s>", "</s>", "<end>", "<turn>"], ["</s>", "<s>", "<turn>"]
    )
    fields = LLAMA | {"eos_token_id": 2}
    (model / "config.json").write_text(json.dumps(fields))
    own = [
        "tokenizer_type=huggingface",
        f"tokenizer_path={model / 'tokenizer.json'}",
    ]
    for number, words in enumerate(([f"load_parameters_path={model}"], own)):
        place = tmp_path / str(number)
        config = load_config(None, [*words, "vocab_size=264"])
        assert new_ends(config, [2, 4]) == ["<turn>"]
        files = stored(place, *words, learned=[4])
        stated = json.loads(files["generation_config.json"])
        assert stated["eos_token_id"] == [2, 4]
        tokenizer = load_tokenizer(config)
        run = place / "run"
        assert stop_tokens([run], tokenizer) == (2, 4)
        next_run = stored(place / "next", *own, f"load_parameters_path={run}")
        assert next_run["generation_config.json"] == files["generation_config.json"]
        carry_tokens(config, run, place / "out")
        assert stop_tokens([place / "out"], tokenizer) == (2, 4)
        carry_own_tokens(config, run, model, place / "adapter")
        assert stop_tokens([place / "adapter"], tokenizer) == (2, 4)
        assert (
            new_ends(load_config(None, [*own, f"load_parameters_path={run}"]), [4])
            == []
        )
    assert stated.keys() == {"eos_token_id"}
    assert "generation_config.json" not in stored(tmp_path / "none", *own, learned=[2])
