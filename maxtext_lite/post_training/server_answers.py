"""Completions by inference servers, parsed and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from maxtext_lite.config.errors import value_text
from maxtext_lite.models.decoding import Sampling
from maxtext_lite.post_training.rollout import Response

TokenId = Annotated[int, Field(strict=True)]
LogProbability = Annotated[float, Field(strict=True, ge=-1000, le=1e-4)]
"""Of a drawn token; float32 may round it above 0."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request to a server.

    Attributes:
      seed: of its draws.
      stop_token_ids: tokens after which the response ends; the server may have more of its own.
      weights: the label of the parameters to draw from.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stop_token_ids: list[int]
    vocab_size: int
    weights: str


class _Span(pydantic.BaseModel):
    """Some tokens of a response, and the label of the parameters that drew them."""

    version: str


class _Logprobs(pydantic.BaseModel):
    token_logprobs: list[LogProbability]
    tokens: list[str]


class _Choice(pydantic.BaseModel):
    prompt_token_ids: list[TokenId]
    token_ids: list[TokenId]
    logprobs: _Logprobs
    finish_reason: Literal["stop", "length"]
    stop_reason: Any = None
    weight_versions: list[_Span] | None = None  # from vLLM 0.33 on


class _Completion(pydantic.BaseModel):
    """vLLM's answer to /v1/completions."""

    choices: list[_Choice] = Field(min_length=1, max_length=1)


class _Finish(pydantic.BaseModel):
    type: Literal["stop", "length"]
    matched: Any = None


class _Meta(pydantic.BaseModel):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[LogProbability, TokenId, Any]]
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None


class _Generation(pydantic.BaseModel):
    """SGLang's answer to /generate."""

    prompt_token_ids: list[TokenId]
    output_ids: list[TokenId]
    meta_info: _Meta


def read_vllm_completion(answer: dict[str, Any], asked: Asked) -> Response:
    """The response in vLLM's answer.

    Raises:
      ValueError: it is not a completion of the prompt by tokens of the vocabulary, each with a log-probability, the
        token that ended it included.
    """
    (choice,) = _Completion.model_validate(answer).choices
    if choice.logprobs.tokens != [f"token_id:{token_id}" for token_id in choice.token_ids]:
        raise ValueError("logprobs.tokens are not its token_ids")
    _check_source(choice.prompt_token_ids, choice.weight_versions, asked)
    return _response(choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason, choice.stop_reason, asked)


def read_generation(answer: dict[str, Any], asked: Asked) -> Response:
    """The response in SGLang's answer; raises ValueError as `read_vllm_completion` does."""
    generation = _Generation.model_validate(answer)
    meta = generation.meta_info
    if [token_id for _, token_id, _ in meta.output_token_logprobs] != generation.output_ids:
        raise ValueError("output_token_logprobs are not of its output_ids")
    spans = list(meta.weight_versions or [])
    if meta.weight_version is not None:
        spans.append(_Span(version=meta.weight_version))
    _check_source(generation.prompt_token_ids, spans, asked)
    log_probabilities = [value for value, _, _ in meta.output_token_logprobs]
    finish = meta.finish_reason
    return _response(generation.output_ids, log_probabilities, finish.type, finish.matched, asked)


def _check_source(prompt: list[int], spans: Sequence[_Span] | None, asked: Asked) -> None:
    """Raises ValueError if the response continues another prompt or was drawn from other parameters."""
    if prompt != asked.prompt:
        raise ValueError(f"prompt_token_ids={value_text(prompt)} is not the prompt that was sent")
    for span in spans or ():
        if span.version != asked.weights:
            raise ValueError(
                f"it was drawn from the parameters {span.version}, not from the last update, {asked.weights}"
            )


def _response(
    token_ids: list[int], log_probabilities: list[float], reason: str, ended_by: Any, asked: Asked
) -> Response:
    """The response, after checking its tokens and its end.

    Args:
      reason: stop or length.
      ended_by: the token or tokens that ended the response, if the server says so.
    """
    if not 1 <= len(token_ids) <= asked.max_new_tokens:
        raise ValueError(f"it has {len(token_ids)} tokens, not 1 to {asked.max_new_tokens}")
    if len(token_ids) != len(log_probabilities):
        raise ValueError(f"it has {len(token_ids)} tokens and {len(log_probabilities)} log-probabilities")
    if not 0 <= min(token_ids) <= max(token_ids) < asked.vocab_size:
        raise ValueError(f"token ids {value_text(token_ids)} are not all within the vocabulary of {asked.vocab_size}")
    if not set(token_ids[:-1]).isdisjoint(asked.stop_token_ids):
        raise ValueError(f"it continues after one of stop_token_ids={asked.stop_token_ids}")
    ended = reason == "stop" or token_ids[-1] in asked.stop_token_ids
    if not ended and len(token_ids) < asked.max_new_tokens:
        raise ValueError(f"it ends after {len(token_ids)} of {asked.max_new_tokens} tokens: raise the server's limit")
    if ended and ended_by is not None:
        ends = ended_by if isinstance(ended_by, list) else [ended_by]
        if token_ids[-len(ends) :] != ends:
            raise ValueError(f"it was ended by {value_text(ended_by)}, which its token ids do not include")
    return Response(token_ids, log_probabilities, ended)
