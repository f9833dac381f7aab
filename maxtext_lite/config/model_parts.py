"""Keys whose value is a mapping: rotary positions' rescaling, queries' temperatures, latent attention's widths."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, PlainSerializer

from maxtext_lite.config.errors import WrongType, any_of, did_you_mean, value_text

_LARGEST, _LARGEST_COUNT = 1e30, 2**31 - 1

LayerKind = Literal["global", "local", "nope", "local_nope", "chunked"]
"""What a layer's attention sees: all earlier tokens or those of a window, and either without rotation; or those of its
chunk."""
MlpKind = Literal["moe", "dense"]
"""Whether a layer of a model with experts has them, or an mlp in their place."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """A frozen mapping with known entries; those that are None were not given."""

    def to_mapping(self) -> dict[str, object]:
        """The entries that were given."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {name: list(value) if name in _LISTS else value for name, value in given.items()}

    def __str__(self) -> str:
        return value_text(self.to_mapping())

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """The part with these entries.

        Raises:
          WrongType: an entry is unknown, missing or not a number in its range.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class RopeScaling(_Part):
    """How rotary wavelengths are changed for sequences longer than a model was first trained on; {}: not at all.

    Attributes:
      rope_type: linear and ntk divide every wavelength's frequency alike or by its rank; dynamic is ntk by as much as
        the longest position of a row asks for; llama3 and yarn change long wavelengths and leave short ones; longrope
        divides each frequency by a factor of its own, of one list in documents up to the original length, of another
        in longer ones.
      factor: ratio of the new length to the original one.
      original_max_position_embeddings: tokens of the original length.
      low_freq_factor, high_freq_factor: llama3: the original length over the wavelengths between which it blends.
      beta_fast, beta_slow: yarn: turns within the original length between which it blends.
      attention_factor: yarn, longrope: what cosines and sines are multiplied by; not given: it follows from factor.
      mscale, mscale_all_dim: yarn as DeepSeek has it: the factors of the rotation and of the scores.
      truncate: yarn: the bounds of the blend are whole planes.
      short_factor, long_factor: longrope: of each plane, half as many as dims are rotated.
    Source: ntk is bloc97 2023; yarn is Peng et al. 2023, arXiv:2309.00071; llama3 is Dubey et al. 2024,
      arXiv:2407.21783, section 3.4.1; longrope is Ding et al. 2024, arXiv:2402.13753.
    """

    rope_type: str
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """See _Part."""
        kind = values.get("rope_type")
        if kind not in ROPE_ENTRIES:
            raise WrongType(f"needs a rope_type: {any_of(list(ROPE_ENTRIES))}.")
        needed, optional = ROPE_ENTRIES[str(kind)]
        _refuse_entries(f"rope_type={kind}", values, {"rope_type", *needed, *optional}, needed)
        for name, value in values.items():
            if name == "truncate":
                if not isinstance(value, bool):
                    raise WrongType("has a truncate that is not true or false.")
            elif name == "original_max_position_embeddings":
                _whole_entry(name, value, 1)
            elif name in _LISTS:
                _list_entry(name, value)
            elif name != "rope_type":
                _number_entry(name, value, 1.0 if name == "factor" else 0.0)
                if name.startswith("beta") and value == 0:
                    raise WrongType(f"has {name}=0; it must be above 0.")
        entries: dict[str, Any] = {name: float(value) if _is_real(name) else value for name, value in values.items()}
        entries |= {name: tuple(map(float, entries[name])) for name in _LISTS if name in entries}
        if kind == "llama3" and entries["low_freq_factor"] > entries["high_freq_factor"]:
            raise WrongType("has a low_freq_factor above its high_freq_factor.")
        return cls(**entries)


ROPE_ENTRIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "ntk": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
        ("attention_factor",),
    ),
}
"""For each rope_type, the entries that it must have and those that it may have."""


def _is_real(name: str) -> bool:
    return name not in ("rope_type", "original_max_position_embeddings", "truncate", *_LISTS)


_LISTS = ("short_factor", "long_factor")


@dataclasses.dataclass(frozen=True)
class PositionTemperature(_Part):
    """Queries are multiplied by 1 + scale x log(1 + floor((position + offset) / floor_scale)); {}: they are not.

    Attributes:
      scale: of the logarithm.
      floor_scale: tokens after which the factor steps up.
      offset: added to positions, which count from 0.
      layers: all, or nope: those that are not rotated.
    Source: Llama 4's and Ministral 3's published code; Nakanishi 2025, arXiv:2501.19399.
    """

    scale: float
    floor_scale: int
    offset: int = 0
    layers: str = "all"

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """See _Part."""
        names = tuple(field.name for field in dataclasses.fields(cls))
        _refuse_entries("position_temperature", values, set(names), names[:2])
        _number_entry("scale", values["scale"], 0.0)
        _whole_entry("floor_scale", values["floor_scale"], 1)
        _whole_entry("offset", values.get("offset", 0), 0)
        if values.get("layers", "all") not in ("all", "nope"):
            raise WrongType(f"has layers={value_text(values['layers'])}; it must be all or nope.")
        entries: dict[str, Any] = {**values, "scale": float(values["scale"])}
        return cls(**entries)

    def of(self, kind: LayerKind) -> bool:
        """Whether layers of a kind have it."""
        return self.layers == "all" or kind.endswith("nope")


@dataclasses.dataclass(frozen=True)
class Mla(_Part):
    """Widths of multi-head latent attention; {}: ordinary attention. Source: DeepSeek-AI 2024, arXiv:2405.04434, 2.1.

    Attributes:
      q_lora_rank: of the latent vector that queries are made of; 0: they are made of the stream itself.
      kv_lora_rank: of the one that keys and values are made of.
      qk_nope_head_dim: dims of a head that are not rotated.
      qk_rope_head_dim: dims that are, shared by the keys of all heads.
      v_head_dim: of a value.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """See _Part."""
        names = tuple(field.name for field in dataclasses.fields(cls))
        _refuse_entries("latent attention", values, set(names), names)
        for name, value in values.items():
            _whole_entry(name, value, 0 if name == "q_lora_rank" else 1)
        if values["qk_rope_head_dim"] % 2:
            raise WrongType("has a qk_rope_head_dim that is odd; it must be even for rotary positions.")
        return cls(**values)


def _refuse_entries(what: str, values: Mapping[str, Any], known: set[str], needed: tuple[str, ...]) -> None:
    for name in values:
        if name not in known:
            others = ", ".join(sorted(known))
            shown = value_text(name, 40)
            raise WrongType(f"has {shown}, which {what} does not; it has {others}.{did_you_mean(name, known)}")
    for name in needed:
        if name not in values:
            raise WrongType(f"lacks {name}, which {what} needs.")


def _number_entry(name: str, value: object, minimum: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or (value != value or abs(value) == math.inf):
        raise WrongType(f"has {name}={value_text(value)}, which is not a finite number.")
    if not minimum <= value <= _LARGEST:
        bound = f"at least {value_text(minimum)}" if value < minimum else f"at most {value_text(_LARGEST)}"
        raise WrongType(f"has {name}={value_text(value)}; it must be {bound}.")


def _list_entry(name: str, value: object) -> None:
    if not isinstance(value, list | tuple):
        raise WrongType(f"has {name}={value_text(value)}, which is not a list of numbers.")
    for each in cast("list[object]", value):
        _number_entry(name, each, 0.0)
        if each == 0:
            raise WrongType(f"has 0 in {name}; its numbers must be above 0.")


def _whole_entry(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise WrongType(f"has {name}={value_text(value)}; it must be an integer of at least {minimum}.")
    if value > _LARGEST_COUNT:
        raise WrongType(f"has {name}={value_text(value)}; it must be at most {_LARGEST_COUNT}.")


def _mapping_of(kind: type[_Part]) -> Callable[[object], object]:
    def check(value: object) -> object:
        if isinstance(value, kind) or value is None:
            return value
        if not isinstance(value, dict):
            raise WrongType("is not a mapping, as {name: value}.", ({},))
        entries = cast("dict[str, Any]", value)
        try:
            return kind.checked(entries) if entries else None
        except WrongType as error:
            raise WrongType(str(error), error.nearest or ({},)) from None

    return check


def _serialised(value: _Part | None) -> dict[str, object]:
    return {} if value is None else value.to_mapping()


RopeScalingOrNone = Annotated[
    RopeScaling | None, BeforeValidator(_mapping_of(RopeScaling)), PlainSerializer(_serialised)
]
"""A mapping that makes a RopeScaling; {} is none."""
MlaOrNone = Annotated[Mla | None, BeforeValidator(_mapping_of(Mla)), PlainSerializer(_serialised)]
"""A mapping that makes an Mla; {} is none."""
PositionTemperatureOrNone = Annotated[
    PositionTemperature | None, BeforeValidator(_mapping_of(PositionTemperature)), PlainSerializer(_serialised)
]
"""A mapping that makes a PositionTemperature; {} is none."""
