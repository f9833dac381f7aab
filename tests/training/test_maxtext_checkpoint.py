"""MaxText's checkpoints give MaxText's logits, with or without scanned layers; others are refused by name.

tests/training/maxtext.npz holds what maxtext 0.2.5 made, in float32 at the highest precision: for each of its models,
as small as can be, the names and shapes in the checkpoint that it saved, and its logits of TOKENS. Their numbers are
drawn again here from their names, so that the file is small. They are those of bfloat16, in which MaxText multiplies
with a tied table whatever its dtype is.
"""

import json
import re
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.convert import main
from maxtext_lite.inference.sampler import load_on_mesh

TOKENS = np.random.default_rng(0).integers(1, 64, (1, 12)).astype(np.int32)
_SIZES = """
base_emb_dim=16 base_num_query_heads=4 base_num_kv_heads=2 head_dim=8 base_mlp_dim=24 vocab_size=64 dtype=float32
ici_fsdp_parallelism=1 ici_data_parallelism=-1
"""
SIZES = _SIZES.split()
LOCAL = ["sliding_window_size=4", "query_pre_attn_scalar=8"]
# MaxText's model_name, and what is said of it here; two layers of Gemma 2 are one of MaxText's.
MODELS = {
    "llama3-8b": ["model_name=llama3-8b", "base_num_decoder_layers=3"],
    "gemma2-2b": ["model_name=gemma2-2b", *LOCAL, "base_num_decoder_layers=4"],
    "gemma3-4b": ["model_name=gemma3-4b", *LOCAL, "base_num_decoder_layers=8"],
    "qwen2.5-1.5b": ["model_name=qwen2.5-1.5b", "base_num_decoder_layers=3"],
}


@pytest.fixture(scope="module")
def recorded():
    with np.load(Path(__file__).with_name("maxtext.npz")) as file:
        return dict(file)


def drawn(name, shape):
    draw = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    x = (
        1 + 0.2 * draw
        if name.endswith("scale")
        else draw
        if name.endswith("embedding")
        else 0.2 * draw
    )
    return x.astype(jnp.bfloat16).astype(np.float32)


def checkpoint(directory, recorded, case, change=lambda name, x: x):
    """A checkpoint as MaxText's trainer writes it: a step with `items`, which include its parameters."""
    tree = {}
    for name, shape in json.loads(str(recorded[f"{case}/shapes"])).items():
        parent = tree
        *steps, last = name.split("/")
        for step in steps:
            parent = parent.setdefault(step, {})
        parent[last] = change(name, drawn(name, shape))
    state = {
        "params": {"params": tree},
        "step": np.zeros((), np.int32),
        "opt_state": {"mu": np.zeros(3)},
    }
    with ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(items=ocp.PyTreeCheckpointHandler())
    ) as checkpointer:
        checkpointer.save(
            directory / "checkpoints" / "7",
            args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)),
        )
    return directory


def logits_of(directory):
    decoder, params, _ = load_on_mesh(
        directory, load_config(directory / "config.yml"), {"fsdp": 2}
    )
    with jax.default_matmul_precision("highest"):
        places = np.ones_like(TOKENS), np.arange(TOKENS.shape[1])[None]
        return jax.jit(
            lambda params: decoder.logits(
                params, decoder.hidden(params, TOKENS, *places)
            )
        )(params)


@pytest.mark.parametrize(
    "case",
    [
        *(f"{model}-scanned" for model in MODELS),
        "gemma2-2b-unscanned",
    ],
)
def test_an_imported_checkpoint_has_the_logits_of_maxtext(case, recorded, tmp_path):
    source = checkpoint(tmp_path / "maxtext", recorded, case)
    model, _, _ = case.rpartition("-")
    assert (
        main(["import", str(source), str(tmp_path / "out"), *SIZES, *MODELS[model]])
        == 0
    )
    np.testing.assert_array_equal(recorded[f"{case}/tokens"], TOKENS)
    theirs = recorded[f"{case}/logits"]
    np.testing.assert_allclose(
        logits_of(tmp_path / "out"), theirs, atol=5e-6 * np.abs(theirs).max()
    )


@pytest.mark.parametrize(
    ("words", "change", "named"),
    [
        (
            ["base_num_decoder_layers=4"],
            {},
            "key/kernel is [16, 3, 2, 8], not [16, 4, 2, 8]",
        ),
        (["logits_via_embedding=true"], {}, "decoder/logits_dense/kernel"),
        ([], {"decoder/decoder_norm/scale": np.nan}, "decoder/decoder_norm/scale"),
    ],
)
def test_another_model_than_the_checkpoint_s_is_refused(
    words, change, named, recorded, tmp_path
):
    source = checkpoint(
        tmp_path / "maxtext",
        recorded,
        "llama3-8b-scanned",
        lambda name, x: x + change.get(name, 0),
    )
    paths = str(source), str(tmp_path / "out")
    with pytest.raises(UserError, match=re.escape(named)):
        main(["import", *paths, *SIZES, *MODELS["llama3-8b"], *words])
    assert not (tmp_path / "out").exists()
