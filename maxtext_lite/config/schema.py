"""A config: all sections together, their order, and all keys. The class of another kind of run adds its own."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import PrivateAttr
from pydantic.fields import FieldInfo

from maxtext_lite.config.field_types import Section
from maxtext_lite.config.registry import load_installed
from maxtext_lite.config.sections import (
    BatchConfig,
    DataConfig,
    LocalUpdatesConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    PreferenceConfig,
    RunConfig,
)

SECTIONS: tuple[tuple[str, type[Section]], ...] = (
    ("Run", RunConfig),
    ("Batch size", BatchConfig),
    ("Optimizer", OptimizerConfig),
    ("Local updates", LocalUpdatesConfig),
    ("Mesh", MeshConfig),
    ("Model", ModelConfig),
    ("Numerics", NumericsConfig),
    ("Data", DataConfig),
    ("Post-training", PreferenceConfig),
)
"""The sections in the order of configs/base.yml, with their headings."""


class Config(
    RunConfig,
    BatchConfig,
    OptimizerConfig,
    LocalUpdatesConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    DataConfig,
    PreferenceConfig,
):
    """Every key of a run, as `load_config` returns it. Configs with equal values are equal, whatever their origins."""

    run_kind: ClassVar[str] = "train"
    """What the run does: its name in the registry's kinds that each kind of run implements."""
    base_files: ClassVar[tuple[str, ...]] = ("base.yml",)
    """The files below configs/ that have every key, the lowest first; the last one selects this kind of run."""
    sections: ClassVar[tuple[tuple[str, type[Section]], ...]] = SECTIONS
    """The sections in the order of the files, with their headings."""
    unused_keys: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Keys that must have their values of base.yml, each with the reason."""
    shown_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of its own that `describe` always shows."""
    fingerprint_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of its own that a run's continuation must share."""

    _origins: Mapping[str, str] = PrivateAttr(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def rules(cls) -> tuple[Callable[[Any], Any], ...]:
        """The rules of this kind of run beside those of every config: each gives the Violation of a config, or None."""
        return ()

    @property
    def origins(self) -> Mapping[str, str]:
        """For each key, the file that its value came from, or `command line`."""
        return self._origins

    def with_origins(self, origins: Mapping[str, str]) -> "Config":
        """The same values with these origins."""
        copy = self.model_copy()
        copy._origins = MappingProxyType(dict(origins))  # safe: only this function has the copy
        return copy

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.items()))

    def __reduce__(self) -> tuple[object, ...]:  # a mapping proxy does not pickle
        return _restore, (type(self), dict(self.__dict__), dict(self._origins))


def _restore(kind: type[Config], values: dict[str, object], origins: dict[str, str]) -> Config:
    return kind.model_construct(**values).with_origins(origins)  # type: ignore[arg-type]


def keys_of(kind: type[Config]) -> tuple[str, ...]:
    """Every key of a kind of config, in the order of its files."""
    return tuple(key for _, section in kind.sections for key in section.model_fields)


KEYS: tuple[str, ...] = keys_of(Config)
"""Every key, in the order of configs/base.yml."""


def known_keys() -> dict[str, FieldInfo]:
    """Every key of any kind of run that is installed."""
    fields = dict(Config.model_fields)
    for kind in load_installed("run"):
        fields |= kind.model_fields
    return fields


def field_of(key: str) -> FieldInfo | None:
    """The field of a key of any kind of run that is installed; None if there is no such key."""
    return Config.model_fields.get(key) or known_keys().get(key)
