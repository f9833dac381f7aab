"""Adapters are PEFT's, in and out: what they add to transformers' model is what ours add; experts' are refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.config import UserError
from maxtext_lite.config.json_file import read_object
from maxtext_lite.hf.adapter import adapter_of
from maxtext_lite.hf.config_json import model_keys
from maxtext_lite.hf.model_directory import directory_config
from maxtext_lite.hf.names import flat
from maxtext_lite.hf.peft import export_adapters, read_peft_adapters
from maxtext_lite.inference.sampler import load_on_mesh
from maxtext_lite.models import Decoder, Lora
from tests.hf.test_importing import TOKENS, load, logits_of
from tests.hf_models import logits, model, save

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

LLAMA = ("query", "key", "value", "out", "gate", "up", "down")
TARGETS = {
    "llama": LLAMA,
    "phi3": (
        "query",
        "value",
        "out",
        "gate",
        "down",
    ),  # parts of qkv_proj and of gate_up_proj
    "gpt2": (
        "query",
        "key",
        "value",
        "out",
        "up",
        "down",
    ),  # linear modules the other way round
    "deepseek_v3": (
        "query_down",
        "query_up",
        "kv_down",
        "key_up",
        "value_up",
        "out",
    ),  # rotated dims in pairs
    "gemma4-shared": (
        "query",
        "key",
        "out",
        "gate",
        "per_layer_input_gate",
    ),  # stacks of other sizes, and layers without keys
}


def adapted(directory, targets):
    """A decoder with random adapters of rank 3 beside imported parameters, its adapters, and all parameters."""
    plain, params = load(directory)
    decoder = Decoder(dataclasses.replace(plain.shape, lora=Lora(3, 6.0, targets)))
    adapters = decoder.trained(decoder.with_adapters(params, jax.random.key(1)))
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda x: np.asarray(0.1 * rng.standard_normal(x.shape), np.float32), adapters
    )
    return decoder, adapters, decoder.joined(adapters, params)


def shapes_of(decoder):
    """Of the parameters without adapters."""
    params = decoder.abstract_params
    params = decoder.frozen(params) if decoder.shape.lora else params
    return {path: leaf.shape for path, leaf in flat(params).items()}


def export(directory, out, decoder, adapters):
    fields = read_object(directory / "config.json")
    kind, keys = fields["model_type"], model_keys(fields, "")
    export_adapters(
        out,
        adapters,
        decoder.shape.lora,
        kind,
        keys,
        shapes=shapes_of(decoder),
        base=str(directory),
    )


def assert_same(one, other):
    assert flat(one).keys() == flat(other).keys()
    jax.tree.map(assert_array_equal, one, other)


def logits_with(name, out, scale_of):
    """Of a model with the scale of its module and rank x lora_B lora_A added to each weight, as PEFT documents it."""
    tensors = safetensors_torch.load_file(out / "adapter_model.safetensors")
    is_transposed = read_object(out / "adapter_config.json")["fan_in_fan_out"]
    theirs, changed = model(name), {}
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        delta = scale_of(module, len(a)) * (b @ a)
        weight = theirs.get_submodule(module).weight
        changed[f"{module}.weight"] = weight + (delta.T if is_transposed else delta)
    with torch.no_grad():
        given = (torch.tensor([TOKENS]),)
        return torch.func.functional_call(theirs, changed, given).logits[0].numpy()


def stated_scale(about):
    def scale_of(module, rank):
        (target,) = [
            target
            for target in about["target_modules"]
            if module.endswith(f".{target}")
        ]
        assert rank == about["rank_pattern"].get(target, about["r"])
        return about["alpha_pattern"].get(target, about["lora_alpha"]) / rank

    return scale_of


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_add_in_transformers_what_they_add_here_and_are_read_back(
    name, tmp_path
):
    directory, out = save(name, tmp_path / "base"), tmp_path / "adapters"
    decoder, adapters, params = adapted(directory, TARGETS[name])
    export(directory, out, decoder, adapters)
    ours = logits_of(decoder, params)[0]
    assert np.abs(ours - logits(model(name), TOKENS)).max() > 0.1 * np.abs(ours).max()
    theirs = logits_with(
        name, out, stated_scale(read_object(out / "adapter_config.json"))
    )
    assert_allclose(theirs, ours, atol=1e-5 * np.abs(ours).max())
    found = adapter_of(out)
    assert (found.rank, found.alpha) == (3, 6)
    assert_same(read_peft_adapters(found, shapes_of(decoder)), adapters)

    # Matrices that add nothing yet are read back as each weight's own too.
    new = jax.tree_util.tree_map_with_path(
        lambda path, x: x * (path[-1].key == "a"), adapters
    )
    export(directory, tmp_path / "new", decoder, new)
    read = read_peft_adapters(adapter_of(tmp_path / "new"), shapes_of(decoder))
    assert_same(read, new)


def outside(name, path, ranks, **fields):
    """An adapter as others write it, with matrices of these ranks for modules of the layers."""
    directory, out = save(name, path / "base"), path / "adapters"
    rng, tensors = np.random.default_rng(3), {}
    for module, rank in ranks.items():
        weight = model(name).get_submodule(f"model.layers.{module}").weight
        num_out, num_in = weight.shape
        for which, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            key = f"base_model.model.model.layers.{module}.lora_{which}.weight"
            tensors[key] = 0.2 * rng.standard_normal(shape).astype(np.float32)
    out.mkdir()
    safetensors.numpy.save_file(tensors, out / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(directory),
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
        "fan_in_fan_out": False,
        "bias": "none",
    }
    (out / "adapter_config.json").write_text(json.dumps(about | fields))
    return out


def assert_adds(name, out, scale_of, *, rank, alpha):
    """What is read of an adapter has the model's logits with it; returns the decoder and its config."""
    config = directory_config(out, "float32")
    assert (config.lora_rank, config.lora_alpha) == (rank, alpha)
    decoder, params, _ = load_on_mesh(out, config, {"fsdp": 2, "tensor": 2})
    ours = logits_of(decoder, jax.tree.map(np.asarray, params))[0]
    theirs = logits_with(name, out, scale_of)
    assert_allclose(ours, theirs, atol=5e-6 * np.abs(theirs).max())
    return decoder, config


def test_one_matrix_for_several_weights_is_each_ones(tmp_path):
    """Also one that is wider than r as an export's are, with the same scale."""
    ends = ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
    modules = [f"{layer}.{end}" for layer in range(3) for end in ends]
    targets = [end.partition(".")[2] for end in ends]
    out = outside(
        "phi3",
        tmp_path,
        dict.fromkeys(modules, 8),
        use_rslora=True,
        r=4,
        lora_alpha=5,
        rank_pattern=dict.fromkeys(targets, 8),
        alpha_pattern=dict.fromkeys(targets, 5 * 2**0.5),
    )
    # alpha / sqrt(r) = 2.5 = 20 / 8
    _, config = assert_adds("phi3", out, lambda *_: 2.5, rank=8, alpha=20)
    targets = sorted(config.lora_targets.split(","))
    assert targets == ["down", "gate", "key", "query", "up", "value"]


def test_modules_have_ranks_scales_and_layers_of_their_own(tmp_path):
    """By PEFT's rules worked out by hand. What a narrower adapter is padded
    with never changes in training: both of its matrices are zero."""
    of_each = {  # rank, and alpha / rank
        "1.self_attn.q_proj": (2, 2),
        "2.self_attn.q_proj": (1, 6),
        "1.mlp.down_proj": (5, 2),
        "1.mlp.up_proj": (3, 2),
        "2.mlp.up_proj": (3, 2),
        "2.self_attn.v_proj": (3, 0.5),
    }
    of_second = r"layers\.2\..*q_proj"
    out = outside(
        "llama",
        tmp_path,
        {module: rank for module, (rank, _) in of_each.items()},
        r=3,
        lora_alpha=6,
        layers_to_transform=[1, 2],
        exclude_modules=r".*layers\.(2\.mlp\.down_proj|1\..*v_proj)",
        rank_pattern={of_second: 1, "q_proj": 2, "down_proj": 5},
        alpha_pattern={
            of_second: 6,
            "self_attn.q_proj": 4,
            "down_proj": 10,
            "v_proj": 1.5,
        },
    )
    decoder, _ = assert_adds(
        "llama",
        out,
        lambda module, rank: of_each[module.removeprefix("model.layers.")][1],
        rank=5,
        alpha=10,
    )
    adapters = flat(read_peft_adapters(adapter_of(out), shapes_of(decoder)))
    for path in (path for path in adapters if path.endswith("/a")):
        a, b = adapters[path], adapters[path.removesuffix("a") + "b"]
        unused = (a == 0).all(axis=tuple(range(1, a.ndim - 1)))  # [L, r]
        assert unused.any()
        assert not b[unused].any(), path


@pytest.mark.parametrize(
    ("lacking", "fields", "named"),
    [
        ("2.mlp.down_proj", {}, "no matrices for model.layers.2.mlp.down_proj"),
        ("", {"rank_pattern": {"q_proj": 6}}, r"is \[3, 32\] .*\[6, 32\]"),
    ],
)
def test_matrices_that_do_not_fit_the_model_are_refused_by_name(
    lacking, fields, named, tmp_path
):
    ends = ("self_attn.q_proj", "mlp.down_proj")
    modules = {f"{layer}.{end}" for layer in range(3) for end in ends} - {lacking}
    ranks = dict.fromkeys(sorted(modules), 3)
    out = outside("llama", tmp_path, ranks, r=3, lora_alpha=4, **fields)
    shapes = shapes_of(load(tmp_path / "base")[0])
    with pytest.raises(UserError, match=named):
        read_peft_adapters(adapter_of(out), shapes)


def test_experts_adapters_are_refused(tmp_path):
    directory = save("mixtral", tmp_path / "base")
    decoder, adapters, _ = adapted(directory, LLAMA)
    with pytest.raises(UserError, match=r"lora_targets=query.*merge_lora=true"):
        export(directory, tmp_path / "adapters", decoder, adapters)
