"""MaxText's configs in our keys, with a list of what has no equivalent."""

import fnmatch
import functools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import yaml

from maxtext_lite.config.errors import UserError, did_you_mean, value_text
from maxtext_lite.config.keys import QKV, REMAT_TENSORS
from maxtext_lite.config.load import packaged_directory

_KEYS = "maxtext_keys.yml"
_VERSION = "0.2.5"
_LARGEST = 1e15
_OF_EXPERTS = re.compile(r"moe|expert|rout|topk|capacity|first_num_dense")
_NO_PATH = "prepared"  # where the user must put the data
_NO_TOKENIZER = "tokenizer"  # and the tokenizer of the named model
_LLAMA_TOKENIZER = "tokenizer.llama2"  # MaxText's own, where neither a model nor a tokenizer is named
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
_OTHER_POLICIES = {  # remat_policy: the same with a name here
    "minimal_with_context": "save_dot_products",
    "minimal_flash": "save_dot_products",
    "minimal_with_context_and_quantization": "save_dot_products",
    "minimal_with_quantization": "minimal",
    "": "none",
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


def keys_without_part_in(stated: Mapping[str, Any]) -> frozenset[str]:
    """The keys that have no part in a model: those of layers if it is named, and else of experts if it has none.

    MaxText's own file of defaults states them all, and its versions differ in them.
    """
    part = _table()["architecture"]
    keys = {*part["same"], *part["renamed"], *part["computed"]}
    if stated.get("model_name") not in (None, "default"):
        return frozenset(keys)
    has_experts = stated.get("num_experts", 1) != 1
    return frozenset() if has_experts else frozenset(key for key in keys if _OF_EXPERTS.search(key))


def maxtext_models() -> dict[str, tuple[str, dict[str, Any]]]:
    """For each model_name of MaxText, ours and the keys that must be added for MaxText's dimensions.

    MaxText reads NAME-Instruct as NAME.
    """
    models = _table()["models"]
    same = {name: (name, dict[str, Any]()) for name in models["same"].split()}
    return same | {name: (ours, besides) for name, (ours, besides) in models["renamed"].items()}


def reason_without_effect(key: str) -> str | None:
    """The reason why a key has no effect here; None: MaxText has no such key."""
    families = _table()["elsewhere"].items()
    return next((why for why, names in families if any(fnmatch.fnmatchcase(key, name) for name in names.split())), None)


def translate(
    stated: Mapping[str, Any],
    *,
    num_devices: int | None = None,
    in_files: Collection[str] = (),
    in_base_files: Collection[str] = (),
    ignore_unknown: bool = False,
) -> Translation:
    """Translates the stated values of a MaxText config over MaxText's defaults.

    Args:
      stated: MaxText's keys and values.
      num_devices: of the run; if given, a batch is rounded down as MaxText does.
      in_files: the stated keys that come from a file, over which a named model's file wins in MaxText.
      in_base_files: those that come from MaxText's own file or one that the user's is based on.
      ignore_unknown: list a key that MaxText does not have as a loss, as one of a base file is, instead of refusing it.
    Raises:
      UserError: MaxText has no such key, or maxtext_lite no such model.
    """
    if "rl" in stated or stated.get("use_grpo"):
        raise UserError(
            "a config of reinforcement learning is not translated: docs/coming_from.md names its keys here."
        )
    if stated.get("student_overrides") or stated.get("teacher_overrides"):
        raise UserError("student_overrides and teacher_overrides: distillation has no equivalent.")
    defaults = maxtext_defaults()
    reasons = {key: reason_without_effect(key) for key in stated if key not in defaults}
    unknown = [key for key, reason in reasons.items() if reason is None]
    refused = [] if ignore_unknown else [key for key in unknown if key not in in_base_files]
    if refused:
        problems = [f"MaxText has no key '{value_text(key)}'.{did_you_mean(key, defaults)}" for key in refused]
        problems[-1] += " --ignore-unknown lists such keys instead."
        raise UserError(problems)
    known = {key: value for key, value in stated.items() if key in defaults}
    name, from_model = _model_keys(str(known.get("model_name") or "default"))
    overridden = {key: known.pop(key) for key in from_model if key in known and key in in_files}
    found = Translation(frozenset(stated) - overridden.keys())
    for key, reason in reasons.items():
        if reason is not None:
            found.idle.setdefault(reason, []).append(key)
    found.losses += [f"{key}={value_text(stated[key])}: MaxText {_VERSION} has no such key" for key in unknown]
    without_effect = [
        f"{key}={value_text(value)}"
        for key, value in overridden.items()
        if key not in in_base_files and value != defaults[key]
    ]
    if without_effect:
        found.notes.append(f"models/{name}.yml wins over a config file, as in MaxText: {', '.join(without_effect)}")
    if beside := [key for key in from_model if key in known and not stated.get("override_model_config")]:
        found.notes.append(f"MaxText takes {', '.join(beside)} beside model_name with override_model_config=true alone")
    table = _table()
    of = defaults | {key: "" if value is None and defaults[key] == "" else value for key, value in known.items()}
    lacking = {key for keys in table["lacking"].values() for key in keys}
    _check_kinds({key: value for key, value in of.items() if key not in lacking}, defaults)
    if of["steps"] == -1:
        of["steps"] = of["learning_rate_schedule_steps"]
    if of["steps"] == -1:
        raise UserError("steps=-1 takes learning_rate_schedule_steps, which is -1 too: state one of them.")
    named = name != "default"
    scaled = _scale(of, named=named)
    _rows(found, table, of)
    _rows(found, table["architecture"], of, only_stated=named)
    for key in scaled:
        found.put(key, of[key], key, "global_parameter_scale")
    for reason, keys in table["lacking"].items():
        found.losses += [f"{key}={value_text(of[key])}: {reason}" for key in keys if of[key] != keys[key]]
    _batch(found, of, num_devices)
    _mesh(found, of)
    _optimizer(found, of)
    _model(found, of, name)
    _remat(found, of)
    _data(found, of, named=named)
    _trackers(found, of)
    return found


def _model_keys(name: str) -> tuple[str, list[str]]:
    """The name of MaxText's file of a model, and the keys that it states."""
    name = name.removesuffix("-Instruct")
    if name == "default":
        return name, []
    rows = _table()["models"]["states"].items()
    found: list[str] = []
    for names, keys in rows:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in names.split()):
            found += keys.split()
    return name, found


def _scale(of: dict[str, Any], *, named: bool) -> list[str]:
    """Multiplies dimensions by global_parameter_scale, a power of two, as MaxText does; returns the changed keys.

    Of three doublings one goes to heads and mlp, one to the width and one to the layers.
    """
    scale = of["global_parameter_scale"]
    if scale == 1:
        return []
    doublings = scale.bit_length() - 1 if isinstance(scale, int) and scale > 0 else 0
    if scale != 2**doublings:
        raise UserError(f"global_parameter_scale={value_text(scale)} is not a power of two.")
    if named:
        raise UserError(
            f"global_parameter_scale={scale} with model_name={of['model_name']} is not translated: state the dimensions"
            " instead."
        )
    layers, rest = divmod(doublings, 3)
    inner, width = layers + (rest > 0), layers + (rest > 1)
    powers = {"base_emb_dim": width, "base_num_query_heads": inner, "base_num_kv_heads": inner, "base_mlp_dim": inner,
              "base_moe_mlp_dim": inner, "base_num_decoder_layers": layers}  # fmt: skip
    changed = [key for key, power in powers.items() if power and of[key] > 0]
    for key in changed:
        of[key] *= 2 ** powers[key]
    return changed


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


def _model(found: Translation, of: Mapping[str, Any], name: str) -> None:
    models = maxtext_models()
    if name not in models:
        raise UserError(
            f"model_name={value_text(of['model_name'])} has no equivalent.{did_you_mean(str(of['model_name']), models)}"
        )
    named = name != "default"
    ours, besides = models[name]
    found.put("model_name", ours, "model_name")
    for key, value in besides.items():
        if not found.sources.get(key):
            found.put(key, value, "model_name")
    if named:
        for key in _table()["architecture"]["computed"]:
            if key in found.stated and of[key] != maxtext_defaults()[key]:
                found.losses.append(f"{key}={value_text(of[key])}: model_name decides it")
        return
    block, activations = of["decoder_block"], [str(name) for name in of["mlp_activations"]]
    if block not in _PLAIN_BLOCKS:
        raise UserError(
            f"decoder_block={value_text(block)} needs model_name: without it, only Llama's kind is translated."
            f"{did_you_mean(str(block), models)}"
        )
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
    policy: str = of["remat_policy"]
    policy = _OTHER_POLICIES.get(policy, policy)
    saved, offloaded = _SAVED.get(policy, ()), tuple[str, ...]()
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


def _data(found: Translation, of: Mapping[str, Any], *, named: bool) -> None:
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
    if not of["tokenizer_path"]:
        _default_tokenizer(found, named=named)
    files = {"hf": "hf_train_files", "grain": "grain_train_files"}.get(kind, "")
    held_out = {"hf": "hf_eval_files", "grain": "grain_eval_files"}.get(kind, "")
    ours = "dpo" if of["use_dpo"] else "sft" if of["use_sft"] else "array_record"
    found.put("dataset_type", ours, "dataset_type", "use_dpo", "use_sft")
    patterns = _patterns(of[files]) if files else []
    keeps_paths = ours != "array_record"  # which MaxText's records are not
    if len(patterns) > 1:
        sources: list[dict[str, Any]] = []
        for number, (pattern, weight) in enumerate(patterns, 1):
            path = pattern if keeps_paths else f"{_NO_PATH}/{number}"
            sources.append({"path": path, "weight": weight})
            if not keeps_paths:
                found.notes.append(f"{path} is to be what `prepare` makes of the text of {value_text(pattern)}")
        found.put("dataset_path", sources, files)
    elif keeps_paths and patterns:
        found.put("dataset_path", patterns[0][0], files)
    else:
        found.put("dataset_path", _NO_PATH, files)
        of_text = f"the text of {value_text(patterns[0][0])}" if patterns else "its text"
        how = "JSONL files (docs/post_training.md)" if keeps_paths else f"what `prepare` makes of {of_text}"
        found.notes.append(f"dataset_type={kind} has no equivalent: dataset_path={_NO_PATH} is to be {how}")
    if held_out and ";" in of[held_out]:
        found.losses.append(f"{held_out}={value_text(of[held_out])}: its weights; eval_dataset_path is one path")
        held_out = ""
    held_out_path = of[held_out] if held_out else ""
    if held_out_path and not keeps_paths:
        text = value_text(held_out_path)
        held_out_path = "" if of["eval_interval"] == -1 else f"{_NO_PATH}_held_out"
        if held_out_path:
            found.notes.append(f"eval_dataset_path={held_out_path} is to be what `prepare` makes of the text of {text}")
    found.put("eval_dataset_path", held_out_path, held_out)
    if not found.values["eval_dataset_path"]:
        found.put("eval_fraction", 0.0 if of["eval_interval"] == -1 else 0.02, "eval_interval")
    if of["use_sft"] and not of["sft_train_on_completion_only"]:
        found.losses.append("sft_train_on_completion_only=false: an answer's tokens alone count in SFT")


def _patterns(text: str) -> list[tuple[str, float]]:
    """The patterns of grain_train_files with their weights: `a*,0.3;b*,0.7`, or one pattern without a weight."""
    if ";" not in text:
        return [(text, 1.0)] if text else []
    found: list[tuple[str, float]] = []
    for part in text.split(";"):
        pattern, _, weight = part.rpartition(",")
        try:
            found.append((pattern.strip(), float(weight)))
        except ValueError:
            raise UserError(f"grain_train_files={value_text(text)} is not `PATTERN,WEIGHT;PATTERN,WEIGHT`.") from None
    return found


def _default_tokenizer(found: Translation, *, named: bool) -> None:
    """Names the tokenizer that MaxText takes where tokenizer_path is empty; the user must fetch it."""
    if named:
        found.put("tokenizer_type", "huggingface", "model_name")
        found.put("tokenizer_path", _NO_TOKENIZER, "model_name")
        found.notes.append(f"tokenizer_path={_NO_TOKENIZER} is to be the model's tokenizer, which MaxText downloads")
    else:
        found.put("tokenizer_type", "sentencepiece")
        found.put("tokenizer_path", _LLAMA_TOKENIZER)
        found.notes.append(f"tokenizer_path={_LLAMA_TOKENIZER} is MaxText's, in its assets/tokenizers")


def _trackers(found: Translation, of: Mapping[str, Any]) -> None:
    """Translates the services that MaxText logs to."""
    services = {"tensorboard": of["enable_tensorboard"], "wandb": of["enable_wandb"]}
    chosen = ",".join(service for service, is_on in services.items() if is_on)
    found.put("log_to", chosen, "enable_tensorboard", "enable_wandb")
    if of["enable_wandb"]:
        found.notes.append("W&B's project is WANDB_PROJECT in the environment (docs/running.md)")
