"""The command: in, out, trained and talked to; every directory that a user may name."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.hf.model_directory import hf_config
from maxtext_lite.convert import main
from maxtext_lite.generate import main as generate
from maxtext_lite.training import train
from tests.hf_models import VOCABULARY, model, save, save_with_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A Hugging Face directory of a tiny llama with a tokenizer, as transformers writes them."""
    return save_with_tokenizer(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def imported(hf):
    out = hf.parent / "imported"
    assert main(["import", str(hf), str(out), "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2",
                 "ici_data_parallelism=2"]) == 0  # fmt: skip
    return out


def tensors(directory):
    return safetensors.numpy.load_file(directory / "model.safetensors")


def assert_same_tensors(one, other):
    one, other = tensors(one), tensors(other)
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name], err_msg=name)


def test_an_imported_model_is_a_run_directory_that_exports_what_it_was(hf, imported, tmp_path, capsys):
    config = load_config(imported / "config.yml")
    assert (config.base_emb_dim, config.vocab_size, config.load_parameters_path) == (32, VOCABULARY, "")
    assert config.tokenizer_path == str(imported / "hf" / "tokenizer.json")
    out = tmp_path / "out"
    assert main(["export", str(imported), str(out)]) == 0
    assert "parameters in" in capsys.readouterr().out
    assert_same_tensors(out, hf)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (hf / name).read_bytes()
    assert transformers.AutoTokenizer.from_pretrained(out)("to be").input_ids[0] == 0


def test_an_export_in_bfloat16_halves_the_numbers(imported, tmp_path):
    main(["export", str(imported), str(tmp_path / "out"), "weight_dtype=bfloat16"])
    assert {str(x.dtype) for x in tensors(tmp_path / "out").values()} == {"bfloat16"}
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["dtype"], fields["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert hf_config(tmp_path / "out").weight_dtype == "bfloat16"


def greedy(directory, capsys, *more):
    generate([str(directory), "temperature=0", "max_new_tokens=12", "--json", *more])
    return json.loads(capsys.readouterr().out)


def test_greedy_text_is_that_of_transformers_on_any_mesh(hf, imported, capsys):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    prompts, expected = ["to be or", "the king"], []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = theirs.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
        expected.append((out.tolist(), tokenizer.decode(out, skip_special_tokens=True)))
    meshes = ([], ["ici_tensor_parallelism=2", "ici_fsdp_parallelism=2", "ici_data_parallelism=2"])
    for directory, mesh in ((hf, meshes[1]), (imported, meshes[0])):
        answers = greedy(directory, capsys, f"prompts={json.dumps(prompts)}", *mesh)
        assert [(answer["tokens"], answer["text"]) for answer in answers] == expected


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "deepseek_v3"])
def test_models_with_caches_of_their_own_write_what_transformers_writes(name, tmp_path, capsys):
    directory = save(name, tmp_path / name)
    prompts, expected = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22]], []
    for prompt in prompts:
        out = model(name).generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
        )
        expected.append(out[0, len(prompt) :].tolist())
    answers = greedy(directory, capsys, f"prompt_ids={prompts}", "ici_tensor_parallelism=2", "ici_fsdp_parallelism=2")
    assert [answer["tokens"] for answer in answers] == expected


def test_a_chat_is_the_template_and_a_stop_string_ends_it(hf, capsys, monkeypatch):
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    rendered = tokenizer("sbe|uto be|", add_special_tokens=False).input_ids
    (expected,) = greedy(hf, capsys, f"prompt_ids=[{rendered}]")
    (answer,) = greedy(hf, capsys, "prompt=to be", "system=be", "--chat")
    assert answer["tokens"] == expected["tokens"]
    whole = answer["text"]
    middle = whole[len(whole) // 2 :][:2]
    generate([str(hf), "temperature=0", "max_new_tokens=12", "prompt=to be", "system=be", "chat=true",
              f"stop_strings={json.dumps([middle])}"])  # fmt: skip
    captured = capsys.readouterr()
    assert captured.out == whole[: whole.index(middle)] + "\n"
    assert "tokens/s" in captured.err
    lines = iter(["to be\n", ""])
    monkeypatch.setattr("sys.stdin.readline", lambda: next(lines), raising=False)
    generate([str(hf), "temperature=0", "max_new_tokens=12", "system=be", "--chat"])
    assert capsys.readouterr().out == whole + "\n"


def test_training_starts_from_the_directory_and_its_run_is_exported(hf, tmp_path, capsys):
    overrides = [
        f"load_parameters_path={hf}", f"base_output_directory={tmp_path}", "run_name=run", "steps=1", "warmup_steps=0",
        "learning_rate=0", "weight_decay=0", "per_device_batch_size=1", "max_target_length=16", "eval_interval=-1",
        "data_shuffle_seed=-1", "ici_tensor_parallelism=2", "packing=true",
    ]  # fmt: skip
    result = train(load_config(None, overrides))
    run = result.run_directory
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    assert step["loss"] == pytest.approx(mean_loss(model, load_config(None, overrides)), rel=1e-4)
    with pytest.raises(UserError, match=r"merge_lora=false has no effect with .*run, whose lora_rank is 0"):
        main(["export", str(run), str(tmp_path / "out"), "merge_lora=false"])
    main(["export", str(run), str(tmp_path / "out")])
    assert_same_tensors(tmp_path / "out", hf)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    capsys.readouterr()
    assert greedy(run, capsys, "prompt=to be") == greedy(hf, capsys, "prompt=to be")


def mean_loss(model, config):
    """transformers' loss of the first batch, each document of a row by itself."""
    from maxtext_lite.data import open_sources

    source, _ = open_sources(config, vocab_size=config.vocab_size)
    total = weight = 0.0
    for number in range(len(jax.devices())):
        row = source[number]
        for document in set(row["segments"]) - {0}:
            where = row["segments"] == document
            with torch.no_grad():
                logits = model(torch.tensor(row["tokens"][where][None]).long()).logits[0]
            loss = torch.nn.functional.cross_entropy(
                logits, torch.tensor(row["targets"][where]).long(), reduction="none"
            ).numpy()
            total += float((loss * row["weights"][where]).sum())
            weight += float((row["weights"][where] > 0).sum())
    return total / weight


def test_a_run_of_ones_own_is_exported_as_a_family(tmp_path):
    config = load_config(None, [
        f"base_output_directory={tmp_path}", "run_name=run", "steps=1", "eval_interval=-1", "vocab_size=264",
        "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=8", "base_mlp_dim=24",
        "base_num_decoder_layers=2", "max_target_length=16", "qk_norm=head", "warmup_steps=0",
        "ici_pipeline_parallelism=2", "per_device_batch_size=1", "num_layers_per_pipeline_stage=1",
    ])  # fmt: skip
    result = train(config)
    main(["export", str(result.run_directory), str(tmp_path / "out")])
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["model_type"], fields["eos_token_id"]) == ("qwen3", 256)
    tokens = np.arange(12, dtype=np.int32)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(tokens[None]).long()).logits[0].numpy()
    from maxtext_lite.training.state import make_decoder

    decoder = make_decoder(config, "cpu")
    params = jax.device_get(result.state.params)
    params = params | {"layers": jax.tree.map(lambda x: x.reshape(2, *x.shape[-(x.ndim - _lead(x, params)) :]),
                                              params["layers"])}  # fmt: skip
    ours = decoder.logits(
        params, decoder.hidden(params, tokens[None], np.ones((1, 12), np.int32), np.arange(12)[None])
    )[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


def test_an_adapter_is_trained_on_merged_and_exported(hf, tmp_path, capsys):
    from tests.hf.test_peft import outside

    given = outside(hf, tmp_path / "adapter", ["self_attn.q_proj", "mlp.down_proj"], rank=3, alpha=6, layers=2)
    run = [f"base_output_directory={tmp_path}", f"load_parameters_path={given}", "eval_interval=-1", "warmup_steps=0",
           "max_target_length=16", "per_device_batch_size=1", "optimizer=sgd"]  # fmt: skip
    runs = {}
    for name, more in (("same", ["steps=1", "learning_rate=0"]), ("trained", ["steps=2", "learning_rate=0.1"])):
        runs[name] = train(load_config(None, [*run, f"run_name={name}", *more])).run_directory
        assert main(["export", str(runs[name]), str(tmp_path / f"{name}-out")]) == 0
    stored = {name: safetensors.numpy.load_file(tmp_path / name / "adapter_model.safetensors")
              for name in ("adapter", "same-out", "trained-out")}  # fmt: skip
    about = json.loads((tmp_path / "trained-out" / "adapter_config.json").read_text())
    assert (about["base_model_name_or_path"], about["r"], about["lora_alpha"]) == (str(hf), 3, 6)
    for name, x in stored["adapter"].items():
        np.testing.assert_array_equal(stored["same-out"][name], x, err_msg=name)
        assert np.abs(stored["trained-out"][name] - x).max() > 0
    assert stored["adapter"].keys() == stored["same-out"].keys() == stored["trained-out"].keys()

    assert main(["import", str(given), str(tmp_path / "imported")]) == 0
    assert f"with the adapter of {given} merged" in capsys.readouterr().out
    assert main(["export", str(runs["same"]), str(tmp_path / "merged"), "merge_lora=true"]) == 0
    assert main(["export", str(tmp_path / "imported"), str(tmp_path / "plain")]) == 0
    assert_same_tensors(tmp_path / "merged", tmp_path / "plain")
    pair = [stored["adapter"][f"base_model.model.model.layers.1.mlp.down_proj.lora_{which}.weight"] for which in "BA"]
    name = "model.layers.1.mlp.down_proj.weight"
    want = tensors(hf)[name].astype(np.float64) + 2 * (pair[0].astype(np.float64) @ pair[1])
    np.testing.assert_allclose(tensors(tmp_path / "plain")[name], want, rtol=1e-5, atol=1e-6)
    capsys.readouterr()
    (beside,), (merged,) = (greedy(path, capsys, 'prompt="to be"') for path in (given, tmp_path / "imported"))
    chances = [np.array(each.pop("log_probabilities")) for each in (beside, merged)]
    assert beside == merged
    np.testing.assert_allclose(*chances, rtol=1e-5)  # numbers merged twice, by a matmul that may round otherwise


def _lead(x, params):
    """Dims that count layers."""
    return min(leaf.ndim for leaf in jax.tree.leaves(params["layers"])) - 1


@pytest.mark.parametrize(("arguments", "message"), [
    (["import", "{hf}", "{hf}"], "exists already and is not an empty directory"),
    (["import", "{hf}", "/a*"], "has [*] in a path of checkpoints"),
    (["import", "{tmp}/nothing", "{tmp}/out"], "is not a Hugging Face directory"),
    (["export", "{hf}", "{tmp}/out"], "is neither a run directory nor an imported one"),
    (["import", "{hf}", "{tmp}/out", "steps=3"], "'steps=3' is not key=value with a key that convert takes."),
    (["import", "{hf}", "{tmp}/out", "ici_tensor_parallelism=3"], "ici_tensor_parallelism=3"),
    (["import", "{hf}", "{tmp}/out", "ici_tensor_parallelism=8"], "cannot be split evenly over the mesh of 8 devices"),
    (["sideways", "{hf}", "{tmp}/out"], "invalid choice"),
    (["import", "{hf}", "{tmp}/out", "merge_lora=true"], "merge_lora=true has no effect in an import"),
    (["export", "{hf}", "{tmp}/out", "merge_lora=1"], "merge_lora=1 is neither true nor false"),
])  # fmt: skip
def test_mistakes_are_named(arguments, message, hf, tmp_path):
    with pytest.raises(UserError, match=message):
        main([word.format(hf=hf, tmp=tmp_path) for word in arguments])
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_tokenizer_takes_tokens(tmp_path, capsys):
    directory = save("gpt2", tmp_path / "gpt2")
    answers = greedy(directory, capsys, "prompt_ids=[[5,6,7]]", "ici_fsdp_parallelism=2")
    assert len(answers[0]["tokens"]) == 12
    with pytest.raises(UserError, match=r"goes past the model's 64 learned positions\. Nearest that works: 62"):
        generate([str(directory), "prompt_ids=[[5,6,7]]", "max_new_tokens=63"])
