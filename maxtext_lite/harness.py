"""Models for lm-evaluation-harness (the extra `harness`): its command line, with our models added.

python -m maxtext_lite.harness run --model maxtext_lite --model_args path=DIR,max_length=1024 --tasks TASK
"""

from collections.abc import Sequence
from typing import Any, Protocol

from maxtext_lite.config.bucket import local_copy
from maxtext_lite.config.hf.model_directory import directory_config
from maxtext_lite.generation.scoring import TextScorer

NAME = "maxtext_lite"
"""The name of our models for `--model`."""


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
      batch_size: sequences per forward pass.
      tensor, fsdp: sizes of these mesh axes.
    """

    def __init__(
        self,
        path: str,
        max_length: int = 1024,
        batch_size: int = 4,
        dtype: str = "",
        tensor: int = 1,
        fsdp: int = 1,
        **unused: object,
    ) -> None:
        super().__init__()
        del unused  # such as `device`
        directory, self._max_length = local_copy(path, "path"), int(max_length)
        self._scorer = TextScorer(
            directory,
            directory_config(directory, dtype),
            max_length=self._max_length,
            rows_at_once=int(batch_size),
            mesh={"tensor": int(tensor), "fsdp": int(fsdp)},
        )

    def loglikelihood(self, requests: Sequence[HarnessRequest]) -> list[tuple[float, bool]]:
        """For each (context, continuation), the log-likelihood and whether greedy decoding gives the continuation."""
        scored = self._scorer.continuations(request.args for request in requests)
        return [(one.log_likelihood, one.is_greedy) for one in scored]

    def loglikelihood_rolling(self, requests: Sequence[HarnessRequest]) -> list[float]:
        """For each text, its whole log-likelihood."""
        texts = [request.args[0] for request in requests]
        return [sum(one.log_likelihood for one in self._scorer.windows(text, self._max_length - 1)) for text in texts]

    def generate_until(self, requests: Sequence[HarnessRequest]) -> list[str]:
        """For each (context, options), the generated text up to the first of the texts in `until`."""
        answers = []
        for request in requests:
            context, options = request.args
            until = options.get("until") or []
            answers.append(
                self._scorer.written(
                    context,
                    stop_strings=[until] if isinstance(until, str) else list(until),
                    max_new_tokens=int(options.get("max_gen_toks", 256)),
                    temperature=float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0,
                )
            )
        return answers


def main() -> None:
    """Runs the command line of the harness."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

    register_model(NAME)(type("MaxTextLite", (HarnessModel, LM), {}))
    cli_evaluate()


if __name__ == "__main__":
    main()
