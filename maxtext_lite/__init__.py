"""maxtext_lite: LLM training in JAX in which batch size is a first-class concept. Importing it imports no jax."""

import sys
from typing import TYPE_CHECKING

from maxtext_lite.console import command_signals, open_closed_streams, report_absent_package, runs_a_command

if runs_a_command(sys.orig_argv):  # a plain import does not change the process
    open_closed_streams()
    command_signals.install()  # before the slow imports
    sys.excepthook = report_absent_package

if TYPE_CHECKING:
    from maxtext_lite.batching import make_plan
    from maxtext_lite.config import load_config

__all__ = ["__version__", "load_config", "make_plan"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Imports `make_plan` and `load_config` on first use: a part of the package needs neither."""
    if name == "load_config":
        from maxtext_lite.config import load_config

        return load_config
    if name == "make_plan":
        from maxtext_lite.batching import make_plan

        return make_plan
    raise AttributeError(f"module 'maxtext_lite' has no attribute {name!r}")
