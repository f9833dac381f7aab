"""Adapters are PEFT's, in and out: what they add to transformers' model is what ours add; experts' are refused."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import safetensors.numpy

from maxtext_lite.config import UserError
from maxtext_lite.config.hf.adapter import adapter_of
from maxtext_lite.config.hf.config import model_keys
from maxtext_lite.config.hf.model_directory import directory_config
from maxtext_lite.config.json_file import read_object
from maxtext_lite.generation.sampler import load_on_mesh
from maxtext_lite.hf import export_adapters, flat, read_peft_adapters
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
    return plain, decoder, adapters, decoder.joined(adapters, params)


def shapes_of(decoder):
    """Of the parameters without adapters."""
    params = decoder.abstract_params
    return {
        path: leaf.shape
        for path, leaf in flat(
            decoder.frozen(params) if decoder.shape.lora else params
        ).items()
    }


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
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for path, x in one.items():
        np.testing.assert_array_equal(x, other[path], err_msg=path)


def with_adapters_of(theirs, out, scale=None):
    """The model's weights with scale x lora_B lora_A added, module by module, as PEFT's documents define the files."""
    about = json.loads((out / "adapter_config.json").read_text())
    tensors = safetensors_torch.load_file(out / "adapter_model.safetensors")
    weights, changed = theirs.state_dict(), {}
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        (target,) = [
            target
            for target in about["target_modules"]
            if module.endswith(f".{target}")
        ]
        rank = about["rank_pattern"].get(target, about["r"])
        alpha = about["alpha_pattern"].get(target, about["lora_alpha"])
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        assert a.shape[0] == b.shape[1] == rank
        delta = (scale or alpha / rank) * (b @ a)
        changed[f"{module}.weight"] = weights[f"{module}.weight"] + (
            delta.T if about["fan_in_fan_out"] else delta
        )
    assert len(tensors) == 2 * sum(
        bool(re.search(f"\\.({'|'.join(about['target_modules'])})$", name))
        for name, _ in theirs.named_modules()
    )
    return torch.func.functional_call, changed


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_add_in_transformers_what_they_add_here_and_are_read_back(
    name, tmp_path
):
    directory = save(name, tmp_path / "base")
    _, decoder, adapters, params = adapted(directory, TARGETS[name])
    export(directory, tmp_path / "adapters", decoder, adapters)
    ours = logits_of(decoder, params)[0]
    assert np.abs(ours - logits(model(name), TOKENS)).max() > 0.1 * np.abs(ours).max()
    call, changed = with_adapters_of(model(name), tmp_path / "adapters")
    with torch.no_grad():
        theirs = call(model(name), changed, (torch.tensor([TOKENS]),)).logits[0].numpy()
    np.testing.assert_allclose(theirs, ours, atol=1e-5 * np.abs(ours).max())
    found = adapter_of(tmp_path / "adapters")
    assert (found.rank, found.alpha) == (3, 6)
    assert_same(read_peft_adapters(found, shapes_of(decoder)), adapters)

    # Matrices that add nothing yet are read back as each weight's own too.
    new = jax.tree_util.tree_map_with_path(
        lambda path, x: x * (path[-1].key == "a"), adapters
    )
    export(directory, tmp_path / "new", decoder, new)
    assert_same(
        read_peft_adapters(adapter_of(tmp_path / "new"), shapes_of(decoder)), new
    )


def outside(directory, out, modules, *, rank, alpha, **fields):
    """An adapter as others write it, with one pair of matrices for each of a llama's or phi3's modules."""
    widths = {
        "qkv_proj": (32, 64),
        "gate_up_proj": (32, 96),
        "q_proj": (32, 32),
        "down_proj": (48, 32),
    }
    rng, tensors = np.random.default_rng(3), {}
    for layer in range(fields.pop("layers", 3)):
        for module in modules:
            path = f"base_model.model.model.layers.{layer}.{module}"
            num_in, num_out = widths[module.rpartition(".")[2]]
            for which, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                tensors[f"{path}.lora_{which}.weight"] = 0.2 * rng.standard_normal(
                    shape
                ).astype(np.float32)
    out.mkdir()
    safetensors.numpy.save_file(tensors, out / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(directory),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [module.rpartition(".")[2] for module in modules],
        "rank_pattern": {},
        "alpha_pattern": {},
        "fan_in_fan_out": False,
        "lora_dropout": 0.1,
        "bias": "none",
        "modules_to_save": None,
        **fields,
    }
    (out / "adapter_config.json").write_text(json.dumps(about))
    return out


def test_one_matrix_for_several_weights_is_each_ones(tmp_path):
    """Also one that is wider than r as an export's are, with the same scale."""
    directory = save("phi3", tmp_path / "base")
    modules = ["self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    ends = [module.rpartition(".")[2] for module in modules]
    out = outside(
        directory,
        tmp_path / "adapters",
        modules,
        rank=8,
        alpha=5,
        use_rslora=True,
        r=4,
        rank_pattern=dict.fromkeys(ends, 8),
        alpha_pattern=dict.fromkeys(ends, 5 * 2**0.5),
    )
    config = directory_config(out, "float32")
    # alpha / sqrt(r) = 2.5 = 20 / 8
    assert (config.lora_rank, config.lora_alpha) == (8, 20)
    targets = sorted(config.lora_targets.split(","))
    assert targets == ["down", "gate", "key", "query", "up", "value"]
    decoder, params, _ = load_on_mesh(out, config, {"fsdp": 2, "tensor": 2})
    call, changed = with_adapters_of(model("phi3"), out, scale=2.5)
    with torch.no_grad():
        found = call(model("phi3"), changed, (torch.tensor([TOKENS]),))
    theirs = found.logits[0].numpy()
    ours = logits_of(decoder, jax.tree.map(np.asarray, params))[0]
    np.testing.assert_allclose(ours, theirs, atol=5e-6 * np.abs(theirs).max())


def test_modules_have_ranks_scales_and_layers_of_their_own(tmp_path):
    """By PEFT's rules worked out by hand. What a narrower adapter is padded
    with never changes in training: both of its matrices are zero."""
    directory, out = save("llama", tmp_path / "base"), tmp_path / "adapters"
    ranks = {
        "q_proj": (2, 4),
        "down_proj": (5, 10),
        "v_proj": (3, 1.5),
    }  # with alpha; r=3 and lora_alpha=6 give 2
    ranks |= {"layers.2.self_attn.q_proj": (1, 6)}
    widths = {
        "q_proj": (32, 32),
        "v_proj": (32, 16),
        "down_proj": (48, 32),
        "up_proj": (32, 48),
    }
    rng, tensors, changed = np.random.default_rng(4), {}, {}
    weights = model("llama").state_dict()
    for layer, module in [
        (1, "self_attn.q_proj"),
        (2, "self_attn.q_proj"),
        (1, "mlp.down_proj"),
        (1, "mlp.up_proj"),
        (2, "mlp.up_proj"),
        (2, "self_attn.v_proj"),
    ]:
        path, end = f"model.layers.{layer}.{module}", module.rpartition(".")[2]
        rank, alpha = ranks.get(f"layers.{layer}.{module}", ranks.get(end, (3, 6)))
        a, b = (
            0.2 * rng.standard_normal(shape).astype(np.float32)
            for shape in ((rank, widths[end][0]), (widths[end][1], rank))
        )
        tensors |= {
            f"base_model.model.{path}.lora_A.weight": a,
            f"base_model.model.{path}.lora_B.weight": b,
        }
        changed[f"{path}.weight"] = weights[
            f"{path}.weight"
        ] + alpha / rank * torch.from_numpy(b @ a)
    out.mkdir()
    safetensors.numpy.save_file(tensors, out / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(directory),
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
        "layers_to_transform": [1, 2],
        "exclude_modules": r".*layers\.(2\.mlp\.down_proj|1\..*v_proj)",
        "rank_pattern": {r"layers\.2\..*q_proj": 1, "q_proj": 2, "down_proj": 5},
        "alpha_pattern": {
            r"layers\.2\..*q_proj": 6,
            "self_attn.q_proj": 4,
            "down_proj": 10,
            "v_proj": 1.5,
        },
        "fan_in_fan_out": False,
        "bias": "none",
    }
    (out / "adapter_config.json").write_text(json.dumps(about))
    config = directory_config(out, "float32")
    assert (config.lora_rank, config.lora_alpha) == (5, 10)
    decoder, params, _ = load_on_mesh(out, config, {"fsdp": 2})
    with torch.no_grad():
        of_all = torch.func.functional_call(
            model("llama"), changed, (torch.tensor([TOKENS]),)
        )
    theirs = of_all.logits[0].numpy()
    params = jax.tree.map(np.asarray, params)
    np.testing.assert_allclose(
        logits_of(decoder, params)[0], theirs, atol=5e-6 * np.abs(theirs).max()
    )

    adapters = flat(read_peft_adapters(adapter_of(out), shapes_of(decoder)))
    for path in (path for path in adapters if path.endswith("/a")):
        a, b = adapters[path], adapters[path.removesuffix("a") + "b"]
        unused = (a == 0).all(axis=tuple(range(1, a.ndim - 1)))  # [L, r]
        assert unused.any()
        assert not b[unused].any(), path


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layers": 2}, "no matrices for model.layers.2.mlp.down_proj"),
        (
            {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 8}},
            r"is \[3, 32\] .*\[6, 32\]",
        ),
    ],
)
def test_matrices_that_do_not_fit_the_model_are_refused_by_name(
    fields, named, tmp_path
):
    directory = save("llama", tmp_path / "base")
    modules, given = ["self_attn.q_proj", "mlp.down_proj"], {"rank": 3, "alpha": 4}
    shapes = shapes_of(load(directory)[0])
    fitting = adapter_of(outside(directory, tmp_path / "fitting", modules, **given))
    assert read_peft_adapters(fitting, shapes)["layers"]["mlp"]["down"]["a"].shape == (
        3,
        48,
        3,
    )
    found = adapter_of(
        outside(directory, tmp_path / "adapters", modules, **given, **fields)
    )
    with pytest.raises(UserError, match=named):
        read_peft_adapters(found, shapes)


def test_experts_adapters_are_refused(tmp_path):
    directory = save("mixtral", tmp_path / "base")
    _, decoder, adapters, _ = adapted(directory, LLAMA)
    with pytest.raises(UserError, match=r"lora_targets=query.*merge_lora=true"):
        export(directory, tmp_path / "adapters", decoder, adapters)
