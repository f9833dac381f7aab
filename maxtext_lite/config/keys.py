"""The keys of a config and their types, in sections; only configs/base.yml has their defaults and meanings."""

import dataclasses
import difflib
import importlib.util
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import PurePath
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast, get_args

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from maxtext_lite.config.errors import UserError, WrongType, full_text, install_text, value_text
from maxtext_lite.config.registry import NotInstalled, added_names, load, load_installed, names
from maxtext_lite.config.types import (
    AmountOrZero,
    AtLeastOne,
    AutoOrFlag,
    BatchSchedule,
    BelowHalf,
    Count,
    CountOrMinusOne,
    CountOrZero,
    DataPathName,
    Decay,
    Exact,
    ExactOrDerived,
    ExactOrOne,
    ExactOrSame,
    ExactOrUnlimited,
    ExactOrZero,
    Flag,
    HangTimeout,
    KernelName,
    Layers,
    LayersOrZero,
    Name,
    NotNegative,
    ObjectiveName,
    Packing,
    ParametersPath,
    PathName,
    PathText,
    Port,
    Positive,
    PositiveShare,
    RateGroups,
    RunsPath,
    Section,
    Seed,
    SeedOrMinusOne,
    Share,
    ShareBelowOne,
    SourceName,
    SpecialInText,
    StepsOrPartOfEpoch,
    StepsOrPartOfEpochOrMinusOne,
    StepsOrPartOfRun,
    WhichParameters,
    data_path_text,
    make,
    stated_text,
)

ATTENTION_KINDS = ("global", "local", "nope", "local_nope", "chunked")
"""What a layer's attention sees: all earlier tokens, or a window of them, each also without rotation; or its chunk."""
LOCAL_KINDS = ("local", "local_nope")


def layer_kinds() -> tuple[str, ...]:
    """The names that layer_pattern may have: kinds of attention, and the layers of other packages."""
    return (*ATTENTION_KINDS, *names("layer"))


def listed(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list."""
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def kinds_in(pattern: str) -> tuple[str, ...]:
    """The kinds of a comma-separated pattern."""
    return tuple(kind.strip() for kind in pattern.split(","))


def mixer_of(kind: str, *, splits_global: bool = False) -> str:
    """What layers of a kind use for attention: attention itself, or the kind, a layer of another package.

    Args:
      splits_global: layers without a window have heads of their own.
    """
    if kind not in ATTENTION_KINDS:
        return kind
    return "global_attention" if splits_global and kind not in LOCAL_KINDS else "attention"


QueryKeyNorm = Literal["none", "head", "head_and_values", "each_head", "all_heads", "head_after_rope", "l2_after_rope"]
"""How queries and keys are normed, and with head_and_values also values, without a scale."""
NormPlacement = Literal["pre", "post", "both", "each"]
"""Norms before attention and mlp, after them, or both; each: experts, shared experts and routers have their own too."""
MlpKind = Literal["moe", "dense"]
"""Whether a layer of a model with experts has experts, or a dense mlp in their place."""


Factors = Annotated[tuple[Positive, ...], Field(strict=False)]
"""Numbers above 0."""
_STRICT = ConfigDict(strict=True, extra="forbid", defer_build=True)


class _Part:
    """A frozen mapping with known entries; an entry that is None was not given."""

    def to_mapping(self) -> dict[str, object]:
        """The entries that were given."""
        entries: dict[str, Any] = dataclasses.asdict(cast("Any", self))
        for name in ("short_factor", "long_factor"):
            if entries.get(name) is not None:
                entries[name] = list(entries[name])
        return {name: value for name, value in entries.items() if value is not None}

    def __str__(self) -> str:
        return full_text(self.to_mapping())


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class RopeScaling(_Part):
    """How rotary frequencies change for sequences longer than those of pre-training; {}: not at all.

    Attributes:
      rope_type: linear divides every frequency alike, and ntk by its rank; dynamic is ntk for the longest position in a
        row; llama3 and yarn change long wavelengths and leave short ones alone; longrope divides each frequency by its
        own factor, from short_factor in documents up to the original length and from long_factor in longer ones;
        proportional is linear in the planes that turn.
      factor: ratio of the new length to the original one.
      original_max_position_embeddings: tokens of the original length.
      low_freq_factor, high_freq_factor: llama3 blends between the wavelengths that are the original length divided by
        these.
      beta_fast, beta_slow: yarn blends between these numbers of turns within the original length.
      attention_factor: yarn, longrope: multiplies cosines and sines; not given: computed from factor.
      mscale, mscale_all_dim: yarn as in DeepSeek: the factors of the rotation and of the scores.
      truncate: yarn: the bounds of the blend are rounded to whole planes.
      short_factor, long_factor: longrope: one number for each plane, that is for each pair of rotated dims.
      partial_rotary_factor: proportional: the share of planes that turn, the fastest ones.
    Source: ntk is bloc97 2023; yarn is Peng et al. 2023, arXiv:2309.00071; llama3 is Dubey et al. 2024,
      arXiv:2407.21783, section 3.4.1; longrope is Ding et al. 2024, arXiv:2402.13753.
    """

    rope_type: Literal["linear", "ntk", "dynamic", "llama3", "yarn", "longrope", "proportional"]
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
    partial_rotary_factor: PositiveShare | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed, optional = ROPE_ENTRIES[self.rope_type]
        given = self.to_mapping()
        for name in needed:
            if name not in given:
                raise WrongType(f"lacks {name}, which rope_type={self.rope_type} needs.")
        for name in given:
            if name not in ("rope_type", *needed, *optional):
                raise WrongType(f"has {name}, which rope_type={self.rope_type} does not take.")
        if (self.low_freq_factor or 0) > (self.high_freq_factor or 0):
            raise WrongType("has a low_freq_factor above its high_freq_factor.")
        is_undecided = self.original_max_position_embeddings == 1 and (self.factor or 0) > 1
        if self.rope_type == "longrope" and is_undecided and self.attention_factor is None:
            raise WrongType("lacks attention_factor, which original_max_position_embeddings=1 does not decide.")
        return self


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
    "proportional": (("partial_rotary_factor",), ("factor",)),
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
    layers: Literal["all", "nope"] = "all"

    def of(self, kind: str) -> bool:
        """Whether layers of a kind have it."""
        return kind in ATTENTION_KINDS if self.layers == "all" else kind in ("nope", "local_nope")


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
    qk_rope_head_dim: Annotated[Count, Field(multiple_of=2)]
    v_head_dim: Count


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class GlobalAttention(_Part):
    """Heads of layers without a window, where local layers have others; {}: all layers have the same.

    Attributes:
      global_head_dim: width of a head.
      global_num_kv_heads: key/value heads.
      share_kv_projections: keys are also the values, before norm and rotation.
      global_num_query_heads: query heads; None: base_num_query_heads.
      global_partial_rotary_factor: share of a head that is rotated; None: 1.
    """

    global_head_dim: Annotated[Count, Field(multiple_of=2)]
    global_num_kv_heads: Count
    share_kv_projections: Flag = False
    global_num_query_heads: Count | None = None
    global_partial_rotary_factor: PositiveShare | None = None

    @property
    def rotary_dim(self) -> int:
        """The rotated dims of a head."""
        return int(self.global_head_dim * (self.global_partial_rotary_factor or 1))


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class SharedKv(_Part):
    """Last layers without keys and values, which attend to those of the last other layer of their kind; {}: none.

    Attributes:
      num_kv_shared_layers: how many.
      use_double_wide_mlp: their mlp has twice the width.
    """

    num_kv_shared_layers: Count
    use_double_wide_mlp: Flag = False


def _mapping_of(kind: type[_Part]) -> Callable[[object], object]:
    def check(value: object) -> object:
        if isinstance(value, kind) or value is None:
            return value
        if not isinstance(value, dict):
            raise WrongType("is not a mapping, as {name: value}.", (None,))
        return make(kind, cast("dict[str, object]", value)) if value else None

    return check


def _part_as_entries(value: _Part | None) -> dict[str, object]:
    return {} if value is None else value.to_mapping()


_mapping = PlainSerializer(_part_as_entries)
RopeScalingOrNone = Annotated[RopeScaling | None, BeforeValidator(_mapping_of(RopeScaling)), _mapping]
"""A mapping that makes a RopeScaling; {} is none."""
MlaOrNone = Annotated[Mla | None, BeforeValidator(_mapping_of(Mla)), _mapping]
"""A mapping that makes an Mla; {} is none."""
GlobalAttentionOrNone = Annotated[GlobalAttention | None, BeforeValidator(_mapping_of(GlobalAttention)), _mapping]
"""A mapping that makes a GlobalAttention; {} is none."""
SharedKvOrNone = Annotated[SharedKv | None, BeforeValidator(_mapping_of(SharedKv)), _mapping]
"""A mapping that makes a SharedKv; {} is none."""
PositionTemperatureOrNone = Annotated[
    PositionTemperature | None, BeforeValidator(_mapping_of(PositionTemperature)), _mapping
]
"""A mapping that makes a PositionTemperature; {} is none."""


def name_of_path(path: str) -> str:
    """The last part of a path without suffixes, or the path where that is blank: web for data/web/ and web.jsonl.gz."""
    last = PurePath(path).name
    name = last[:1] + last[1:].split(".")[0]
    return name if name.strip() else path


def _name_of_entry(values: dict[str, str]) -> str:
    return name_of_path(values["path"])


class HeldOutEntry(Section):
    """One held-out set.

    Attributes:
      name: in metrics and messages; by default the path's last part, without suffixes.
    """

    path: DataPathName
    name: Name = Field(default_factory=_name_of_entry)


class MixtureEntry(Section):
    """One source of a mixture.

    Attributes:
      weight: its share of the target tokens; only the ratios of weights matter.
      max_epochs: passes over it in the whole run; -1: any number.
      name: as in a held-out set.
    """

    path: DataPathName
    weight: Exact
    max_epochs: ExactOrUnlimited = Fraction(-1)
    name: Name = Field(default_factory=_name_of_entry)


SourceEntry = HeldOutEntry | MixtureEntry


@dataclass(frozen=True)
class SourceList:
    """Sources in the order of the list."""

    entries: tuple[SourceEntry, ...]

    def __str__(self) -> str:
        """The list in JSON, which is also YAML, and reads back as the same list."""
        return json.dumps(_serialized(self), ensure_ascii=False)


@dataclass(frozen=True)
class MixtureList(SourceList):
    """The sources of a mixture."""

    entries: tuple[MixtureEntry, ...]


def _list_of(made: type[SourceList], kind: type[SourceEntry], example: str) -> Callable[[object], object]:
    """The check of a value that is a path or a list of mappings, such as `example`."""

    def check(value: object) -> object:
        if isinstance(value, SourceList):
            return cast("object", value)
        if not isinstance(value, list | dict):
            return data_path_text(value)
        entries: list[SourceEntry] = []
        has_number = False
        for entry in cast("list[object]", value):
            if not isinstance(entry, dict):
                raise WrongType(f"is neither a path nor a list of mappings, as [{example}].")
            stated = cast("dict[str, object]", entry)
            numbers = {name: str(stated.get(name)) for name in ("path", "name") if type(stated.get(name)) is int}
            has_number = has_number or bool(numbers)
            entries.append(make(kind, stated | numbers))
        if not entries:
            raise WrongType("has no source.")
        if has_number:
            raise WrongType("has a number as a path or name: put it in quotes.", [made(tuple(entries))])
        for name, times in Counter(entry.name for entry in entries).items():
            if times > 1:
                raise WrongType(f"has two sources named {value_text(name, 40)}: give each its own name.")
        return made(tuple(entries))

    return check


def single_path(value: str | SourceList) -> str:
    """A key's path, after the rules have refused a list."""
    assert isinstance(value, str), "rules refuse a list of sources here"
    return value


def _serialized(value: str | SourceList) -> str | Sequence[Mapping[str, object]]:
    return value if isinstance(value, str) else [entry.model_dump() for entry in value.entries]


_MIXTURE = _list_of(MixtureList, MixtureEntry, "{path: web.jsonl, weight: 0.7}")
_HELD_OUT = _list_of(SourceList, HeldOutEntry, "{path: web.jsonl, name: web}")

PathOrSources = Annotated[str | MixtureList, BeforeValidator(_MIXTURE), PlainSerializer(_serialized)]
"""A path, or a list of mappings with the keys of `MixtureEntry`."""
PathOrHeldOut = Annotated[str | SourceList, BeforeValidator(_HELD_OUT), PlainSerializer(_serialized)]
"""A path, or a list of mappings with the keys of `HeldOutEntry`."""


TRACKERS = ("tensorboard", "wandb", "mlflow")
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})\Z")
_MOST_STEPS = 2**31 - 1


def _traced_steps(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_STEPS:
        return value
    found = _RANGE.match(value) if isinstance(value, str) else None
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise WrongType("is neither a number of steps nor a range such as 100-104.", [0])
    return value


def _names(
    find_known: Callable[[], Sequence[str]],
    alike: Callable[[str], Sequence[str]],
    split: Callable[[object], Sequence[str]],
) -> BeforeValidator:
    """Comma-separated names, each from a list.

    Args:
      alike: what to name instead of an unknown name.
    """

    def check(value: object) -> object:
        names = split(value)
        known = find_known()
        unknown = [name for name in names if name not in known]
        if not unknown:
            return ",".join(names)
        legal: list[str] = []
        for name in names:
            legal += [name] if name in known else alike(name)
        rule = f"is none of {', '.join(known)}" if known else "no installed package has"
        raise WrongType(f"names '{value_text(unknown[0], 40)}', which {rule}.", [",".join(legal)] if legal else [])

    return BeforeValidator(check)


def _kinds(value: object) -> Sequence[str]:
    return kinds_in(stated_text(value))


def _tensors(value: object) -> Sequence[str]:
    return listed(stated_text(value))


def _different(value: object) -> Sequence[str]:
    """The names of a list, without repetition. On the command line, a list for a text key arrives as text."""
    if isinstance(value, str):
        value = [*listed(value.strip().removeprefix("[").removesuffix("]"))]
    if not isinstance(value, list):
        raise WrongType("is not a list of names.")
    names = [str(name) for name in cast("list[object]", value)]
    if len(set(names)) < len(names):
        raise WrongType("names one twice.", [",".join(dict.fromkeys(names))])
    return names


def _alike_tracker(name: str) -> Sequence[str]:
    return difflib.get_close_matches(name, TRACKERS, n=1)


def _alike_hook(name: str) -> Sequence[str]:
    return difflib.get_close_matches(name, added_names("hook"), n=1)


def _alike_layer(kind: str) -> Sequence[str]:
    return difflib.get_close_matches(kind, names("layer"), n=1) or ["global"]


def _alike_tensor(name: str) -> Sequence[str]:
    return difflib.get_close_matches(name, REMAT_TENSORS, n=1, cutoff=0)


StepsToTrace = Annotated[int | str, BeforeValidator(_traced_steps)]
"""A number of steps, or a range of the run's steps such as 100-104."""
TrackerNames = Annotated[str, _names(lambda: TRACKERS, _alike_tracker, _different)]
"""Some of `TRACKERS`, comma-separated; may be given as a list."""
HookNames = Annotated[str, _names(lambda: added_names("hook"), _alike_hook, _different)]
"""Some of the hooks that other packages add, comma-separated; may be given as a list."""
LayerPattern = Annotated[str, _names(layer_kinds, _alike_layer, _kinds)]
"""Kinds of layers, comma-separated."""
MlpPattern = Annotated[str, _names(lambda: get_args(MlpKind), lambda _: ["moe"], _kinds)]
"""Kinds of mlps, comma-separated."""
TensorNames = Annotated[str, _names(lambda: REMAT_TENSORS, _alike_tensor, _tensors)]
"""Some of `REMAT_TENSORS`, comma-separated; "" included."""


def require_trackers(log_to: str) -> None:
    """Raises a UserError if a tracker in `log_to` is not installed."""
    extras = [name for name in listed(log_to) if name != "tensorboard"]
    if missing := [name for name in extras if importlib.util.find_spec(name) is None]:
        raise UserError(f"log_to={name} needs {name}: {install_text(name)}." for name in missing)


Data = Literal["text", "answers", "pairs", "prompts"]
"""What examples are: text to continue, answers to learn, pairs of answers, or prompts to be answered."""


@dataclass(frozen=True)
class SourceKind:
    """A value of `dataset_type`.

    Attributes:
      opens: `module:function` that opens the data, an `Open` of data/sources.py; "": prompts, which no feed reads.
      data: what its examples are, which decides the objective.
      run_kind: the kind of run that trains on it.
      reads_files: needs a dataset_path.
      reads_buckets: its files may be in a bucket.
      is_mixable: may be a source of a mixture.
      has_turns: its examples are conversations, which a chat template renders.
      fields: arrays of an example besides those that every example has.
    """

    opens: str
    data: Data = "text"
    run_kind: str = "train"
    reads_files: bool = True
    reads_buckets: bool = False
    is_mixable: bool = False
    has_turns: bool = False
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class ObjectiveKind:
    """A value of `objective`.

    Attributes:
      makes: `module:function` from a config to an `Objective` of training/objective.py; "": the run makes it.
      data: what it trains on.
      rows_per_example: rows of max_target_length tokens in an example.
      starts: `module:function` called with (run, state, counts, say) before the first step; "": nothing.
      against: `module:function` from a model's scores and those of the model that the run began with to those to
        evaluate; "": the model's own.
      repeats: `module:attribute` of what equiv and replay need of its runs; see analysis/repeat.py.
    """

    makes: str
    data: Data
    rows_per_example: int = 1
    starts: str = ""
    against: str = ""
    repeats: str = "maxtext_lite.analysis.repeat:READ"


TEXT = SourceKind("maxtext_lite.data.sources:open_text", is_mixable=True)
PREPARED = SourceKind("maxtext_lite.data.prepared_rows:open_prepared_rows", is_mixable=True, reads_buckets=True)
SYNTHETIC = SourceKind("maxtext_lite.data.sources:open_synthetic", reads_files=False)
PRETRAIN = ObjectiveKind("maxtext_lite.training.objective:next_token", "text")


@cache
def source_kind(dataset_type: str) -> SourceKind:
    """The kind of source that a value of `dataset_type` names.

    Raises:
      NotInstalled: it is in a part of the library that is absent.
    """
    return load("source", dataset_type)


def source_names(run_kind: str) -> list[str]:
    """The values of `dataset_type` that a kind of run can train on, as far as they are installed."""
    found: list[str] = []
    for name in names("source"):
        try:
            if source_kind(name).run_kind == run_kind:
                found.append(name)
        except NotInstalled:
            continue
    return found


@cache
def objective_name(objective: str, dataset_type: str) -> str:
    """The objective, or for `auto` the first one for the data."""
    if objective != "auto":
        return objective
    data = source_kind(dataset_type).data
    for name in names("objective"):
        if objective_kind(name).data == data:
            return name
    raise UserError(f"objective=auto: no objective is for {data}, the data of dataset_type={dataset_type}.")


@cache
def objective_kind(name: str) -> ObjectiveKind:
    """The kind of objective that a value of `objective` other than auto names. Raises NotInstalled as `source_kind`
    does."""
    return load("objective", name)


Normalization = Literal[
    "rms_norm", "rms_norm_plus_one", "layer_norm", "layer_norm_plus_one", "layer_norm_no_bias", "layer_norm_plain"
]
"""The divisor of a norm, the root mean square or the standard deviation around the mean, and its learned weights."""

OutputGate = Literal["none", "sigmoid", "softplus", "sigmoid_per_head", "softplus_per_head"]
"""The function of attention's output gate, for each element of a head or for the head as a whole."""

Quantization = Literal["none", "int8", "fp8", "fp8_full"]
"""The number format of matmuls with layers' weights: the activations' dtype, or eight bits (kernels/eight_bits.py)."""


class RunConfig(Section):
    """The run: its directory, length, checkpoints and reports."""

    run_name: PathName
    base_output_directory: RunsPath
    overwrite: Flag
    steps: CountOrMinusOne
    num_epochs: ExactOrZero
    last_batch: Literal["drop", "train"]
    seed: Seed
    log_period: StepsOrPartOfEpoch
    log_level: Literal["brief", "detail"]
    enable_checkpointing: Flag
    checkpoint_period: StepsOrPartOfEpoch
    max_num_checkpoints_to_keep: Count
    async_checkpointing: Flag
    load_parameters_path: ParametersPath
    on_resume_batch: Literal["keep", "config"]
    eval_interval: StepsOrPartOfEpochOrMinusOne
    eval_steps: CountOrMinusOne
    eval_parameters: WhichParameters
    profiler_steps: StepsToTrace
    log_to: TrackerNames
    hooks: HookNames
    prometheus_port: Port
    prometheus_host: Name
    hang_timeout_seconds: HangTimeout

    @property
    def starts_over(self) -> bool:
        """Whether the earlier run in the directory is removed: not by a job that SLURM has queued again."""
        return self.overwrite and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"


class BatchConfig(Section):
    """The keys from which batch sizes follow; only `batching.make_plan` derives them."""

    per_device_batch_size: ExactOrDerived
    gradient_accumulation_steps: CountOrMinusOne
    global_batch_size: CountOrZero
    global_batch_tokens: AmountOrZero
    batch_schedule: BatchSchedule
    batch_schedule_unit: Literal["examples", "tokens"]
    eval_per_device_batch_size: ExactOrSame
    expansion_factor_real_data: ExactOrOne
    enable_rampup_batch_size: Flag
    rampup_mode: Literal["per_device_batch_size", "gradient_accumulation_steps"]
    per_device_batch_size_start: Exact
    per_device_batch_size_increment: Exact
    global_rampup_samples: Count
    num_pipeline_microbatches: CountOrMinusOne


GLOBAL_BATCH_KEYS = (
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "global_batch_tokens",
    "batch_schedule",
    "batch_schedule_unit",
    "enable_rampup_batch_size",
    "rampup_mode",
    "per_device_batch_size_start",
    "per_device_batch_size_increment",
    "global_rampup_samples",
)
"""The keys that, on given devices, decide the global batches of a run."""


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    optimizer: Literal["adamw", "sgd", "adafactor", "muon", "lion"]
    learning_rate: NotNegative
    learning_rate_schedule: Literal["cosine", "wsd", "linear", "constant"]
    learning_rate_final_fraction: Share
    learning_rate_groups: RateGroups
    warmup_steps: StepsOrPartOfRun
    schedule_unit: Literal["steps", "examples", "tokens"]
    learning_rate_scaling: Literal["none", "linear", "sqrt"]
    learning_rate_scaling_of: Literal["target", "stage"]
    base_global_batch_size: CountOrZero
    scale_adam_with_batch: Flag
    wsd_decay_steps_fraction: Share
    adam_b1: Decay
    adam_b2: Decay
    adam_eps: NotNegative
    sgd_momentum: Decay
    ema_decay: Decay
    routed_bias_update_rate: NotNegative
    weight_decay: NotNegative
    weight_decay_on_norms_and_embeddings: Flag
    gradient_clipping_threshold: NotNegative
    skip_nonfinite_updates: Flag
    max_skipped_updates: Count
    max_loss_spike: NotNegative
    loss_spike_action: Literal["exclude", "stop"]
    qk_clip_threshold: NotNegative
    optimizer_state_dtype: Literal["float32", "bfloat16", "int8"]
    optimizer_memory_host_offload: Flag


class LocalUpdatesConfig(Section):
    """DiLoCo: replicas that update their own copies of the parameters between synchronizations."""

    enable_diloco: Flag
    diloco_num_replicas: CountOrMinusOne
    diloco_sync_period: Count
    diloco_outer_lr: NotNegative
    diloco_outer_momentum: Decay


class MeshConfig(Section):
    """The axes of the mesh, and how layers are split over pipeline stages."""

    dcn_data_parallelism: CountOrMinusOne
    dcn_fsdp_parallelism: CountOrMinusOne
    dcn_tensor_parallelism: CountOrMinusOne
    dcn_context_parallelism: CountOrMinusOne
    dcn_expert_parallelism: CountOrMinusOne
    dcn_pipeline_parallelism: CountOrMinusOne
    ici_data_parallelism: CountOrMinusOne
    ici_fsdp_parallelism: CountOrMinusOne
    ici_tensor_parallelism: CountOrMinusOne
    ici_context_parallelism: CountOrMinusOne
    ici_expert_parallelism: CountOrMinusOne
    ici_pipeline_parallelism: CountOrMinusOne
    context_parallel_strategy: Literal["all_gather", "ring"]
    shard_optimizer_over_data: Flag
    pipeline_schedule: Literal["gpipe", "1f1b"]
    num_layers_per_pipeline_stage: Count
    num_pipeline_repeats: CountOrMinusOne


class ModelConfig(Section):
    """The architecture."""

    model_name: PathName
    vocab_size: Count
    base_emb_dim: Count
    base_num_query_heads: Count
    base_num_kv_heads: Count
    head_dim: Count
    base_mlp_dim: Count
    base_num_decoder_layers: Layers
    normalization: Normalization
    norm_placement: NormPlacement
    normalization_layer_epsilon: Positive
    parallel_block: Literal["none", "one_norm", "two_norms"]
    residual_multiplier: Positive
    layer_scalar: Flag
    mlp_activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "xielu", "clamped_silu"]
    gated_mlp: Flag
    mlp_bias: Flag
    attention_bias: Literal["none", "qkv", "all"]
    qk_norm: QueryKeyNorm
    clip_qkv: NotNegative
    layer_pattern: LayerPattern
    sliding_window_size: CountOrZero
    chunk_attn_window_size: CountOrZero
    attn_logits_soft_cap: NotNegative
    attention_sinks: Flag
    attention_output_gate: OutputGate
    query_pre_attn_scalar: NotNegative
    inverse_layer_scaling: Flag
    position_temperature: PositionTemperatureOrNone
    mla: MlaOrNone
    global_attention: GlobalAttentionOrNone
    shared_kv: SharedKvOrNone
    rope_max_timescale: Positive
    rope_local_max_timescale: NotNegative
    rope_scaling: RopeScalingOrNone
    partial_rotary_factor: PositiveShare
    trainable_position_size: CountOrZero
    scale_embeddings: Flag
    embedding_multiplier: Positive
    hidden_size_per_layer_input: CountOrZero
    logits_via_embedding: Flag
    logits_bias: Flag
    logits_multiplier: Positive
    final_logits_soft_cap: NotNegative
    initializer_range: NotNegative
    mup_base_emb_dim: CountOrZero
    mup_base_num_layers: CountOrZero
    num_experts: Count
    num_experts_per_tok: Count
    base_moe_mlp_dim: CountOrMinusOne
    shared_experts: CountOrZero
    base_shared_mlp_dim: CountOrMinusOne
    shared_expert_gate: Flag
    routed_score_func: Literal["softmax", "sigmoid", "sparsemixer"]
    norm_topk_prob: Flag
    routed_scaling_factor: Positive
    apply_router_weight_on_input: Flag
    capacity_factor: ExactOrUnlimited
    n_routing_groups: Count
    topk_routing_group: Count
    routed_bias: Flag
    load_balance_over: Literal["example", "batch"]
    expert_bias: Flag
    first_num_dense_layers: LayersOrZero
    mlp_pattern: MlpPattern
    mtp_num_layers: LayersOrZero
    lora_rank: CountOrZero
    lora_alpha: Positive
    lora_targets: Name

    @property
    def moe_mlp_dim(self) -> int:
        """Width of one expert."""
        return self.base_mlp_dim if self.base_moe_mlp_dim == -1 else self.base_moe_mlp_dim

    @property
    def shared_mlp_dim(self) -> int:
        """Width of the shared expert's mlp, which every token passes through; 0: there is none."""
        as_experts = self.base_shared_mlp_dim == -1 or not self.shared_experts
        return self.shared_experts * self.moe_mlp_dim if as_experts else self.base_shared_mlp_dim

    @property
    def mlp_kinds(self) -> tuple[MlpKind, ...]:
        """Which of the first layers have experts; the layers after them repeat the pattern."""
        return cast("tuple[MlpKind, ...]", kinds_in(self.mlp_pattern))

    @property
    def of_global_layers(self) -> Self:
        """The keys with the heads of layers without a window as those of all."""
        own = self.global_attention
        if own is None:
            return self
        heads = {
            "head_dim": own.global_head_dim,
            "base_num_query_heads": own.global_num_query_heads or self.base_num_query_heads,
            "base_num_kv_heads": own.global_num_kv_heads,
        }
        return self.model_copy(update={**heads, "global_attention": None})

    @property
    def per_layer_inputs_dim(self) -> int:
        """Width of a token's inputs to all layers; 0: there are none."""
        return self.base_num_decoder_layers * self.hidden_size_per_layer_input

    @property
    def num_stacked_layers(self) -> int:
        """Layers after the dense ones, which are split over pipeline stages."""
        return self.base_num_decoder_layers - self.first_num_dense_layers

    @property
    def pattern(self) -> tuple[str, ...]:
        """The kinds of the first layers; the layers after them repeat the pattern."""
        return kinds_in(self.layer_pattern)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        pattern = self.pattern
        return tuple(pattern[layer % len(pattern)] for layer in range(self.base_num_decoder_layers))

    @property
    def trained_kinds(self) -> tuple[str, ...]:
        """The kind of each layer, those of multi-token prediction included."""
        kinds = self.layer_kinds
        return kinds + kinds[-1:] * self.mtp_num_layers

    @property
    def width_ratio(self) -> float:
        """The width over CompleteP's base width; 1 without."""
        return self.base_emb_dim / (self.mup_base_emb_dim or self.base_emb_dim)

    @property
    def depth_ratio(self) -> float:
        """The number of layers over CompleteP's base; 1 without."""
        return self.base_num_decoder_layers / (self.mup_base_num_layers or self.base_num_decoder_layers)

    def with_plain_multipliers(self) -> Self:
        """The same model with CompleteP's multipliers in the keys that state them.

        Source: Dey et al. 2025, arXiv:2505.01618, table 1, alpha = 1; Yang & Hu 2022, arXiv:2203.03466.
        """
        plain = {
            "residual_multiplier": self.residual_multiplier / self.depth_ratio,
            "logits_multiplier": self.logits_multiplier / self.width_ratio,
            "mup_base_emb_dim": 0,
            "mup_base_num_layers": 0,
        }
        return self.model_copy(update=plain)

    @property
    def rotary_dim(self) -> int:
        """The rotated dims of a head; 0 where positions are learned."""
        if self.trainable_position_size:
            return 0
        if self.mla is not None:
            return self.mla.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim


class NumericsConfig(Section):
    """Number formats, kernels and rematerialization."""

    dtype: Literal["float32", "bfloat16", "float16"]
    weight_dtype: Literal["float32", "bfloat16"]
    master_weights: Flag
    grad_dtype: Literal["float32", "bfloat16"]
    quantization: Quantization
    loss_scale: NotNegative
    loss_scale_growth_interval: Count
    matmul_precision: Literal["default", "high", "highest"]
    remat_policy: Literal[
        "none",
        "save_dot_products",
        "minimal",
        "save_qkv_proj",
        "minimal_offloaded",
        "qkv_proj_offloaded",
        "full",
        "custom",
    ]
    remat_save: TensorNames
    remat_offload: TensorNames
    attention: KernelName
    num_vocab_tiling: CountOrMinusOne
    z_loss_multiplier: NotNegative
    router_z_loss_multiplier: NotNegative
    load_balance_loss_weight: NotNegative
    mtp_loss_scaling_factor: NotNegative


TOKENIZER_FILES = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}
"""A tokenizer's file in a directory, by tokenizer_type; the first one that exists counts."""


class DataConfig(Section):
    """The data, its tokens and their order."""

    objective: ObjectiveName
    dataset_type: SourceName
    dataset_path: PathOrSources
    mixture_exhausted: Literal["error", "stop", "drop"]
    eval_dataset_path: PathOrHeldOut
    eval_fraction: ShareBelowOne
    tokenizer_type: Literal["byte", "huggingface", "sentencepiece"]
    tokenizer_path: PathText
    chat_template: PathText
    add_bos: AutoOrFlag
    add_eos: Flag
    special_tokens_in_text: SpecialInText
    max_target_length: Count
    long_examples: Literal["truncate", "drop", "refuse"]
    packing: Packing
    balance_attention: Flag
    data_shuffle_seed: SeedOrMinusOne
    excluded_rows: PathText
    grain_worker_count: CountOrZero

    @property
    def objective_kind(self) -> ObjectiveKind:
        """The objective, with `auto` replaced by the data's."""
        return objective_kind(objective_name(self.objective, self.dataset_type))

    @property
    def rows_per_example(self) -> int:
        """Rows of max_target_length tokens in an example: in DPO two, the chosen and the rejected answer."""
        return self.objective_kind.rows_per_example

    @property
    def held_out_fraction(self) -> float:
        """The held-out share of the training examples; 0 if held-out examples have their own path."""
        return 0.0 if self.eval_dataset_path else self.eval_fraction


class PreferenceConfig(Section):
    """The loss of DPO."""

    dpo_beta: Positive
    dpo_label_smoothing: BelowHalf


# ---- Rematerialization: the tensors of a layer that are kept on the device, kept on the host, or recomputed --------


QKV = ("query_proj", "key_proj", "value_proj")
PROJECTIONS = (*QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")
REMAT_TENSORS = ("decoder_layer_input", *PROJECTIONS, "context", "expert_rows")
"""A layer's named tensors. They are its input, the results of its matmuls (experts' like an mlp's), the output of
attention, and the tokens at their experts."""


class Remat(NamedTuple):
    """The tensors that the forward pass keeps on the device, and those that it moves to pinned host memory."""

    saved: tuple[str, ...]
    offloaded: tuple[str, ...] = ()


REMAT_POLICIES: dict[str, Remat] = {
    "save_dot_products": Remat((*PROJECTIONS, "context")),
    "minimal": Remat(PROJECTIONS),
    "save_qkv_proj": Remat(QKV),
    "minimal_offloaded": Remat((), PROJECTIONS),
    "qkv_proj_offloaded": Remat((), QKV),
    "full": Remat(()),
}
"""What each remat_policy keeps besides the input of each layer; `none` keeps everything, `custom` what is listed."""


def remat_of(config: NumericsConfig) -> Remat | None:
    """The tensors that are kept of each layer; None: all."""
    match config.remat_policy:
        case "none":
            return None
        case "custom":
            return Remat(listed(config.remat_save), listed(config.remat_offload))
        case policy:
            return REMAT_POLICIES[policy]


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
    """Every key of a run, from `load_config`. Configs with equal values are equal, whatever their origins."""

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

    _origins: dict[str, str] = PrivateAttr(default_factory=dict[str, str])

    def own_refusals(self) -> Iterable[Any]:
        """The Refusals by this kind of run's rules, beside the rules of every config; None where a rule holds."""
        return ()

    @property
    def tokens_per_example(self) -> int:
        """Tokens of all rows of an example."""
        return self.rows_per_example * self.max_target_length

    @property
    def stated_global_batch(self) -> int:
        """Examples per step by global_batch_size, global_batch_tokens or the end of batch_schedule; 0: not stated."""
        if self.batch_schedule:
            return self.batch_schedule[-1][1]
        return self.global_batch_size or self.global_batch_tokens // self.tokens_per_example

    @property
    def origins(self) -> Mapping[str, str]:
        """For each key, the file that its value came from, or `command line`."""
        return self._origins

    def with_origins(self, origins: Mapping[str, str]) -> "Config":
        """The same values with these origins."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:  # pydantic's equality, but not its hash, includes the origins
        return hash(tuple(self.__dict__.items()))


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
