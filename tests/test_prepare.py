"""The command `prepare`: from texts to a dataset for runs, at once or in shares; and its inspection."""

import functools
import json
import pickle
import re
import time

import pytest
import tokenizers

from maxtext_lite import prepare
from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.phases import StatusLine
from maxtext_lite.data.prepared import read_manifest
from maxtext_lite.data.sources import open_sources
from maxtext_lite.preparation.keys import PrepareConfig
from maxtext_lite.prepare import PrepareStep, main
from tests.source_tree import REPOSITORY


@pytest.fixture
def words(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "abc"}\n{"text": ""}\nno\n{"text": "defg"}\n'
    )
    return [
        f"input={tmp_path / 'a.jsonl'}",
        f"output={tmp_path / 'out'}",
        "max_bad_fraction=0.25",
    ]


@pytest.mark.parametrize(
    ("slow", "command"),
    [
        ("dataset.prepare_dataset", []),
        ("vocabulary.train_tokenizer", ["tokenizer", "vocab_size=300"]),
        ("inspecting.report", ["inspect"]),
    ],
)
def test_silence_is_broken_by_what_prepare_does(
    slow, command, words, tmp_path, monkeypatch, capsys
):
    def wait(*_, **__):
        time.sleep(0.2)
        raise UserError("over")
        yield  # lines, as inspect

    def wait_at_once(*_, **__):
        next(wait())

    waits = wait if command == ["inspect"] else wait_at_once
    monkeypatch.setattr(f"maxtext_lite.preparation.{slow}", waits)
    often = functools.partial(StatusLine, 0.01)
    monkeypatch.setattr(prepare, "StatusLine", often)
    given = [str(tmp_path / "out")] if command == ["inspect"] else words[:2]
    with pytest.raises(UserError, match="over"):
        main([*command, *given])
    said = capsys.readouterr()
    assert f"{tmp_path / 'out'}: 0 s so far" in said.err
    assert not said.out


@pytest.mark.fast
def test_texts_become_a_dataset_that_a_run_reads(words, tmp_path, capsys):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"bad line: {tmp_path}/a.jsonl: line at byte 29" in out
    assert "2 documents, 9 tokens in 1 shard of " in out
    assert "1 empty document skipped, 1 bad line" in out
    assert main(words) == 0
    assert "is complete" in capsys.readouterr().out
    keys = [
        "dataset_type=array_record",
        "max_target_length=4",
        "eval_fraction=0",
        "eval_interval=-1",
    ]
    source, _ = open_sources(
        load_config(None, [*keys, f"dataset_path={tmp_path / 'out'}"])
    )
    assert [source[row]["tokens"].tolist() for row in range(len(source))] == [
        [*b"abc", 256],
        [*b"defg"],
    ]
    inspect = ["inspect", str(tmp_path / "out"), "max_target_length=4"]
    assert main(inspect) == 0
    assert "concat 2 rows 7 target tokens, 87.50% of the slots" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main([*inspect, "--rows", "1:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == [*b"defg"]


def test_the_manifest_says_how_documents_begin_and_end_and_a_run_must_agree(
    tmp_path, capsys
):
    """Of conversations, whose template writes its own beginning and end."""
    vocabulary = {
        word: number for number, word in enumerate(["</s>", "<s>", "hi", "x"])
    }
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token="x")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>", "<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}"
    )
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<s>"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    keys = ["tokenizer_type=huggingface", f"tokenizer_path={tmp_path}"]
    keys += ["num_workers=1"]
    words = [f"input={tmp_path}/c.jsonl", f"output={tmp_path}/out", "chat=true"]
    assert main([*words, *keys, f"chat_template={tmp_path}/t.jinja"]) == 0
    assert "1 special token spelled" in capsys.readouterr().out
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.begin_ids, manifest.add_eos) == (None, True)
    assert (manifest.special_tokens_in_text, manifest.spelled_special_tokens) == (
        "plain",
        1,
    )
    assert manifest.tokens == 6  # hi </s> x x x </s>
    (tmp_path / "d.txt").write_text("hi hi")
    assert main([f"input={tmp_path}/d.txt", f"output={tmp_path}/texts", *keys]) == 0
    assert read_manifest(tmp_path / "texts").begin_ids == (1,)
    keys[-1:] = ["dataset_type=array_record", "vocab_size=4", "eval_interval=-1"]
    keys += ["eval_fraction=0", "packing=none"]
    chat, texts = f"dataset_path={tmp_path}/out", f"dataset_path={tmp_path}/texts"
    # However a run begins texts, a conversation begins as its template says.
    for begins in ("auto", "false"):
        source, _ = open_sources(load_config(None, [*keys, chat, f"add_bos={begins}"]))
        assert any("1 special token" in note for note in source.notes)
    for path, key in ((texts, "add_bos"), (texts, "add_eos"), (chat, "add_eos")):
        with pytest.raises(UserError, match=rf"{key}=true"):
            open_sources(load_config(None, [*keys, path, f"{key}=false"]))


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("txt/x: y #1.txt", ["txt/x: y #1.txt"]),
        ("[a.txt, b.txt]", ["a.txt", "b.txt"]),
        ("[ab]*.txt", ["[ab]*.txt"]),
    ],
)
def test_a_path_is_the_text_as_it_is_unless_it_is_a_list(text, paths):
    assert prepare.parse_prepare_config([f"input={text}", "output=x"]).input == paths


def test_a_pipeline_of_datatrove_makes_the_same_bytes(tmp_path, monkeypatch):
    """Its executors call a copy of each step with the documents of the previous step, the rank and the world size."""
    monkeypatch.setenv(
        "TOKENIZERS_PARALLELISM", "true"
    )  # which a share sets for its whole process
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": "abc " * 70_000}) + "\n" for _ in range(12))
    )
    words = [f"input={tmp_path / 'a.jsonl'}", "task_megabytes=1"]
    assert main([*words, f"output={tmp_path / 'own'}", "num_workers=1"]) == 0
    step = pickle.loads(
        pickle.dumps(PrepareStep(*words, f"output={tmp_path / 'step'}"))
    )
    for rank in (4, 0, 2, 1, 3):  # 4 tasks: one share has none
        assert not (tmp_path / "step" / "manifest.json").exists()
        assert step(None, rank, 5) is None
    own, ours = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("own", "step")
    )
    assert len(own) == 6  # a task without lines writes no shard
    assert ours == own
    with pytest.raises(UserError, match="PrepareStep"):
        step(iter([]), 0, 1)


def test_the_page_on_data_names_every_key():
    page = (REPOSITORY / "docs" / "data.md").read_text(encoding="utf-8")
    stated = re.findall(
        r"^\| `(\w+)`(?:, `(\w+)`)? \|", page.partition("## Preparing")[2], re.MULTILINE
    )
    assert {key for keys in stated for key in keys if key} >= set(
        PrepareConfig.model_fields
    )
