"""Several processes on one machine: what each is told, what is printed, and how all end."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts.test_shell import WITH_SIGNALS
from tests.source_tree import REPOSITORY

LAUNCHER = REPOSITORY / "scripts" / "launch_local.py"
SECONDS = 60
TOLD = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start(*options, command, **environment):
    """The launcher with `--processes 2 --grace 0.3`, unless the options say otherwise, as a shell's own child."""
    words = [sys.executable, "-I", str(LAUNCHER), "--processes", "2", "--grace", "0.3", *options, "--", *command]
    return subprocess.Popen(
        [*WITH_SIGNALS, "timeout", "--foreground", str(SECONDS), *words],
        env={"PATH": os.environ["PATH"], **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
