"""The command `prepare`: text, tokenized once into a dataset that runs read; `prepare inspect` looks at one."""

import sys
from collections.abc import Sequence

from maxtext_lite.cli import ArgumentParser, parse_keys, run_command, whole_number
from maxtext_lite.config import UserError
from maxtext_lite.data.preparing.keys import PrepareConfig

EXAMPLE = "prepare input=texts/*.jsonl.zst output=data/texts tokenizer_type=huggingface tokenizer_path=tokenizer.json"
_TEXTS = ("output", "tokenizer_path", "chat_template", "text_field")


def parse_prepare_config(words: Sequence[str]) -> PrepareConfig:
    """The keys of `prepare` from key=value words, of which the last of a key wins.

    Raises:
      UserError: with every problem.
    """
    config, problems = parse_keys(PrepareConfig, words, texts=_TEXTS, example=EXAMPLE)
    problems += [f"{key} is missing. Example: {EXAMPLE}" for key in ("input", "output") if not getattr(config, key)]
    if (config.tokenizer_type == "byte") != (config.tokenizer_path == ""):
        said = "is empty" if config.tokenizer_path == "" else "has no use"
        problems.append(f"tokenizer_path {said} with tokenizer_type={config.tokenizer_type}.")
    if config.chat_template and not config.chat:
        problems.append("chat_template has no use without chat=true.")
    if problems:
        raise UserError(problems)
    return config


def main(argv: Sequence[str]) -> int:
    """Prepares what the arguments name, or shows it; returns the exit code.

    Raises:
      UserError: with every problem of the arguments, the inputs or the dataset.
    """
    parser = ArgumentParser(
        prog="maxtext-lite prepare", description=f"{__doc__} It goes on where it was stopped. Example: {EXAMPLE}"
    )
    parser.keys = PrepareConfig.model_fields
    parser.add_argument("words", nargs="*", metavar="key=value", help=", ".join(PrepareConfig.model_fields))
    parser.add_argument("--task", type=whole_number, help="the share of the work to do, from 0; for arrays of jobs")
    parser.add_argument("--of", type=whole_number, help="into how many shares the work is divided")
    arguments = parser.parse_intermixed_args(argv)
    number, of = arguments.task, arguments.of
    if (number is None) != (of is None):
        raise UserError("--task and --of go together: --task 0 --of 4 is the first quarter of the work.")
    if of is not None and not 0 <= number < of:
        raise UserError(
            f"--task {number} --of {of}: the shares are 0 to {of - 1}." if of > 0 else f"--of {of} is no share."
        )
    config = parse_prepare_config(arguments.words)
    _prepare(config, (0, 1) if of is None else (number, of))
    return 0


def _prepare(config: PrepareConfig, share: tuple[int, int]) -> None:
    from maxtext_lite.data.preparing.dataset import prepare_dataset

    outcome = prepare_dataset(config, share=share, say=lambda line: print(line, flush=True))
    if outcome is None:
        print(f"share {share[0]} of {share[1]} is done; the last one to end writes the manifest")
        return
    manifest = outcome.manifest
    for problem in outcome.problems:
        print(f"bad line: {problem}")
    print(
        f"{config.output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens in {len(manifest.shards):,} "
        f"shards of {sum(shard.bytes for shard in manifest.shards):,} bytes; {outcome.empty:,} empty documents left "
        f"out, {outcome.bad:,} bad lines; fingerprint {manifest.fingerprint[:16]}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
