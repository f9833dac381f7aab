"""Checks that all processes of a run have the same config, versions of libraries and kind of device."""

import itertools
import json
from collections.abc import Sequence

import jax

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import full_text, value_text, without_secrets
from maxtext_lite.config.keys import SourceList
from maxtext_lite.config.phases import phases
from maxtext_lite.parallel.coordination import put_text, wait_for_text
from maxtext_lite.training.run_files import package_versions

MAY_DIFFER = frozenset(
    {
        "grain_worker_count",  # how a host reads, not what
        "log_to",  # the first host alone writes logs
        "log_level",
        "prometheus_port",
        "prometheus_host",
        "profiler_steps",
        # The data that they lead to are compared when they are opened.
        "dataset_path",
        "eval_dataset_path",
        "tokenizer_path",
        "chat_template",
    }
)
"""Keys of a config that processes of one run may set to different values."""

_calls = itertools.count()


def require_one_config(config: Config) -> None:
    """Compares what the processes were started with. All of them must call it, before any collective.

    Raises:
      UserError: on every process, with each key that differs and two of its values.
    """
    num_processes = jax.process_count()
    phases.advance()
    call = next(_calls)
    put_text(f"{call}/{jax.process_index()}", json.dumps(_describe(config)))
    if jax.process_index() == 0:
        descriptions = [json.loads(wait_for_text(f"{call}/{process}")) for process in range(num_processes)]
        put_text(f"{call}/problems", json.dumps(_find_problems(descriptions)))
    problems = json.loads(wait_for_text(f"{call}/problems"))
    if problems:
        raise UserError(problems)


def _find_problems(descriptions: Sequence[dict[str, str]]) -> list[str]:
    """A sentence on each key that differs from process 0's, at the first process where it does."""
    first = descriptions[0]
    problems: dict[str, str] = {}
    for process, description in enumerate(descriptions):
        for key in sorted({*first, *description}):
            here = first.get(key, "")
            there = description.get(key, "")
            if here != there and key not in problems:
                usual = value_text(here)
                problems[key] = (
                    f"{key}={usual} on process 0, but {value_text(there)} on process {process}: the processes of a run "
                    f"need the same. Nearest that works: {key}={usual} on all."
                )
    return list(problems.values())


def _describe(config: Config) -> dict[str, str]:
    """What must be the same on all processes, as text."""
    kinds = sorted({device.device_kind for device in jax.local_devices()})
    description = {"kind of device": " and ".join(kinds)}
    for package, version in package_versions().items():
        description[f"version of {package}"] = version
    for key, value in config:
        if key not in MAY_DIFFER or isinstance(
            value, SourceList
        ):  # the paths of a mixture give its sources their names
            description[key] = without_secrets(full_text(value))
    return description
