"""The command `convert`: in, out, trained on and talked to, beside transformers on the same directories."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from maxtext_lite.config import UserError, load_config
from maxtext_lite.convert import main
from maxtext_lite.data import open_sources
from maxtext_lite.generate import main as generate
from maxtext_lite.hf.model_directory import hf_config
from maxtext_lite.training import train
from tests.hf_models import VOCABULARY, save_with_tokenizer
from tests.hf_models import logits as logits_of
from tests.processes import RunFiles

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MESH = ["ici_tensor_parallelism=2", "ici_fsdp_parallelism=2", "ici_data_parallelism=2"]


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A Hugging Face directory of a tiny llama with a tokenizer, as transformers writes them."""
    return save_with_tokenizer(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def imported(hf):
    out = hf.parent / "imported"
    assert main(["import", str(hf), str(out), *MESH]) == 0
    return out


def tensors(directory):
    return safetensors.numpy.load_file(directory / "model.safetensors")


@pytest.mark.fast
def test_an_imported_model_is_a_run_directory_that_exports_what_it_was(
    hf, imported, tmp_path, capsys
):
    config = load_config(imported / "config.yml")
    assert (config.base_emb_dim, config.vocab_size) == (32, VOCABULARY)
    assert config.load_parameters_path == ""
    assert config.tokenizer_path == str(imported / "hf" / "tokenizer.json")
    out = tmp_path / "out"
    assert main(["export", str(imported), str(out)]) == 0
    np.testing.assert_equal(tensors(out), tensors(hf))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (hf / name).read_bytes()
    halved = tmp_path / "halved"
    assert main(["export", str(imported), str(halved), "weight_dtype=bfloat16"]) == 0
    assert {str(x.dtype) for x in tensors(halved).values()} == {"bfloat16"}
    assert hf_config(halved).weight_dtype == "bfloat16"
    # A model that is trained in float32 goes back to the format that it came in, unless another is asked for.
    wide = tmp_path / "wide"
    assert main(["import", str(halved), str(wide), "weight_dtype=float32"]) == 0
    for number, (words, dtype) in enumerate(
        (([], "bfloat16"), (["weight_dtype=float32"], "float32"))
    ):
        capsys.readouterr()
        assert main(["export", str(wide), str(tmp_path / str(number)), *words]) == 0
        assert f"in {dtype}" in capsys.readouterr().out
        assert {str(x.dtype) for x in tensors(tmp_path / str(number)).values()} == {
            dtype
        }


def greedy(directory, capsys, *more):
    generate([str(directory), "temperature=0", "max_new_tokens=12", "--json", *more])
    return json.loads(capsys.readouterr().out)


def test_greedy_text_is_that_of_transformers_on_any_mesh(hf, imported, capsys):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    prompts = ["to be or", "the king"]
    tokens = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = loaded.eval().generate(ids, do_sample=False, max_new_tokens=12)
        tokens.append(out[0, ids.shape[1] :].tolist())
    texts = [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]
    for directory, mesh in ((hf, MESH), (imported, [])):
        answers = greedy(directory, capsys, f"prompts={json.dumps(prompts)}", *mesh)
        assert [answer["tokens"] for answer in answers] == tokens
        assert [answer["text"] for answer in answers] == texts


def mean_loss(directory, config):
    """transformers' loss of a run's first batch, each document of a row by itself."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    ).eval()
    source, _ = open_sources(config, vocab_size=config.vocab_size)
    losses = []
    for number in range(int(config.per_device_batch_size)):
        row = source[number]
        for document in set(row["segments"]) - {0}:
            where = row["segments"] == document
            logits = torch.tensor(logits_of(loaded, row["tokens"][where].tolist()))
            targets = torch.tensor(row["targets"][where]).long()
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            losses.extend(loss[row["weights"][where] > 0].tolist())
    return np.mean(losses)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A few sentences to train on, as the key of a config."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rest = "the king and the queen "
    lines = [{"text": "to be or not to be " + rest * (n % 5)} for n in range(64)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return f"dataset_path={path}"


RUN = """
run_name=run steps=1 warmup_steps=0 learning_rate=0 weight_decay=0 per_device_batch_size=4 max_target_length=16
eval_interval=-1 data_shuffle_seed=-1 packing=true eval_fraction=0
"""


OWN = """
vocab_size=264 base_emb_dim=16 base_num_query_heads=2 base_num_kv_heads=1 head_dim=8 base_mlp_dim=24
base_num_decoder_layers=2 qk_norm=head
"""


def trained(directory, *words):
    """The config and the directory of a run."""
    config = load_config(
        None, [*RUN.split(), f"base_output_directory={directory}", *words]
    )
    return config, train(config).run_directory


def test_a_run_of_ones_own_is_exported_as_a_family_that_has_its_loss(
    texts, tmp_path, one_device
):
    config, run = trained(tmp_path, texts, *OWN.split())
    main(["export", str(run), str(tmp_path / "out")])
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["model_type"], fields["eos_token_id"]) == ("qwen3", 256)
    (step,) = RunFiles(run).steps
    assert step["loss"] == pytest.approx(mean_loss(tmp_path / "out", config), rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_trained_merged_and_exported(
    hf, texts, tmp_path, one_device, dtype
):
    """A sum of bfloat16 weights and float32 adapters is exported in the float32 of the model that the run came from."""
    words = f"optimizer=sgd steps=3 lora_rank=3 lora_alpha=6 learning_rate=1 weight_dtype={dtype}"
    start = f"load_parameters_path={hf}"
    _, run = trained(tmp_path, texts, *words.split(), start)
    assert main(["export", str(run), str(tmp_path / "adapter")]) == 0
    assert main(["export", str(run), str(tmp_path / "merged"), "merge_lora=true"]) == 0
    assert main(["import", str(tmp_path / "adapter"), str(tmp_path / "imported")]) == 0
    assert main(["export", str(tmp_path / "imported"), str(tmp_path / "plain")]) == 0
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(hf)
    assert (about["r"], about["lora_alpha"]) == (3, 6)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    matrices = safetensors.numpy.load_file(path)
    assert all(np.abs(matrix).max() > 0 for matrix in matrices.values())
    frozen = {name: x.astype(dtype) for name, x in tensors(hf).items()}
    assert_merged(matrices, frozen, tensors(tmp_path / "merged"))
    assert_merged(matrices, tensors(hf), tensors(tmp_path / "plain"))


def assert_merged(adapters, base, found):
    """Every weight is the base's, and those with an adapter have 6 / 3 B A added, which is not nothing."""
    assert found.keys() == base.keys()
    for name, x in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        want = x.astype(np.float64)
        if f"{stem}.lora_A.weight" in adapters:
            a, b = (adapters[f"{stem}.lora_{which}.weight"] for which in "AB")
            want = want + 2 * (b.astype(np.float64) @ a)
            assert np.abs(want - x).max() > 1e-4
        np.testing.assert_allclose(
            found[name], want, rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_a_merge_is_the_weighted_mean_and_transformers_reads_it(hf, imported, tmp_path):
    """Of a Hugging Face directory, an import of it and a third model with other weights, in two formats."""
    rng = np.random.default_rng(0)
    third = tmp_path / "third"
    shutil.copytree(hf, third)
    other = {
        name: rng.standard_normal(x.shape, np.float32)
        for name, x in tensors(hf).items()
    }
    safetensors.numpy.save_file(
        other, third / "model.safetensors", metadata={"format": "pt"}
    )
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        rounded = np.dtype(getattr(ml_dtypes, dtype, dtype))
        words = [f"{hf}:1", str(imported), f"weight_dtype={dtype}", f"{third}:0.5"]
        assert main(["merge", str(out), *words]) == 0
        for name, x in tensors(hf).items():
            want = (2 * x.astype(np.float64) + 0.5 * other[name]) / 2.5
            np.testing.assert_array_equal(tensors(out)[name], want.astype(rounded))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert str(loaded.dtype) == f"torch.{dtype}"
        transformers.AutoTokenizer.from_pretrained(out)


def test_a_mean_beyond_float16_is_refused(hf, tmp_path):
    for name, factor, dtype in (("half", 1, np.float16), ("large", 1e9, np.float32)):
        shutil.copytree(hf, tmp_path / name)
        own = {each: (x * factor).astype(dtype) for each, x in tensors(hf).items()}
        safetensors.numpy.save_file(own, tmp_path / name / "model.safetensors")
    with pytest.raises(UserError, match="no finite mean in float16"):
        main(["merge", *(str(tmp_path / name) for name in ("out", "half", "large"))])


def test_only_models_of_one_shape_are_merged(hf, tmp_path):
    def changed(name, fields, change):
        there = tmp_path / name
        shutil.copytree(hf, there)
        own = tensors(hf)
        change(own)
        safetensors.numpy.save_file(own, there / "model.safetensors")
        stated = json.loads((hf / "config.json").read_text()) | fields
        (there / "config.json").write_text(json.dumps(stated))
        return there

    norm = "model.norm.weight"
    head = "lm_head.weight"
    cases = (
        (changed("other", {"rms_norm_eps": 0.5}, dict), "normalization_layer_epsilon"),
        (changed("less", {}, lambda own: own.pop(norm)), norm),
        (
            changed("short", {}, lambda own: own.update({norm: own[norm][:3]})),
            rf"{norm} is \[3\], not the \[32\]",
        ),
        (
            changed("tied", {"tie_word_embeddings": True}, lambda own: own.pop(head)),
            head,
        ),
        (f"{hf}:-1", "weight=-1 .*:1"),
        (tmp_path, "neither a run nor"),
    )
    for directory, message in cases:
        with pytest.raises(UserError, match=message):
            main(["merge", str(tmp_path / "out"), str(hf), str(directory)])
    with pytest.raises(UserError, match=r"weights=1.* is not key=value"):
        main(["merge", str(tmp_path / "out"), str(hf), str(hf), "weights=1,1"])
