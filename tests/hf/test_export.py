"""What is exported, transformers reads: the same logits, whatever family and mesh."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from maxtext_lite.config.hf.config import config_json, model_keys
from maxtext_lite.config.hf.model_directory import hf_config
from maxtext_lite.config.json_file import read_object
from maxtext_lite.hf import export_parameters
from tests.hf.test_importing import TOKENS, load
from tests.hf_models import MODELS, logits, model, save

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def export(source, out, params, *, original, **how):
    """Exports parameters with the config.json that `original` makes of theirs."""
    fields = config_json(hf_config(source), max_position_embeddings=64, dtype="float32", original=original)
    out.mkdir()
    export_parameters(out, params, fields["model_type"], model_keys(fields, "config.json"), dtype="float32", **how)
    (out / "config.json").write_text(json.dumps(fields))
    return fields


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_an_exported_model_with_the_same_logits(name, tmp_path):
    source = save(name, tmp_path / "source", old=name in ("gemma3_text", "phi3"))
    _, params = load(source)
    original = read_object(source / "config.json")
    export(source, tmp_path / "carried", params, original=original)
    fresh = export(source, tmp_path / "fresh", params, original={"model_type": original["model_type"]})
    assert fresh["model_type"] == original["model_type"]
    expected = logits(model(name), TOKENS)
    for out in ("carried", "fresh"):
        read, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / out, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        np.testing.assert_allclose(logits(read.eval(), TOKENS), expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["phi3", "deepseek_v3"])
def test_tensors_are_those_that_were_imported_from_any_mesh_and_in_several_files(name, tmp_path):
    source = save(name, tmp_path / "source")
    _, params = load(source, fsdp=2, tensor=2, data=2)
    export(source, tmp_path / "out", params, original=read_object(source / "config.json"), file_bytes=30_000)
    imported = safetensors.numpy.load_file(source / "model.safetensors")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    exported = {tensor: x for file in files for tensor, x in safetensors.numpy.load_file(file).items()}
    assert exported.keys() == imported.keys()
    for tensor, x in imported.items():
        np.testing.assert_array_equal(exported[tensor], x, err_msg=tensor)


def test_experts_biases_stay_float32_in_a_model_in_bfloat16(tmp_path):
    source = save("deepseek_v3", tmp_path / "source")
    _, params = load(source)
    fields = read_object(source / "config.json")
    (tmp_path / "out").mkdir()
    export_parameters(tmp_path / "out", params, "deepseek_v3", model_keys(fields, ""), dtype="bfloat16")
    exported = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    formats = {name: str(x.dtype) for name, x in exported.items()}
    wide = {name for name, dtype in formats.items() if dtype == "float32"}
    assert wide == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    assert set(formats.values()) == {"float32", "bfloat16"}


def test_layers_split_over_pipeline_stages_are_exported_in_their_order(tmp_path):
    source = save("llama", tmp_path / "source")
    _, params = load(source)
    in_rounds = params | {"layers": jax.tree.map(lambda x: x.reshape(3, 1, *x.shape[1:]), params["layers"])}
    fields = read_object(source / "config.json")
    for name, tree in (("plain", params), ("in_rounds", in_rounds)):
        (tmp_path / name).mkdir()
        export_parameters(tmp_path / name, tree, "llama", model_keys(fields, ""), dtype="float32")
    contents = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "in_rounds")]
    assert contents[0] == contents[1]
