"""The answers of inference servers, parsed as responses. Everything that can be checked is."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, cast

from maxtext_lite.models import Sampling
from maxtext_lite.post_training.rollout import Response

_LEAST, _MOST = -1000.0, 1e-4  # log-probability of a drawn token; float32 may round it above 0
_SHOWN = 80  # characters of a value
_COMPLETIONS = (
    ". The server must return, in each of choices, token_ids with the ids of all new tokens where it is asked "
    "return_token_ids=true, as vLLM and SGLang do from some version on, and logprobs.token_logprobs with a "
    "log-probability of each"
)


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


def read_completion(answer: Mapping[str, Any], asked: Asked) -> Response:
    """The response in an answer of OpenAI's protocol, with the `token_ids` that vLLM and SGLang add.

    Raises:
      ValueError: it is not a completion of the prompt by tokens of the vocabulary, each with a log-probability, the
        token that ended it included; the message is the end of a sentence.
    """
    response, by = _completion(answer, asked), answer["choices"][0].get("stop_reason")
    if response.ended and by is None and response.token_ids[-1] not in asked.stop_token_ids:
        raise ValueError(
            f"choices[0].finish_reason=stop after {response.token_ids[-1]}, which is none of stop_token_ids="
            f"{shown(asked.stop_token_ids)}, nor named by stop_reason: token_ids must include the token that ended the "
            "response"
        )
    return response


def _completion(answer: Mapping[str, Any], asked: Asked) -> Response:
    entry = functools.partial(_entry, hint=_COMPLETIONS)
    choices = entry(answer, "choices", list, "")
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError(f"choices={shown(choices)} is not a list of the one choice that was asked for")
    choice, at = choices[0], "choices[0]."
    if "index" in choice and (type(choice["index"]) is not int or choice["index"] != 0):
        raise ValueError(f"{at}index={shown(choice['index'])}, where the only choice has 0")
    for place, of in (("", answer), (at, choice)):
        _check_prompt(of.get("prompt_token_ids"), f"{place}prompt_token_ids", asked)
    token_ids = entry(choice, "token_ids", list, at)
    values = entry(entry(choice, "logprobs", dict, at), "token_logprobs", list, f"{at}logprobs.")
    names = {"tokens": f"{at}token_ids", "values": f"{at}logprobs.token_logprobs", "reason": f"{at}finish_reason"}
    response = _response(token_ids, values, choice.get("finish_reason"), asked, **names)
    _check_end(response, choice.get("stop_reason"), f"{at}stop_reason", f"{at}token_ids")
    return response


def read_vllm_completion(answer: Mapping[str, Any], asked: Asked) -> Response:
    """As `read_completion`, with vLLM's further fields.

    They name the token of each log-probability, repeat the prompt and, from 0.33 on, give the parameters' labels.
    """
    response = _completion(answer, asked)
    choice, at = answer["choices"][0], "choices[0]."
    _entry(choice, "prompt_token_ids", list, at)  # required; `read_completion` has compared it
    named, expected = choice["logprobs"].get("tokens"), [f"token_id:{token_id}" for token_id in response.token_ids]
    if named != expected:
        raise ValueError(f"{at}logprobs.tokens={shown(named)}, where token_ids are {shown(expected)}")
    _check_weights(choice.get("weight_versions"), f"{at}weight_versions", asked)
    return response


def read_generation(answer: Mapping[str, Any], asked: Asked) -> Response:
    """The response in an answer to SGLang's /generate.

    Raises:
      ValueError: as of `read_completion`.
    """
    token_ids, at = _entry(answer, "output_ids", list, ""), "meta_info."
    about = _entry(answer, "meta_info", dict, "")
    scored = _entry(about, "output_token_logprobs", list, at)
    for place, of in (("", answer), (at, about)):
        _check_prompt(of.get("prompt_token_ids"), f"{place}prompt_token_ids", asked)
    if not all(isinstance(each, list) and len(cast(list[Any], each)) >= 2 for each in scored):
        raise ValueError(f"{at}output_token_logprobs={shown(scored)} is not a list of [log-probability, id, text]")
    if [each[1] for each in scored] != token_ids:
        raise ValueError(f"{at}output_token_logprobs={shown(scored)} are not of output_ids={shown(token_ids)}")
    count = about.get("prompt_tokens")
    if count is not None and count != len(asked.prompt):
        raise ValueError(f"{at}prompt_tokens={shown(count)}, where the prompt has {len(asked.prompt):,}")
    finish = _entry(about, "finish_reason", dict, at)
    _check_weights(about.get("weight_versions"), f"{at}weight_versions", asked)
    if about.get("weight_version") not in (None, asked.weights):
        raise ValueError(_other_weights(f"{at}weight_version", about["weight_version"], asked))
    names = {"tokens": "output_ids", "values": f"{at}output_token_logprobs", "reason": f"{at}finish_reason.type"}
    response = _response(token_ids, [each[0] for each in scored], finish.get("type"), asked, **names)
    _check_end(response, finish.get("matched"), f"{at}finish_reason.matched", "output_ids")
    return response


def _response(
    token_ids: list[Any],
    log_probabilities: list[Any],
    finish: Any,
    asked: Asked,
    *,
    tokens: str,
    values: str,
    reason: str,
) -> Response:
    """The response of these values, after a check; `tokens`, `values` and `reason` are their names in the answer."""
    most, stops = asked.max_new_tokens, asked.stop_token_ids
    if not 1 <= len(token_ids) <= most:
        raise ValueError(f"{tokens} has {len(token_ids):,} tokens, where 1 to {most:,} were asked for")
    if len(token_ids) != len(log_probabilities):
        short, other = (name.rpartition(".")[2] for name in (tokens, values))
        raise ValueError(f"{len(token_ids):,} {short} with {len(log_probabilities):,} {other}")
    for number, (token_id, value) in enumerate(zip(token_ids, log_probabilities, strict=True)):
        if type(token_id) is not int or not 0 <= token_id < asked.vocab_size:
            raise ValueError(f"{tokens}[{number}]={shown(token_id)} is not an id from 0 to {asked.vocab_size - 1}")
        if type(value) not in (int, float) or not _LEAST <= value <= _MOST:  # also refuses NaN
            raise ValueError(
                f"{values}[{number}]={shown(value)} is not the log-probability of a token that was drawn, from "
                f"{_LEAST:g} to 0"
            )
    stopped = token_ids[-1] in stops
    if finish not in ("stop", "length"):
        raise ValueError(f"{reason}={shown(finish)} is neither stop nor length")
    if any(token_id in stops for token_id in token_ids[:-1]):
        raise ValueError(f"{tokens} goes on after one of stop_token_ids={shown(stops)}")
    if finish == "length" and not stopped and len(token_ids) < most:
        raise ValueError(
            f"{reason}=length after {len(token_ids):,} tokens, where max_tokens={most} were asked for: the server has "
            "a limit of its own, which must be raised"
        )
    return Response(token_ids, [float(value) for value in log_probabilities], finish == "stop" or stopped)


def _check_end(response: Response, by: Any, name: str, tokens: str) -> None:
    """Raises ValueError if the server reports that something else than the last token ended the response.

    Args:
      by: the token, the tokens or the text that ended it; None: it is not said.
    """
    if by is None or not response.ended:
        return
    ends = cast(list[Any], by) if isinstance(by, list) else [by]
    if response.token_ids[-len(ends) :] != ends:
        raise ValueError(
            f"{name}={shown(cast(object, by))}, where {tokens} ends in {response.token_ids[-1]}: the ids must include "
            "the token that ended the response"
        )


def _check_prompt(echo: Any, name: str, asked: Asked) -> None:
    """Raises ValueError if the server reports another prompt."""
    if echo is not None and (echo != asked.prompt or any(type(token_id) is not int for token_id in echo)):
        raise ValueError(f"{name}={shown(echo)} is not the prompt that was sent, {shown(asked.prompt)}")


def _check_weights(spans: Any, name: str, asked: Asked) -> None:
    """Raises ValueError if the server reports that it drew a token from parameters other than the last update's."""
    if not (spans is None or isinstance(spans, list)):
        raise ValueError(f"{name}={shown(spans)} is not a list")
    for span in cast(list[Any], spans or []):
        label = cast(dict[str, Any], span).get("version") if isinstance(span, dict) else span
        if label != asked.weights:
            raise ValueError(_other_weights(name, label, asked))


def _other_weights(name: str, label: Any, asked: Asked) -> str:
    return (
        f"{name}={shown(label)}, where the last update was {shown(asked.weights)}: it sampled from other parameters, "
        "as behind an address with several servers all but one do"
    )


def _entry(of: Mapping[str, Any], name: str, kind: type, place: str, *, hint: str = "") -> Any:
    """A required entry of a kind."""
    if isinstance(of.get(name), kind):
        return of[name]
    wrong = f"={shown(of[name])} is not {'an object' if kind is dict else 'a list'}" if name in of else " is missing"
    raise ValueError(f"{place}{name}{wrong}{hint}")


def shown(value: object, most: int = _SHOWN) -> str:
    """The beginning of a JSON value's text."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "(something nested too deeply)"
    return text if len(text) <= most else f"{text[:most]}..."
