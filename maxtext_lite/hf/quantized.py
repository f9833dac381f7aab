"""The `quantization_config` of a config.json: the format of its weights, refused if it cannot be read."""

from collections.abc import Mapping
from typing import Any, cast

from maxtext_lite.config.errors import any_of, value_text
from maxtext_lite.hf.fields import Fields, JsonObject

FIELD = "quantization_config"

_SKIPPED = frozenset({"modules_to_not_convert"})
# The known entries of each format: the tensors say the same, or they are about activations, caches and kernels, which a
# run here does not take from the checkpoint. Any other entry could change the numbers and is refused.
FORMATS: Mapping[str, frozenset[str]] = {
    "mxfp4": _SKIPPED | {"dequantize"},
    "fp8": _SKIPPED | {"activation_scheme", "dequantize", "fmt", "ignored_layers", "scale_fmt", "weight_block_size"},
    "fbgemm_fp8": _SKIPPED | {"activation_scale_ub"},
    "compressed-tensors": frozenset({
        "config_groups", "dequantize", "format", "global_compression_ratio", "ignore", "kv_cache_scheme",
        "quantization_status", "run_compressed", "sparsity_config", "use_optimized_inference", "version",
    }),
    "bitsandbytes": frozenset({
        "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
        "llm_int8_skip_modules", "llm_int8_threshold", "load_in_4bit", "load_in_8bit",
    }),
}  # fmt: skip
"""The formats that are read, by quant_method, with the entries of `quantization_config` that each may have."""

_NEAREST = {
    "mxfp8": "fp8",
    "nvfp4": "mxfp4",
}  # of any other compressed-tensors, which stores the results of GPTQ and AWQ too
_STORED_AS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
_WEIGHTS = {"type": ("int", "float"), "strategy": ("tensor", "channel", "group", "block")}


def quantization_of(fields: JsonObject) -> JsonObject:
    """The `quantization_config` of a config.json, with its quant_method; {} if it has none or no object."""
    stated = fields.get(FIELD)
    if not isinstance(stated, dict):
        return {}
    found = {name: value for name, value in cast("dict[str, Any]", stated).items() if value is not None}
    if "quant_method" not in found and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        found["quant_method"] = "bitsandbytes"  # which its first versions did not name
    return found


def check_quantization(fields: Fields) -> None:
    """Reads `quantization_config`, and notes its problems."""
    stated = fields.take(FIELD)
    if stated is None or stated == {}:
        return
    found = quantization_of({FIELD: stated})
    method = found.pop("quant_method", None)
    if not isinstance(method, str) or method not in FORMATS:
        nearest = _NEAREST.get(str(method), "compressed-tensors")
        said = f"quant_method={value_text(method)}" if found or method else value_text(stated)
        fields.problems.append(
            f"{FIELD}: {said} is not a format that is read: it must be {any_of(list(FORMATS))}. Nearest that work: "
            f"{nearest}, or the model in bfloat16 without {FIELD}."
        )
        return
    found = {name: value for name, value in found.items() if value is not False and value not in ([], {})}
    unknown = [name for name in found if name not in FORMATS[method]]
    if unknown:
        _refuse(fields, method, unknown[0], found[unknown[0]], "is not known, and could change the weights.")
    if method == "fp8" and not _is_block(found.get("weight_block_size", [128, 128])):
        _refuse(fields, method, "weight_block_size", found["weight_block_size"], "is not two integers of at least 1.")
    if method == "compressed-tensors":
        _check_groups(fields, found)


def _is_block(value: object) -> bool:
    sizes = cast("list[Any]", value) if isinstance(value, list) else []
    return len(sizes) == 2 and all(type(size) is int and 1 <= size < 2**31 for size in sizes)


def _refuse(fields: Fields, method: str, name: str, value: object, why: str) -> None:
    fields.problems.append(f"{FIELD} ({method}): {name}={value_text(value)} {why}")


def _check_groups(fields: Fields, found: JsonObject) -> None:
    """Notes the problems of compressed-tensors' groups."""
    method = "compressed-tensors"
    stored = found.get("format")
    if stored not in _STORED_AS:
        _refuse(fields, method, "format", stored, f"is not read: it must be {any_of(_STORED_AS)}.")
    if found.get("quantization_status", "compressed") != "compressed":
        status = found["quantization_status"]
        _refuse(fields, method, "quantization_status", status, "is not read: it must be compressed.")
    sparsity: object = found.get("sparsity_config", {"format": "dense"})
    if not isinstance(sparsity, dict) or cast("JsonObject", sparsity).get("format") != "dense":
        _refuse(fields, method, "sparsity_config", found["sparsity_config"], "is not read: its format must be dense.")
    groups = weight_groups(found)
    if not groups:
        _refuse(fields, method, "config_groups", found.get("config_groups"), "has no group with weights.")
    for group in groups:
        for name, allowed in _WEIGHTS.items():
            value = group.get(name)
            if value is not None and value not in allowed:
                _refuse(fields, method, name, value, f"of weights is not read: it must be {any_of(allowed)}.")
        bits, least = group.get("num_bits", 8), 8 if group.get("type") == "float" else 1
        if type(bits) is not int or not least <= bits <= 8:
            _refuse(fields, method, "num_bits", bits, "of weights is not read.")
        if group.get("strategy") == "block" and not _is_block(group.get("block_structure")):
            _refuse(fields, method, "block_structure", group.get("block_structure"), "is not two integers.")


def weight_groups(quantization: JsonObject) -> list[JsonObject]:
    """The `weights` of each of compressed-tensors' `config_groups`."""
    groups = quantization.get("config_groups")
    values: list[Any] = list(cast("dict[str, Any]", groups).values()) if isinstance(groups, dict) else []
    weights = [cast("dict[str, Any]", group).get("weights") for group in values if isinstance(group, dict)]
    return [cast("dict[str, Any]", each) for each in weights if isinstance(each, dict) and each]
