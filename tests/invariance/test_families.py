"""Each family's term: one import of a tiny model has transformers' logits, packed and padded, its greedy text through
the cache, and is read back by transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from maxtext_lite.config import UserError
from maxtext_lite.config.json_file import read_object
from maxtext_lite.hf.config_json import config_json
from maxtext_lite.hf.model_directory import hf_config
from maxtext_lite.inference.decoding import decode, new_cache
from tests.hf.test_importing import (
    POSITIONS,
    ROWS,
    SEGMENTS,
    TOKENS,
    assert_exported,
    assert_logits,
    assert_old_is_new,
    load,
)
from tests.hf_models import logits, model, save, torch, transformers
from tests.hf_variants import VARIANTS

GIVEN, NEW = 7, 7  # tokens of a prompt, and of what follows it


CACHED = (
    "sliding",
    "chunk",
    "layer_types",
    "longrope",
    "dynamic",
    "yarn",
    "lora_rank",
    "no_rope",
)
"""Words of what the cache must know of a family; the others' texts one token at a time: tests/models."""


def ours(decoder, params, *, is_decoded):
    """Logits of packed and padded rows; and the greedy text after a prompt, and its logits."""

    def everything(params):
        rows = decoder.logits(params, decoder.hidden(params, ROWS, SEGMENTS, POSITIONS))
        if not is_decoded:
            return rows, None

        def step(carry, token):
            cache, likeliest, count = carry
            token = jnp.where(token < 0, likeliest, token)
            hidden, cache = decode(
                decoder, params, token[None, None], count[None], cache
            )
            found = decoder.logits(params, hidden)[0, 0]
            return (cache, jnp.argmax(found), count + 1), (token, found)

        tokens = jnp.asarray([*TOKENS[:GIVEN], *[-1] * NEW])
        start = (
            new_cache(decoder, 1, GIVEN + NEW),
            jnp.zeros([], tokens.dtype),
            jnp.zeros([], jnp.int32),
        )
        return rows, jax.lax.scan(step, start, tokens)[1]

    with jax.default_matmul_precision("highest"):
        return jax.device_get(jax.jit(everything)(params))


def theirs(made):
    """The greedy text after the prompt, one token at a time, and its logits."""
    logits(made, TOKENS[:1])
    cache, tokens, found = None, list(TOKENS[:GIVEN]), []
    with torch.no_grad():
        for at in range(GIVEN + NEW):
            if at == len(tokens):
                tokens.append(int(found[-1].argmax()))
            out = made(
                torch.tensor([[tokens[at]]]), past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            found.append(out.logits[0, 0].numpy())
    return tokens, np.stack(found)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_what_transformers_makes_of_it(name, tmp_path):
    source, made = save(name, tmp_path / "source"), model(name)
    decoder, params = load(source)
    is_decoded = any(word in str(VARIANTS[name]) for word in CACHED)
    rows, decoded = ours(decoder, params, is_decoded=is_decoded)
    assert_logits(rows, name)
    if is_decoded:
        text, text_logits = theirs(made)
        assert list(decoded[0]) == text
        largest = np.abs(logits(made, TOKENS)).max()
        np.testing.assert_allclose(decoded[1], text_logits, atol=1e-5 * largest, rtol=0)

    original = read_object(source / "config.json")
    kind = {"model_type": original["model_type"]}
    assert_old_is_new(name, source, tmp_path / "other", is_old=False)
    assert_exported(name, source, params, tmp_path / "carried", original)
    assert_exported(name, source, params, tmp_path / "fresh", kind)


def _of_images(name, directory, *, old, **outer):
    """A text model's directory, as the model of text and images has it that it is a part of."""
    save(name, directory)
    fields, path = (
        read_object(directory / "config.json"),
        directory / "model.safetensors",
    )
    tensors = safetensors.numpy.load_file(path)
    prefix = "language_model.model." if old else "model.language_model."
    renamed = {
        key.replace("model.", prefix, 1) if key.startswith("model.") else key: x
        for key, x in tensors.items()
    }
    if old and "lm_head.weight" in renamed:
        renamed["language_model.lm_head.weight"] = renamed.pop("lm_head.weight")
    image = {f"{'' if old else 'model.'}vision_tower.x.weight": np.zeros(2, np.float32)}
    safetensors.numpy.save_file(renamed | image, path)
    (directory / "config.json").write_text(
        json.dumps({"text_config": fields, "vision_config": {}, **outer})
    )
    return directory


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemma3_text", "gemma3"),
        ("gemma4-shared", "gemma4"),
        ("ministral3", "mistral3"),
    ],
)
def test_the_text_part_of_a_model_of_images_is_that_model(
    name, kind, old, tmp_path, capsys
):
    plain = load(save(name, tmp_path / "plain"))[1]
    source = _of_images(name, tmp_path / "whole", old=old, model_type=kind)
    _, params = load(source)
    assert "1 tensors for images are passed over" in capsys.readouterr().err
    assert jax.tree.all(jax.tree.map(np.array_equal, plain, params))
    fields = config_json(
        hf_config(source),
        max_position_embeddings=64,
        dtype="float32",
        original=read_object(source / "config.json"),
    )
    assert fields["model_type"] == model(name).config.model_type
    assert "vision_config" not in fields
    assert getattr(transformers, fields["architectures"][0]) is type(model(name))


def test_a_text_part_of_another_family_is_refused(tmp_path):
    source = _of_images("gemma", tmp_path, old=False, model_type="gemma3")
    with pytest.raises(UserError, match=r"text_config\.model_type=gemma"):
        hf_config(source)


def test_an_activation_with_other_constants_is_refused(tmp_path):
    source = save("apertus", tmp_path)
    path = source / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = "model.layers.1.mlp.act_fn.beta"
    safetensors.numpy.save_file(tensors | {name: np.full([], 0.75, np.float32)}, path)
    with pytest.raises(UserError, match=name):
        load(source)
