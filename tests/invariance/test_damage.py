"""Damaged files, of Hugging Face directories and of data: one clear error, or the same numbers; never an exception."""

import json
import random
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.sources import open_sources
from maxtext_lite.data.tokenizer import load_tokenizer
from maxtext_lite.hf.chat import ChatTemplate
from maxtext_lite.hf.model_directory import hf_config
from maxtext_lite.hf.stop_tokens import stop_ids_of
from maxtext_lite.hf.weights import load_hf_parameters
from maxtext_lite.post_training.prompts import open_prompts
from maxtext_lite.training.state import make_decoder
from tests.hf_models import model, save, save_with_tokenizer
from tests.meshes import abstract_parameters, mesh_of

WRONG = (None, True, -1, 2.5, 10**18, "", "\x1b[2J\n", [], [1], {}, {"a": {"b": [1]}})
TIMES = 16


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """The content cut short, with a bit flipped, or zeroed from one place to another."""
    place, end = sorted(draw.sample(range(len(content)), 2))
    head, tail = content[:place], content[end:]
    flipped = bytes([content[place] ^ 1 << draw.randrange(8)])
    zeroed = bytes(end - place)
    return draw.choice(
        [head, head + flipped + content[place + 1 :], head + zeroed + tail]
    )


def damaged_json(content: bytes, draw: random.Random) -> bytes:
    """The JSON with one of its values, at any depth, missing or of another kind."""
    value = json.loads(content)
    places = [(value, name) for name in value]
    for holder, name in places:
        inner = holder[name]
        if isinstance(inner, dict):
            places += [(inner, each) for each in [*inner][:40]]
        elif isinstance(inner, list):
            places += [(inner, each) for each in range(len(inner))[:40]]
    holder, name = draw.choice(places)
    if draw.random() < 0.2:
        del holder[name]
    else:
        holder[name] = draw.choice(WRONG)
    return json.dumps(value).encode()


def damaged(file: Path, whole: bytes, draw: random.Random) -> bytes:
    """A file's content, damaged. Of weights only the header: no file knows what its numbers should be."""
    if file.suffix == ".safetensors":
        first = 8 + int.from_bytes(whole[:8], "little")
        return damaged_bytes(whole[:first], draw) + whole[first:]
    if draw.random() < 0.5 or file.suffix not in (".json", ".jsonl"):
        return damaged_bytes(whole, draw)
    if file.suffix == ".json":
        return damaged_json(whole, draw)
    first, newline, rest = whole.partition(b"\n")
    return damaged_json(first, draw) + newline + rest


def num_refused(file: Path, use) -> int:
    """How many damages `use` refuses with printable lines; it takes the others."""
    whole, draw = file.read_bytes(), random.Random(1)
    refusals = []
    for _ in range(TIMES):
        file.write_bytes(damaged(file, whole, draw))
        try:
            use()
        except UserError as error:
            refusals.append(error.problems)
    file.write_bytes(whole)
    use()
    for problems in refusals:
        assert problems
        assert all(problem.isprintable() for problem in problems)
    return len(refusals)


def loader(directory):
    """A function that loads the weights of a directory onto one device and compares them with what they are now."""
    config = hf_config(directory).model_copy(update={"attention": "dot_product"})
    abstract = abstract_parameters(make_decoder(config, "cpu"), mesh_of())
    load = lambda: load_hf_parameters(directory, abstract, "HF_DIR")  # noqa: E731
    whole = jax.device_get(load())
    return lambda: jax.tree.map(np.testing.assert_array_equal, load(), whole)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_damaged_model_is_refused_or_has_the_same_numbers(family, tmp_path):
    directory = save(family, tmp_path)
    use = loader(directory)
    refused = num_refused(directory / "model.safetensors", use)
    for name in ("config.json", "generation_config.json"):
        refused += num_refused(
            directory / name, lambda: (hf_config(directory), stop_ids_of(directory))
        )
    assert refused > TIMES


def test_a_damaged_index_is_refused_or_changes_nothing(tmp_path):
    model("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    use = loader(tmp_path)
    assert num_refused(tmp_path / "model.safetensors.index.json", use) > TIMES / 3
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    assert num_refused(shard, use) > TIMES / 3


TURNS = [
    {"role": "user", "content": "to be"},
    {"role": "assistant", "content": "or not"},
]


def test_damaged_tokenizers_and_templates_are_refused_or_read(tmp_path):
    save_with_tokenizer(tmp_path)

    def use():
        tokenizer = load_tokenizer(hf_config(tmp_path))
        assert tokenizer.decode(tokenizer.encode("to be")) is not None
        ChatTemplate(tmp_path).render(TURNS)

    names = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
    assert sum(num_refused(tmp_path / name, use) for name in names) > TIMES / 2


TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
KEYS = ["eval_fraction=0", "eval_interval=-1", "max_target_length=64"]
RL = ["max_prefill_predict_length=16", "tokenizer_type=byte"]
LINES = {
    "text": ({"text": "To be, or not to be: that is the question."}, []),
    "sft": ({"prompt": "to be", "completion": "or not"}, []),
    "chat": ({"messages": TURNS * 2}, []),
    "dpo": ({"prompt": "to be", "chosen": "or not", "rejected": "or so"}, []),
    "prompts": ({"prompt": "1+1=", "answer": 2}, RL),
}


@pytest.mark.parametrize("kind", LINES)
def test_damaged_data_are_refused_or_read(kind, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    line, words = LINES[kind]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(line | {"n": n}) + "\n" for n in range(4)))
    words = [*KEYS, *words, f"dataset_path={file}"]
    words.append(f"dataset_type={'sft' if kind == 'chat' else kind}")
    if kind in ("sft", "chat", "dpo"):
        words.append(f"chat_template={tmp_path / 't.jinja'}")
    if kind == "prompts":
        config = load_config("configs/post_train/rl.yml", words)
        use = lambda: len(open_prompts(config)[0])  # noqa: E731
    else:
        config = load_config(None, words)
        use = lambda: open_sources(config)[0][0]  # noqa: E731
    assert num_refused(file, use) > TIMES / 4
