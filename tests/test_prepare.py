"""The command: from texts to a dataset for runs, at once, in shares or a second time; and its inspection."""

import json
import pickle
import re

import pytest

from maxtext_lite import prepare
from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.preparing.keys import PrepareConfig
from maxtext_lite.data.sources import open_sources
from maxtext_lite.prepare import PrepareStep, main
from tests.source_tree import REPOSITORY


@pytest.fixture
def words(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": ""}\nno\n{"text": "defg"}\n')
    return [f"input={tmp_path / 'a.jsonl'}", f"output={tmp_path / 'out'}", "max_bad_fraction=0.25"]


def test_texts_become_a_dataset_that_a_run_reads(words, tmp_path, capsys):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"bad line: {tmp_path}/a.jsonl: line at byte 29: not JSON" in out
    assert "2 documents, 9 tokens in 1 shards of " in out
    assert "1 empty documents left out, 1 bad lines" in out
    assert main(words) == 0
    assert "is complete: it was prepared from these inputs before" in capsys.readouterr().out
    config = load_config(None, [
        "dataset_type=array_record", f"dataset_path={tmp_path / 'out'}", "max_target_length=4", "eval_fraction=0",
        "eval_interval=-1",
    ])  # fmt: skip
    source, _ = open_sources(config)
    assert [source[row]["tokens"].tolist() for row in range(len(source))] == [[*b"abc", 256], [*b"defg"]]

    assert main(["inspect", str(tmp_path / "out"), "max_target_length=4"]) == 0
    assert "concat 2 rows 7 target tokens, 87.50% of the slots" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(tmp_path / "out"), "max_target_length=4", "--rows", "1:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == [*b"defg"]


@pytest.mark.parametrize(("text", "paths"), [
    ("*.txt", ["*.txt"]), ("2024", ["2024"]), ("txt/x: y.txt", ["txt/x: y.txt"]), ("txt/x #1.txt", ["txt/x #1.txt"]),
    ("'a #1.txt'", ["a #1.txt"]), ("[a.txt, b.txt]", ["a.txt", "b.txt"]), ("[ab]*.txt", ["[ab]*.txt"]),
])  # fmt: skip
def test_a_path_is_the_text_as_it_is_unless_it_is_a_list(text, paths):
    assert prepare.parse_prepare_config([f"input={text}", "output=x"]).input == paths


def test_the_output_may_be_below_the_home_directory(words, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main([*words, "output=~/own", "num_workers=1"]) == 0
    assert (tmp_path / "own" / "manifest.json").exists()


def test_a_share_says_that_others_are_missing(words, tmp_path, capsys):
    assert main([*words, "--task", "1", "--of", "2"]) == 0
    assert capsys.readouterr().out == "share 1 of 2 is done; the last share to finish writes the manifest\n"
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_pipeline_of_datatrove_makes_the_same_bytes(tmp_path, monkeypatch, capsys):
    """Its executors call a copy of each step with the documents of the previous step, the rank and the world size."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # which a share sets for its whole process
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "abc " * 70_000}) + "\n" for _ in range(12)))
    words = [f"input={tmp_path / 'a.jsonl'}", "task_megabytes=1"]
    assert main([*words, f"output={tmp_path / 'own'}", "num_workers=1"]) == 0
    step = pickle.loads(pickle.dumps(PrepareStep(*words, f"output={tmp_path / 'step'}")))
    for rank in (4, 0, 2, 1, 3):  # 4 tasks: one share has none
        assert not (tmp_path / "step" / "manifest.json").exists()
        assert step(None, rank, 5) is None
    own, ours = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("own", "step"))
    assert len(own) == 6  # a task without lines writes no shard
    assert ours == own
    with pytest.raises(UserError, match="PrepareStep is the first step of a pipeline"):
        step(iter([]), 0, 1)
    with pytest.raises(UserError, match="num_workers has no effect in a pipeline"):
        PrepareStep(*words, f"output={tmp_path / 'step'}", "num_workers=2")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--task", "1"], "--task and --of go together"),
    (["--task", "2", "--of", "2"], "--task 2 --of 2: the first of N shares is 0, the last is N - 1."),
    (["outpt=x"], "unknown key 'outpt' (command line). Did you mean 'output'?"),
    (["inspect", "x", "max_target_lenth=3"], "unknown key 'max_target_lenth' (command line). Did you mean 'max_t"),
    (["inspect", "x", "--rows", "3"], "--rows 3 must be two numbers, as in --rows 0:3."),
    (["inspect", "x", "--json"], "--json has no effect without --rows."),
    (["inspect", "az://a/b"], "argument PATH: az://a/b is a URL (az:), and only local paths"),
    (["input=gs://a/b", "output=c"], "input.0=gs://a/b is a URL (gs:), and only local paths"),
    (["inspect", "not-there"], "PATH='not-there' is not a directory that `python -m maxtext_lite.prepare` made."),
])  # fmt: skip
def test_a_wrong_argument_is_named(arguments, message):
    with pytest.raises(UserError) as refused:
        main(arguments)
    assert any(problem.startswith(message) for problem in refused.value.problems), refused.value.problems


def test_the_keys_of_a_trained_tokenizer_are_words_of_a_shell(monkeypatch, capsys):
    monkeypatch.setattr(
        "maxtext_lite.data.preparing.vocabulary.train_tokenizer", lambda config: "my tok/tokenizer.json"
    )
    assert main(["tokenizer", "input=x", "output=my tok", "vocab_size=300"]) == 0
    said = capsys.readouterr().out
    assert said == "tokenizer_type=huggingface 'tokenizer_path=my tok/tokenizer.json': 300 ids\n"


def test_the_commands_of_the_page_are_understood(monkeypatch):
    whole = (REPOSITORY / "docs" / "data.md").read_text(encoding="utf-8")
    page = "".join(re.findall(r"^## (?:Preparing|Inspecting)$.*?(?=^## |\Z)", whole, re.MULTILINE | re.DOTALL))
    commands = re.findall(r"^python -m maxtext_lite\.prepare (.*)$", page, re.MULTILINE)
    asked = []
    monkeypatch.setattr(prepare, "_prepare", lambda config, share: asked.append((config.output, share)))
    monkeypatch.setattr(
        "maxtext_lite.data.preparing.vocabulary.train_tokenizer", lambda config: asked.append((config.output, None))
    )
    monkeypatch.setattr("maxtext_lite.data.preparing.inspecting.report", lambda path, config: iter([]))
    monkeypatch.setattr("maxtext_lite.data.preparing.inspecting.shown_rows", lambda *_, as_json: iter([]))
    for command in commands:
        index = command.replace("$SLURM_ARRAY_TASK_ID", "3").replace("$SLURM_ARRAY_TASK_COUNT", "16")
        assert main(index.replace("$JOB_COMPLETION_INDEX", "4").split()) == 0
    assert asked == [("data/texts", (0, 1)), ("data/texts", (3, 16)), ("data/texts", (4, 16)), ("tokenizer", None)]
    assert len(commands) == 7
    stated = set(re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|", page, re.MULTILINE))
    assert {key for keys in stated for key in keys if key} == set(PrepareConfig.model_fields)
