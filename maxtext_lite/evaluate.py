"""The command `evaluate`: perplexity of a text, and multiple-choice and cloze questions by log-likelihood."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from maxtext_lite.cli import ArgumentParser, run_command
from maxtext_lite.config import Config, UserError, parse_value
from maxtext_lite.config.errors import did_you_mean
from maxtext_lite.config.hf_config import hf_directory
from maxtext_lite.generate import model_config

EXAMPLE = "evaluate RUN_DIR text=held_out.txt max_length=1024"
_PATHS = ("text", "choices", "cloze")


class EvaluateConfig(BaseModel):
    """What `evaluate` takes as key=value; one of the first three.

    Attributes:
      text: a file, as one text: its perplexity.
      choices: a JSONL file of {"context": text, "choices": [text, ...], "answer": number of the right one}.
      cloze: a JSONL file of {"context": text, "target": text}.
      max_length: tokens that a forward pass sees.
      stride: text: tokens by which the window moves on; the others of it are context. 0: max_length.
      rows_at_once: sequences of one forward pass.
      dtype: of activations; "": as the directory's config says.
      ici_tensor_parallelism: devices that share heads, mlp and vocabulary.
      ici_fsdp_parallelism: devices that share the rest of the parameters, and the rows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    text: str = ""
    choices: str = ""
    cloze: str = ""
    max_length: int = Field(1024, ge=2)
    stride: int = Field(0, ge=0)
    rows_at_once: int = Field(4, ge=1)
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    ici_tensor_parallelism: int = Field(1, ge=1)
    ici_fsdp_parallelism: int = Field(1, ge=1)


def parse_evaluate_config(overrides: Sequence[str]) -> EvaluateConfig:
    """The keys of `evaluate` from key=value words, of which the last of a key wins.

    Raises:
      UserError: with every problem.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            problems.append(f"'{word}' is not of the form key=value. Example: {EXAMPLE}")
        elif key not in EvaluateConfig.model_fields:
            problems.append(f"unknown key '{key}' (command line).{did_you_mean(key, EvaluateConfig.model_fields)}")
        else:
            try:
                values[key] = text if key in _PATHS else parse_value(text).value
            except ValueError as error:
                problems.append(f"{key}={text} {error}.")
    if problems:
        raise UserError(problems)
    try:
        config = EvaluateConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(
            f"{detail['loc'][0]}={detail['input']}: {detail['msg']}." for detail in error.errors()
        ) from None
    given = [key for key in _PATHS if getattr(config, key)]
    if len(given) != 1:
        said = f"{' and '.join(given)} contradict each other" if given else "nothing is asked for"
        problems.append(f"{said}: give one of text, choices and cloze. Example: {EXAMPLE}")
    if config.stride > config.max_length - 1:
        problems.append(
            f"stride={config.stride} is more than max_length={config.max_length} - 1: a window's first token has no "
            f"context in it. Nearest that works: {config.max_length - 1}."
        )
    if config.stride and not config.text:
        problems.append(f"stride={config.stride} has no use without text. Nearest that works: 0.")
    if problems:
        raise UserError(problems)
    return config


class Question(BaseModel):
    """A context and what may follow it.

    Attributes:
      answer: number of the right choice.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    context: str
    choices: list[str] = Field(min_length=2)
    answer: int = Field(ge=0)

    @model_validator(mode="after")
    def _has_its_answer(self) -> Self:
        if self.answer >= len(self.choices):
            raise ValueError(f"answer must be in 0..{len(self.choices) - 1}")
        if not all(text.strip() for text in self.choices):
            raise ValueError("choices must not be empty")
        return self


class Cloze(BaseModel):
    """A context and the only thing that ought to follow it."""

    model_config = ConfigDict(frozen=True, strict=True)

    context: str
    target: str = Field(pattern=r"\S")

    @property
    def choices(self) -> list[str]:
        """The target alone."""
        return [self.target]

    @property
    def answer(self) -> int:
        """Its number."""
        return 0


def read_questions(path: str, kind: Literal["choices", "cloze"]) -> list[Question] | list[Cloze]:
    """The questions of a JSONL file.

    Raises:
      UserError: the file is missing or empty, or a line is not such a question; names it.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{kind}={path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{kind}={path} is not UTF-8 text.") from None
    model: Any = Question if kind == "choices" else Cloze
    questions: list[Any] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            questions.append(model.model_validate_json(line))
        except ValidationError as error:
            detail = error.errors()[0]
            about = ".".join(map(str, detail["loc"]))
            where = f"{kind}={path}, line {number}"
            raise UserError(f"{where}: {about + ': ' if about else ''}{detail['msg']}.") from None
    if not questions:
        raise UserError(f"{kind}={path} has no question in it.")
    return questions


def continued(encode: Callable[[str], Sequence[int]], context: str, continuation: str) -> tuple[list[int], int]:
    """Tokens of a context with its continuation, and how many of them are the context's.

    The two are tokenized together, as they would be read; blanks between them belong to the continuation, and one
    blank is put there where there is none.
    """
    stripped = context.rstrip()
    between = context[len(stripped) :]
    if stripped and not between and not continuation[:1].isspace():
        between = " "
    whole = [int(token) for token in encode(stripped + between + continuation)]
    return whole, min(len(encode(stripped)), len(whole) - 1)


def main(argv: Sequence[str]) -> int:
    """Prints what a model makes of a text or of questions; returns the exit code.

    Raises:
      UserError: with every problem of the arguments, the directory or the file.
    """
    parser = ArgumentParser(prog="maxtext-lite evaluate", description=f"{__doc__} Example: {EXAMPLE}")
    parser.add_argument("directory", help="a run directory or a Hugging Face directory")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=", ".join(EvaluateConfig.model_fields))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args(argv)
    asked = parse_evaluate_config(arguments.overrides)
    directory = Path(arguments.directory)
    found = _evaluate(directory, model_config(directory, asked.dtype), asked)
    if arguments.json:
        print(json.dumps(found))
    else:
        print("  ".join(f"{name} {value:,.6g}" for name, value in found.items()))
    return 0


def _evaluate(directory: Path, config: Config, asked: EvaluateConfig) -> dict[str, float]:
    if config.trainable_position_size and asked.max_length - 1 > config.trainable_position_size:
        raise UserError(
            f"max_length={asked.max_length} is more than the model's {config.trainable_position_size} learned "
            f"positions and one. Nearest that works: {config.trainable_position_size + 1}."
        )
    text = _read_text(asked.text) if asked.text else ""
    questions = (
        [] if asked.text else read_questions(asked.choices or asked.cloze, "choices" if asked.choices else "cloze")
    )
    import jax  # only once the arguments are known to be right

    from maxtext_lite.data import check_vocabulary, load_tokenizer
    from maxtext_lite.parallel import start_devices
    from maxtext_lite.training.sampler import load_on_mesh
    from maxtext_lite.training.scoring import Scorer, Span, windows

    tokenizer: Any = load_tokenizer(config)
    check_vocabulary(tokenizer, config.vocab_size)
    carried = hf_directory(directory)

    def encode(text: str) -> list[int]:
        """Tokens as the model has seen texts begin: with what its tokenizer puts there, or after the end of another."""
        if carried:
            return [int(token) for token in tokenizer.encode_with_special(text)]
        return [tokenizer.end_of_text_id, *map(int, tokenizer.encode(text))]

    if asked.text:
        tokens = encode(text)
        if len(tokens) < 2:
            raise UserError(f"text={asked.text} has {len(tokens)} token; perplexity needs at least 2.")
        spans = windows(tokens, length=asked.max_length, stride=asked.stride or asked.max_length - 1)
    else:
        spans = []
        for question in questions:
            for choice in question.choices:
                tokens, first = continued(encode, question.context, choice)
                if first == 0:  # no context, and a tokenizer that puts nothing first
                    tokens, first = [tokenizer.end_of_text_id, *tokens], 1
                spans.append(Span(*_cut(tokens, first, asked.max_length)))
    start_devices()
    sizes = {"tensor": asked.ici_tensor_parallelism, "fsdp": asked.ici_fsdp_parallelism}
    with jax.default_matmul_precision(config.matmul_precision):
        scorer = Scorer(*load_on_mesh(directory, config, sizes), rows_at_once=asked.rows_at_once)
        scored = scorer.score(spans)
    if asked.text:
        return _perplexity(scored, text)
    return _answers(questions, scored)


def _read_text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"text={path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"text={path} is not UTF-8 text.") from None


def _cut(tokens: list[int], first: int, length: int) -> tuple[list[int], int]:
    """The last `length` tokens, as far as a context can be cut short."""
    drop = max(min(len(tokens) - length, first - 1), 0)
    return tokens[drop:], first - drop


def _perplexity(scored: Sequence[Any], text: str) -> dict[str, float]:
    nll, tokens = -sum(part.log_likelihood for part in scored), sum(part.num_tokens for part in scored)
    return {
        "loss": nll / tokens,
        "perplexity": math.exp(nll / tokens),
        "bits_per_byte": nll / math.log(2) / len(text.encode()),
        "tokens": tokens,
    }


def _answers(questions: Sequence[Any], scored: Sequence[Any]) -> dict[str, float]:
    """Accuracy by log-likelihood and by that divided by a continuation's bytes; of cloze, how often it is greedy."""
    rest = list(scored)
    right = right_by_byte = greedy = nll = tokens = 0.0
    for question in questions:
        count = len(question.choices)
        of_question, rest = rest[:count], rest[count:]
        likelihoods: list[float] = [part.log_likelihood for part in of_question]
        by_byte = [
            likelihood / len(text.encode()) for likelihood, text in zip(likelihoods, question.choices, strict=True)
        ]
        right += max(range(count), key=likelihoods.__getitem__) == question.answer
        right_by_byte += max(range(count), key=by_byte.__getitem__) == question.answer
        answer = of_question[question.answer]
        greedy += answer.is_greedy
        nll, tokens = nll - answer.log_likelihood, tokens + answer.num_tokens
    number = len(questions)
    about = {"answer_perplexity": math.exp(nll / tokens), "questions": number}
    if all(len(question.choices) == 1 for question in questions):
        return {"accuracy": greedy / number, **about}
    return {"accuracy": right / number, "accuracy_per_byte": right_by_byte / number, **about}


if __name__ == "__main__":
    sys.exit(run_command(main))
