"""The check that all processes of a run have one config, the same versions of libraries, and one kind of device."""

import itertools
import json

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
    if jax.process_count() == 1:
        return
    phases.advance()
    call, process, here = next(_calls), jax.process_index(), _about(config)
    if process == 0:
        put_text(f"{call}/first", json.dumps(here))
        different = _found_by_others(call, here)
        put_text(f"{call}/different", json.dumps(different))
    else:
        first = json.loads(wait_for_text(f"{call}/first"))
        keys = {*here, *first}
        own = {key: here.get(key, "") for key in sorted(keys) if here.get(key) != first.get(key)}
        put_text(f"{call}/{process}", json.dumps(own))
        different = json.loads(wait_for_text(f"{call}/different"))
    if different:
        raise UserError(different)


def _found_by_others(call: int, first: dict[str, str]) -> list[str]:
    """The problems that the first process tells: each key at the first other process where it differs."""
    found: dict[str, tuple[int, str]] = {}
    for other in range(1, jax.process_count()):
        for key, value in json.loads(wait_for_text(f"{call}/{other}")).items():
            found.setdefault(key, (other, value))
    problems: list[str] = []
    for key, (other, value) in found.items():
        usual = value_text(first.get(key, ""))
        problems.append(
            f"{key}={usual} on process 0, but {value_text(value)} on process {other}: the processes of a run need the "
            f"same. Nearest that works: {key}={usual} on all."
        )
    return problems


def _about(config: Config) -> dict[str, str]:
    """What must be the same on all processes, as text."""
    kinds = sorted({device.device_kind for device in jax.local_devices()})
    versions = {f"version of {package}": version for package, version in package_versions().items()}
    values = {
        key: without_secrets(full_text(value))
        for key, value in config
        if key not in MAY_DIFFER or isinstance(value, SourceList)  # the paths of a mixture give its sources their names
    }
    return values | versions | {"kind of device": " and ".join(kinds)}
