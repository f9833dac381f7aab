"""The fields of a config.json, read one by one, and the keys that they decide."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from pydantic import ValidationError

from maxtext_lite.config.errors import any_of, value_text
from maxtext_lite.config.json_file import read_text
from maxtext_lite.config.keys import ModelConfig
from maxtext_lite.config.load import ROOT_FILE, packaged_directory
from maxtext_lite.config.types import wrong_value
from maxtext_lite.config.yaml import parse_mapping

JsonObject = dict[str, Any]
"""An object of JSON, such as a config.json's fields by name."""

Keys = Mapping[str, Any]
"""Keys of the Model section, with values of their fields' types."""

_ALWAYS_STATED = (
    "model_name", "vocab_size", "base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "base_num_query_heads",
    "base_num_kv_heads", "head_dim", "normalization_layer_epsilon", "logits_via_embedding", "initializer_range",
    "capacity_factor", "load_balance_over", "mtp_num_layers", "lora_rank", "lora_alpha", "lora_targets",
)  # fmt: skip
_BASE = dict(parse_mapping(read_text(packaged_directory("configs") / ROOT_FILE)))
DEFAULTS: Keys = {key: _BASE[key].value for key in ModelConfig.model_fields if key not in _ALWAYS_STATED}
"""The keys that a family's config.json has no field for: a directory decides every key."""

TABLE: JsonObject = yaml.load(
    Path(__file__).with_name("families.yml").read_text(encoding="utf-8"),
    yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader,
)
"""families.yml: what families' fields mean, and their tensors."""

WITHOUT_EFFECT = frozenset(name for names in TABLE["without_effect"].values() for name in names.split())
"""Fields that do not change a model's logits."""

WEIGHTS_FIELD = "transformers_weights"
"""The field that names the file with the weights, or its index; transformers then reads no other."""

NEVER_NULL = frozenset(TABLE["never_null"].split())
"""Fields whose default transformers does not use for a null: it fails, or null counts as false or 0."""

MOST_LAYERS = 10_000
"""The most layers of a model: a bound for what grows with them, such as `layer_types`."""
_FLOATS = ("float32", "bfloat16", "float16", "float64")


class Fields:
    """The fields of a config.json as they are read, with the problems found in them.

    A null field counts as missing, except for those of NEVER_NULL.

    Attributes:
      problems: sentences, each with the field and its value.
      names: the field that decides each key read so far.
      has_local_layers: whether a layer has a sliding window, once the layers are read.
      global_layers: numbers of the layers without one, likewise.
    """

    def __init__(self, fields: JsonObject) -> None:
        self._fields = fields
        self._unread = {name for name, value in fields.items() if value is not None}
        self.problems: list[str] = []
        self.names: dict[str, str] = {}
        self.has_local_layers = False
        self.global_layers: list[int] = []

    def take(self, name: str, default: object = None, *, key: str = "") -> Any:
        """The field's value, marked as read; `default` if it is missing.

        Args:
          key: which the field decides.
        """
        if key:
            self.names[key] = name
        if name in NEVER_NULL and self.is_null(name):
            self.refuse(name, None, "is not a value of this field. Remove it for its default.")
        self._unread.discard(name)
        return self.peek(name, default)

    def peek(self, name: str, default: object = None) -> Any:
        """The field's value, without marking it as read."""
        value = self._fields.get(name)
        return default if value is None else value

    def is_null(self, name: str) -> bool:
        """Whether the field is stated as null."""
        return name in self._fields and self._fields[name] is None

    @property
    def num_layers(self) -> int:
        """The number of layers, 0 if it is wrong."""
        value = self._fields.get("num_hidden_layers")
        return value if is_whole(value, 1, MOST_LAYERS) else 0

    def need(self, *names: str, key: str = "") -> Any:
        """The value of a field with possibly several names, which must agree; 1 and a problem if missing."""
        first, *others = sorted(names, key=lambda name: self.peek(name) is None)
        if self.peek(first) is None:
            self.problems.append(f"{first} is missing.")
        value = self.take(first, 1, key=key)
        for name in others:
            other = self.take(name, value)
            if other != value:
                self.refuse(name, other, f"contradicts {first}={value_text(value)}.")
        return value

    def whole(self, name: str, default: int | None = None, *, least: int = 1, key: str = "") -> int:
        """The field's value, an integer of at least `least`; `least` and a problem if it is not one."""
        value = self.need(name, key=key) if default is None else self.take(name, default, key=key)
        return self._checked(name, value, is_whole(value, least), f"an integer of at least {least}", least)

    def size(self, name: str, default: int) -> int:
        """The value of a size that another part reads and checks; `default` if it is wrong or missing."""
        value = self._fields.get(name)
        return value if is_whole(value, 1) else default

    def flag(self, name: str, default: bool, *, key: str = "") -> bool:
        """The field's value, true or false; `default` and a problem if it is neither."""
        value = self.take(name, default, key=key)
        return self._checked(name, value, isinstance(value, bool), "true or false", default)

    def listed(self, name: str) -> list[Any] | None:
        """The field's value, a list; None if it is missing; None and a problem if it is something else."""
        value = self.take(name)
        return self._checked(name, value, value is None or isinstance(value, list), "a list", None)

    def mapping(self, name: str) -> JsonObject:
        """The field's entries that are not null; {} and a problem if it is no object."""
        value = self.take(name, {})
        value = self._checked(name, value, isinstance(value, dict), "an object with entries such as rope_type", {})
        return {entry: each for entry, each in value.items() if each is not None}

    def _checked(self, name: str, value: Any, is_right: bool, kind: str, default: Any) -> Any:
        if is_right:
            return value
        self.refuse(name, value, f"is not {kind}.")
        return default

    def refuse(self, name: str, value: object, why: str) -> None:
        """Notes a value that cannot be expressed."""
        self.problems.append(f"{name}={value_text(value)} {why}")

    def drop(self, names: Iterable[str]) -> None:
        """Marks fields as read."""
        self._unread.difference_update(names)

    def check_keys(self, keys: Keys) -> None:
        """Notes values of the wrong kind, in the words of the config's schema and with the fields' names.

        A field with a problem already is not named again.
        """
        known = {re.split("[= ]", problem)[0] for problem in self.problems}
        layers = keys["base_num_decoder_layers"]
        name = self.names.get("base_num_decoder_layers")
        if name and name not in known and isinstance(layers, int) and layers > MOST_LAYERS:
            self.refuse(name, layers, f"is more than {MOST_LAYERS:,}. Nearest that works: {MOST_LAYERS}.")
            known.add(name)
        try:
            ModelConfig.model_validate(keys)
        except ValidationError as error:
            for detail in error.errors():
                name = self.names.get(str(detail["loc"][0]))  # a key without a field of its own follows from others
                if name and name not in known:
                    self.problems.append(str(wrong_value(ModelConfig, detail, name)))

    def check_stored(self, architecture: str, kind: str) -> None:
        """Reads the fields about the files: the weights' number format, and code that comes with them.

        Args:
          architecture: the family's class; code for classes of that name, or of the model_type's, is the code that
            transformers has.
          kind: the model_type.
        """
        stated: list[str] = []
        for name in ("dtype", "torch_dtype"):
            value = self.take(name)
            if value is None:
                continue
            stated.append(str(value).removeprefix("torch."))
            if stated[-1] not in _FLOATS:
                self.refuse(name, value, f"is none of {any_of(_FLOATS)}: weights in it are not read.")
        if len(set(stated)) > 1:
            self.refuse("torch_dtype", self.peek("torch_dtype"), f"contradicts dtype={stated[0]}.")
        code = self.take("auto_map", {})
        family = re.sub("(ForCausalLM|LMHeadModel)$", "", architecture)
        for each in code.values() if isinstance(code, dict) else [code]:
            for name in each if isinstance(each, list) else [each]:
                title = str(name).rpartition(".")[2]
                if name is None or title.startswith(family) or title.lower().startswith(kind.replace("_", "")):
                    continue
                why = f"is code that is not run. If the model is {family}, remove auto_map."
                self.refuse("auto_map", name, why)

    def unknown(self, kind: str) -> list[str]:
        """A problem for each field that no part has read."""
        advice = f"is not a known field of {kind}, and could change the logits. If it does not, remove it."
        return [
            f"{value_text(name)}={value_text(value)} {advice}"
            for name, value in self._fields.items()
            if name in self._unread and not is_off(value)
        ]


def is_off(value: object) -> bool:
    """Whether a value is false or empty: what it switches changes nothing."""
    return value is False or value in ([], {})


def without_experts(keys: Keys) -> JsonObject:
    """The keys of a model without experts in any layer: a dense model's."""
    return {**keys, "num_experts": 1, **{key: DEFAULTS[key] for key in _OF_EXPERTS}}


def is_whole(value: object, least: int, most: float = math.inf) -> TypeGuard[int]:
    """Whether a value is an integer, not true or false, in this range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def same_architecture(one: Keys, other: Keys) -> list[str]:
    """The keys that differ between two models; two ways to state the same thing are no difference.

    Args:
      one: keys from a config.json.
      other: the same keys of a config.
    """
    plain_one = _plain(one)
    plain_other = _plain(other)
    return [key for key in plain_one if key != "initializer_range" and plain_one[key] != plain_other[key]]


def _plain(keys: Keys) -> JsonObject:
    """The keys in one normal form."""
    plain = dict(keys)
    layers = range(plain["base_num_decoder_layers"])
    kinds = [kind.strip() for kind in plain["layer_pattern"].split(",")]
    plain["layer_pattern"] = [kinds[layer % len(kinds)] for layer in layers]
    mlps = [kind.strip() for kind in plain["mlp_pattern"].split(",")]
    first = plain["first_num_dense_layers"]
    plain["first_num_dense_layers"] = 0
    plain["mlp_pattern"] = ["dense" if layer < first else mlps[layer % len(mlps)] for layer in layers]
    if plain["query_pre_attn_scalar"] == plain["head_dim"]:
        plain["query_pre_attn_scalar"] = 0.0
    if plain["base_moe_mlp_dim"] == -1:
        plain["base_moe_mlp_dim"] = plain["base_mlp_dim"]
    if plain["base_shared_mlp_dim"] == -1:
        plain["base_shared_mlp_dim"] = plain["shared_experts"] * plain["base_moe_mlp_dim"]
    plain["shared_experts"] = min(plain["shared_experts"], 1)
    if plain["num_experts"] == 1:
        plain |= {key: DEFAULTS[key] for key in _OF_EXPERTS}
    elif "dense" not in plain["mlp_pattern"]:
        plain["base_mlp_dim"] = 0  # no layer has it
    for key in ("mla", "global_attention", "shared_kv", "rope_scaling", "position_temperature"):
        part = plain[key] or {}
        entries = part if isinstance(part, dict) else part.to_mapping()
        plain[key] = {name: value for name, value in entries.items() if value != _USUAL.get(name)}
    return plain


_OF_EXPERTS = (
    "num_experts_per_tok", "base_moe_mlp_dim", "shared_experts", "routed_score_func", "norm_topk_prob",
    "routed_scaling_factor", "n_routing_groups", "topk_routing_group", "routed_bias", "expert_bias",
    "first_num_dense_layers", "mlp_pattern", "base_shared_mlp_dim", "shared_expert_gate",
    "apply_router_weight_on_input",
)  # fmt: skip
_USUAL: JsonObject = {
    "beta_fast": 32, "beta_slow": 1, "truncate": True, "offset": 0, "layers": "all", "share_kv_projections": False,
    "use_double_wide_mlp": False, "global_partial_rotary_factor": 1.0,
}  # fmt: skip
"""Entries of a mapping that equal their defaults."""
