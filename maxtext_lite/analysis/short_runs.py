"""Keys of the short runs that `equiv`, `tune` and `branch` train."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

SHORT_RUNS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))
"""The sections of short_runs.yml."""
