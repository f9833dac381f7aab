"""Where each name that a config can select is implemented; the module is imported when the name is used.

The core reaches every optional part of the library through this table, and no other way: a part whose folder is absent
is simply not there. Other packages add names through entry points, whose group is `maxtext_lite.KIND`:

    [project.entry-points."maxtext_lite.source"]
    parquet_stream = "their_package.source:open"
"""

import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from maxtext_lite.config.errors import UserError

_BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "observer": {"watchdog": "maxtext_lite.process.watchdog:watchdog"},
    "lock": {"lease": "maxtext_lite.training.lease:hold"},
    "hook": {
        "goodput": "maxtext_lite.training.goodput:GoodputHook",
        "memory": "maxtext_lite.training.step_memory:MemoryHook",
        "trackers": "maxtext_lite.training.trackers:TrackersHook",
        "profiler": "maxtext_lite.training.profile:ProfileHook",
        "kernel_check": "maxtext_lite.training.kernel_truth:KernelCheckHook",
        "spikes": "maxtext_lite.training.spikes:SpikesHook",
    },
    "diagnosis": {
        "nonfinite": "maxtext_lite.training.nonfinite:origin_of_nonfinite",
        "out_of_memory": "maxtext_lite.batching.smaller_step:refusal_of",
    },
}
"""`module:attribute` of each name of each kind."""


class NotInstalled(UserError):
    """What a name stands for is in a part of the library, or a package, that is absent."""


def names(kind: str) -> tuple[str, ...]:
    """The names of a kind: ours in the order of the table, then those of other packages."""
    return tuple(_targets(kind))


def is_installed(kind: str, name: str) -> bool:
    """Whether `load` would find the name. Imports it."""
    try:
        load(kind, name)
    except NotInstalled:
        return False
    return True


def load(kind: str, name: str) -> Any:
    """The object that a name stands for.

    Raises:
      KeyError: no table has the name.
      NotInstalled: the module that holds it is absent.
    """
    target = _targets(kind)[name]
    module_name, attribute = target.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise NotInstalled(f"{kind} {name!r} is not installed: there is no module {error.name}.") from None
        raise
    return getattr(module, attribute)


def load_installed(kind: str) -> list[Any]:
    """The objects of all names of a kind whose modules are there, in the order of `names`."""
    found: list[Any] = []
    for name in names(kind):
        try:
            found.append(load(kind, name))
        except NotInstalled:
            continue
    return found


@cache
def _targets(kind: str) -> Mapping[str, str]:
    targets = dict(_BUILT_IN.get(kind, {}))
    for point in entry_points(group=f"maxtext_lite.{kind}"):
        targets.setdefault(point.name, point.value)
    return targets
