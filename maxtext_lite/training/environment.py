"""The environment of a run: versions, devices, the git commit and the working directory."""

import contextlib
import importlib.metadata
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from maxtext_lite.config.hf.model_directory import WORKING_DIRECTORY

_COMMIT = re.compile(rb"[0-9a-f]{40}|[0-9a-f]{64}")
_SECONDS_FOR_GIT = 10.0


def environment() -> dict[str, Any]:
    """The content of environment.json."""
    packages = ("maxtext-lite", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": versions,
        "devices": [device.device_kind for device in jax.devices()],
        "num_processes": jax.process_count(),
        "git_commit": _git_commit(),
        WORKING_DIRECTORY: str(Path.cwd()),
    }


def _git_commit() -> str | None:
    """The commit of the checkout that contains this file.

    None if git does not answer, and for an installed package, whose environment may be an ignored directory of another
    checkout.
    """
    own = Path(__file__)
    commit = _git("rev-parse", "HEAD", directory=own.parent)
    if not _COMMIT.fullmatch(commit) or _git("check-ignore", own.name, directory=own.parent):
        return None
    return commit.decode()


def _git(*words: str, directory: Path) -> bytes:
    """The output of git; empty if it is not installed, fails or does not answer."""
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_SECONDS_FOR_GIT,
        )
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout.strip()
