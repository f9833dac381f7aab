"""MaxText's configs in our keys, with a list of what has no equivalent."""

import fnmatch
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import yaml

from maxtext_lite.config.errors import UserError, did_you_mean, value_text
from maxtext_lite.config.files import packaged_directory
from maxtext_lite.config.sections import QKV, REMAT_TENSORS

_KEYS = "maxtext_keys.yml"
_LARGEST = 1e15
_NO_PATH = "prepared"  # where the user must put the data
_PLAIN_BLOCKS = {  # decoder_block: whether it may have biases in attention, and norms of queries and keys
    **dict.fromkeys(("default", "llama2", "mistral", "mixtral"), (False, False)),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}
_SAVED = {  # remat_policy: the tensors that it keeps on the device, for policies without a name here
    "save_out_proj": ("out_proj",),
    "save_dot_except_mlp": (*QKV, "out_proj"),
    "save_dot_with_context_except_mlp": (*QKV, "context", "out_proj"),
    "save_dot_except_mlpwi": (*QKV, "out_proj", "mlpwo"),
}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_tanh", "relu": "relu"}  # flax's gelu is the tanh approximation by default


@dataclass
class Translation:
    """The translation of a MaxText config.

    Attributes:
      stated: the MaxText keys that the user stated.
      values: our keys and values.
      sources: for each of our keys, the stated MaxText keys that it follows from.
      losses: settings without an equivalent that differ from MaxText's default, as `key=value: why`.
      notes: remarks on translated values.
      idle: for each reason, the stated keys without effect on what is trained here.
    """

    stated: frozenset[str]
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    losses: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    idle: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def put(self, ours: str, value: object, *theirs: str) -> None:
        """Sets one of our keys, which follows from these of MaxText."""
        self.values[ours] = value
        self.sources[ours] = tuple(key for key in theirs if key in self.stated)


@functools.cache
def _table() -> dict[str, Any]:
    return yaml.safe_load((packaged_directory("assets") / _KEYS).read_text(encoding="utf-8"))


@functools.cache
def maxtext_defaults() -> dict[str, Any]:
    """MaxText's default of each key that is translated or may be lost."""
    table, found = _table(), dict[str, Any]()
    for part in (table, table["architecture"]):
        found |= part["same"] | part["computed"] | {key: row[0] for key, row in part["renamed"].items()}
    for axis in (axis for axes in table["axes"].values() for axis in axes):
        found |= {f"ici_{axis}_parallelism": 1, f"dcn_{axis}_parallelism": 1}
    for keys in table["lacking"].values():
        found |= keys
    return found | {"ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1}


def maxtext_models() -> dict[str, tuple[str, dict[str, Any]]]:
    """For each model_name of MaxText, ours and the keys that must be added for MaxText's dimensions."""
    models = _table()["models"]
    same = {name: (name, dict[str, Any]()) for name in models["same"].split()}
    return same | {name: (ours, besides) for name, (ours, besides) in models["renamed"].items()}


def _reason(key: str) -> str | None:
    """The reason why a key has no effect here; None: MaxText has no such key."""
    families = _table()["elsewhere"].items()
    return next((why for why, names in families if any(fnmatch.fnmatchcase(key, name) for name in names.split())), None)


def translate(stated: Mapping[str, Any], *, num_devices: int | None = None) -> Translation:
    """Translates the stated values of a MaxText config over MaxText's defaults.

    Args:
      stated: MaxText's keys and values.
      num_devices: of the run; if given, a batch is rounded down as MaxText does.
    Raises:
      UserError: MaxText has no such key, or maxtext_lite no such model.
    """
    if "rl" in stated:
        raise UserError(
            "a config of reinforcement learning is not translated: docs/coming_from.md names its keys here."
        )
    defaults = maxtext_defaults()
    reasons = {key: _reason(key) for key in stated if key not in defaults}
    unknown = [key for key, reason in reasons.items() if reason is None]
    if unknown:
        raise UserError(f"MaxText has no key '{value_text(key)}'.{did_you_mean(key, defaults)}" for key in unknown)
    found = Translation(frozenset(stated))
    for key, reason in reasons.items():
        found.idle.setdefault(str(reason), []).append(key)
    table = _table()
    of = defaults | {
        key: "" if value is None and defaults[key] == "" else value for key, value in stated.items() if key in defaults
    }
    lacking = {key for keys in table["lacking"].values() for key in keys}
    _check_kinds({key: value for key, value in of.items() if key not in lacking}, defaults)
    named = of["model_name"] != "default"
    _rows(found, table, of)
    _rows(found, table["architecture"], of, only_stated=named)
    for reason, keys in table["lacking"].items():
        found.losses += [f"{key}={value_text(of[key])}: {reason}" for key in keys if of[key] != keys[key]]
    _batch(found, of, num_devices)
    _mesh(found, of)
    _optimizer(found, of)
    _model(found, of, named=named)
    _remat(found, of)
    _data(found, of)
    return found


def _check_kinds(of: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuses values of the wrong kind, such as text for a number, before anything computes with them."""
    problems: list[str] = []
    for key, value in of.items():
        default = defaults[key]
        is_number = isinstance(value, int | float) and abs(value) < _LARGEST
        right = is_number if isinstance(default, int | float | None) else type(value) is type(default)
        right &= default is None or isinstance(value, bool) == isinstance(default, bool)
        if value is not default and not right:
            problems.append(f"{key}={value_text(value)} is not of the kind of MaxText's {key}={value_text(default)}.")
    if problems:
        raise UserError(problems)


def _rows(found: Translation, part: Mapping[str, Any], of: Mapping[str, Any], *, only_stated: bool = False) -> None:
    """Translates the keys that have exactly one counterpart here."""
    rows: dict[str, list[Any]] = {key: ["", key] for key in part["same"]} | part["renamed"]
    for key, (_, ours, *maps) in rows.items():
        value = of[key]
        choices: dict[Any, Any] = maps[0] if maps else {}
        if (only_stated and key not in found.stated) or (value in (None, "") and not choices):
            continue
        if choices and value not in choices and not isinstance(value, int):
            found.losses.append(
                f"{key}={value_text(value)}: {ours} is one of {', '.join(map(str, dict.fromkeys(choices.values())))}"
            )
            continue
        found.put(ours, choices.get(value, value), key)


def _batch(found: Translation, of: Mapping[str, Any], num_devices: int | None) -> None:
    """Translates the batch. MaxText: int(per_device_batch_size x devices) x gradient_accumulation_steps rows a step."""
    per_device, accumulation, factor = (
        of[key] for key in ("per_device_batch_size", "gradient_accumulation_steps", "expansion_factor_real_data")
    )
    rows = 0 if num_devices is None else int(num_devices * per_device)
    if rows and num_devices and Fraction(rows, num_devices) != Fraction(str(per_device)):
        found.notes.append(
            f"per_device_batch_size={per_device} x {num_devices} devices is {rows} rows in MaxText, which rounds down"
        )
        per_device = rows / num_devices
    elif num_devices is None and not float(per_device).is_integer():
        found.notes.append("MaxText rounds per_device_batch_size x devices down: --devices N does the same")
    found.put("per_device_batch_size", per_device, "per_device_batch_size")
    if 0 < factor < 1:
        found.notes.append(
            f"expansion_factor_real_data={factor} leaves the batch as it is here; MaxText 0.2.5 loads and trains on "
            f"{factor} of it where per_device_batch_size is at least 1"
        )
    if accumulation > 1 and of["enable_rampup_batch_size"]:
        found.notes.append(
            "a ramp's stages are accumulated here as all steps are; MaxText's ramp leaves accumulation out"
        )
    if accumulation > 1 and of["use_dpo"] and not of["use_tunix_gradient_accumulation"]:
        found.notes.append(
            f"MaxText 0.2.5 accumulates {accumulation} loads of the whole global batch in DPO; here a step is one"
        )


def _mesh(found: Translation, of: Mapping[str, Any]) -> None:
    for ours, theirs in _table()["axes"].items():
        for links in ("ici", "dcn"):
            keys = [f"{links}_{axis}_parallelism" for axis in theirs]
            sizes = [max(of["num_slices"], 1) if links == "dcn" and of[key] == -1 else of[key] for key in keys]
            found.put(f"{links}_{ours}_parallelism", -1 if -1 in sizes else math.prod(sizes), *keys)
    if of["enable_diloco"]:
        keys = ("ici_diloco_parallelism", "dcn_diloco_parallelism")
        found.put("diloco_num_replicas", math.prod(max(of[key], 1) for key in keys), *keys)


def _optimizer(found: Translation, of: Mapping[str, Any]) -> None:
    steps, end, optimizer = of["steps"], of["learning_rate_schedule_steps"], of["opt_type"]
    if end not in (-1, steps):
        found.losses.append(f"learning_rate_schedule_steps={end}: the schedule ends with the last of steps={steps}")
    warmup = int((steps if end == -1 else end) * of["warmup_steps_fraction"])
    found.put("warmup_steps", warmup, "warmup_steps_fraction", "learning_rate_schedule_steps", "steps")
    decay = {"sgd": 0.0, "muon": of["muon_weight_decay"]}.get(optimizer, of["adam_weight_decay"])
    found.put("weight_decay", decay, "adam_weight_decay", "muon_weight_decay")
    found.put("weight_decay_on_norms_and_embeddings", bool(decay) and not of["adamw_mask"], "adamw_mask")
    if of["adamw_mask"]:
        found.notes.append("what adamw_mask names is not decayed in MaxText; here norms and embeddings are not")
    if optimizer == "muon":
        found.put("adam_b1", of["muon_beta"], "muon_beta")
        found.notes.append("muon_beta and muon_weight_decay count for all parameters, also those that Adam updates")
    keep = of["max_num_checkpoints_to_keep"] or int(steps // max(of["checkpoint_period"], 1)) + 2
    found.put("max_num_checkpoints_to_keep", keep, "max_num_checkpoints_to_keep")
    found.put("profiler_steps", of["profiler_steps"] if of["profiler"] else 0, "profiler", "profiler_steps")
    if of["enable_lora"]:
        found.put("lora_rank", of["lora_rank"], "lora_rank")
        found.put("lora_alpha", of["lora_alpha"], "lora_alpha")


def _model(found: Translation, of: Mapping[str, Any], *, named: bool) -> None:
    models = maxtext_models()
    if of["model_name"] not in models:
        raise UserError(
            f"model_name={value_text(of['model_name'])} has no equivalent.{did_you_mean(str(of['model_name']), models)}"
        )
    name, besides = models[of["model_name"]]
    found.put("model_name", name, "model_name")
    for key, value in besides.items():
        if not found.sources.get(key):
            found.put(key, value, "model_name")
    if named and not found.stated & _table()["architecture"]["computed"].keys():
        return
    block, activations = of["decoder_block"], [str(name) for name in of["mlp_activations"]]
    if block not in _PLAIN_BLOCKS:
        if not named:
            found.losses.append(
                f"decoder_block={value_text(block)}: without model_name only the layers of Llama's kind"
            )
        return
    biased, normed = _PLAIN_BLOCKS[block]
    for key, ours, there, allowed in (
        ("attention_bias", "attention_bias", "qkv", biased),
        ("use_qk_norm", "qk_norm", "head", normed),
    ):
        if of[key] and allowed:
            found.put(ours, there, key, "decoder_block")
        elif of[key]:
            found.losses.append(f"{key}=true: with decoder_block={block} there is no equivalent")
    first, gate = _ACTIVATIONS.get("".join(activations[:1])), activations[1:]
    if first and gate in ([], ["linear"]):
        found.put("mlp_activation", first, "mlp_activations")
        found.put("gated_mlp", bool(gate), "mlp_activations")
    else:
        found.losses.append(f"mlp_activations={value_text(activations)}: mlp_activation has no such kind")
    if of["logits_via_embedding"] and of["normalize_embedding_logits"] and of["base_emb_dim"] > 0:
        found.put("logits_multiplier", of["base_emb_dim"] ** -0.5, "normalize_embedding_logits", "logits_via_embedding")
    factor = of["rope_linear_scaling_factor"]
    if of["rope_type"] != "default":
        found.losses.append(f"rope_type={value_text(of['rope_type'])}: without model_name, state rope_scaling yourself")
    elif factor != 1:
        found.put("rope_scaling", {"rope_type": "linear", "factor": factor}, "rope_linear_scaling_factor")


def _remat(found: Translation, of: Mapping[str, Any]) -> None:
    policy, saved, offloaded = of["remat_policy"], _SAVED.get(of["remat_policy"], ()), tuple[str, ...]()
    if policy == "custom":
        at = {name: of["qkv_proj"] if name in QKV and of[name] == "remat" else of.get(name) for name in REMAT_TENSORS}
        saved = tuple(name for name, where in at.items() if where == "device" and name != "decoder_layer_input")
        offloaded = tuple(name for name, where in at.items() if where == "offload")
    elif policy not in _SAVED:
        found.put("remat_policy", policy, "remat_policy")
        return
    found.put("remat_policy", "custom" if saved or offloaded else "full", "remat_policy")
    for ours, names in (("remat_save", saved), ("remat_offload", offloaded)):
        if names:
            found.put(ours, ",".join(names), "remat_policy", *names)


def _data(found: Translation, of: Mapping[str, Any]) -> None:
    kind = of["dataset_type"]
    seed = of["data_shuffle_seed"] if of["enable_data_shuffling"] else -1
    found.put("data_shuffle_seed", seed, "data_shuffle_seed", "enable_data_shuffling")
    packed = {"concat_then_split": "concat"}.get(of["grain_packing_type"], "best_fit") if of["packing"] else "none"
    found.put("packing", "concat" if packed == "best_fit" and kind == "synthetic" else packed, "packing")
    if kind == "synthetic" and not (of["use_sft"] or of["use_dpo"]):
        found.put("dataset_type", "synthetic", "dataset_type")
        for key in ("tokenizer_type", "tokenizer_path", "add_bos", "add_eos"):  # of no use for synthetic data
            found.values.pop(key, None)
        return
    files = {"hf": "hf_train_files", "grain": "grain_train_files"}.get(kind, "")
    held_out = {"hf": "hf_eval_files", "grain": "grain_eval_files"}.get(kind, "")
    ours = "dpo" if of["use_dpo"] else "sft" if of["use_sft"] else "array_record"
    path = of[files] if files and ours != "array_record" and of[files] else _NO_PATH
    found.put("dataset_type", ours, "dataset_type", "use_dpo", "use_sft")
    found.put("dataset_path", path, files)
    how = "JSONL files (docs/post_training.md)" if ours != "array_record" else "what `prepare` makes of its text"
    if path == _NO_PATH:
        found.notes.append(f"dataset_type={kind} has no equivalent: dataset_path={_NO_PATH} is to be {how}")
    found.put("eval_dataset_path", of[held_out] if held_out and ours != "array_record" else "", held_out)
    if not found.values["eval_dataset_path"]:
        found.put("eval_fraction", 0.0 if of["eval_interval"] == -1 else 0.02, "eval_interval")
    if of["use_sft"] and not of["sft_train_on_completion_only"]:
        found.losses.append("sft_train_on_completion_only=false: an answer's tokens alone count in SFT")
