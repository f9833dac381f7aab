"""Keys whose value is a mapping: scaling of rotary positions, temperatures of queries, widths of latent attention."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, cast

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, PlainSerializer

from maxtext_lite.config.errors import WrongType, any_of, full_text, value_text
from maxtext_lite.config.field_types import AtLeastOne, Count, CountOrZero, Flag, NotNegative, Positive, from_entries

LayerKind = Literal["global", "local", "nope", "local_nope", "chunked"]
"""What a layer's attention sees: all earlier tokens, or a window of them, each also without rotation; or its chunk."""
MlpKind = Literal["moe", "dense"]
"""Whether a layer of a model with experts has experts, or a dense mlp in their place."""


def _numbers(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise WrongType("is not a list of numbers.")
    return tuple(cast("list[object]", value))


Factors = Annotated[tuple[Positive, ...], BeforeValidator(_numbers)]
"""Numbers above 0."""
_STRICT = ConfigDict(strict=True, extra="forbid", defer_build=True)


class _Part:
    """A frozen mapping with known entries; an entry that is None was not given."""

    def to_mapping(self) -> dict[str, object]:
        """The entries that were given."""
        entries: dict[str, Any] = dataclasses.asdict(cast("Any", self))
        given: dict[str, object] = {name: value for name, value in entries.items() if value is not None}
        return given | {name: list(entries[name]) for name in ("short_factor", "long_factor") if name in given}

    def __str__(self) -> str:
        return full_text(self.to_mapping())

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """The part with these entries.

        Raises:
          WrongType: an entry is unknown, missing or out of range.
        """
        raise NotImplementedError


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class RopeScaling(_Part):
    """How rotary frequencies change for sequences longer than those of pre-training; {}: not at all.

    Attributes:
      rope_type: linear divides every frequency alike, and ntk by its rank; dynamic is ntk for the longest position in a
        row; llama3 and yarn change long wavelengths and leave short ones alone; longrope divides each frequency by its
        own factor, from short_factor in documents up to the original length and from long_factor in longer ones.
      factor: ratio of the new length to the original one.
      original_max_position_embeddings: tokens of the original length.
      low_freq_factor, high_freq_factor: llama3 blends between the wavelengths that are the original length divided by
        these.
      beta_fast, beta_slow: yarn blends between these numbers of turns within the original length.
      attention_factor: yarn, longrope: multiplies cosines and sines; not given: computed from factor.
      mscale, mscale_all_dim: yarn as in DeepSeek: the factors of the rotation and of the scores.
      truncate: yarn: the bounds of the blend are rounded to whole planes.
      short_factor, long_factor: longrope: one number for each plane, that is for each pair of rotated dims.
    Source: ntk is bloc97 2023; yarn is Peng et al. 2023, arXiv:2309.00071; llama3 is Dubey et al. 2024,
      arXiv:2407.21783, section 3.4.1; longrope is Ding et al. 2024, arXiv:2402.13753.
    """

    rope_type: str
    factor: AtLeastOne | None = None
    original_max_position_embeddings: Count | None = None
    low_freq_factor: NotNegative | None = None
    high_freq_factor: NotNegative | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: NotNegative | None = None
    mscale: NotNegative | None = None
    mscale_all_dim: NotNegative | None = None
    truncate: Flag | None = None
    short_factor: Factors | None = None
    long_factor: Factors | None = None

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """See _Part."""
        kind = str(values.get("rope_type"))
        if kind not in ROPE_ENTRIES:
            raise WrongType(f"needs a rope_type: {any_of(list(ROPE_ENTRIES))}.")
        needed, optional = ROPE_ENTRIES[kind]
        part = from_entries(cls, values, f"rope_type={kind}", ("rope_type", *needed), optional)
        if (part.low_freq_factor or 0) > (part.high_freq_factor or 0):
            raise WrongType("has a low_freq_factor above its high_freq_factor.")
        is_undecided = part.original_max_position_embeddings == 1 and (part.factor or 0) > 1
        if kind == "longrope" and is_undecided and part.attention_factor is None:
            raise WrongType("lacks attention_factor, which original_max_position_embeddings=1 does not decide.")
        return part


ROPE_ENTRIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "ntk": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("factor", "original_max_position_embeddings", "short_factor", "long_factor"), ("attention_factor",)),
}
"""For each rope_type, the entries that it needs and those that it may have."""


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class PositionTemperature(_Part):
    """A factor on queries, 1 + scale x log(1 + floor((position + offset) / floor_scale)); {}: none.

    Attributes:
      scale: of the logarithm.
      floor_scale: tokens after which the factor steps up.
      offset: added to positions, which count from 0.
      layers: all, or nope: those without rotation.
    Source: the published code of Llama 4 and Ministral 3; Nakanishi 2025, arXiv:2501.19399.
    """

    scale: NotNegative
    floor_scale: Count
    offset: CountOrZero = 0
    layers: str = "all"

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """See _Part."""
        part = from_entries(cls, values, "position_temperature", ("scale", "floor_scale"), ("offset", "layers"))
        if part.layers not in ("all", "nope"):
            raise WrongType(f"has layers={value_text(part.layers)}, which must be all or nope.")
        return part

    def of(self, kind: LayerKind) -> bool:
        """Whether layers of a kind have it."""
        return self.layers == "all" or kind.endswith("nope")


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class Mla(_Part):
    """Widths of multi-head latent attention; {}: ordinary attention. Source: DeepSeek-AI 2024, arXiv:2405.04434, 2.1.

    Attributes:
      q_lora_rank: of the latent vector from which queries are made; 0: they are made from the residual stream.
      kv_lora_rank: of the latent vector from which keys and values are made.
      qk_nope_head_dim: dims of a head without rotation.
      qk_rope_head_dim: dims with rotation, shared by the keys of all heads.
      v_head_dim: of a value.
    """

    q_lora_rank: CountOrZero
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """See _Part."""
        part = from_entries(cls, values, "latent attention", [field.name for field in dataclasses.fields(cls)])
        if part.qk_rope_head_dim % 2:
            raise WrongType("has an odd qk_rope_head_dim; it must be even for rotary positions.")
        return part


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
            raise WrongType(str(error), ({},)) from None

    return check


def _part_as_entries(value: _Part | None) -> dict[str, object]:
    return {} if value is None else value.to_mapping()


_mapping = PlainSerializer(_part_as_entries)
RopeScalingOrNone = Annotated[RopeScaling | None, BeforeValidator(_mapping_of(RopeScaling)), _mapping]
"""A mapping that makes a RopeScaling; {} is none."""
MlaOrNone = Annotated[Mla | None, BeforeValidator(_mapping_of(Mla)), _mapping]
"""A mapping that makes an Mla; {} is none."""
PositionTemperatureOrNone = Annotated[
    PositionTemperature | None, BeforeValidator(_mapping_of(PositionTemperature)), _mapping
]
"""A mapping that makes a PositionTemperature; {} is none."""
