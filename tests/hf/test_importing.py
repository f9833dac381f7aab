"""Imported models have transformers' logits, on any mesh, and transformers reads what is exported; what does not fit is
refused by name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.config import UserError
from maxtext_lite.config.json_file import read_object
from maxtext_lite.hf.config_json import config_json, model_keys
from maxtext_lite.hf.families import FAMILIES
from maxtext_lite.hf.fields import same_architecture
from maxtext_lite.hf.model_directory import hf_config
from maxtext_lite.hf.names import TABLES
from maxtext_lite.hf.weights import export_parameters, load_hf_parameters
from maxtext_lite.parallel import (
    sharding,
)
from maxtext_lite.training.state import make_decoder
from tests.hf_models import MODELS, SINCE_5, logits, model, save, torch, transformers
from tests.hf_variants import VARIANTS
from tests.meshes import abstract_parameters, mesh_of

TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 96, 16)]
# One row is a document; the other has two, of 9 and 4 tokens, and then padding.
ROWS = np.array([TOKENS, [*TOKENS[:9], *TOKENS[3:7], 0, 0, 0]], np.int32)
SEGMENTS = np.array([[1] * 16, [1] * 9 + [2] * 4 + [0] * 3], np.int32)
POSITIONS = np.array([range(16), [*range(9), *range(4), *range(3)]], np.int32)


def load(directory, *, dtype="float32", **mesh_sizes):
    """The decoder of a directory and its parameters on a mesh."""
    config = hf_config(directory, [f"dtype={dtype}", "attention=dot_product"])
    decoder = make_decoder(config, "cpu")
    abstract = abstract_parameters(decoder, mesh_of(**mesh_sizes))
    return decoder, load_hf_parameters(directory, abstract, "HF_DIR")


def logits_of(decoder, params):
    def both(params):
        return decoder.logits(params, decoder.hidden(params, ROWS, SEGMENTS, POSITIONS))

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(both)(params))


def equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(
        lambda x, y: assert_array_equal(x, np.asarray(y).reshape(x.shape)),
        one,
        other,
    )


def tensors_of(directory):
    files = sorted(directory.glob("*.safetensors"))
    return {
        tensor: x
        for file in files
        for tensor, x in safetensors.numpy.load_file(file).items()
    }


def rewrite(directory, change):
    """Changes the tensors of a directory."""
    safetensors.numpy.save_file(
        change(tensors_of(directory)), directory / "model.safetensors"
    )


def test_every_family_has_a_table_and_a_model_that_is_compared_with_transformers():
    kinds = {
        getattr(transformers, f"{kind}Config").model_type
        for kind, _ in (MODELS | VARIANTS).values()
    }
    assert kinds == TABLES.keys() == FAMILIES.keys()


def assert_logits(rows, name):
    """Those of `ROWS` are transformers', document by document."""
    theirs = model(name)
    largest = np.abs(logits(theirs, TOKENS)).max()
    for got, document in (
        (rows[0], TOKENS),
        (rows[1, :9], TOKENS[:9]),
        (rows[1, 9:13], TOKENS[3:7]),
    ):
        # Dynamic rotation forgets what it has seen when it sees a short text.
        logits(theirs, TOKENS[:1])
        expected = logits(theirs, document)
        assert_allclose(got, expected, atol=1e-5 * largest, rtol=0)


def assert_exported(name, source, params, out, original, **how):
    """What is exported, with a config.json from `original`, transformers reads without loss."""
    out.mkdir()
    fields = config_json(
        hf_config(source),
        max_position_embeddings=64,
        dtype="float32",
        original=original,
    )
    kind = original["model_type"]
    assert fields["model_type"] == kind
    keys = model_keys(fields, "")
    export_parameters(out, params, kind, keys, dtype="float32", **how)
    (out / "config.json").write_text(json.dumps(fields))
    read, report = transformers.AutoModelForCausalLM.from_pretrained(
        out,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem]
    expected = logits(model(name), TOKENS)
    found = logits(read.eval(), TOKENS)
    assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


def assert_old_is_new(name, source, other, is_old):
    """Both versions of transformers say the same of a model, of which `source` has one."""
    save(name, other, old=not is_old)
    new, old = (read_object(path / "config.json") for path in (source, other))
    if is_old:
        new, old = old, new
    assert "rope_parameters" not in old or old["model_type"] in SINCE_5
    assert same_architecture(model_keys(new, "new"), model_keys(old, "old")) == []


@pytest.mark.parametrize(
    "name",
    [pytest.param("qwen3", marks=pytest.mark.fast), *sorted({*MODELS} - {"qwen3"})],
)
def test_a_model_is_transformers_in_both_directions(name, tmp_path):
    """Imported onto a mesh with its logits, packed and padded; and exported from there, with a new config.json, in
    several files."""
    is_old = name in ("gemma3_text", "phi3")
    source = save(name, tmp_path / "source", old=is_old)
    assert_old_is_new(name, source, tmp_path / "other", is_old)
    decoder, params = load(source, fsdp=2, tensor=2, data=2)
    assert_logits(logits_of(decoder, jax.tree.map(np.asarray, params)), name)
    imported, out = tensors_of(source), tmp_path / "fresh"
    kind = {"model_type": read_object(source / "config.json")["model_type"]}
    assert_exported(name, source, params, out, kind, file_bytes=30_000)
    assert len(list(out.glob("model-00001-of-*.safetensors"))) == 1
    equal(imported, tensors_of(out))


def test_layers_split_over_pipeline_stages_are_the_same_layers(tmp_path):
    source = save("deepseek_v3", tmp_path / "source")
    decoder, plain = load(source)  # a dense layer, and two with experts
    mesh = mesh_of(stage=2, fsdp=2)
    abstract = abstract_parameters(decoder, mesh)

    def in_stages(leaf, axes):
        where = sharding(mesh, ("repeats", "layers", *axes[1:]))
        shape = (1, 2, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

    abstract["layers"] = jax.tree.map(
        in_stages, abstract["layers"], decoder.axes["layers"]
    )
    loaded = load_hf_parameters(source, abstract, "HF_DIR")
    gate = loaded["layers"]["mlp"]["gate"]
    assert {shard.data.shape for shard in gate.addressable_shards} == {
        (1, 1, 4, 16, 12)
    }
    equal(plain, loaded)
    fields = read_object(source / "config.json")
    export_parameters(
        tmp_path, loaded, "deepseek_v3", model_keys(fields, ""), dtype="float32"
    )
    equal(tensors_of(source), tensors_of(tmp_path))


def test_a_model_in_bfloat16_is_read_bit_by_bit_and_written_but_for_experts_biases(
    tmp_path,
):
    source = save("deepseek_v3", tmp_path / "source", dtype="bfloat16")
    wide = {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)
    }
    rewrite(
        source,
        lambda tensors: {
            n: x if n in wide else x.astype(jnp.bfloat16) for n, x in tensors.items()
        },
    )
    _, params = load(source, dtype="bfloat16")
    assert params["layers"]["mlp"]["up"].dtype == jnp.bfloat16
    fields = read_object(source / "config.json")
    export_parameters(
        tmp_path, params, "deepseek_v3", model_keys(fields, ""), dtype="bfloat16"
    )
    exported = tensors_of(tmp_path)
    assert {name for name, x in exported.items() if x.dtype == np.float32} == wide
    equal(tensors_of(source), exported)


@pytest.fixture
def llama(tmp_path):
    return save("llama", tmp_path / "llama")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: {n: x for n, x in t.items() if "0.mlp.up" not in n},
            "lacks .*model.layers.0.mlp.up_proj.weight",
        ),
        (
            lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"},
            "lm_head.weight.*tie_word_embeddings=true",
        ),
        (
            lambda t: t | {"model.layers.3.input_layernorm.weight": np.zeros(32)},
            "no place .*model.layers.3.input_lay",
        ),
        (
            lambda t: t | {NORM: np.zeros(31, np.float32)},
            rf"{NORM} is \[31\], not \[32\]",
        ),
        (
            lambda t: t | {NORM: np.append(np.zeros(31), -np.inf).astype(jnp.bfloat16)},
            f"model.safetensors: {NORM} ",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, named, llama):
    rewrite(llama, change)
    with pytest.raises(UserError, match=named) as refusal:
        load(llama, fsdp=2, tensor=2)
    assert len(refusal.value.problems) == 1
    assert str(llama) in str(refusal.value)


def test_a_checkpoint_without_the_prefix_or_with_what_is_no_tensor_of_another_model_is_the_same(
    tmp_path,
):
    """Buffers, empty tensors, as transformers stores shared experts that there are none of, and heads of further
    tokens of DeepSeek-V3 and ERNIE 4.5."""
    empty = {
        "model.layers.0.mlp.shared_experts.up_proj.weight": np.zeros(
            (0, 32), np.float32
        )
    }
    heads = dict.fromkeys(
        ("model.layers.3.eh_proj.weight", "model.mtp_linear_proj.0.weight"),
        np.zeros(4, np.float32),
    )
    for name, prefix, more in (
        ("gpt2", "transformer.", {"h.0.attn.bias": np.zeros(4, np.float32)}),
        (
            "llama-biases-tied-llama3",
            "model.",
            {"layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)},
        ),
        ("llama", "", empty),
        ("deepseek_v3", "", heads),
    ):
        first, second = (
            save(name, tmp_path / name),
            save(name, tmp_path / f"{name}-other"),
        )
        rewrite(
            second,
            lambda tensors, prefix=prefix, more=more: {
                **{path.removeprefix(prefix): x for path, x in tensors.items()},
                **more,
            },
        )
        equal(load(first)[1], load(second)[1])


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_a_tied_model_may_store_its_table_twice_or_only_its_head_but_not_another_one(
    name, tmp_path
):
    whole, headed = save(name, tmp_path / "whole"), save(name, tmp_path / "headed")
    table = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
    rewrite(headed, lambda tensors: tensors | {"lm_head.weight": tensors.pop(table)})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        headed, attn_implementation="eager"
    ).eval()
    assert_array_equal(logits(theirs, TOKENS), logits(model(name), TOKENS))
    expected = load(whole)[1]
    equal(expected, load(headed)[1])
    rewrite(whole, lambda tensors: tensors | {"lm_head.weight": tensors[table].copy()})
    equal(expected, load(whole)[1])
    rewrite(whole, lambda tensors: tensors | {"lm_head.weight": tensors[table] + 1})
    with pytest.raises(UserError, match=rf"lm_head\.weight is not {table}"):
        load(whole)


def test_a_model_of_another_size_than_its_files_or_the_decoder_is_refused(llama):
    fields = read_object(llama / "config.json")
    other = save("llama", llama.parent / "other", intermediate_size=40)
    decoder = make_decoder(hf_config(other), "cpu")
    with pytest.raises(
        UserError,
        match=r"layers/mlp/down is \(3, 48, 32\) there and \(3, 40, 32\) here",
    ):
        load_hf_parameters(llama, decoder.abstract_params, "HF_DIR")
    (llama / "config.json").write_text(
        json.dumps(fields | {"num_hidden_layers": 9_999})
    )
    with pytest.raises(
        UserError, match=r"30 tensors.*89,994"
    ):  # before its tensors are named
        load(llama)
