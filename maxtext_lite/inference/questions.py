"""Texts and questions for the evaluation of a model, and their metrics from its log-likelihoods."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from maxtext_lite.config import UserError
from maxtext_lite.data.text_files import json_objects


@dataclasses.dataclass(frozen=True)
class Scored:
    """The score of one continuation.

    Attributes:
      log_likelihood: sum of its tokens' log-probabilities, in nats, each given all tokens before it.
      is_greedy: whether each of its tokens is the likeliest.
      num_tokens: the number of scored tokens.
    """

    log_likelihood: float
    is_greedy: bool
    num_tokens: int


class Question(BaseModel):
    """A context and its possible continuations.

    Attributes:
      answer: the number of the right choice.
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
    """A context and its only right continuation."""

    model_config = ConfigDict(frozen=True, strict=True)

    context: str
    target: str = Field(pattern=r"\S")

    @property
    def choices(self) -> list[str]:
        """The target alone."""
        return [self.target]

    @property
    def answer(self) -> int:
        """The number of the target."""
        return 0


def read_questions(path: str, kind: Literal["choices", "cloze"]) -> list[Question | Cloze]:
    """The questions in files of JSON lines or rows.

    Raises:
      UserError: the file is missing or empty, or a line is not such a question; names the line.
    """
    model = Question if kind == "choices" else Cloze
    wanted = ", ".join(f'"{name}"' for name in model.model_fields)
    questions: list[Question | Cloze] = []
    for where, value in json_objects(kind, path, reads=f"{kind} reads .jsonl files", wanted=wanted):
        try:
            questions.append(model.model_validate(value))
        except ValidationError as error:
            detail = error.errors()[0]
            about = ".".join(map(str, detail["loc"]))
            raise UserError(f"{kind}: {where}: {about + ': ' if about else ''}{detail['msg']}.") from None
    if not questions:
        raise UserError(f"{kind}={path} has no question in it.")
    return questions


def continued(encode: Callable[[str], Sequence[int]], context: str, continuation: str) -> tuple[list[int], int]:
    """The tokens of a context with its continuation, and the number of the context's tokens.

    The two are tokenized together, as one text; blanks between them belong to the continuation.
    """
    stripped = context.rstrip()
    whole = [int(token) for token in encode(context + continuation)]
    return whole, min(len(encode(stripped)), len(whole) - 1)


def with_blank(context: str, continuation: str) -> str:
    """The continuation, after a blank if none separates it from the context."""
    parted = not context or context[-1].isspace() or continuation[:1].isspace()
    return continuation if parted else f" {continuation}"


def _exp(exponent: float) -> float:
    """`math.exp`, infinite where no float is large enough."""
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf


def perplexity(scored: Sequence[Scored], texts: Sequence[str], unscored: Sequence[str] = ()) -> dict[str, float]:
    """The perplexity of texts, from the scores of all their parts; infinite beyond 709 nats per token.

    Args:
      unscored: parts of the texts that are not scored, whose bytes do not count.
    """
    nll = -sum(part.log_likelihood for part in scored)
    tokens = sum(part.num_tokens for part in scored)
    return {
        "loss": nll / tokens,
        "perplexity": _exp(nll / tokens),
        "bits_per_byte": nll / math.log(2) / (_num_bytes(texts) - _num_bytes(unscored)),
        "tokens": tokens,
    }


def _num_bytes(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def accuracy(questions: Sequence[Question | Cloze], scored: Sequence[Scored]) -> dict[str, float]:
    """Accuracy by log-likelihood, and by log-likelihood per byte; for cloze, the share of greedy answers."""
    rest = iter(scored)
    right = right_by_byte = greedy = 0
    nll = tokens = 0.0
    for question in questions:
        of_question = list(itertools.islice(rest, len(question.choices)))
        likelihoods = np.array([part.log_likelihood for part in of_question])
        num_bytes = [len(text.encode()) for text in question.choices]
        right += int(likelihoods.argmax() == question.answer)
        right_by_byte += int((likelihoods / num_bytes).argmax() == question.answer)
        answer = of_question[question.answer]
        greedy += answer.is_greedy
        nll -= answer.log_likelihood
        tokens += answer.num_tokens
    number = len(questions)
    about = {"answer_perplexity": _exp(nll / tokens), "questions": number}
    if all(len(question.choices) == 1 for question in questions):
        return {"accuracy": greedy / number, **about}
    return {"accuracy": right / number, "accuracy_per_byte": right_by_byte / number, **about}
