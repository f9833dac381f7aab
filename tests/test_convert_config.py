"""The command `convert_config`: MaxText's files and command lines become configs that train what they asked for."""

import io

import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.cli import main
from maxtext_lite.config import load_config


@pytest.fixture
def converted(capsys, tmp_path):
    """The config that the command prints, read as a file of the user's."""

    def run(*words):
        assert main(["convert-config", *words]) == 0
        file = tmp_path / "ours.yml"
        file.write_text(capsys.readouterr().out)
        return load_config(file), file.read_text()

    return run


@pytest.mark.fast
def test_a_command_line_of_maxtext_becomes_a_config(converted):
    words = "python3 -m MaxText.train src/MaxText/configs/base.yml run_name=7 steps=10_000 per_device_batch_size=4"
    words += " model_name=qwen3-0.6b attention=flash sa_block_q=1024 quantization= max_num_checkpoints_to_keep=None"
    config, text = converted(*words.split(), "gradient_accumulation_steps=2")
    assert make_plan(config, num_devices=16).global_batch_to_train == 128
    assert (config.run_name, config.steps) == ("7", 10000)
    # MaxText's default, and a tenth of the steps.
    assert (config.learning_rate, config.warmup_steps) == (3e-05, 1000)
    assert "base_emb_dim" not in text  # of the model's own file
    assert "add_bos" not in text  # where the tokenizer has the token, as by default
    assert "sa_block_q" in text.rpartition("# Without effect")[2]


def test_a_file_is_read_over_those_that_it_is_based_on(converted, tmp_path):
    (tmp_path / "configs" / "mine").mkdir(parents=True)
    dpo = "base_config: base.yml\ndpo:\n  dpo_beta: 0.3\nsteps: 5\nuse_dpo: true\n"
    (tmp_path / "configs" / "dpo.yml").write_text(dpo)
    file = tmp_path / "configs" / "mine" / "run.yml"
    file.write_text("base_config: dpo.yml\nsteps: 6\ndataset_type: hf\n")
    words = "dpo.dpo_label_smoothing=0.1 tokenizer_path=tokens.model dropout_rate=0.5"
    words += " add_bos=False add_eos=false"
    config, text = converted(str(file), *words.split())
    assert (config.steps, config.dpo_beta, config.dpo_label_smoothing) == (6, 0.3, 0.1)
    assert (config.dataset_type, config.dataset_path) == ("dpo", "prepared")
    assert (config.add_bos, config.add_eos) == (False, False)
    assert "dropout_rate=0.5" in text.rpartition("# No equivalent")[2]


@pytest.mark.parametrize(
    ("interval", "held_out"), [(-1, ""), (40, "prepared_held_out")]
)
def test_records_are_to_be_prepared_again_also_those_held_out(
    interval, held_out, converted
):
    words = "dataset_type=grain grain_train_files=t* tokenizer_type=huggingface"
    words += f" grain_eval_files=h* tokenizer_path=x.json eval_interval={interval}"
    config, text = converted("MaxText.train", "base.yml", *words.split())
    assert (config.dataset_path, config.eval_dataset_path) == ("prepared", held_out)
    notes = text.rpartition("# Notes")[2]
    assert "t*" in notes
    assert ("h*" in notes) == bool(held_out)


def test_stdin_is_a_file_and_devices_round_as_maxtext_does(converted, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("per_device_batch_size: 0.3\n"))
    config, _ = converted("-", "--devices", "8")
    assert make_plan(config, num_devices=8).global_batch_to_train == 2


def test_a_named_model_wins_over_maxtext_s_files_and_the_command_line_over_it(
    converted, tmp_path
):
    """MaxText merges its base file, the user's file, the model's file and the command line in this order."""
    base = "model_name: default\nbase_emb_dim: 2048\nbase_num_decoder_layers: 16\ndecoder_block: llama2\nnew_key: 1\n"
    (tmp_path / "base.yml").write_text(base)
    file = tmp_path / "mine.yml"
    file.write_text(
        "base_config: base.yml\nmodel_name: llama3-70b\nbase_num_decoder_layers: 5\nnewer_key: 2\n"
    )
    config, text = converted(
        str(file), "--ignore-unknown", "vocab_size=128000", "override_model_config=true"
    )
    assert (config.base_emb_dim, config.base_num_decoder_layers, config.vocab_size) == (
        8192,
        80,
        128000,
    )
    lost, _, notes = text.rpartition("# No equivalent")[2].partition("# Notes")
    assert "new_key=1" in lost
    assert "newer_key=2" in lost
    assert "base_num_decoder_layers=5" in notes
    config, text = converted(
        str(tmp_path / "base.yml"), "model_name=llama3.1-8b-Instruct"
    )
    assert (config.base_emb_dim, config.base_num_decoder_layers) == (4096, 32)
    assert "new_key=1" in text


def test_a_trainer_without_a_file_has_its_own_defaults(converted):
    config, _ = converted(
        "maxtext.trainers.post_train.sft.train_sft", "model_name=qwen3-0.6b", "steps=9"
    )
    assert (config.dataset_type, config.learning_rate, config.tokenizer_type) == (
        "sft",
        2e-5,
        "huggingface",
    )
