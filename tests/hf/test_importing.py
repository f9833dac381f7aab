"""Imported models have transformers' logits, on any mesh; what does not fit is refused by name."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from maxtext_lite.config import UserError
from maxtext_lite.config.hf.config import model_keys
from maxtext_lite.config.hf.fields import same_architecture
from maxtext_lite.config.hf.model_directory import hf_config
from maxtext_lite.config.json_file import read_object
from maxtext_lite.hf import load_hf_parameters
from maxtext_lite.parallel import MESH_AXES, make_mesh, sharding, tree_shardings
from maxtext_lite.training.state import make_decoder
from tests.hf_models import MODELS, logits, model, save, transformers

TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 96, 16)]
# One row is a document; the other has two, of 9 and 4 tokens, and then padding.
ROWS = np.array([TOKENS, [*TOKENS[:9], *TOKENS[3:7], 0, 0, 0]], np.int32)
SEGMENTS = np.array([[1] * 16, [1] * 9 + [2] * 4 + [0] * 3], np.int32)
POSITIONS = np.array([range(16), [*range(9), *range(4), *range(3)]], np.int32)


def load(directory, *, dtype="float32", **mesh_sizes):
    """The decoder of a directory and its parameters on a mesh."""
    config = hf_config(directory, [f"dtype={dtype}"])
    decoder = make_decoder(config.model_copy(update={"attention": "dot_product"}), "cpu")
    sizes = dict.fromkeys(MESH_AXES, 1) | mesh_sizes
    mesh = make_mesh(sizes, dict.fromkeys(MESH_AXES, 1), jax.devices()[: int(np.prod(list(sizes.values())))])
    abstract = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        decoder.abstract_params,
        tree_shardings(mesh, decoder.axes),
    )
    return decoder, load_hf_parameters(directory, abstract, "HF_DIR")


def logits_of(decoder, params):
    def both(params):
        return decoder.logits(params, decoder.hidden(params, ROWS, SEGMENTS, POSITIONS))

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(both)(params))


@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_has_the_logits_of_transformers(name, tmp_path):
    decoder, params = load(save(name, tmp_path), fsdp=2, tensor=2, data=2)
    ours = logits_of(decoder, jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params))
    theirs = model(name)
    largest = np.abs(logits(theirs, TOKENS)).max()
    documents = [(ours[0], TOKENS), (ours[1, :9], TOKENS[:9]), (ours[1, 9:13], TOKENS[3:7])]
    for got, document in documents:
        logits(theirs, TOKENS[:1])  # dynamic rotation forgets what it has seen when it sees a short text
        np.testing.assert_allclose(got, logits(theirs, document), atol=1e-5 * largest)


@pytest.mark.parametrize("name", MODELS)
def test_config_json_of_transformers_4_and_5_is_the_same_model(name, tmp_path):
    new, old = (read_object(save(name, tmp_path / str(old), old=old) / "config.json") for old in (False, True))
    assert "rope_parameters" in new or name == "gpt2"
    assert "rope_parameters" not in old
    assert same_architecture(model_keys(new, "new"), model_keys(old, "old")) == []


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_oss", "deepseek_v3"])
def test_the_mesh_does_not_change_a_parameter(name, tmp_path):
    save(name, tmp_path)
    one, eight = load(tmp_path)[1], load(tmp_path, fsdp=2, tensor=2, expert=2)[1]
    assert jax.tree.structure(one) == jax.tree.structure(eight)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
        np.testing.assert_array_equal(x, y)


def test_layers_split_over_pipeline_stages_are_the_same_layers(tmp_path):
    decoder, plain = load(save("deepseek_v3", tmp_path))  # a dense layer, and two with experts
    mesh = make_mesh(
        dict.fromkeys(MESH_AXES, 1) | {"stage": 2, "fsdp": 2}, dict.fromkeys(MESH_AXES, 1), jax.devices()[:4]
    )

    def in_stages(leaf, axes):
        return jax.ShapeDtypeStruct(
            (1, 2, *leaf.shape[1:]), leaf.dtype, sharding=sharding(mesh, ("repeats", "layers", *axes[1:]))
        )

    whole = decoder.abstract_params
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(mesh)), whole)
    abstract["layers"] = jax.tree.map(in_stages, whole["layers"], decoder.axes["layers"])
    loaded = load_hf_parameters(tmp_path, abstract, "HF_DIR")
    gate = loaded["layers"]["mlp"]["gate"]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(1, 1, 4, 16, 12)}
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(one, np.asarray(other).reshape(one.shape))


def test_each_device_has_its_part_and_no_more(tmp_path):
    _, params = load(save("llama", tmp_path), fsdp=2, tensor=2, data=2)
    query = params["layers"]["attention"]["query"]  # [L, D, N, H]: D over fsdp, N over tensor
    assert query.shape == (3, 32, 4, 8)
    assert {shard.data.shape for shard in query.addressable_shards} == {(3, 16, 2, 8)}
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    for shard in query.addressable_shards:
        layers = [stored[f"model.layers.{layer}.self_attn.q_proj.weight"].reshape(4, 8, 32) for layer in range(3)]
        whole = np.stack([layer.transpose(2, 0, 1) for layer in layers])
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def test_a_model_in_bfloat16_is_read_bit_by_bit(tmp_path):
    save("qwen2", tmp_path, dtype="bfloat16")
    rewrite(tmp_path, lambda tensors: {name: x.astype(jnp.bfloat16) for name, x in tensors.items()})
    config = hf_config(tmp_path)
    assert (config.dtype, config.weight_dtype) == ("bfloat16", "bfloat16")
    _, params = load(tmp_path, dtype="bfloat16")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    up = params["layers"]["mlp"]["up"]
    assert up.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(up[1]), stored["model.layers.1.mlp.up_proj.weight"].T)


@pytest.fixture
def llama(tmp_path):
    return save("llama", tmp_path / "llama")


def rewrite(directory, change):
    """Changes the tensors of a directory."""
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(change(tensors), path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: {n: x for n, x in t.items() if "0.mlp.up" not in n},
     "HF_DIR={0} lacks tensors of the model: model.layers.0.mlp.up_proj.weight."),
    (lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"},
     "HF_DIR={0} lacks tensors of the model: lm_head.weight. If the embedding table is also the head, set "
     "tie_word_embeddings=true in its config.json."),
    (lambda t: t | {"model.layers.0.surprise": np.zeros(3, np.float32)},
     "HF_DIR={0} has tensors that the model has no place for: model.layers.0.surprise."),
    (lambda t: t | {"model.layers.3.input_layernorm.weight": np.zeros(32, np.float32)},
     "HF_DIR={0} has tensors that the model has no place for: model.layers.3.input_layernorm.weight."),
    (lambda t: t | {"model.norm.weight": np.zeros(31, np.float32)},
     "HF_DIR={0} has tensors of other shapes than config.json says: model.norm.weight is [31], not [32]."),
    (lambda t: t | {"model.norm.weight": np.zeros(32, np.int8)},
     "HF_DIR={0} has tensors that are none of F64, F32, F16, BF16: model.norm.weight is I8."),
    (lambda t: {n: x for n, x in t.items() if "layernorm" not in n and "mlp" not in n},
     "HF_DIR={0} lacks tensors of the model: model.layers.0.input_layernorm.weight, "
     "model.layers.1.input_layernorm.weight, model.layers.2.input_layernorm.weight, "
     "model.layers.0.post_attention_layernorm.weight, model.layers.1.post_attention_layernorm.weight, "
     "model.layers.2.post_attention_layernorm.weight, model.layers.0.mlp.down_proj.weight, "
     "model.layers.1.mlp.down_proj.weight, model.layers.2.mlp.down_proj.weight, "
     "model.layers.0.mlp.gate_proj.weight, and 5 more."),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_named(change, message, llama):
    rewrite(llama, change)
    with pytest.raises(UserError) as refusal:
        load(llama)
    assert refusal.value.problems == (message.format(llama),)


def test_an_empty_tensor_is_no_tensor_of_another_model(llama):
    """As transformers stores shared experts that there are none of."""
    rewrite(llama, lambda tensors: tensors | {"model.layers.0.mlp.shared_experts.up_proj.weight": np.zeros((0, 32))})
    load(llama)


def test_of_several_files_that_with_the_tensor_is_named(llama):
    other = {"model.layers.0.surprise": np.zeros(3), "model.norm.weight": np.zeros(31)}
    rewrite(llama, lambda tensors: {name: x for name, x in tensors.items() if name not in other})
    (llama / "model.safetensors").rename(llama / "model-1.safetensors")
    safetensors.numpy.save_file(other, llama / "model-2.safetensors")
    with pytest.raises(UserError) as refusal:
        load(llama)
    assert refusal.value.problems == (
        f"HF_DIR={llama} has tensors that the model has no place for: model.layers.0.surprise of model-2.safetensors.",
        f"HF_DIR={llama} has tensors of other shapes than config.json says: model.norm.weight of model-2.safetensors "
        "is [31], not [32].",
    )


def test_blocks_of_mxfp4_are_refused_by_name(tmp_path):
    save("gpt_oss", tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def quantized(tensors):
        del tensors[name]
        return tensors | {f"{name}_blocks": np.zeros(4, np.uint8), f"{name}_scales": np.zeros(4, np.uint8)}

    rewrite(tmp_path, quantized)
    with pytest.raises(UserError, match=f"{name}_blocks, {name}_scales"):
        load(tmp_path)


def test_a_checkpoint_without_the_prefix_or_with_buffers_is_the_same(tmp_path):
    for name, prefix, buffer in (
        ("gpt2", "transformer.", "h.0.attn.bias"),
        ("llama-biases-tied-llama3", "model.", "layers.0.self_attn.rotary_emb.inv_freq"),
    ):
        first, second = save(name, tmp_path / name), save(name, tmp_path / f"{name}-bare")
        rewrite(second, lambda tensors, prefix=prefix, buffer=buffer: {
            **{path.removeprefix(prefix): x for path, x in tensors.items()}, buffer: np.zeros(4, np.float32)
        })  # fmt: skip
        for one, other in zip(jax.tree.leaves(load(first)[1]), jax.tree.leaves(load(second)[1]), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_tied_model_may_store_its_table_twice_but_not_another_one(tmp_path):
    directory = save("gemma2", tmp_path)
    table = safetensors.numpy.load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(directory, lambda tensors: tensors | {"lm_head.weight": table.copy()})
    load(directory)
    rewrite(directory, lambda tensors: tensors | {"lm_head.weight": table + 1})
    with pytest.raises(UserError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        load(directory)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_a_tied_model_that_stores_only_its_head_is_read_as_transformers_reads_it(name, tmp_path):
    whole, headed = save(name, tmp_path / "whole"), save(name, tmp_path / "headed")
    table = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
    rewrite(headed, lambda tensors: tensors | {"lm_head.weight": tensors.pop(table)})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(headed, attn_implementation="eager").eval()
    np.testing.assert_array_equal(logits(theirs, TOKENS), logits(model(name), TOKENS))
    for one, other in zip(jax.tree.leaves(load(whole)[1]), jax.tree.leaves(load(headed)[1]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("value", "dtype", "kind"), [
    (np.nan, np.float32, "NaN or infinite numbers"), (-np.inf, np.float32, "NaN or infinite numbers"),
    (np.nan, jnp.bfloat16, "NaN or infinite numbers"), (np.inf, np.float16, "NaN or infinite numbers"),
    (1e300, np.float64, "numbers beyond those of float32"),
])  # fmt: skip
def test_numbers_that_are_none_are_refused_with_their_tensor_and_file(value, dtype, kind, llama):
    damaged = ("model.layers.1.mlp.down_proj.weight", "model.norm.weight")

    def change(tensors):
        changed = {name: tensors[name].astype(dtype) for name in damaged}
        for x in changed.values():
            x.reshape(-1)[-3] = value
        return tensors | changed

    rewrite(llama, change)
    with pytest.raises(UserError) as refusal:
        load(llama, fsdp=2, tensor=2)
    assert sorted(refusal.value.problems) == [
        f"{llama / 'model.safetensors'}: {name} holds {kind}: it is damaged, or was saved from a run that had diverged."
        for name in sorted(damaged)
    ]


def test_what_one_host_refuses_all_refuse(llama, monkeypatch):
    told = []

    def exchange(problems):
        told.append(problems)
        return [problems, ["there/model.safetensors: x holds NaN or infinite numbers."]]

    monkeypatch.setattr("maxtext_lite.hf.importing.exchange", exchange)
    with pytest.raises(UserError, match=r"^there/model"):
        load(llama)
    (llama / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError) as refusal:
        load(llama)
    assert len(refusal.value.problems) == 2
    assert told[0] == []


def test_a_model_far_larger_than_its_files_is_refused_before_its_tensors_are_named(llama):
    fields = json.loads((llama / "config.json").read_text()) | {"num_hidden_layers": 9_999}
    (llama / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"has 30 tensors, where the model of its config\.json has 89,994\."):
        load(llama)


def test_the_heads_for_further_tokens_are_passed_over_with_a_message(tmp_path, capsys):
    directory = save("deepseek_v3", tmp_path)
    heads = ("model.layers.3.eh_proj.weight", "model.mtp_linear_proj.0.weight")  # of DeepSeek-V3, of ERNIE 4.5
    rewrite(directory, lambda tensors: tensors | dict.fromkeys(heads, np.zeros(4, np.float32)))
    load(directory)
    assert "2 tensors of heads for further tokens are left out" in capsys.readouterr().err


def test_a_decoder_of_another_size_is_refused(llama):
    fields = json.loads((llama / "config.json").read_text())
    other = llama.parent / "other"
    shutil.copytree(llama, other)
    (other / "config.json").write_text(json.dumps(fields | {"intermediate_size": 40}))
    decoder = make_decoder(hf_config(other), "cpu")
    with pytest.raises(UserError, match=r"parameter layers/mlp/down is \(3, 48, 32\) there and \(3, 40, 32\) here"):
        load_hf_parameters(llama, decoder.abstract_params, "HF_DIR")
