"""Exported adapters are PEFT's: what they add to transformers' model is what ours add; experts' are refused."""

import json
import re

import jax
import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.config.hf.config import model_keys
from maxtext_lite.config.json_file import read_object
from maxtext_lite.hf import export_adapters, flat
from maxtext_lite.models import Decoder, Lora, merged
from maxtext_lite.models.decoder import DecoderShape
from tests.hf.test_importing import TOKENS, load, logits_of
from tests.hf_models import logits, model, save

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

LLAMA = ("query", "key", "value", "out", "gate", "up", "down")
TARGETS = {
    "llama": LLAMA,
    "gemma2": ("query", "down"),
    "phi3": ("query", "value", "out", "gate", "down"),  # parts of qkv_proj and of gate_up_proj
    "gpt2": ("query", "key", "value", "out", "up", "down"),  # linear modules the other way round
    "mixtral": ("query", "key", "value", "out"),
    "deepseek_v3": ("query_down", "query_up", "kv_down", "key_up", "value_up", "out"),  # rotated dims in pairs
}


def adapted(directory, targets):
    """A decoder with random adapters of rank 3 beside imported parameters, its adapters, and all parameters."""
    plain, params = load(directory)
    lora = Lora(3, 6.0, targets)
    shape: DecoderShape = plain.shape
    decoder = Decoder(type(shape)(**{**vars(shape), "lora": lora}))
    adapters = decoder.trained(decoder.with_adapters(params, jax.random.key(1)))
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: np.asarray(0.1 * rng.standard_normal(x.shape), np.float32), adapters)
    return plain, decoder, adapters, decoder.joined(adapters, params)


def export(directory, out, decoder, adapters):
    fields = read_object(directory / "config.json")
    kind, keys = fields["model_type"], model_keys(fields, "")
    shapes = {path: leaf.shape for path, leaf in flat(decoder.frozen(decoder.abstract_params)).items()}
    export_adapters(out, adapters, decoder.shape.lora, kind, keys, shapes=shapes, base=str(directory))


def with_adapters_of(theirs, out):
    """The model's weights with scale x lora_B lora_A added, module by module, as PEFT's documents define the files."""
    about = json.loads((out / "adapter_config.json").read_text())
    tensors = safetensors_torch.load_file(out / "adapter_model.safetensors")
    weights, changed = theirs.state_dict(), {}
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        (target,) = [target for target in about["target_modules"] if module.endswith(f".{target}")]
        rank = about["rank_pattern"].get(target, about["r"])
        alpha = about["alpha_pattern"].get(target, about["lora_alpha"])
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        assert a.shape[0] == b.shape[1] == rank
        delta = alpha / rank * (b @ a)
        changed[f"{module}.weight"] = weights[f"{module}.weight"] + (delta.T if about["fan_in_fan_out"] else delta)
    assert len(tensors) == 2 * sum(bool(re.search(f"\\.({'|'.join(about['target_modules'])})$", name))
                                   for name, _ in theirs.named_modules())  # fmt: skip
    return torch.func.functional_call, changed


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_add_in_transformers_what_they_add_here(name, tmp_path):
    directory = save(name, tmp_path / "base")
    plain, decoder, adapters, params = adapted(directory, TARGETS[name])
    export(directory, tmp_path / "adapters", decoder, adapters)
    ours = logits_of(decoder, params)[0]
    assert np.abs(ours - logits(model(name), TOKENS)).max() > 0.1 * np.abs(ours).max()
    np.testing.assert_allclose(logits_of(plain, merged(params))[0], ours, atol=1e-5 * np.abs(ours).max())
    call, changed = with_adapters_of(model(name), tmp_path / "adapters")
    with torch.no_grad():
        theirs = call(model(name), changed, (torch.tensor([TOKENS]),)).logits[0].numpy()
    np.testing.assert_allclose(theirs, ours, atol=1e-5 * np.abs(ours).max())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # between the library and transformers
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_peft_loads_them(name, tmp_path):
    """Where the library is installed, which nothing else needs."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    directory = save(name, tmp_path / "base")
    _, decoder, adapters, params = adapted(directory, TARGETS[name])
    export(directory, tmp_path / "adapters", decoder, adapters)
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    ours = logits_of(decoder, params)[0]
    np.testing.assert_allclose(logits(theirs, TOKENS), ours, atol=1e-5 * np.abs(ours).max())


def test_experts_adapters_are_refused(tmp_path):
    directory = save("mixtral", tmp_path / "base")
    _, decoder, adapters, _ = adapted(directory, LLAMA)
    with pytest.raises(UserError, match=r"lora_targets=query.* adapts experts.*merge_lora=true"):
        export(directory, tmp_path / "adapters", decoder, adapters)
