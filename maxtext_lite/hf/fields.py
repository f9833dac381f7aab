"""The fields of a config.json, read one by one, and the keys that they decide."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard, cast

from pydantic import ValidationError

from maxtext_lite.config.errors import any_of, value_text
from maxtext_lite.config.keys import ModelConfig, PositionTemperature, RopeScaling
from maxtext_lite.config.types import wrong_value

JsonObject = dict[str, Any]
"""An object of JSON, such as a config.json's fields by name."""

Keys = Mapping[str, Any]
"""Keys of the Model section, with values of their fields' types."""

DEFAULTS: Keys = MappingProxyType({
    "normalization": "rms_norm", "norm_placement": "pre", "mlp_activation": "silu", "gated_mlp": True,
    "mlp_bias": False, "attention_bias": "none", "qk_norm": "none", "layer_pattern": "global",
    "sliding_window_size": 0, "attn_logits_soft_cap": 0.0, "attention_sinks": False, "query_pre_attn_scalar": 0.0,
    "mla": {}, "rope_max_timescale": 10000.0, "rope_local_max_timescale": 0.0, "rope_scaling": {},
    "partial_rotary_factor": 1.0, "trainable_position_size": 0, "scale_embeddings": False,
    "final_logits_soft_cap": 0.0, "num_experts": 1, "num_experts_per_tok": 1, "base_moe_mlp_dim": -1,
    "shared_experts": 0, "routed_score_func": "softmax", "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "n_routing_groups": 1, "topk_routing_group": 1, "routed_bias": False, "expert_bias": False,
    "first_num_dense_layers": 0, "parallel_block": "none", "residual_multiplier": 1.0, "clip_qkv": 0.0,
    "inverse_layer_scaling": False, "position_temperature": {}, "embedding_multiplier": 1.0, "logits_bias": False,
    "logits_multiplier": 1.0, "mlp_pattern": "moe", "base_shared_mlp_dim": -1, "shared_expert_gate": False,
    "apply_router_weight_on_input": False, "chunk_attn_window_size": 0,
})  # fmt: skip
"""The keys that a family's config.json has no field for: a directory decides every key."""

WITHOUT_EFFECT = frozenset({
    # names, versions
    "_name_or_path", "architectures", "finetuning_task", "model_type", "name", "prefix", "tokenizer_class",
    "transformers.js_config", "transformers_version",
    "transformers_weights", "unsloth_fixed", "unsloth_version", "is_llama_config",
    "eod_token_id", "pad_id", "org_vocab_size",
    # tokens and sampling
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "pad_token_id",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p",
    # what is returned, cached or recomputed, and by which implementation
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "cache_implementation",
    "chunk_size_feed_forward", "gradient_checkpointing", "output_attentions", "output_hidden_states",
    "output_router_logits", "pretraining_tp", "return_dict", "torchscript", "use_bfloat16", "use_cache",
    "max_position_embeddings", "ep_size", "_sliding_window_pattern", "max_sequence_length", "model_max_length",
    "tokenizer_model_max_length", "tokenizer_padding_side", "use_flash_attn", "_commit_hash",
    # heads for other tasks
    "id2label", "is_decoder", "is_encoder_decoder", "label2id", "num_labels", "problem_type", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tie_encoder_decoder", "cross_attention_hidden_size", "num_nextn_predict_layers",
    # training only: dropout and router losses
    "attention_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout",
    "attn_pdrop", "aux_loss_alpha", "classifier_dropout", "embd_pdrop", "resid_pdrop",
    "router_aux_loss_coef", "seq_aux",
})  # fmt: skip
"""Fields that do not change a model's logits."""

NEVER_NULL = frozenset({
    "activation_function", "attention_bias", "attention_multiplier", "attention_out_bias", "attn_scale",
    "attn_temperature_tuning", "decoder_sparse_step", "embedding_multiplier", "first_k_dense_replace", "floor_scale",
    "hidden_act", "interleave_moe_layer_step", "intermediate_size_mlp", "is_causal", "layer_norm_eps",
    "layer_norm_epsilon", "lm_head_bias", "logit_scale", "logits_scaling", "mlp_bias", "moe_layer_end_index",
    "moe_layer_interval", "moe_layer_start_index", "moe_norm_min", "moe_num_shared_experts",
    "no_rope_layer_interval", "norm_eps", "norm_epsilon", "norm_topk_prob", "qk_layernorm", "qkv_bias",
    "query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps", "rope_interleave", "routed_scaling_factor",
    "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "shared_intermediate_size", "swiglu_alpha", "swiglu_limit",
    "use_parallel_residual", "use_qkv_bias", "use_sliding_window",
})  # fmt: skip
"""Fields with a default that transformers does not use for a null: it fails, or null counts as false or 0."""

MOST_LAYERS = 10_000
"""The most layers of a model: a bound for what grows with them, such as `layer_types`."""
_FLOATS = ("float32", "bfloat16", "float16", "float64")


class Fields:
    """The fields of a config.json that are still unread, and the problems of those that were read.

    A null field counts as missing, except for those of NEVER_NULL.

    Attributes:
      problems: sentences, each with the field and its value.
      names: the field that decides each key read so far.
      has_local_layers: whether a layer has a sliding window, once the layers are read.
    """

    def __init__(self, fields: JsonObject) -> None:
        self._all = dict(fields)
        self._left = {name: value for name, value in fields.items() if value is not None}
        self.problems: list[str] = []
        self.names: dict[str, str] = {}
        self.has_local_layers = False

    def take(self, name: str, default: object = None) -> Any:
        """The field's value, marked as read; `default` if it is missing."""
        if name in NEVER_NULL and self.is_null(name):
            self.refuse(name, None, "is not a value of this field. Remove it for its default.")
        return self._left.pop(name, default)

    def take_entry(self, name: str, entry: str, default: object) -> Any:
        """An entry of a field that is an object, marked as read; `default` if it is missing."""
        stated = self._left.get(name)
        if not isinstance(stated, dict):  # refused by the part that reads the field
            return default
        entries = dict(cast("JsonObject", stated))
        value = entries.pop(entry, None)
        self._left[name] = entries
        return default if value is None else value

    def peek(self, name: str, default: object) -> Any:
        """The field's value, read already or not."""
        value = self._all.get(name)
        return default if value is None else value

    def is_null(self, name: str) -> bool:
        """Whether the field is stated as null."""
        return name in self._all and self._all[name] is None

    @property
    def num_layers(self) -> int:
        """The number of layers, 0 if it is wrong."""
        return self.size("num_hidden_layers", 0, most=MOST_LAYERS)

    def check_layer_types(self, kinds: Sequence[object], layers: int, window: int, known: Sequence[str]) -> None:
        """Notes the problems of a list of the layers' kinds."""
        if layers and len(kinds) != layers:
            self.refuse("layer_types", len(kinds), f"kinds do not name the {layers} layers.")
        odd = [kind for kind in kinds if kind not in known]
        if odd:
            self.refuse("layer_types", odd[0], f"cannot be expressed: a layer is {any_of(known)}.")
        if "sliding_attention" in kinds and not window:
            self.refuse("layer_types", "sliding_attention", "needs a sliding_window that is switched on.")

    def need(self, name: str) -> Any:
        """The field's value; 1 and a problem if it is missing."""
        if name not in self._left:
            self.problems.append(f"{name} is missing.")
        return self._left.pop(name, 1)

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """The field's value, an integer of at least `least`; `least` and a problem if it is not one."""
        value = self.need(name) if default is None else self.take(name, default)
        if is_whole(value, least):
            return value
        self.refuse(name, value, f"is not an integer of at least {least}.")
        return least

    def size(self, name: str, default: int, *, most: float = math.inf) -> int:
        """The value of a field that another part reads and checks; `default` if it is wrong or missing."""
        value = self._all.get(name)
        return value if is_whole(value, 1, most) else default

    def flag(self, name: str, default: bool) -> bool:
        """The field's value, true or false; `default` and a problem if it is neither."""
        value = self.take(name, default)
        if isinstance(value, bool):
            return value
        self.refuse(name, value, "is not true or false.")
        return default

    def listed(self, name: str) -> list[Any] | None:
        """The field's value, a list; None if it is missing; None and a problem if it is something else."""
        value = self.take(name)
        if value is None or isinstance(value, list):
            return cast("list[Any] | None", value)
        self.refuse(name, value, "is not a list.")
        return None

    def mapping(self, name: str) -> JsonObject:
        """The field's entries that are not null; {} and a problem if it is no object."""
        value = self.take(name)
        if isinstance(value, dict):
            return {entry: each for entry, each in cast("dict[str, Any]", value).items() if each is not None}
        if value is not None:
            self.refuse(name, value, "is not an object with entries such as rope_type.")
        return {}

    def refuse(self, name: str, value: object, why: str) -> None:
        """Notes a value that cannot be expressed."""
        self.problems.append(f"{name}={value_text(value)} {why}")

    def drop(self, names: Iterable[str]) -> None:
        """Marks fields as read."""
        for name in names:
            self._left.pop(name, None)

    def check_keys(self, keys: Keys) -> None:
        """Notes values of the wrong kind, in the words of the config's schema and with the fields' names.

        A field with a problem already is not named again.
        """
        known = {problem.partition("=")[0].partition(" ")[0] for problem in self.problems}
        layers, name = keys["base_num_decoder_layers"], self.names.get("base_num_decoder_layers")
        if name and name not in known and isinstance(layers, int) and layers > MOST_LAYERS:
            self.refuse(name, layers, f"is more than {MOST_LAYERS:,}. Nearest that works: {MOST_LAYERS}.")
            known.add(name)
        try:
            ModelConfig.model_validate(dict(keys))
        except ValidationError as error:
            for detail in error.errors():
                key = str(detail["loc"][0])
                name = self.names.get(key, "")  # a key without a field of its own follows from others
                if name and name not in known:
                    self.problems.append(str(wrong_value(ModelConfig, detail, name)))

    def check_stored(self, architecture: str) -> None:
        """Reads the fields about the files: the weights' number format, and code that comes with them.

        Args:
          architecture: the family's class; code for classes of that name is the code that transformers has.
        """
        formats = {name: self.take(name) for name in ("dtype", "torch_dtype")}
        stated = {name: str(value).removeprefix("torch.") for name, value in formats.items() if value is not None}
        for name, value in stated.items():
            if value not in _FLOATS:
                self.refuse(name, formats[name], f"is none of {any_of(_FLOATS)}: weights in it are not read.")
        if len(set(stated.values())) > 1:
            self.refuse("torch_dtype", formats["torch_dtype"], f"contradicts dtype={value_text(formats['dtype'])}.")
        code, family = self.take("auto_map", {}), architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        classes = cast("dict[str, Any]", code).values() if isinstance(code, dict) else [code]
        for each in classes:
            for name in cast("list[Any]", each) if isinstance(each, list) else [each]:
                if name is not None and not str(name).rpartition(".")[2].startswith(family):
                    self.refuse(
                        "auto_map", name, f"is code of its author's, which is not run: the model may not be {family}. "
                        "If it is, remove auto_map."
                    )  # fmt: skip

    def unknown(self, kind: str) -> list[str]:
        """A problem for each field that no part has read."""
        problems: list[str] = []
        for name, value in self._left.items():
            if value is False or value in ([], {}):  # off or empty: changes nothing
                continue
            problems.append(
                f"{value_text(name)}={value_text(value)} is not a field of {kind} that maxtext_lite knows, and could "
                "change the logits. If it does not, remove it."
            )
        return problems


def without_experts(keys: Keys) -> Keys:
    """The keys of a model none of whose layers has experts: those of a dense model."""
    return {**keys, "num_experts": 1, **{key: DEFAULTS[key] for key in _OF_EXPERTS}}


def is_whole(value: object, least: int, most: float = math.inf) -> TypeGuard[int]:
    """Whether a value is an integer, not true or false, in this range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def same_architecture(one: Keys, other: Keys) -> list[str]:
    """The keys in which two models differ; two ways of stating the same thing are no difference.

    Args:
      one: keys from a config.json.
      other: the same keys of a config.
    """
    plain_one, plain_other = _plain(one), _plain(other)
    return [key for key in plain_one if key != "initializer_range" and plain_one[key] != plain_other[key]]


def _plain(keys: Keys) -> Keys:
    """The keys in one normal form."""
    plain = dict(keys)
    layers = plain["base_num_decoder_layers"]
    kinds = [kind.strip() for kind in str(plain["layer_pattern"]).split(",")]
    plain["layer_pattern"] = [kinds[layer % len(kinds)] for layer in range(layers)]
    if plain["query_pre_attn_scalar"] == plain["head_dim"]:
        plain["query_pre_attn_scalar"] = 0.0
    if plain["base_moe_mlp_dim"] == -1:
        plain["base_moe_mlp_dim"] = plain["base_mlp_dim"]
    mlps = [kind.strip() for kind in str(plain["mlp_pattern"]).split(",")]
    first = plain["first_num_dense_layers"]
    plain["mlp_pattern"] = ["dense" if layer < first else mlps[layer % len(mlps)] for layer in range(layers)]
    plain["first_num_dense_layers"] = 0
    if plain["base_shared_mlp_dim"] == -1:
        plain["base_shared_mlp_dim"] = plain["shared_experts"] * plain["base_moe_mlp_dim"]
    plain["shared_experts"] = min(plain["shared_experts"], 1)
    if plain["num_experts"] == 1:
        plain |= {key: DEFAULTS[key] for key in _OF_EXPERTS}
    elif "dense" not in plain["mlp_pattern"]:
        plain["base_mlp_dim"] = 0  # no layer has it
    for key in ("mla", "rope_scaling", "position_temperature"):
        part: Any = plain[key] or {}
        entries = cast("JsonObject", part) if isinstance(part, dict) else part.to_mapping()
        plain[key] = {name: value for name, value in entries.items() if value != _USUAL.get(name)}
    return plain


_OF_EXPERTS = (
    "num_experts_per_tok", "base_moe_mlp_dim", "shared_experts", "routed_score_func", "norm_topk_prob",
    "routed_scaling_factor", "n_routing_groups", "topk_routing_group", "routed_bias", "expert_bias",
    "first_num_dense_layers", "mlp_pattern", "base_shared_mlp_dim", "shared_expert_gate",
    "apply_router_weight_on_input",
)  # fmt: skip
_USUAL: JsonObject = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "offset": 0, "layers": "all"}
"""Entries of a rope_scaling or position_temperature that equal their defaults."""

assert set(_USUAL) <= {*RopeScaling.__dataclass_fields__, *PositionTemperature.__dataclass_fields__}
