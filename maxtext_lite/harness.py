"""Run lm-evaluation-harness (the extra `harness`) on runs and Hugging Face directories, as `--model maxtext_lite`.

python -m maxtext_lite.harness run --model maxtext_lite --model_args path=DIR,max_length=1024 --tasks TASK
"""

import argparse
import functools
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import ValidationError

from maxtext_lite.cli import run_command, whole_number
from maxtext_lite.config import UserError
from maxtext_lite.config.bucket import local_copy
from maxtext_lite.config.errors import did_you_mean, install_text, value_text
from maxtext_lite.config.types import path_problem, wrong_value
from maxtext_lite.hf.chat import ChatTemplate, chat_template
from maxtext_lite.hf.model_directory import directory_config
from maxtext_lite.inference.requests import GenerateConfig

NAME = "maxtext_lite"
"""The name of our models for `--model`."""

_ARGUMENTS = ("path", "max_length", "batch_size", "dtype", "tensor", "fsdp")
_NO_MEANING = ("device", "max_batch_size")  # the harness adds them to --model_args by itself
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the harness has four names
_OPTIONS = ("until", *_MOST_TOKENS, "do_sample", "temperature", "top_k", "top_p")
_USUAL_MOST_TOKENS = 256
_MOST = 2**31 - 1  # of a model argument, as of keys


class HarnessRequest(Protocol):
    """A request of the harness; `args` are a context and a continuation or options, or only a text."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments, which depend on the type of request."""
        ...


class HarnessModel:
    """The methods that the harness calls on a model; `main` combines this class with the harness's own base class.

    Args:
      path: a run directory or a Hugging Face directory.
      max_length: tokens of one forward pass.
      batch_size: sequences per forward pass.
      tensor, fsdp: sizes of these mesh axes.
      others: `device` and `max_batch_size`, which have no meaning here.
    Raises:
      UserError: an argument is unknown or wrong, or the directory is neither.
    """

    def __init__(
        self,
        path: str,
        max_length: int | str = 1024,
        batch_size: int | str = 4,
        dtype: str = "",
        tensor: int | str = 1,
        fsdp: int | str = 1,
        **others: object,
    ) -> None:
        super().__init__()
        if unknown := [key for key in others if key not in _NO_MEANING]:
            raise UserError(
                f"--model_args has the unknown key '{value_text(key)}'.{did_you_mean(key, _ARGUMENTS)}"
                for key in unknown
            )
        if problem := path_problem(str(path), of_run=True):
            raise UserError(f"path={value_text(path)} {problem}")
        from maxtext_lite.inference.scoring import TextScorer  # imports jax, once the arguments are known

        directory, self._max_length = local_copy(path, "path"), _count("max_length", max_length, 2)
        rows = _count("batch_size", batch_size)
        mesh = {"tensor": _count("tensor", tensor), "fsdp": _count("fsdp", fsdp)}
        self._config = config = directory_config(directory, dtype)
        self._scorer = TextScorer(directory, config, max_length=self._max_length, rows_at_once=rows, mesh=mesh)

    @property
    def tokenizer_name(self) -> str:
        """What the harness names its stored requests by; it asks only where requests are rendered."""
        self._scorer.is_rendered = True
        return f"{self._scorer.tokenizer.fingerprint}-{self._template.fingerprint}"

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return chat_template(self._config)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The hash of the chat template, for the harness's records.

        Raises:
          UserError: there is no template, or one is asked for by a name.
        """
        if isinstance(chat_template, str):
            raise UserError(
                f"--apply_chat_template={value_text(chat_template)}: templates have no names here. Nearest that works: "
                "--apply_chat_template without one."
            )
        return self._template.fingerprint if chat_template else ""

    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of these turns, to which an answer is added.

        Args:
          add_generation_prompt: false: the last turn is the beginning of the answer.
        Raises:
          UserError: there is no template, or it refuses these turns.
        """
        self._scorer.is_rendered = True
        if add_generation_prompt:
            return self._template.render(chat_history)
        return self._template.render(chat_history[:-1]) + chat_history[-1]["content"]

    def loglikelihood(self, requests: Sequence[HarnessRequest]) -> list[tuple[float, bool]]:
        """For each (context, continuation), the log-likelihood and whether greedy decoding gives the continuation."""
        scored = self._scorer.continuations(request.args for request in requests)
        return [(one.log_likelihood, one.is_greedy) for one in scored]

    def loglikelihood_rolling(self, requests: Sequence[HarnessRequest]) -> list[float]:
        """For each text, its whole log-likelihood."""
        texts = [request.args[0] for request in requests]
        return [sum(one.log_likelihood for one in self._scorer.whole(text)) for text in texts]

    def generate_until(self, requests: Sequence[HarnessRequest]) -> list[str]:
        """For each (context, options), the generated text up to the first of the texts in `until`.

        The draws of a request depend on its number, so repeated requests have different answers.

        Raises:
          UserError: an option is unknown or wrong.
        """
        asked = [_asked(number, *request.args) for number, request in enumerate(requests)]
        return [self._scorer.written(each) for each in asked]


def _count(key: str, value: float | str, least: int = 1) -> int:
    """The whole number of a model argument, from `least` to 2**31 - 1.

    Raises:
      UserError: it is not one.
    """
    try:
        count = whole_number(str(value))  # the harness makes 1.5 and 1e400 numbers
    except argparse.ArgumentTypeError:
        raise UserError(f"{key}={value_text(value)} is not a whole number. Nearest that works: {least}.") from None
    if not least <= count <= _MOST:
        rule, bound = ("least", least) if count < least else ("most", _MOST)
        raise UserError(f"{key}={value_text(count)} must be at {rule} {bound}. Nearest that works: {bound}.")
    return count


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
    try:
        return GenerateConfig.model_validate(values)
    except ValidationError as error:
        refusals = (
            wrong_value(GenerateConfig, detail, str(detail["loc"][0]).replace("max_new_tokens", most))
            for detail in error.errors()
        )
        raise UserError(f"generation option {refusal}" for refusal in refusals) from None


def main(argv: Sequence[str]) -> int:
    """Runs the command line of the harness; returns the exit code.

    Raises:
      UserError: the harness is not installed, or a model's argument, its directory or an option of a task is wrong.
    """
    if importlib.util.find_spec("lm_eval") is None:
        needed = f"harness needs lm_eval: {install_text('harness')}."
        if {"-h", "--help"}.isdisjoint(argv):
            raise UserError(needed)
        print(f"{__doc__}\n{needed} It then lists its arguments.")
        return 0
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

    register_model(NAME)(type("MaxTextLite", (HarnessModel, LM), {}))
    sys.argv = ["maxtext-lite harness", *argv]  # which the harness reads itself
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
