"""The command `convert`: in, out, trained on and talked to, beside transformers on the same directories."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.hf.model_directory import hf_config
from maxtext_lite.convert import main
from maxtext_lite.data import open_sources
from maxtext_lite.generate import main as generate
from maxtext_lite.training import train
from tests.hf_models import VOCABULARY, model, save, save_with_tokenizer

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


def assert_same_tensors(one, other):
    one, other = tensors(one), tensors(other)
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name)


@pytest.mark.fast
def test_an_imported_model_is_a_run_directory_that_exports_what_it_was(
    hf, imported, tmp_path
):
    config = load_config(imported / "config.yml")
    assert (config.base_emb_dim, config.vocab_size, config.load_parameters_path) == (
        32,
        VOCABULARY,
        "",
    )
    assert config.tokenizer_path == str(imported / "hf" / "tokenizer.json")
    out = tmp_path / "out"
    assert main(["export", str(imported), str(out)]) == 0
    assert_same_tensors(out, hf)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (hf / name).read_bytes()
    assert transformers.AutoTokenizer.from_pretrained(out)("to be").input_ids[0] == 0
    halved = tmp_path / "halved"
    assert main(["export", str(imported), str(halved), "weight_dtype=bfloat16"]) == 0
    assert {str(x.dtype) for x in tensors(halved).values()} == {"bfloat16"}
    assert hf_config(halved).weight_dtype == "bfloat16"


def greedy(directory, capsys, *more):
    generate([str(directory), "temperature=0", "max_new_tokens=12", "--json", *more])
    return json.loads(capsys.readouterr().out)


def test_greedy_text_is_that_of_transformers_on_any_mesh(hf, imported, capsys):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    prompts = ["to be or", "the king"]
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = theirs.generate(ids, do_sample=False, max_new_tokens=12)[
            0, ids.shape[1] :
        ]
        expected.append((out.tolist(), tokenizer.decode(out, skip_special_tokens=True)))
    for directory, mesh in ((hf, MESH), (imported, [])):
        answers = greedy(directory, capsys, f"prompts={json.dumps(prompts)}", *mesh)
        assert [(answer["tokens"], answer["text"]) for answer in answers] == expected


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt_oss", []),
        ("deepseek_v3", ["ici_tensor_parallelism=2", "ici_fsdp_parallelism=2"]),
    ],
)
def test_models_with_caches_of_their_own_write_what_transformers_writes(
    name, mesh, tmp_path, capsys
):
    directory = save(name, tmp_path / name)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22]]
    options = {
        "do_sample": False,
        "max_new_tokens": 12,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    texts = [
        model(name).generate(torch.tensor([prompt]), **options)[0].tolist()
        for prompt in prompts
    ]
    answers = greedy(directory, capsys, f"prompt_ids={prompts}", *mesh)
    assert [
        [*prompt, *answer["tokens"]]
        for prompt, answer in zip(prompts, answers, strict=True)
    ] == texts


def test_a_chat_is_the_template(hf, capsys):
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    rendered = tokenizer(
        "sbe|uto be|", add_special_tokens=False, return_tensors="pt"
    ).input_ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.float32
    ).eval()
    expected = theirs.generate(rendered, do_sample=False, max_new_tokens=12)[
        0, rendered.shape[1] :
    ]
    (answer,) = greedy(hf, capsys, "prompt=to be", "system=be", "--chat")
    assert answer["tokens"] == expected.tolist()


def mean_loss(directory, config):
    """transformers' loss of a run's first batch, each document of a row by itself."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    ).eval()
    source, _ = open_sources(config, vocab_size=config.vocab_size)
    total = weight = 0.0
    for number in range(len(jax.devices())):
        row = source[number]
        for document in set(row["segments"]) - {0}:
            where = row["segments"] == document
            with torch.no_grad():
                logits = theirs(torch.tensor(row["tokens"][where][None]).long()).logits[
                    0
                ]
            targets = torch.tensor(row["targets"][where]).long()
            loss = torch.nn.functional.cross_entropy(
                logits, targets, reduction="none"
            ).numpy()
            total += float((loss * row["weights"][where]).sum())
            weight += float((row["weights"][where] > 0).sum())
    return total / weight


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A few sentences to train on, as the key of a config."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [
        json.dumps(
            {"text": "to be or not to be " + "the king and the queen " * (n % 5)}
        )
        for n in range(64)
    ]
    path.write_text("\n".join(lines))
    return f"dataset_path={path}"


RUN = [
    "run_name=run",
    "steps=1",
    "warmup_steps=0",
    "learning_rate=0",
    "weight_decay=0",
    "per_device_batch_size=1",
]
RUN += [
    "max_target_length=16",
    "eval_interval=-1",
    "data_shuffle_seed=-1",
    "packing=true",
]
RUN += ["eval_fraction=0"]
OWN = [
    "vocab_size=264",
    "base_emb_dim=16",
    "base_num_query_heads=2",
    "base_num_kv_heads=1",
    "head_dim=8",
]
OWN += ["base_mlp_dim=24", "base_num_decoder_layers=2", "qk_norm=head"]


def test_training_starts_from_the_directory_and_its_run_is_exported(
    hf, texts, tmp_path
):
    words = [
        *RUN,
        texts,
        f"base_output_directory={tmp_path}",
        f"load_parameters_path={hf}",
        "ici_tensor_parallelism=2",
    ]
    config = load_config(None, words)
    run = train(config).run_directory
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert step["loss"] == pytest.approx(mean_loss(hf, config), rel=1e-4)
    with pytest.raises(UserError, match="merge_lora"):
        main(["export", str(run), str(tmp_path / "out"), "merge_lora=false"])
    main(["export", str(run), str(tmp_path / "out")])
    assert_same_tensors(tmp_path / "out", hf)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        hf / "tokenizer.json"
    ).read_bytes()


def test_a_run_of_ones_own_is_exported_as_a_family_that_has_its_loss(texts, tmp_path):
    config = load_config(None, [*RUN, *OWN, texts, f"base_output_directory={tmp_path}"])
    run = train(config).run_directory
    main(["export", str(run), str(tmp_path / "out")])
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["model_type"], fields["eos_token_id"]) == ("qwen3", 256)
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert step["loss"] == pytest.approx(mean_loss(tmp_path / "out", config), rel=1e-4)


def test_an_adapter_is_trained_merged_and_exported(hf, texts, tmp_path):
    words = [
        f"base_output_directory={tmp_path}",
        f"load_parameters_path={hf}",
        "optimizer=sgd",
        "steps=3",
    ]
    words += ["lora_rank=3", "lora_alpha=6", "learning_rate=1"]
    run = train(load_config(None, [*RUN, texts, *words])).run_directory
    assert main(["export", str(run), str(tmp_path / "adapter")]) == 0
    assert main(["export", str(run), str(tmp_path / "merged"), "merge_lora=true"]) == 0
    assert main(["import", str(tmp_path / "adapter"), str(tmp_path / "imported")]) == 0
    assert main(["export", str(tmp_path / "imported"), str(tmp_path / "plain")]) == 0
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (about["base_model_name_or_path"], about["r"], about["lora_alpha"]) == (
        str(hf),
        3,
        6,
    )
    matrices = safetensors.numpy.load_file(
        tmp_path / "adapter" / "adapter_model.safetensors"
    )
    assert all(np.abs(matrix).max() > 0 for matrix in matrices.values())
    for out in ("merged", "plain"):
        assert_merged(matrices, tensors(hf), tensors(tmp_path / out))


def assert_merged(adapters, base, found):
    """Every weight is the base's, and those with an adapter have 6 / 3 B A added, which is not nothing."""
    assert found.keys() == base.keys()
    for name, x in base.items():
        pair = [
            f"base_model.model.{name.removesuffix('.weight')}.lora_{which}.weight"
            for which in "BA"
        ]
        want = x.astype(np.float64)
        if pair[0] in adapters:
            want = want + 2 * (adapters[pair[0]].astype(np.float64) @ adapters[pair[1]])
            assert np.abs(want - x).max() > 1e-4
        np.testing.assert_allclose(
            found[name], want, rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["import", "{hf}", "{hf}"], "model"),
        (["import", "{hf}", "/a*"], r"/a\*"),
        (["export", "{hf}", "{tmp}/out"], "model"),
        (
            ["import", "{hf}", "{tmp}/out", "ici_tensor_parallelism=3"],
            "ici_tensor_parallelism=3",
        ),
        (["import", "{hf}", "{tmp}/out", "ici_tensor_parallelism=8"], "mesh"),
    ],
)
def test_a_directory_or_mesh_that_cannot_be_is_refused(words, name, hf, tmp_path):
    with pytest.raises(UserError, match=name):
        main([word.format(hf=hf, tmp=tmp_path) for word in words])
    assert not (tmp_path / "out").exists()
