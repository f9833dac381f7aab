"""A run or a Hugging Face directory as lm-evaluation-harness (the extra `harness`) sees a model."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import local_copy
from maxtext_lite.config.errors import did_you_mean, value_text
from maxtext_lite.config.types import path_problem, wrong_value
from maxtext_lite.hf.chat import ChatTemplate, chat_template
from maxtext_lite.hf.model_directory import directory_config
from maxtext_lite.inference.requests import EvaluateConfig, GenerateConfig

_ARGUMENTS = {
    "max_length": "max_length",
    "batch_size": "rows_at_once",
    "dtype": "dtype",
    "tensor": "ici_tensor_parallelism",
    "fsdp": "ici_fsdp_parallelism",
    "parameters": "parameters",
}  # beside the path: the keys of `evaluate` by other names
_NO_MEANING = ("device", "max_batch_size")  # the harness adds them to --model_args by itself
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the harness has four names
_OPTIONS = ("until", *_MOST_TOKENS, "do_sample", "temperature", "top_k", "top_p")
_USUAL_MOST_TOKENS = 256


class HarnessModel:
    """The methods that the harness calls on a model; the command combines this class with the harness's own base class.

    A request has `args`: a context and a continuation or options, or only a text.

    Args:
      path: a run directory or a Hugging Face directory.
      arguments: as in --model_args: `max_length`, tokens of one forward pass; `batch_size`, sequences of one; `dtype`;
        `tensor` and `fsdp`, sizes of these mesh axes; `device` and `max_batch_size`, which have no meaning here.
    Raises:
      UserError: an argument is unknown or wrong, or the directory is neither.
    """

    def __init__(self, path: str, **arguments: Any) -> None:
        super().__init__()
        keys: dict[str, Any] = {}
        for name, value in arguments.items():
            if name in _ARGUMENTS:
                is_number = isinstance(value, str) and re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", value)
                keys[_ARGUMENTS[name]] = json.loads(value) if is_number else value
            elif name not in _NO_MEANING:
                hint = did_you_mean(name, ("path", *_ARGUMENTS))
                raise UserError(f"--model_args has the unknown key '{value_text(name)}'.{hint}")
        if problem := path_problem(str(path), of_run=True):
            raise UserError(f"path={value_text(path)} {problem}")
        names = {key: name for name, key in _ARGUMENTS.items()}
        asked = _validated(EvaluateConfig, keys, names, "")
        from maxtext_lite.inference.scoring import TextScorer  # imports jax, once the arguments are known

        directory = local_copy(path, "path")
        self._config = directory_config(directory, asked.dtype)
        self._scorer = TextScorer(directory, self._config, asked)

    @property
    def tokenizer_name(self) -> str:
        """The harness's name for its stored requests, which it needs only if it renders them."""
        self._scorer.is_rendered = True
        return f"{self._scorer.tokenizer.fingerprint}-{self._template.fingerprint}"

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return chat_template(self._config)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The hash of the chat template, for the harness's records.

        Raises:
          UserError: there is no template, or one is requested by name.
        """
        if isinstance(chat_template, str):
            raise UserError(
                f"--apply_chat_template={value_text(chat_template)}: templates have no names here. Nearest that works: "
                "--apply_chat_template without one."
            )
        return self._template.fingerprint if chat_template else ""

    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of these turns, ready for an answer.

        Args:
          add_generation_prompt: false: the last turn is the beginning of the answer.
        Raises:
          UserError: there is no template, or it refuses these turns.
        """
        self._scorer.is_rendered = True
        if add_generation_prompt:
            return self._template.render(chat_history)
        return self._template.render(chat_history[:-1]) + chat_history[-1]["content"]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """For each (context, continuation), the log-likelihood and whether greedy decoding gives the continuation."""
        scored = self._scorer.continuations(request.args for request in requests)
        return [(one.log_likelihood, one.is_greedy) for one in scored]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """For each text, its whole log-likelihood."""
        texts = [request.args[0] for request in requests]
        return [sum(one.log_likelihood for one in self._scorer.whole(text)) for text in texts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """For each (context, options), the generated text up to the first of the texts in `until`.

        The draws of a request depend on its number, so repeated requests have different answers.

        Raises:
          UserError: an option is unknown or wrong.
        """
        asked = [_asked(number, *request.args) for number, request in enumerate(requests)]
        return [self._scorer.written(each) for each in asked]


def _asked(number: int, context: str, options: Mapping[str, Any]) -> GenerateConfig:
    """A request of `generate_until`, its options read as the harness reads them for its own `hf` models.

    Without do_sample, a temperature above 0 means sampling. The temperature of sampling is 1 where none is given, as in
    transformers.

    Raises:
      UserError: an option is unknown or wrong.
    """
    if unknown := [key for key in options if key not in _OPTIONS]:
        raise UserError(
            f"generation option {value_text(key)}={value_text(options[key])} has no meaning here. Those that have one: "
            f"{', '.join(_OPTIONS)}."
            for key in unknown
        )
    given = {key: value for key, value in options.items() if value is not None}
    most = next((key for key in _MOST_TOKENS if key in given), _MOST_TOKENS[0])
    until = given.get("until", [])
    is_sampled = given.get("do_sample", given.get("temperature", 0.0) != 0)
    values = {
        "prompt": context,
        "stop_strings": [until] if isinstance(until, str) else list(until),
        "max_new_tokens": given.get(most, _USUAL_MOST_TOKENS),
        "temperature": given.get("temperature", 1.0) if is_sampled else 0.0,
        "seed": number,
        **{key: given[key] for key in ("top_k", "top_p") if key in given},
    }
    return _validated(GenerateConfig, values, {"max_new_tokens": most}, "generation option ")


_Keys = TypeVar("_Keys", bound=BaseModel)


def _validated(kind: type[_Keys], values: Mapping[str, Any], names: Mapping[str, str], what: str) -> _Keys:
    """The keys with these values; a wrong one is refused by its name for the user."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems: list[str] = []
        for detail in error.errors():
            key = str(detail["loc"][0])
            refusal = wrong_value(kind, detail, names.get(key, key))
            default = "" if refusal.nearest else f" The default is {kind.model_fields[key].default}."
            problems.append(f"{what}{refusal}{default}")
        raise UserError(problems) from None
