"""The weighted mean of models, tensor by tensor, as a Hugging Face directory."""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text, writing
from maxtext_lite.config.json_file import is_there, read_bytes, read_object
from maxtext_lite.config.types import WhichParameters
from maxtext_lite.config.whole_file import write_whole
from maxtext_lite.hf.adapter import adapter_of
from maxtext_lite.hf.config_json import model_keys, quantization_of
from maxtext_lite.hf.conversion import export_directory
from maxtext_lite.hf.directory import CARRIED, has_hf_weights
from maxtext_lite.hf.fields import same_architecture
from maxtext_lite.hf.model_directory import config_of_run
from maxtext_lite.hf.safetensors import DTYPES, SafetensorsDir, Tensor, write_safetensors

_AT_ONCE = 2**22  # numbers in float64


Parts = Sequence[tuple[Path, float]]
"""Runs or Hugging Face directories, each with its weight; only the ratios of weights matter."""


def merge_directories(
    out: Path, parts: Parts, overrides: Sequence[str], *, parameters: WhichParameters = "trained"
) -> str:
    """Writes the weighted mean of models of one architecture, with the other files of the first; returns a summary.

    Sums are in float64. Each tensor has the first model's number format, or the one that the overrides name.

    Args:
      overrides: none, or weight_dtype.
      parameters: of runs, which are exported to a temporary directory beside `out`.
    Raises:
      UserError: a directory has no model or adapters, the models differ in a field or tensor, or `out` cannot be
        written.
    """
    for directory, _ in parts:
        is_run = is_there(directory / "config.yml")
        if adapter_of(directory) or (is_run and config_of_run(directory).lora_rank):
            raise UserError(
                f"{directory} has adapters. Merge them first: convert export {directory} OUT merge_lora=true."
            )
        if not is_run and parameters == "ema":
            raise UserError(f"parameters=ema: {directory} is no run. Nearest that works: parameters=trained.")
        if not is_run and not has_hf_weights(directory):
            raise UserError(f"{directory} is neither a run nor a Hugging Face directory.")
    weight_dtype = overrides[-1].partition("=")[2] if overrides else ""
    if weight_dtype not in ("", "float32", "bfloat16"):
        raise UserError(f"weight_dtype={weight_dtype} is neither float32 nor bfloat16. Nearest that works: float32.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as exports, writing(out):
        models: list[Path] = []
        for number, (directory, _) in enumerate(parts):
            models.append(directory)
            if is_there(directory / "config.yml"):
                models[-1] = Path(exports) / str(number)
                export_directory(directory, models[-1], [], parameters=parameters)
        return _write_mean(out, models, parts, weight_dtype)


def _write_mean(out: Path, models: Sequence[Path], parts: Parts, weight_dtype: str) -> str:
    first, _ = parts[0]
    files = [SafetensorsDir(model) for model in models]
    fields = [read_object(model / "config.json") for model in models]
    for (directory, _), there, stated in zip(parts, files, fields, strict=True):
        _check_alike(first, files[0], directory, there)
        if quantization_of(stated):
            raise UserError(f"{directory} is quantized. Dequantize it first: convert import and convert export.")
        keys, others = (model_keys(each, str(path)) for each, path in ((fields[0], first), (stated, directory)))
        if different := same_architecture(others, keys):
            key = different[0]
            values = f"{value_text(others[key])}, not the {value_text(keys[key])} of {first}"
            raise UserError(f"{directory} has {key}={values}. Models of one architecture are merged.")
    weights = [weight for _, weight in parts]
    tensors: list[Tensor] = []
    for name, stored in files[0].tensors.items():
        dtype = np.dtype(getattr(ml_dtypes, weight_dtype, weight_dtype)) if weight_dtype else DTYPES[stored.dtype]
        tensors.append(Tensor(name, stored.shape, dtype, functools.partial(_mean, name, files, weights, dtype)))
    out.mkdir(exist_ok=True)
    write_safetensors(out, tensors)
    for name in CARRIED:
        if is_there(models[0] / name):
            write_whole(out / name, read_bytes(models[0] / name))
    if weight_dtype:
        changed = fields[0] | {"dtype": weight_dtype}
        changed.pop("torch_dtype", None)
        write_whole(out / "config.json", (json.dumps(changed, indent=2) + "\n").encode())
    count = sum(int(np.prod(tensor.shape)) for tensor in tensors)
    shares = " + ".join(f"{weight / sum(weights):.4g} {directory}" for directory, weight in parts)
    return f"{count:,} parameters in {out} = {shares}"


def _check_alike(first: Path, wanted: SafetensorsDir, directory: Path, there: SafetensorsDir) -> None:
    """Refuses a model with other tensors than the first one."""
    if odd := sorted(wanted.tensors.keys() ^ there.tensors.keys()):
        has, lacks = (first, directory) if odd[0] in wanted.tensors else (directory, first)
        raise UserError(f"{has} has {value_text(odd[0])}, which {lacks} lacks. Models of one shape are merged.")
    for name, stored in there.tensors.items():
        shape = wanted.tensors[name].shape
        if stored.shape != shape:
            raise UserError(f"{directory}: {name} is {list(stored.shape)}, not the {list(shape)} of {first}.")
        if stored.dtype not in DTYPES:
            raise UserError(f"{directory}: {name} is {stored.dtype}, none of {', '.join(DTYPES)}.")


def _mean(name: str, files: Sequence[SafetensorsDir], weights: Sequence[float], dtype: np.dtype) -> np.ndarray:
    views = [each.view(name).reshape(-1) for each in files]
    mean = np.empty(views[0].shape, dtype)
    for start in range(0, mean.size, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        total = np.zeros(mean[part].shape)
        for view, weight in zip(views, weights, strict=True):
            total += weight * view[part].astype(np.float64)
        with np.errstate(over="ignore"):
            mean[part] = total / sum(weights)
        if not np.isfinite(mean[part]).all():
            raise UserError(f"{name} has no finite mean in {dtype}. Nearest that works: weight_dtype=float32.")
    return mean.reshape(files[0].tensors[name].shape)
