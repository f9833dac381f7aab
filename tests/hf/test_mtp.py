"""Multi-token prediction of published checkpoints: transformers' logits, each document alone, and every bit written
back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from numpy.testing import assert_allclose, assert_array_equal

from maxtext_lite.config import UserError
from maxtext_lite.config.weights import MTP_LAYERS
from maxtext_lite.hf.model_directory import hf_config
from maxtext_lite.hf.weights import export_model, load_hf_parameters
from maxtext_lite.models import Stream
from maxtext_lite.training.loss import tokens_ahead
from maxtext_lite.training.objective import with_ahead
from maxtext_lite.training.state import make_decoder
from tests.hf.test_importing import POSITIONS, ROWS, SEGMENTS, equal, tensors_of
from tests.hf_models import model, save, torch
from tests.meshes import abstract_parameters, mesh_of

MtpModel = pytest.importorskip("transformers.modeling_layers").MtpModel
LAYERS = 2


def heads_of(name):
    """transformers' layers for a model, random."""
    theirs = model(name)
    heads = MtpModel(theirs, LAYERS).eval()
    values = torch.Generator().manual_seed(1)
    for path, parameter in [*heads.named_parameters(), *heads.named_buffers()]:
        if path.startswith("layers.") and not path.endswith("inv_freq"):
            noise = torch.randn(parameter.shape, generator=values)
            parameter.data.copy_(0.15 * noise + path.endswith("norm.weight"))
    return theirs, heads


def published(theirs, heads):
    """Their tensors, by the names of published checkpoints."""
    first = theirs.config.num_hidden_layers
    found = {}
    for path, value in heads.state_dict().items():
        if not path.startswith("layers."):
            continue
        _, layer, rest = path.split(".", 2)
        below = f"model.layers.{first + int(layer)}."
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        value = value.numpy()
        for expert in range(len(value)):
            one = f"{below}mlp.experts.{expert}."
            if rest.endswith("experts.gate_up_proj"):
                gate, up = np.split(value[expert], 2)
                found[f"{one}gate_proj.weight"] = gate.copy()
                found[f"{one}up_proj.weight"] = up.copy()
            elif rest.endswith("experts.down_proj"):
                found[f"{one}down_proj.weight"] = value[expert].copy()
        if "experts." not in rest or "shared_experts" in rest:
            found[below + rest] = value
        shared = {
            "embed_tokens": theirs.get_input_embeddings(),
            "shared_head.head": theirs.lm_head,
        }
        for copy, module in shared.items():
            found[f"{below}{copy}.weight"] = module.weight.detach().numpy().copy()
    return found


def directory_of(name, out):
    theirs, heads = heads_of(name)
    save(name, out, num_nextn_predict_layers=LAYERS)
    tensors = tensors_of(out) | published(theirs, heads)
    safetensors.numpy.save_file(tensors, out / "model.safetensors")
    return theirs, heads


def load(directory, layers=LAYERS):
    words = ["dtype=float32", "attention=dot_product", f"mtp_num_layers={layers}"]
    decoder = make_decoder(hf_config(directory, words), "cpu")
    abstract = abstract_parameters(decoder, mesh_of(fsdp=2))
    return decoder, load_hf_parameters(directory, abstract, "HF_DIR")


def their_logits(theirs, heads, document):
    """The logits of each layer for one document alone; layer k ends k tokens before it."""
    tokens, found = torch.tensor([document]), []
    with torch.no_grad():
        hidden = theirs(tokens, output_hidden_states=True).hidden_states[-1]
        for layer in range(LAYERS):
            places = torch.arange(layer + 1, len(document))[None]
            hidden = heads.forward_layer(
                layer,
                hidden[:, : places.shape[1]],
                places,
                None,
                input_ids=tokens[:, layer + 1 :],
            )
            found.append(heads.shared_head(hidden)[0].numpy())
    return found


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_layers_of_a_checkpoint_have_transformers_logits_and_are_written_back_to_the_bit(
    name, tmp_path, capsys
):
    source, out = tmp_path / "source", tmp_path / "out"
    theirs, heads = directory_of(name, source)
    decoder, params = load(source)
    assert "ignored" not in capsys.readouterr().err
    batch = {"tokens": ROWS, "targets": ROWS, "segments": SEGMENTS}
    batch["weights"] = (SEGMENTS > 0).astype(np.float32)

    def states(params):
        x, aux = decoder.hidden_and_aux(params, ROWS, SEGMENTS, POSITIONS)
        rows = with_ahead({name: jnp.asarray(x) for name, x in batch.items()}, LAYERS)
        stream = Stream(x, SEGMENTS, POSITIONS, aux)
        ahead, _ = decoder.predict_ahead(params, stream, tokens_ahead(rows))
        return [decoder.logits(params, x) for x in ahead]

    with jax.default_matmul_precision("highest"):
        got = jax.device_get(jax.jit(states)(params))
    for row, first, end in ((0, 0, 16), (1, 0, 9), (1, 9, 13)):
        expected = their_logits(theirs, heads, [*map(int, ROWS[row, first:end])])
        for layer, want in enumerate(expected):
            part = got[layer][row, first : first + len(want)]
            assert_allclose(part, want, atol=2e-5 * np.abs(want).max(), rtol=0)

    fields = json.loads((source / "config.json").read_text())
    stated = fields | {"num_nextn_predict_layers": 9}
    written = export_model(out, params, stated, dtype="float32")
    assert written.keys() == params.keys()
    exported = json.loads((out / "config.json").read_text())
    assert exported["num_nextn_predict_layers"] == LAYERS
    before, after = tensors_of(source), tensors_of(out)
    assert before.keys() == after.keys()
    for tensor, x in before.items():
        assert_array_equal(after[tensor], x, err_msg=tensor)


def test_layers_are_passed_over_or_new_or_refused_each_in_a_line(tmp_path, capsys):
    directory_of("glm4_moe", tmp_path)
    whole = load(tmp_path)[1]
    capsys.readouterr()
    without, plain = load(tmp_path, 0)
    assert "predict further tokens are ignored" in capsys.readouterr().err
    equal(plain, {name: x for name, x in whole.items() if name != MTP_LAYERS})
    with pytest.raises(UserError, match=r"model\.layers\.4"):
        load(tmp_path, 3)
    tensors = tensors_of(tmp_path)
    copy = "model.layers.3.shared_head.head.weight"
    changed = tensors | {copy: tensors[copy] + 1}
    safetensors.numpy.save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{copy}.*mtp_num_layers=0"):
        load(tmp_path)
    bare = {
        name: x
        for name, x in tensors.items()
        if not name.startswith(("model.layers.2.", "model.layers.3."))
    }
    safetensors.numpy.save_file(bare, tmp_path / "model.safetensors")
    decoder, params = load(tmp_path)
    assert "multi-token prediction are new" in capsys.readouterr().err
    key = jax.random.key(3)
    new, made = decoder.init(key), decoder.with_adapters(params, key)
    equal(made[MTP_LAYERS], new.pop(MTP_LAYERS))
    equal(new, without.init(key))  # whose other parameters are drawn alike
    equal({name: x for name, x in made.items() if name != MTP_LAYERS}, plain)
