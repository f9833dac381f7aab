"""Run lm-evaluation-harness (the extra `harness`) on runs and Hugging Face directories, as `--model maxtext_lite`.

python -m maxtext_lite.harness run --model maxtext_lite --model_args path=DIR,max_length=1024 --tasks TASK
"""

import importlib.util
import sys
from collections.abc import Sequence

from maxtext_lite.cli import run_command
from maxtext_lite.config import UserError
from maxtext_lite.config.errors import install_text
from maxtext_lite.inference.harness_model import HarnessModel

NAME = "maxtext_lite"
"""The name of our models for `--model`."""


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
