"""Damaged files, of Hugging Face directories and of data: one clear error, or the same numbers; never an exception."""

import copy
import json
import random
from collections import Counter
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
from maxtext_lite.parallel import MESH_AXES, make_mesh, sharding
from maxtext_lite.post_training.prompts import open_prompts
from maxtext_lite.training.state import make_decoder
from tests.hf_models import save, save_with_tokenizer

WRONG = (
    None,
    True,
    -1,
    0,
    1,
    2.5,
    10**18,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x" * 5000,
    "\ud83d",
    "\x1b[2J\n",
    [],
    [1],
    [[]] * 3,
    {},
    {"a": {"b": [1]}},
    {"content": 3},
    [{"role": "user"}],
    [{"role": "user", "content": 5}],
)


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """The content with bits flipped, cut off, zeroed, deleted, repeated or appended."""
    place = draw.randrange(max(len(content), 1))
    length = draw.choice((1, 2, 8, 100, len(content)))
    head, part, tail = (
        content[:place],
        content[place : place + length],
        content[place + length :],
    )
    match draw.randrange(7):
        case 0:
            return (
                head
                + bytes([content[place] ^ 1 << draw.randrange(8)])
                + content[place + 1 :]
                if content
                else b"x"
            )
        case 1:
            return head
        case 2:
            return head + bytes(len(part)) + tail
        case 3:
            return head + tail
        case 4:
            return head + part + part + tail
        case 5:
            return content + draw.randbytes(draw.choice((1, 9, 4000)))
        case _:
            return head + draw.choice(
                (b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe", b"\0", b"NaN", b'"')
            )


def damaged_json(content: bytes, draw: random.Random) -> bytes:
    """The JSON with one of its values, at any depth, wrong, missing, nested or twice; with one that is unknown."""
    value = json.loads(content)
    places = [(value, name) for name in value]
    for holder, name in places:
        inner = holder[name]
        names = (
            list(inner)
            if isinstance(inner, dict)
            else range(len(inner))
            if isinstance(inner, list)
            else ()
        )
        places += [(inner, each) for each in list(names)[:40]]
    holder, name = draw.choice(places)
    match draw.randrange(5):
        case 0:
            del holder[name]
        case 1:
            holder[name] = [copy.deepcopy(holder[name])]
        case 2 if isinstance(holder, dict):
            holder[draw.choice(("zeta", "", "quantization_config", "\ud83d"))] = (
                draw.choice(WRONG)
            )
        case 3:
            text = json.dumps(value)
            return (
                text[:-1]
                + f", {json.dumps(next(iter(value), 'a'))}: {json.dumps(draw.choice(WRONG))}}}"
            ).encode()
        case _:
            holder[name] = draw.choice(WRONG)
    return json.dumps(value).encode()


class Damage:
    """Damages one file at a time and counts what became of it."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()

    def count(self, use, content: bytes) -> None:
        """Counts whether it is read or refused; anything else is raised."""
        try:
            use(content)
            problems = None
        except UserError as error:
            problems = error.problems
        assert problems is None or (
            problems and all(problem.isprintable() for problem in problems)
        ), problems
        self.counts["read" if problems is None else "refused"] += 1

    def try_all(self, file: Path, times: int, use) -> None:
        """Calls `use()` with the file damaged in `times` ways: it returns, or raises a UserError of printable lines."""
        whole = file.read_bytes()
        lines = file.suffix in (".json", ".jsonl")
        for _ in range(times):
            if lines and self.draw.random() < 0.6:
                first, newline, rest = (
                    whole.partition(b"\n")
                    if file.suffix == ".jsonl"
                    else (whole, b"", b"")
                )
                content = damaged_json(first, self.draw) + newline + rest
            else:
                content = damaged_bytes(whole, self.draw)
            file.write_bytes(content)
            self.count(use, content)
        file.write_bytes(whole)
        use(whole)


def loader(directory):
    """A function that loads the weights of a directory onto one device and compares them with what they are now."""
    decoder = make_decoder(
        hf_config(directory).model_copy(update={"attention": "dot_product"}), "cpu"
    )
    sizes = dict.fromkeys(MESH_AXES, 1)
    where = sharding(make_mesh(sizes, sizes, jax.devices()[:1]))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        decoder.abstract_params,
    )

    def load():
        return jax.tree.map(
            np.asarray, load_hf_parameters(directory, abstract, "HF_DIR")
        )

    whole = load()
    file = directory / "model.safetensors"
    stored = file.read_bytes() if file.is_file() else b""

    def use(content):
        loaded = load()
        first = 8 + int.from_bytes(stored[:8], "little")
        # Of other numbers no file knows what they should be; everything else that is read is what it was.
        if (
            len(content) == len(stored)
            and content[:first] == stored[:first]
            and content != stored
        ):
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(loaded))
            return
        jax.tree.map(np.testing.assert_array_equal, loaded, whole)

    return use


def damage_weights(directory: Path, family: str, damage: Damage, times: int) -> None:
    save(family, directory)
    use = loader(directory)
    damage.try_all(directory / "model.safetensors", times, use)
    damage.try_all(
        directory / "config.json",
        times,
        lambda _: (hf_config(directory), stop_ids_of(directory)),
    )
    if (directory / "generation_config.json").exists():
        damage.try_all(
            directory / "generation_config.json",
            times // 2,
            lambda _: stop_ids_of(directory),
        )


def damage_shards(directory: Path, damage: Damage, times: int) -> None:
    from tests.hf_models import model

    model("llama").save_pretrained(directory, max_shard_size="30KB")
    use = loader(directory)
    assert len(list(directory.glob("*.safetensors"))) > 2
    damage.try_all(directory / "model.safetensors.index.json", times, use)
    # Another file's numbers are not in `use`'s eye: only its header is damaged.
    file = sorted(directory.glob("model-*.safetensors"))[0]
    content = file.read_bytes()
    first = 8 + int.from_bytes(content[:8], "little")
    for _ in range(times):
        header = damaged_bytes(content[:first], damage.draw)
        file.write_bytes(header + content[first:])
        damage.count(use, b"")
    file.write_bytes(content)


TURNS = [
    {"role": "user", "content": "to be"},
    {"role": "assistant", "content": "or not"},
]


def damage_tokenizer(directory: Path, damage: Damage, times: int) -> None:
    save_with_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<' + m['role'] ~ '>' }}{{ m.content | trim }}{% if not loop.last %};{% endif %}"
        "{% endfor %}{{ eos_token }}"
    )

    def use(_):
        config = hf_config(directory)
        tokenizer = load_tokenizer(config)
        assert tokenizer.decode(tokenizer.encode("to be")) is not None
        ChatTemplate(directory).render(TURNS)
        stop_ids_of(directory)

    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        damage.try_all(directory / name, times, use)


LINES = {
    "text": {"text": "To be, or not to be: that is the question."},
    "sft": {"prompt": "to be", "completion": "or not"},
    "chat": {"messages": TURNS * 2},
    "dpo": {"prompt": "to be", "chosen": "or not", "rejected": "or so"},
    "rl": {"prompt": "1+1=", "answer": 2},
}


def damage_data(directory: Path, damage: Damage, times: int) -> None:
    directory.mkdir()
    (directory / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    for kind, value in LINES.items():
        file = directory / f"{kind}.jsonl"
        file.write_bytes(
            "\n".join(
                json.dumps(value | {"number": number}) for number in range(4)
            ).encode()
        )
        keys = [f"dataset_path={file}", "eval_fraction=0", "max_target_length=64"]
        if kind == "rl":
            config = load_config(
                "configs/post_train/rl.yml",
                [
                    "dataset_type=prompts",
                    f"dataset_path={file}",
                    "eval_interval=-1",
                    "eval_fraction=0",
                    "tokenizer_type=byte",
                    "apply_chat_template=false",
                ],
            )
            damage.try_all(
                file, times, lambda _, config=config: len(open_prompts(config)[0])
            )
            continue
        dataset = {"chat": "sft"}.get(kind, kind)
        rows = ["objective=dpo"] if kind == "dpo" else []
        config = load_config(
            None,
            [*keys, f"dataset_type={dataset}", "eval_interval=-1", *rows]
            + (
                [f"chat_template={directory / 't.jinja'}"]
                if kind in ("chat", "sft", "dpo")
                else []
            ),
        )
        damage.try_all(file, times, lambda _, config=config: open_sources(config)[0][0])
        if kind == "text":
            plain = directory / "plain.txt"
            plain.write_text("To be, or not to be.\n" * 20)
            config = load_config(
                None, [f"dataset_path={plain}", *keys[1:], "eval_interval=-1"]
            )
            damage.try_all(
                plain, times, lambda _, config=config: open_sources(config)[0][0]
            )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_damaged_model_is_refused_or_has_the_same_numbers(family, tmp_path):
    damage = Damage(1)
    damage_weights(tmp_path / "model", family, damage, 25)
    assert damage.counts["refused"] > 10


def test_a_damaged_index_is_refused_or_changes_nothing(tmp_path):
    damage = Damage(2)
    damage_shards(tmp_path / "model", damage, 20)
    assert damage.counts["refused"] > 10


def test_damaged_tokenizers_and_templates_are_refused_or_read(tmp_path):
    damage = Damage(3)
    damage_tokenizer(tmp_path / "model", damage, 12)
    assert damage.counts["refused"] > 10


def test_damaged_data_are_refused_or_read(tmp_path):
    damage = Damage(4)
    damage_data(tmp_path / "data", damage, 12)
    assert damage.counts["refused"] > 10
