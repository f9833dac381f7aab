"""MaxText's configs and command lines in our keys, with a list of what has no equivalent.

A table has its keys: its package is not asked.
"""

import fnmatch
import functools
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from maxtext_lite.config import UserError, parse_value
from maxtext_lite.config.errors import did_you_mean, value_text
from maxtext_lite.config.json_file import read_text
from maxtext_lite.config.keys import QKV, REMAT_TENSORS
from maxtext_lite.config.load import keys_twice, packaged_directory
from maxtext_lite.config.yaml import YamlValue, parse_mapping

Origin = Literal["file", "base", "defaults"]
"""Of a key: a file of the user's, one that it is based on, or MaxText's own file."""
Values = dict[str, Any]
"""Keys and values."""
_VERSION = "0.2.5"
_LARGEST = 1e15
_OF_EXPERTS = re.compile(r"moe|expert|rout|topk|capacity|first_num_dense")
_NO_PATH = "prepared"  # where the user must put the data
_NO_TOKENIZER = "tokenizer"  # and the tokenizer of the named model
_LLAMA_TOKENIZER = "tokenizer.llama2"  # MaxText's own, where neither a model nor a tokenizer is named
_WITH_FILES = ("hf", "grain")  # dataset_type: those whose files are stated


@dataclass
class Translation:
    """The translation of a MaxText config.

    Attributes:
      stated: the MaxText keys that the user stated.
      of: MaxText's value of each key that is translated or may be lost, stated or its default.
      values: our keys and values.
      sources: for each of our keys, the stated MaxText keys that it follows from.
      losses: settings without an equivalent that differ from MaxText's default, as `key=value: why`.
      notes: remarks on translated values.
      idle: for each reason, the stated keys without effect on what is trained here.
    """

    stated: Collection[str]
    of: Values
    values: Values = field(default_factory=Values)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    losses: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    idle: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def put(self, ours: str, value: object, *theirs: str) -> None:
        """Sets one of our keys, which follows from these of MaxText."""
        self.values[ours] = value
        self.sources[ours] = tuple(key for key in theirs if key in self.stated)

    def lose(self, key: str, why: str) -> None:
        """Lists a setting that has no equivalent."""
        self.losses.append(f"{key}={value_text(self.of[key])}: {why}")


@functools.cache
def maxtext_table() -> Values:
    """maxtext_keys.yml."""
    return yaml.safe_load((packaged_directory("assets") / "maxtext_keys.yml").read_text(encoding="utf-8"))


@functools.cache
def maxtext_defaults() -> Values:
    """MaxText's default of each key that is translated or may be lost."""
    table = maxtext_table()
    found: Values = {}
    for part in (table, table["architecture"]):
        found |= part["same"] | part["computed"]
        found |= {key: row[0] for key, row in part["renamed"].items()}
    for axes in table["axes"].values():
        for axis in axes:
            found |= {f"ici_{axis}_parallelism": 1, f"dcn_{axis}_parallelism": 1}
    for keys in table["lacking"].values():
        found |= keys
    return found | {"ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1}


def keys_without_part_in(stated: Values) -> frozenset[str]:
    """Keys without effect on a model: those of layers if it is named, else those of experts if it has none.

    MaxText's own file of defaults states them all, and its versions differ in them.
    """
    part = maxtext_table()["architecture"]
    keys = {*part["same"], *part["renamed"], *part["computed"]}
    if stated.get("model_name") not in (None, "default"):
        return frozenset(keys)
    if stated.get("num_experts", 1) != 1:
        return frozenset()
    return frozenset(filter(_OF_EXPERTS.search, keys))


def maxtext_models() -> dict[str, tuple[str, Values]]:
    """For each model_name of MaxText, ours and the keys that must be added for MaxText's dimensions.

    MaxText reads NAME-Instruct as NAME.
    """
    models = maxtext_table()["models"]
    return {name: (name, {}) for name in models["same"].split()} | models["renamed"]


def reason_without_effect(key: str) -> str | None:
    """The reason why a key has no effect here; None: MaxText has no such key."""
    for why, names in maxtext_table()["elsewhere"].items():
        if any(fnmatch.fnmatchcase(key, name) for name in names.split()):
            return why
    return None


def translate(
    stated: Values,
    *,
    num_devices: int | None = None,
    origins: Mapping[str, Origin] = MappingProxyType({}),
    ignore_unknown: bool = False,
) -> Translation:
    """Translates the stated values of a MaxText config over MaxText's defaults.

    Args:
      stated: MaxText's keys and values.
      num_devices: of the run; if given, a batch is rounded down as MaxText does.
      origins: of the keys that come from a file, over which a named model's file wins in MaxText.
      ignore_unknown: list a key that MaxText does not have as a loss, as one of a base file is, instead of refusing it.
    Raises:
      UserError: MaxText has no such key, or maxtext_lite no such model.
    """
    if "rl" in stated or stated.get("use_grpo"):
        raise UserError("reinforcement learning is not translated: docs/coming_from.md names its keys here.")
    if stated.get("student_overrides") or stated.get("teacher_overrides"):
        raise UserError("student_overrides and teacher_overrides: distillation has no equivalent.")
    table = maxtext_table()
    defaults = maxtext_defaults()
    of = dict(defaults)
    for key in stated.keys() & defaults.keys():
        of[key] = "" if stated[key] is None and defaults[key] == "" else stated[key]
    name = str(of["model_name"] or "default").removesuffix("-Instruct")
    is_named = name != "default"
    of_model = [key for key in _keys_of_model(name) if key in stated] if is_named else []
    overridden = [key for key in of_model if key in origins]
    for key in overridden:
        of[key] = defaults[key]
    found = Translation(stated.keys() - set(overridden), of)
    _sort_others(found, stated, origins, ignore_unknown=ignore_unknown)
    _note_overridden(found, stated, origins, name, of_model)
    _check_kinds(of)
    if of["steps"] == -1:
        of["steps"] = of["learning_rate_schedule_steps"]
    if of["steps"] == -1:
        raise UserError("steps=-1 takes learning_rate_schedule_steps, which is -1 too: state one of them.")
    scaled = _scale(of, is_named=is_named)
    _rows(found, table)
    _rows(found, table["architecture"], only_stated=is_named)
    for key in scaled:
        found.put(key, of[key], key, "global_parameter_scale")
    for reason, keys in table["lacking"].items():
        for key, default in keys.items():
            if of[key] != default:
                found.lose(key, reason)
    _batch(found, num_devices)
    _mesh(found)
    _optimizer(found)
    _model(found, name)
    _remat(found)
    _data(found)
    services = [service for service in ("tensorboard", "wandb") if of[f"enable_{service}"]]
    found.put("log_to", ",".join(services), "enable_tensorboard", "enable_wandb")
    if of["enable_wandb"]:
        found.notes.append("W&B's project is WANDB_PROJECT in the environment (docs/running.md)")
    return found


def _keys_of_model(name: str) -> list[str]:
    """The keys that MaxText's file of a model states."""
    keys: list[str] = []
    for patterns, stated in maxtext_table()["models"]["states"].items():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split()):
            keys += stated.split()
    return keys


def _sort_others(found: Translation, stated: Values, origins: Mapping[str, Origin], *, ignore_unknown: bool) -> None:
    """Lists the stated keys that are not translated: without effect here, or unknown to MaxText."""
    problems: list[str] = []
    for key, value in stated.items():
        if key in found.of:
            continue
        reason = reason_without_effect(key)
        if reason is not None:
            found.idle.setdefault(reason, []).append(key)
        elif ignore_unknown or origins.get(key) in ("base", "defaults"):
            found.losses.append(f"{key}={value_text(value)}: MaxText {_VERSION} has no such key")
        else:
            problems.append(f"MaxText has no key '{value_text(key)}'.{did_you_mean(key, found.of)}")
    if problems:
        problems[-1] += " --ignore-unknown lists such keys instead."
        raise UserError(problems)


def _note_overridden(
    found: Translation, stated: Values, origins: Mapping[str, Origin], name: str, of_model: list[str]
) -> None:
    """Lists the stated keys that a named model's file states too, and which of the two counts."""
    shown: list[str] = []
    beside: list[str] = []
    for key in of_model:
        if key not in origins:
            beside.append(key)
        elif origins[key] == "file" and stated[key] != found.of[key]:
            shown.append(f"{key}={value_text(stated[key])}")
    if shown:
        found.notes.append(f"models/{name}.yml wins over a config file, as in MaxText: {', '.join(shown)}")
    if beside and not stated.get("override_model_config"):
        found.notes.append(f"MaxText takes {', '.join(beside)} beside model_name with override_model_config=true alone")


def _scale(of: Values, *, is_named: bool) -> list[str]:
    """Multiplies dimensions by global_parameter_scale, a power of two, as MaxText does; returns the changed keys.

    Of three doublings one goes to heads and mlp, one to the width and one to the layers.
    """
    scale = of["global_parameter_scale"]
    if scale == 1:
        return []
    doublings = scale.bit_length() - 1 if isinstance(scale, int) and scale > 0 else 0
    if scale != 2**doublings:
        raise UserError(f"global_parameter_scale={value_text(scale)} is not a power of two.")
    if is_named:
        raise UserError(f"global_parameter_scale={scale} with a model_name is not translated: state the dimensions.")
    inner = ("base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_moe_mlp_dim")
    powers = {"base_emb_dim": (doublings + 1) // 3}
    powers |= dict.fromkeys(inner, (doublings + 2) // 3)
    powers["base_num_decoder_layers"] = doublings // 3
    changed = [key for key, power in powers.items() if power and of[key] > 0]
    for key in changed:
        of[key] *= 2 ** powers[key]
    return changed


def _check_kinds(of: Values) -> None:
    """Refuses values of the wrong kind, such as text for a number, before anything computes with them."""
    lacking = {key for keys in maxtext_table()["lacking"].values() for key in keys}
    problems: list[str] = []
    for key, default in maxtext_defaults().items():
        value = of[key]
        if key in lacking or _is_kind_of(value, default):
            continue
        problems.append(f"{key}={value_text(value)} is not of the kind of MaxText's {key}={value_text(default)}.")
    if problems:
        raise UserError(problems)


def _is_kind_of(value: object, default: object) -> bool:
    if value is default:
        return True
    if default is None:
        return isinstance(value, int | float) and abs(value) < _LARGEST
    if isinstance(default, bool) or not isinstance(default, int | float):
        return type(value) is type(default)
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _rows(found: Translation, part: Values, *, only_stated: bool = False) -> None:
    """Translates the keys that have exactly one counterpart here."""
    rows = {key: ["", key] for key in part["same"]} | part["renamed"]
    for key, (_, ours, *choices) in rows.items():
        value = found.of[key]
        if only_stated and key not in found.stated:
            continue
        if not choices:
            if value not in (None, ""):
                found.put(ours, value, key)
            continue
        (names,) = choices
        if value in names or isinstance(value, int):
            found.put(ours, names.get(value, value), key)
        else:
            known = dict.fromkeys(map(str, names.values()))
            found.lose(key, f"{ours} is one of {', '.join(known)}")


def _batch(found: Translation, num_devices: int | None) -> None:
    """Translates the batch. MaxText: int(per_device_batch_size x devices) x gradient_accumulation_steps rows a step."""
    of = found.of
    per_device = of["per_device_batch_size"]
    accumulation = of["gradient_accumulation_steps"]
    factor = of["expansion_factor_real_data"]
    if num_devices is None:
        if not float(per_device).is_integer():
            found.notes.append("MaxText rounds per_device_batch_size x devices down: --devices N does the same")
    else:
        rows = int(num_devices * per_device)
        if rows and Fraction(rows, num_devices) != Fraction(str(per_device)):
            batch = f"per_device_batch_size={per_device} x {num_devices} devices"
            found.notes.append(f"{batch} is {rows} rows in MaxText, which rounds down")
            per_device = rows / num_devices
    found.put("per_device_batch_size", per_device, "per_device_batch_size")
    if 0 < factor < 1:
        found.notes.append(
            f"expansion_factor_real_data={factor} leaves the batch as it is here; MaxText 0.2.5 loads and trains on "
            f"{factor} of it where per_device_batch_size is at least 1"
        )
    if accumulation > 1 and of["enable_rampup_batch_size"]:
        found.notes.append("a ramp's stages are accumulated here as all steps are; MaxText's are not")
    if accumulation > 1 and of["use_dpo"] and not of["use_tunix_gradient_accumulation"]:
        found.notes.append(
            f"MaxText 0.2.5 accumulates {accumulation} loads of the whole global batch in DPO; here a step is one"
        )


def _mesh(found: Translation) -> None:
    of = found.of
    slices = max(of["num_slices"], 1)
    for ours, theirs in maxtext_table()["axes"].items():
        for links in ("ici", "dcn"):
            keys = [f"{links}_{axis}_parallelism" for axis in theirs]
            sizes = [of[key] for key in keys]
            if links == "dcn":
                sizes = [slices if size == -1 else size for size in sizes]
            size = -1 if -1 in sizes else math.prod(sizes)
            found.put(f"{links}_{ours}_parallelism", size, *keys)
    if of["enable_diloco"]:
        keys = ("ici_diloco_parallelism", "dcn_diloco_parallelism")
        replicas = max(of[keys[0]], 1) * max(of[keys[1]], 1)
        found.put("diloco_num_replicas", replicas, *keys)


def _optimizer(found: Translation) -> None:
    of = found.of
    steps = of["steps"]
    end = of["learning_rate_schedule_steps"]
    if end not in (-1, steps):
        found.lose("learning_rate_schedule_steps", f"the schedule ends with the last of steps={steps}")
    if end == -1:
        end = steps
    warmup = int(end * of["warmup_steps_fraction"])
    found.put("warmup_steps", warmup, "warmup_steps_fraction", "learning_rate_schedule_steps", "steps")
    decays = {"sgd": 0.0, "muon": of["muon_weight_decay"]}
    decay = decays.get(of["opt_type"], of["adam_weight_decay"])
    found.put("weight_decay", decay, "adam_weight_decay", "muon_weight_decay")
    found.put("weight_decay_on_norms_and_embeddings", bool(decay) and not of["adamw_mask"], "adamw_mask")
    if of["adamw_mask"]:
        found.notes.append("what adamw_mask names is not decayed in MaxText; here norms and embeddings are not")
    if of["opt_type"] == "muon":
        found.put("adam_b1", of["muon_beta"], "muon_beta")
        found.notes.append("muon_beta and muon_weight_decay count for all parameters, also those that Adam updates")
    threshold = of["qk_clip_threshold"] if of["use_qk_clip"] else 0
    found.put("qk_clip_threshold", threshold, "use_qk_clip", "qk_clip_threshold")
    keep = of["max_num_checkpoints_to_keep"] or int(steps // max(of["checkpoint_period"], 1)) + 2
    found.put("max_num_checkpoints_to_keep", keep, "max_num_checkpoints_to_keep")
    found.put("profiler_steps", of["profiler_steps"] if of["profiler"] else 0, "profiler", "profiler_steps")
    if of["enable_lora"]:
        found.put("lora_rank", of["lora_rank"], "lora_rank")
        found.put("lora_alpha", of["lora_alpha"], "lora_alpha")


def _model(found: Translation, name: str) -> None:
    of = found.of
    table = maxtext_table()
    models = maxtext_models()
    if name not in models:
        stated = str(of["model_name"])
        raise UserError(f"model_name={value_text(stated)} has no equivalent.{did_you_mean(stated, models)}")
    ours, besides = models[name]
    found.put("model_name", ours, "model_name")
    for key, value in besides.items():
        if not found.sources.get(key):
            found.put(key, value, "model_name")
    if name != "default":
        for key, default in table["architecture"]["computed"].items():
            if key in found.stated and of[key] != default:
                found.lose(key, "model_name decides it")
        return
    block = of["decoder_block"]
    if block not in table["plain_blocks"]:
        hint = did_you_mean(str(block), models)
        raise UserError(f"decoder_block={value_text(block)} needs model_name: only Llama's kind does without.{hint}")
    for key, ours, value in (("attention_bias", "attention_bias", "qkv"), ("use_qk_norm", "qk_norm", "head")):
        if of[key] and key in table["plain_blocks"][block]:
            found.put(ours, value, key, "decoder_block")
        elif of[key]:
            found.lose(key, f"with decoder_block={block} there is no equivalent")
    first, *gate = [str(activation) for activation in of["mlp_activations"]] or [""]
    if first in table["activations"] and gate in ([], ["linear"]):
        found.put("mlp_activation", table["activations"][first], "mlp_activations")
        found.put("gated_mlp", bool(gate), "mlp_activations")
    else:
        found.lose("mlp_activations", "mlp_activation has no such kind")
    if of["logits_via_embedding"] and of["normalize_embedding_logits"] and of["base_emb_dim"] > 0:
        found.put("logits_multiplier", of["base_emb_dim"] ** -0.5, "normalize_embedding_logits", "logits_via_embedding")
    factor = of["rope_linear_scaling_factor"]
    if of["rope_type"] != "default":
        found.lose("rope_type", "without model_name, state rope_scaling yourself")
    elif factor != 1:
        found.put("rope_scaling", {"rope_type": "linear", "factor": factor}, "rope_linear_scaling_factor")


def _remat(found: Translation) -> None:
    of = found.of
    table = maxtext_table()
    policy = of["remat_policy"]
    saved = table["saved"].get(policy, [])
    offloaded: list[str] = []
    if policy == "custom":
        for tensor in REMAT_TENSORS:
            place = of.get(tensor)
            if tensor in QKV and place == "remat":
                place = of["qkv_proj"]
            if place == "offload":
                offloaded.append(tensor)
            elif place == "device" and tensor != "decoder_layer_input":
                saved.append(tensor)
    elif not saved:
        found.put("remat_policy", table["policies"].get(policy, policy), "remat_policy")
        return
    found.put("remat_policy", "custom" if saved or offloaded else "full", "remat_policy")
    if saved:
        found.put("remat_save", ",".join(saved), "remat_policy", *saved)
    if offloaded:
        found.put("remat_offload", ",".join(offloaded), "remat_policy", *offloaded)


def _data(found: Translation) -> None:
    of = found.of
    kind = of["dataset_type"]
    seed = of["data_shuffle_seed"] if of["enable_data_shuffling"] else -1
    found.put("data_shuffle_seed", seed, "data_shuffle_seed", "enable_data_shuffling")
    packing = "best_fit"
    if not of["packing"]:
        packing = "none"
    elif kind == "synthetic" or of["grain_packing_type"] == "concat_then_split":
        packing = "concat"
    found.put("packing", packing, "packing")
    ours = "array_record"
    if of["use_dpo"]:
        ours = "dpo"
    elif of["use_sft"]:
        ours = "sft"
    elif kind == "synthetic":
        found.put("dataset_type", "synthetic", "dataset_type")
        for key in ("tokenizer_type", "tokenizer_path", "add_bos", "add_eos"):  # of no use for synthetic data
            found.values.pop(key, None)
        return
    if not of["tokenizer_path"]:
        _default_tokenizer(found)
    found.put("dataset_type", ours, "dataset_type", "use_dpo", "use_sft")
    _dataset_path(found, ours)
    _held_out(found, ours)
    if of["use_sft"] and not of["sft_train_on_completion_only"]:
        found.lose("sft_train_on_completion_only", "an answer's tokens alone count in SFT")


def _dataset_path(found: Translation, ours: str) -> None:
    """Translates the paths of training data; MaxText's records must be prepared again."""
    kind = found.of["dataset_type"]
    key = f"{kind}_train_files" if kind in _WITH_FILES else ""
    patterns = _patterns(found.of[key]) if key else []
    if ours != "array_record" and len(patterns) == 1:
        found.put("dataset_path", patterns[0][0], key)
        return
    if len(patterns) > 1:
        sources: list[Values] = []
        for number, (pattern, weight) in enumerate(patterns, 1):
            path = pattern
            if ours == "array_record":
                path = f"{_NO_PATH}/{number}"
                found.notes.append(f"{path} is to be what `prepare` makes of the text of {value_text(pattern)}")
            sources.append({"path": path, "weight": weight})
        found.put("dataset_path", sources, key)
        return
    found.put("dataset_path", _NO_PATH, key)
    what = "JSONL files (docs/post_training.md)"
    if ours == "array_record":
        of_text = f"the text of {value_text(patterns[0][0])}" if patterns else "its text"
        what = f"what `prepare` makes of {of_text}"
    found.notes.append(f"dataset_type={kind} has no equivalent: dataset_path={_NO_PATH} is to be {what}")


def _held_out(found: Translation, ours: str) -> None:
    """Translates the data of evaluations, or a fraction of the training data in their place."""
    of = found.of
    key = f"{of['dataset_type']}_eval_files" if of["dataset_type"] in _WITH_FILES else ""
    if key and ";" in of[key]:
        found.lose(key, "its weights; eval_dataset_path is one path")
        key = ""
    path = of[key] if key else ""
    evaluates = of["eval_interval"] != -1
    if path and ours == "array_record":
        text = value_text(path)
        path = f"{_NO_PATH}_held_out" if evaluates else ""
        if path:
            found.notes.append(f"eval_dataset_path={path} is to be what `prepare` makes of the text of {text}")
    found.put("eval_dataset_path", path, key)
    if not path:
        found.put("eval_fraction", 0.02 if evaluates else 0.0, "eval_interval")


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


def _default_tokenizer(found: Translation) -> None:
    """Names the tokenizer that MaxText takes where tokenizer_path is empty; the user must fetch it."""
    if found.values["model_name"] == "default":
        found.put("tokenizer_type", "sentencepiece")
        found.put("tokenizer_path", _LLAMA_TOKENIZER)
        found.notes.append(f"tokenizer_path={_LLAMA_TOKENIZER} is MaxText's, in its assets/tokenizers")
    else:
        found.put("tokenizer_type", "huggingface", "model_name")
        found.put("tokenizer_path", _NO_TOKENIZER, "model_name")
        found.notes.append(f"tokenizer_path={_NO_TOKENIZER} is to be the model's tokenizer, which MaxText downloads")


# ---- What a command line of MaxText states, with the files that it names ---------------------------------------------

_MOST_BASES = 16
_SECTIONS = ("dpo", "lora")  # of MaxText's keys, whose keys are unique without them
_OLD_NAMES = {"cosine_learning_rate_final_fraction": "learning_rate_final_fraction"}  # of versions before 0.2


@dataclass
class StatedKeys:
    """MaxText's keys as files and a command line state them, and the origins of those that come from files."""

    values: Values = field(default_factory=Values)
    origins: dict[str, Origin] = field(default_factory=dict[str, Origin])

    def add(self, key: str, stated: YamlValue, origin: Origin | None = None) -> None:
        """Adds a key, or the keys of a section: dpo.dpo_beta is dpo_beta. 007 stays text for a text key."""
        if key in _SECTIONS and isinstance(stated.value, Mapping):
            for part, value in stated.value.items():
                self.add(str(part), YamlValue(value, None), origin)
            return
        section, _, rest = key.partition(".")
        key = rest if section in _SECTIONS and rest else key
        key = _OLD_NAMES.get(key, key)
        value = stated.value
        default = maxtext_defaults().get(key)
        if isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d_]*", value):
            value = int(value)  # 10_000, which is text in YAML 1.2
        if stated.text and isinstance(default, str):
            value = stated.text
        if value == "None":
            value = None
        if origin in ("base", "defaults") and key not in self.values and key in maxtext_defaults() and value == default:
            return
        self.values[key] = value
        self.origins.pop(key, None)
        if origin is not None:
            self.origins[key] = origin


def read_command(command: Sequence[str], words: Sequence[str]) -> StatedKeys:
    """The keys of the file and of the files it is based on, and of the command line, which wins.

    Args:
      command: what precedes the words, such as `python3 -m MaxText.train`.
      words: a file or none, then key=value.
    Raises:
      UserError: a file cannot be read, or a word is not key=value.
    """
    found = StatedKeys()
    if words and "=" not in words[0]:
        _read_file(found, words[0])
        words = words[1:]
    else:
        trainers = maxtext_table()["trainers"]
        for word in command:
            for key, value in trainers.get(word.rpartition(".")[2], {}).items():
                found.add(key, YamlValue(value, None), "file")
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"'{value_text(word)}' is not of the form key=value.")
        try:
            found.add(key, parse_value(text))
        except ValueError as error:
            raise UserError(f"{key}={value_text(text)} {error}.") from None
    for key in keys_without_part_in(found.values):
        if found.origins.get(key) == "defaults":
            del found.values[key]
    return found


def _read_file(found: StatedKeys, name: str, depth: int = 0) -> None:
    if depth > _MOST_BASES:
        raise UserError(f"{value_text(name)} is the base_config of itself.")
    path = Path(name)
    ours = packaged_directory("configs") / "base.yml"  # found when a MaxText command is given in our checkout
    if path.name == "base.yml" and (not path.exists() or path.resolve() == ours.resolve()):
        return  # MaxText's own file of defaults
    try:
        stated = parse_mapping(sys.stdin.read() if name == "-" else read_text(path))
    except ValueError as error:
        raise UserError(f"{value_text(name)} {error}.") from None
    if twice := keys_twice(stated, value_text(name)):
        raise UserError(twice)
    entries = dict(stated)
    base = entries["base_config"].text if "base_config" in entries else ""
    if base:  # relative to its own directory or one above, or in MaxText's `configs` there
        places: list[Path] = []
        for folder in path.absolute().parents:
            places += [folder / base, folder / "configs" / base]
        above = next(filter(Path.is_file, places), path.parent / base)
        _read_file(found, str(above), depth + 1)
    origin: Origin = "base" if depth else "file"
    if not base and (depth or path.name == "base.yml"):
        origin = "defaults"
    for key, value in entries.items():
        if origin != "defaults" or reason_without_effect(key) is None:  # most keys of MaxText's file have no effect
            found.add(key, value, origin)
