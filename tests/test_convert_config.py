import io

import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.cli import main, run_command
from maxtext_lite.config import load_config, packaged_directory
from maxtext_lite.convert_config import main as convert_config


def converted(words, capsys, tmp_path):
    """The config that the command prints, read as a file of the user's."""
    assert main(["convert-config", *words]) == 0
    file = tmp_path / "ours.yml"
    file.write_text(capsys.readouterr().out)
    return load_config(file), file.read_text()


@pytest.mark.fast
def test_a_command_line_of_maxtext_becomes_a_config(capsys, tmp_path):
    words = "python3 -m MaxText.train src/MaxText/configs/base.yml run_name=7 steps=10_000 per_device_batch_size=4"
    words += " model_name=qwen3-0.6b attention=flash sa_block_q=1024 quantization= max_num_checkpoints_to_keep=None"
    config, text = converted([*words.split(), "gradient_accumulation_steps=2"], capsys, tmp_path)
    assert make_plan(config, num_devices=16).global_batch_to_train == 128
    assert (config.run_name, config.steps, config.warmup_steps, config.model_name) == ("7", 10000, 1000, "qwen3-0.6b")
    assert "base_emb_dim" not in text  # of the model's own file
    assert 'run_name: "7"\nsteps: 10000\n' in text
    assert "learning_rate: 3e-05  # MaxText's default\n" in text
    assert "warmup_steps: 1000  # MaxText's steps\n" in text
    assert text.endswith(
        "# Without effect on what is trained here:\n#   kernels, which choose their own tiles: sa_block_q\n"
    )


def test_a_file_is_read_over_those_that_it_is_based_on(capsys, tmp_path):
    (tmp_path / "configs" / "mine").mkdir(parents=True)
    (tmp_path / "configs" / "dpo.yml").write_text(
        "base_config: base.yml\ndpo:\n  dpo_beta: 0.3\nsteps: 5\nuse_dpo: true\n"
    )
    (tmp_path / "configs" / "mine" / "run.yml").write_text("base_config: dpo.yml\nsteps: 6\ndataset_type: hf\n")
    words = [
        str(tmp_path / "configs" / "mine" / "run.yml"),
        "dpo.dpo_label_smoothing=0.1",
        "tokenizer_path=tokens.model",
    ]
    config, text = converted([*words, "dropout_rate=0.5"], capsys, tmp_path)
    assert (config.steps, config.dpo_beta, config.dpo_label_smoothing, config.objective) == (6, 0.3, 0.1, "auto")
    assert (config.dataset_type, config.dataset_path, config.weight_decay) == ("dpo", "prepared", 0.1)
    assert "# No equivalent: this config does not do what these ask for.\n#   dropout_rate=0.5: dropout\n" in text


def test_stdin_is_a_file_and_devices_round_as_maxtext_does(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("per_device_batch_size: 0.3\n"))
    config, _ = converted(["-", "--devices", "8"], capsys, tmp_path)
    assert make_plan(config, num_devices=8).global_batch_to_train == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stps=5"], "MaxText has no key 'stps'. Did you mean 'steps'?"),
        (["base.yml", "steps"], "'steps' is not of the form key=value."),
        (["steps=]"], "steps=] is not YAML"),
        (["none.yml"], "none.yml cannot be read: No such file or directory."),
        (["loop.yml"], "loop.yml is the base_config of itself."),
        (["list.yml"], "list.yml is not a list of `key: value` lines."),
        (["twice.yml"], "key 'steps' occurs twice in twice.yml. Keep one of them."),
        (["bytes.yml"], "bytes.yml is not UTF-8 text."),
        (["/dev/zero"], "/dev/zero has more than the 4,194,304 characters of the largest config."),
        (["--devices", "0"], "--devices=0 must be from 1 to 1000000. Nearest that works: 1."),
        (["--devices", "1000001"], "--devices=1000001 must be from 1 to 1000000. Nearest that works: 1000000."),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.yml").write_text("base_config: loop.yml\n")
    (tmp_path / "list.yml").write_text("- 1\n")
    (tmp_path / "twice.yml").write_text("steps: 5\nseed: 1\nsteps: 7\n")
    (tmp_path / "bytes.yml").write_bytes(b"\xff")
    assert run_command(convert_config, words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_rule_that_the_result_breaks_is_said_beside_it(capsys):
    assert run_command(convert_config, ["dataset_type=grain", "steps=20"]) == 2
    printed = capsys.readouterr()
    assert "steps: 20\n" in printed.out
    assert printed.err.startswith("error: tokenizer_path is empty, but tokenizer_type=sentencepiece reads a file")


def test_a_command_line_of_theirs_means_their_base_yml_in_a_checkout_of_ours_too(capsys, monkeypatch):
    monkeypatch.chdir(packaged_directory("configs").parent)
    assert run_command(convert_config, ["python3", "-m", "MaxText.train", "configs/base.yml", "steps=7"]) == 0
    assert "steps: 7\n" in capsys.readouterr().out
