"""What a run ran on: versions, devices and the git commit."""

import contextlib
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax


def environment() -> dict[str, Any]:
    """Versions, devices and the git commit, for environment.json."""
    packages = ("maxtext-lite", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": versions,
        "devices": [device.device_kind for device in jax.devices()],
        "num_processes": jax.process_count(),
        "git_commit": commit.stdout.strip() or None,
    }
