"""The command `evaluate`: perplexity of a text, and multiple-choice and cloze questions by log-likelihood."""

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from maxtext_lite.cli import ArgumentParser, local_path, parse_keys, run_command
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.field_types import PathText
from maxtext_lite.config.hf.config import hf_directory
from maxtext_lite.config.json_file import user_path
from maxtext_lite.generate import mesh_problems, model_config
from maxtext_lite.generation.stream_text import WrittenText

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

    text: PathText = ""
    choices: PathText = ""
    cloze: PathText = ""
    max_length: int = Field(1024, ge=2)
    stride: int = Field(0, ge=0)
    rows_at_once: int = Field(4, ge=1, lt=2**31)
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    ici_tensor_parallelism: int = Field(1, ge=1)
    ici_fsdp_parallelism: int = Field(1, ge=1)


def parse_evaluate_config(overrides: Sequence[str]) -> EvaluateConfig:
    """The keys of `evaluate` from key=value words, of which the last of a key wins.

    Raises:
      UserError: with every problem.
    """
    config, problems = parse_keys(EvaluateConfig, overrides, texts=_PATHS, example=EXAMPLE)
    if problems:
        raise UserError(problems)
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
        lines = user_path(path).read_text(encoding="utf-8").splitlines()
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

    The two are tokenized together, as they would be read; blanks between them belong to the continuation.
    """
    stripped = context.rstrip()
    whole = [int(token) for token in encode(context + continuation)]
    return whole, min(len(encode(stripped)), len(whole) - 1)


def with_blank(context: str, continuation: str) -> str:
    """The continuation, with a blank before it where there is none between it and the context."""
    parted = not context or context[-1].isspace() or continuation[:1].isspace()
    return continuation if parted else f" {continuation}"


class TextScorer:
    """A model of a directory with its tokenizer: log-likelihoods of texts.

    Args:
      config: of the directory, as `generate.model_config` reads it.
      max_length: tokens that a forward pass sees.
      parallelism: sizes of the mesh axes tensor and fsdp.
    Raises:
      UserError: the model cannot see so many tokens, does not lie on that mesh, or has no tokenizer or parameters.
    """

    def __init__(
        self, directory: Path, config: Config, *, max_length: int, rows_at_once: int, parallelism: Mapping[str, int]
    ):
        positions = config.trainable_position_size
        if positions and max_length - 1 > positions:
            raise UserError(
                f"max_length={max_length} is more than the model's {positions} learned positions and one. "
                f"Nearest that works: {positions + 1}."
            )
        import jax  # only once the arguments are known to be right

        from maxtext_lite.data import check_vocabulary, load_tokenizer
        from maxtext_lite.generation.sampler import load_on_mesh
        from maxtext_lite.generation.scoring import Scorer
        from maxtext_lite.hf import stop_ids_of
        from maxtext_lite.parallel import start_devices

        self._tokenizer: Any = load_tokenizer(config)
        check_vocabulary(self._tokenizer, config.vocab_size)
        carried, self._max_length, self._sampler = hf_directory(directory), max_length, None
        self._is_carried = carried is not None
        self._stop_ids = [*(stop_ids_of(carried) if carried else ()), self._tokenizer.end_of_text_id]
        self._precision = functools.partial(jax.default_matmul_precision, config.matmul_precision)
        if problems := mesh_problems(config, len(start_devices()), **parallelism):
            raise UserError(problems)
        with self._precision():
            self._model = load_on_mesh(directory, config, parallelism)
            self._scorer = Scorer(*self._model, rows_at_once=rows_at_once)

    def encode(self, text: str) -> list[int]:
        """Tokens as the model has seen texts begin: with what its tokenizer puts there, or after the end of another."""
        if self._is_carried:
            return [int(token) for token in self._tokenizer.encode_with_special(text)]
        return [self._tokenizer.end_of_text_id, *map(int, self._tokenizer.encode(text))]

    def continuations(self, pairs: Iterable[tuple[str, str]]) -> list[Any]:
        """What is `scoring.Scored` of each (context, continuation); a context too long loses its beginning."""
        from maxtext_lite.generation.scoring import Span

        spans = []
        for context, continuation in pairs:
            tokens, first = continued(self.encode, context, continuation)
            if first == 0:  # no context, and a tokenizer that puts nothing first
                tokens, first = [self._tokenizer.end_of_text_id, *tokens], 1
            drop = max(min(len(tokens) - self._max_length, first - 1), 0)
            spans.append(Span(tokens[drop:], first - drop))
        with self._precision():
            return self._scorer.score(spans)

    def written(
        self, context: str, *, stop_strings: Sequence[str], max_new_tokens: int, temperature: float = 0.0
    ) -> str:
        """What the model writes after a context, up to the end of a text or one of `stop_strings`."""
        from maxtext_lite.generation.sampler import Sampler

        text = WrittenText(self._tokenizer.stream_decoder(), self._stop_ids, stop_strings)
        prompt = self.encode(context)[-max(self._max_length - max_new_tokens, 1) :] or [self._tokenizer.end_of_text_id]
        with self._precision():
            self._sampler: Any = self._sampler or Sampler(*self._model)
            tokens = self._sampler.stream(
                [prompt], max_new_tokens=max_new_tokens, temperature=temperature, stop_token_ids=self._stop_ids
            )
            for _, token, _ in tokens:
                text.push(token)
                if text.ended:
                    break
        text.end()
        return text.text

    def whole(self, text: str, stride: int) -> list[Any]:
        """What is `scoring.Scored` of each window of a text, which moves on by `stride` tokens.

        Raises:
          UserError: the text has no two tokens.
        """
        from maxtext_lite.generation.scoring import windows

        tokens = self.encode(text)
        if len(tokens) < 2:
            raise UserError(f"a text of {len(tokens)} token has no perplexity. It needs at least 2.")
        with self._precision():
            return self._scorer.score(windows(tokens, length=self._max_length, stride=stride))


def main(argv: Sequence[str]) -> int:
    """Prints what a model makes of a text or of questions; returns the exit code.

    Raises:
      UserError: with every problem of the arguments, the directory or the file.
    """
    parser = ArgumentParser(prog="maxtext-lite evaluate", description=f"{__doc__} Example: {EXAMPLE}")
    parser.keys = EvaluateConfig.model_fields
    parser.add_argument("directory", type=local_path, help="a run directory or a Hugging Face directory")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=", ".join(EvaluateConfig.model_fields))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_intermixed_args(argv)
    asked = parse_evaluate_config(arguments.overrides)
    directory = arguments.directory
    found = _evaluate(directory, model_config(directory, asked.dtype), asked)
    if arguments.json:
        print(json.dumps(found))
    else:
        print("  ".join(f"{name} {value:,.6g}" for name, value in found.items()))
    return 0


def _evaluate(directory: Path, config: Config, asked: EvaluateConfig) -> dict[str, float]:
    text = _read_text(asked.text) if asked.text else ""
    kind: Any = "choices" if asked.choices else "cloze"
    questions: Any = [] if asked.text else read_questions(asked.choices or asked.cloze, kind)
    scorer = TextScorer(
        directory,
        config,
        max_length=asked.max_length,
        rows_at_once=asked.rows_at_once,
        parallelism={"tensor": asked.ici_tensor_parallelism, "fsdp": asked.ici_fsdp_parallelism},
    )
    if asked.text:
        return _perplexity(scorer.whole(text, asked.stride or asked.max_length - 1), text)
    return _answers(
        questions,
        scorer.continuations(
            (question.context, with_blank(question.context, choice))
            for question in questions
            for choice in question.choices
        ),
    )


def _read_text(path: str) -> str:
    try:
        return user_path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"text={path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"text={path} is not UTF-8 text.") from None


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
