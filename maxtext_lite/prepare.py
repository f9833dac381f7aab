"""Tokenize text once, into a dataset for any number of runs."""

import argparse
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Generator, Sequence

from maxtext_lite.cli import ArgumentParser, run_command, whole_number
from maxtext_lite.command_keys import key_arguments, parse_keys
from maxtext_lite.config import UserError
from maxtext_lite.config.errors import WrongType, counted, value_text
from maxtext_lite.config.phases import StatusLine
from maxtext_lite.config.types import data_path_text
from maxtext_lite.preparation.keys import InspectConfig, PrepareConfig, TokenizerConfig

EXAMPLE = "prepare input=texts/*.jsonl.zst output=data/texts tokenizer_type=huggingface tokenizer_path=tokenizer.json"
_TEXTS = ("output", "tokenizer_path", "chat_template", "text_field")
_PATHS = ("input",)


def parse_prepare_config(words: Sequence[str]) -> PrepareConfig:
    """The keys of `prepare` from key=value words; of several for a key, the last wins.

    Raises:
      UserError: with every problem.
    """
    config, problems = parse_keys(PrepareConfig, words, texts=_TEXTS, paths=_PATHS, example=EXAMPLE)
    problems += [f"{key} is missing. Example: {EXAMPLE}" for key in ("input", "output") if not getattr(config, key)]
    if (config.tokenizer_type == "byte") != (config.tokenizer_path == ""):
        said = "is empty" if config.tokenizer_path == "" else "has no effect"
        problems.append(f"tokenizer_path {said} with tokenizer_type={config.tokenizer_type}.")
    if config.chat_template and not config.chat:
        problems.append("chat_template has no effect without chat=true.")
    if problems:
        raise UserError(problems)
    return config


class PrepareStep:
    """`prepare` as a step of a datatrove pipeline: each task of the executor is one share. Does not import datatrove.

    Args:
      words: key=value, as on the command line.
    Raises:
      UserError: with every problem of the words.
    """

    def __init__(self, *words: str) -> None:
        self._config = parse_prepare_config(words)
        if self._config.num_workers != -1:
            raise UserError("num_workers has no effect in a pipeline: each worker of the executor is one thread.")

    def __repr__(self) -> str:
        return f"prepare: {self._config.output}"

    def __call__(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        """Does share `rank` of `world_size` in this process; the last share to finish writes the manifest.

        Raises:
          UserError: as from `prepare`; or there is a previous step, whose documents it would not read.
        """
        if data is not None:
            raise UserError("PrepareStep is the first step of a pipeline: it reads the files of input=.")
        from maxtext_lite.data.tokenizer import load_tokenizer
        from maxtext_lite.preparation.dataset import prepare_dataset

        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker of the executor has one core
        tokenizer = load_tokenizer(self._config)
        prepare_dataset(self._config, tokenizer=tokenizer, share=(rank, world_size), say=lambda line: print(line))


def main(argv: Sequence[str]) -> int:
    """Prepares or inspects a dataset, or trains a tokenizer; returns the exit code.

    Raises:
      UserError: with every problem of the arguments, the inputs or the dataset.
    """
    if argv[:1] == ["inspect"]:
        return _inspect(argv[1:])
    if argv[:1] == ["tokenizer"]:
        return _train_tokenizer(argv[1:])
    parser = ArgumentParser(
        prog="maxtext-lite prepare",
        description=f"{__doc__} It resumes where it was stopped. `prepare inspect` shows a dataset, "
        f"`prepare tokenizer` trains a tokenizer; both have their own --help. Example: {EXAMPLE}",
    )
    key_arguments(parser, PrepareConfig)
    parser.add_argument("--task", type=whole_number, help="share of the work to do, from 0; for job arrays")
    parser.add_argument("--of", type=whole_number, help="number of shares of the work")
    arguments = parser.parse_intermixed_args(argv)
    number, of = arguments.task, arguments.of
    if (number is None) != (of is None):
        raise UserError("--task and --of go together: --task 0 --of 4 is the first quarter of the work.")
    if of is not None and not 0 <= number < of:
        raise UserError(f"--task {number} --of {of}: the first of N shares is 0, the last is N - 1.")
    config = parse_prepare_config(arguments.overrides)
    _prepare(config, (0, 1) if of is None else (number, of))
    return 0


@contextlib.contextmanager
def _status_line(doing: str) -> Generator[StatusLine]:
    status = StatusLine(doing=doing)
    with status.shown():
        status.is_first = True
        yield status


def _prepare(config: PrepareConfig, share: tuple[int, int]) -> None:
    from maxtext_lite.data.text_encoder import spelled_notes
    from maxtext_lite.preparation.dataset import prepare_dataset

    with _status_line(f"preparing {config.output}") as status:
        status.is_first = not sys.stdout.isatty()  # where a bar shows the progress

        def say(line: str) -> None:
            print(line, flush=True)
            status.printed()

        outcome = prepare_dataset(config, share=share, say=say)
    if outcome is None:
        print(f"share {share[0]} of {share[1]} is done; the last share to finish writes the manifest")
        return
    manifest = outcome.manifest
    for problem in outcome.problems:
        print(f"bad line: {problem}")
    for note in spelled_notes(manifest.spelled_special_tokens, manifest.special_tokens_in_text):
        print(f"{note} See special_tokens_in_text.")
    print(
        f"{config.output}: {counted(manifest.documents, 'document')}, {counted(manifest.tokens, 'token')} in "
        f"{counted(len(manifest.shards), 'shard')} of {sum(shard.bytes for shard in manifest.shards):,} bytes; "
        f"{counted(outcome.empty, 'empty document')} skipped, {counted(outcome.bad, 'bad line')}; fingerprint "
        f"{manifest.fingerprint[:16]}"
    )


def _inspect(argv: Sequence[str]) -> int:
    example = "prepare inspect data/texts max_target_length=2048"
    parser = ArgumentParser(
        prog="maxtext-lite prepare inspect", description=f"The content of a prepared dataset. Example: {example}"
    )
    parser.add_argument("path", type=_dataset_path, metavar="PATH", help="the output of prepare")
    key_arguments(parser, InspectConfig)
    parser.add_argument("--rows", metavar="A:B", help="show rows A to B - 1: text, documents and loss weights")
    parser.add_argument("--json", action="store_true", help="with --rows: their arrays, one line of JSON per row")
    arguments = parser.parse_intermixed_args(argv)
    config, problems = parse_keys(InspectConfig, arguments.overrides, texts=("tokenizer_path",), example=example)
    bounds = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", arguments.rows or "0:1")
    if bounds is None:
        problems.append(f"--rows {arguments.rows} must be two numbers, as in --rows 0:3.")
    if arguments.json and not arguments.rows:
        problems.append("--json has no effect without --rows.")
    if problems or bounds is None:
        raise UserError(problems)
    from maxtext_lite.preparation.inspecting import report, shown_rows

    if arguments.rows:
        lines = shown_rows(arguments.path, config, int(bounds[1]), int(bounds[2]), as_json=arguments.json)
    else:
        lines = report(arguments.path, config)
    with _status_line(f"reading {arguments.path}") as status:
        for line in lines:
            print(line, flush=True)
            status.printed()
    return 0


def _dataset_path(text: str) -> str:
    try:
        return str(data_path_text(text))
    except WrongType as wrong:
        raise argparse.ArgumentTypeError(f"{value_text(text)} {str(wrong).rstrip('.')}") from None


def _train_tokenizer(argv: Sequence[str]) -> int:
    example = "prepare tokenizer input=texts output=tokenizer vocab_size=32000"
    parser = ArgumentParser(
        prog="maxtext-lite prepare tokenizer", description=f"Trains a tokenizer on text. Example: {example}"
    )
    key_arguments(parser, TokenizerConfig)
    arguments = parser.parse_intermixed_args(argv)
    config, problems = parse_keys(
        TokenizerConfig, arguments.overrides, texts=("output", "text_field"), paths=_PATHS, example=example
    )
    problems += [f"{key} is missing. Example: {example}" for key in ("input", "output") if not getattr(config, key)]
    if problems:
        raise UserError(problems)
    from maxtext_lite.preparation.vocabulary import train_tokenizer

    with _status_line(f"training the tokenizer {config.output}"):
        path = train_tokenizer(config)
    words = shlex.join([f"tokenizer_type={config.tokenizer_type}", f"tokenizer_path={path}"])
    print(f"{words}: {config.vocab_size:,} ids")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
