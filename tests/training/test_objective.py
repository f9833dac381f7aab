"""Pre-training's and SFT's loss is a mean over target tokens: that of transformers with the other labels at -100."""

import json

import jax
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.config.hf.model_directory import hf_config
from maxtext_lite.data import open_sources
from maxtext_lite.hf import load_hf_parameters
from maxtext_lite.parallel import MESH_AXES, make_mesh, tree_shardings
from maxtext_lite.training import train
from maxtext_lite.training.gradients import GradientLoop
from maxtext_lite.training.objective import NEXT_TOKEN, objective_of
from maxtext_lite.training.optimizer import make_optimizer
from maxtext_lite.training.preference import Preference
from maxtext_lite.training.state import StepParts, make_decoder
from tests import hf_models
from tests.training.conftest import TINY

torch = pytest.importorskip("torch")

LINES = [
    {"prompt": prompt, "completion": completion}
    for prompt, completion in [("!$", "AB"), ("*", "C#D"), ("!+!", "E"), ("##$%", "FGHIJ"), ("!", "K"), ("+*!", "BAD")]
]  # bytes below 96, which the tiny models of transformers know


def test_the_objective_follows_from_the_data():
    assert objective_of(load_config(None, [])) is NEXT_TOKEN
    assert objective_of(load_config(None, ["dataset_type=sft"])) is NEXT_TOKEN
    keys = ["dataset_type=dpo", "dpo_beta=0.25", "dpo_label_smoothing=0.125"]
    assert objective_of(load_config(None, keys)) == Preference(0.25, 0.125)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_loss_and_gradient_of_answers_are_those_of_transformers(packing, tmp_path, monkeypatch):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    directory = hf_models.save("llama", tmp_path / "hf")
    # One conversation at a time, all that is no answer at -100: mean over the answers' tokens of all.
    model = hf_models.model("llama")
    model.zero_grad()
    total, count = 0.0, 0
    for line in LINES:
        ids = [*line["prompt"].encode(), *line["completion"].encode(), 2]
        labels = [-100] * len(line["prompt"]) + ids[len(line["prompt"]) :]
        number = sum(label != -100 for label in labels)
        total = total + number * model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
        count += number
    (total / count).backward()
    want = model.get_input_embeddings().weight.grad.numpy()

    monkeypatch.setattr("maxtext_lite.data.tokenizer.ByteTokenizer.end_of_text_id", 2)  # which the model knows
    monkeypatch.setattr("maxtext_lite.data.tokenizer.ByteTokenizer.vocab_size", 96)
    config = hf_config(directory, ["eval_interval=-1", "optimizer=sgd", "dtype=float32"]).model_copy(
        update={"dataset_type": "sft", "dataset_path": str(path), "packing": packing == "true",
                "max_target_length": 16, "eval_fraction": 0, "tokenizer_type": "byte", "tokenizer_path": ""}
    )  # fmt: skip
    source, _ = open_sources(config)
    assert len(source) == (2 if packing == "true" else 6)  # 4 + 4 + 4 + 2 and 9 + 6 slots
    mesh = make_mesh(*(dict.fromkeys(MESH_AXES, 1),) * 2, jax.devices()[:1])
    decoder = make_decoder(config, "cpu")
    batch = {name: np.stack([source[row][name] for row in range(len(source))])[None] for name in source.fields}
    where = tree_shardings(mesh, decoder.axes)
    abstract = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), decoder.abstract_params, where
    )
    params = load_hf_parameters(directory, abstract, "HF_DIR")
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        step = GradientLoop(StepParts(decoder, make_optimizer(config, decoder.axes), mesh, config)).of_step
        found = jax.device_get(jax.jit(step)(params, batch))
    assert found.target_tokens == found.num_counted == count == 21
    assert found.loss == pytest.approx(total.item() / count, rel=1e-5)
    gradient = found.gradients["embedding"]["table"]
    assert np.abs(gradient - want).max() <= 1e-4 * np.abs(want).max()


def test_a_run_on_answers_is_the_same_however_it_is_split_and_after_a_restart(tmp_path):
    path = tmp_path / "lines.jsonl"
    rng = np.random.default_rng(0)
    path.write_text("".join(
        json.dumps({"prompt": "p" * int(rng.integers(0, 20)), "completion": "ab" * int(rng.integers(1, 20))}) + "\n"
        for _ in range(100)
    ))  # fmt: skip
    keys = [*TINY, "dataset_type=sft", f"dataset_path={path}", f"base_output_directory={tmp_path}", "steps=4",
            "learning_rate_schedule=constant", "eval_interval=4", "global_batch_size=8", "eval_fraction=0.1",
            "gradient_accumulation_steps=-1"]  # fmt: skip

    def run(name, *overrides):
        result = train(load_config(None, [*keys, f"run_name={name}", *overrides]))
        return [json.loads(line) for line in (result.run_directory / "metrics.jsonl").read_text().splitlines()]

    whole = run("whole", "per_device_batch_size=1")
    split = run("split", "per_device_batch_size=0.5", "ici_data_parallelism=2", "ici_tensor_parallelism=2")
    run("again", "per_device_batch_size=1", "steps=2")
    again = run("again", "per_device_batch_size=1")
    close = {"loss", "eval_loss", "eval_target_tokens", "target_tokens", "examples_hash"}
    assert len(whole) == 5
    for got in (split, again):
        steps = {line["step"]: line for line in got if "loss" in line} | {"end": got[-1]}
        for line in whole:
            other = steps["end" if "eval_loss" in line else line["step"]]
            for name in close & set(line):
                exact = isinstance(line[name], str | int) or got is again
                assert other[name] == line[name] if exact else other[name] == pytest.approx(line[name], rel=1e-5), name
