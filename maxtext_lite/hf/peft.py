"""LoRA's adapters in the PEFT library's files: adapter_model.safetensors and adapter_config.json.

Each adapted module of the family's model has lora_A [r, in] and lora_B [out, r]. A module whose weight is several
parameters, one after another, is written with the adapters of those that have one side by side: a wider r, where each
part of the output uses its own range. The file's metadata names them. An adapter from elsewhere has one A for such a
module, and each parameter gets a copy of it. The library itself needs torch (724 MB), for two files.
Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import any_of
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.weights import ModelShape, num_inputs, per_tensor_axes, stacks_of
from maxtext_lite.hf.adapter import CONFIG, SIDE_BY_SIDE, WEIGHTS, Adapter
from maxtext_lite.hf.config_json import family_of, model_keys
from maxtext_lite.hf.fields import Keys
from maxtext_lite.hf.names import INPUTS_FIRST, TABLES, Entry, Leaves, Name, Shapes, entries_of, flat, model_of, nested
from maxtext_lite.hf.safetensors import DTYPES, Shape, Stored, Tensor, is_finite, mapped, stored_in, write_file
from maxtext_lite.models import Lora
from maxtext_lite.parallel import Params


def export_adapters(
    directory: Path,
    adapters: Params,
    lora: Lora,
    kind: str,
    keys: Keys,
    *,
    shapes: Shapes,
    base: str,
) -> None:
    """Writes adapters, float32, for `PeftModel.from_pretrained(model, directory)`.

    Args:
      adapters: whole on every device, leaves of layers [L, ...].
      kind: the family's model_type.
      keys: the model's keys of the Model section, as `config_json.model_keys` gives them.
      shapes: of the parameters without adapters, by path.
      base: the model that they belong to, a name or a path; "" where it has none.
    Raises:
      UserError: experts have adapters, for which the library's layout has no place.
    """
    model = model_of(keys)
    leaves = flat(adapters)
    adapted = {path.rpartition("/")[0] for path in leaves}
    entries = _entries_with(adapted, kind, shapes, model)
    of_experts = [entry.name.tensor for entry in entries if "E" in entry.name.dims or entry.name.per_expert]
    if of_experts:
        raise UserError(
            f"lora_targets={','.join(lora.targets)} of the run adapts experts, {', '.join(of_experts)}, which PEFT "
            "has no modules for. Nearest that works: merge_lora=true."
        )
    tensors: list[Tensor] = []
    ranks: dict[str, int] = {}
    for entry in entries:
        present = [part for part, path in enumerate(entry.paths) if path in adapted]
        if len(present) > 1:
            ranks[_module(entry.name.tensor)] = len(present) * lora.rank
        tensors += _tensors(entry, present, leaves, lora.rank)
    directory.mkdir(parents=True, exist_ok=True)
    names = {_weight(path) for path in adapted}
    write_file(directory / WEIGHTS, tensors, **{SIDE_BY_SIDE: ",".join(sorted(names))})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": _whole(lora.alpha),
        "target_modules": sorted({_module(entry.name.tensor) for entry in entries}),
        # What is added is scaled by alpha / r, which a wider module keeps.
        "rank_pattern": ranks,
        "alpha_pattern": {module: _whole(rank * lora.scale) for module, rank in ranks.items()},
        "fan_in_fan_out": kind in INPUTS_FIRST,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _entries_with(paths: set[str], kind: str, shapes: Shapes, model: ModelShape) -> list[Entry]:
    """The lines of a family's table with one of these parameters."""
    entries = entries_of(TABLES[kind], shapes, model, kind)
    return [entry for entry in entries if paths & set(entry.paths)]


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def _weight(path: str) -> str:
    """The name of a parameter among `lora_targets`."""
    return path.rpartition("/")[2]


def _module(theirs: str) -> str:
    """The end of a module's path, the same in all layers."""
    return theirs.partition("{layer}.")[2].removesuffix(".weight")


def _tensors(entry: Entry, present: list[int], leaves: Mapping[str, jax.Array], rank: int) -> Iterator[Tensor]:
    of_a = [np.asarray(leaves[f"{entry.paths[part]}/a"]) for part in present]  # [L, *in, r]
    of_b = [np.asarray(leaves[f"{entry.paths[part]}/b"]) for part in present]  # [L, r, *out]
    num_in = math.prod(of_a[0].shape[1:-1])
    num_out = math.prod(entry.name.their_shape) // num_in
    whole_rank = rank * len(present)
    for name, layer, _ in entry.tensor_names():

        def make_a(layer: int = layer) -> np.ndarray:
            rows = [np.moveaxis(a[layer], -1, 0) for a in of_a]
            return np.concatenate([each.reshape(rank, num_in) for each in rows])

        def make_b(layer: int = layer) -> np.ndarray:
            columns = [_columns(entry.name, part, b[layer]) for part, b in zip(present, of_b, strict=True)]
            return np.concatenate(columns, axis=1)

        module = f"base_model.model.{name.removesuffix('.weight')}"
        dtype = np.dtype(np.float32)
        yield Tensor(f"{module}.lora_A.weight", (whole_rank, num_in), dtype, make_a)
        yield Tensor(f"{module}.lora_B.weight", (num_out, whole_rank), dtype, make_b)


def _columns(name: Name, part: int, b: np.ndarray) -> np.ndarray:
    """[r, *out] of a part as [whole out, r], zero in the other parts' rows."""
    rank = len(b)
    if len(name.our_dims) > b.ndim:  # several dims of inputs: the only part, and its outputs as they are
        return b.reshape(rank, -1).T
    narrow = _with_inputs(name, rank)
    whole = [np.zeros(narrow.our_shape(other), b.dtype) for other in range(len(name.ours))]
    whole[part] = b
    axis = name.their_dims.index(name.our_dims[:1])
    return np.moveaxis(narrow.to_theirs(whole), axis, -1).reshape(-1, rank)


def _from_columns(name: Name, part: int, b: np.ndarray, num_inputs: int) -> np.ndarray:
    """A part's [r, *out] from [whole out, r], the inverse of `_columns`."""
    rank = b.shape[1]
    if num_inputs > 1:
        return b.T.reshape(rank, *(name.sizes[letter] for letter in name.our_dims[num_inputs:]))
    narrow = _with_inputs(name, rank)
    axis = name.their_dims.index(name.our_dims[:1])
    outputs = list(narrow.their_shape)
    del outputs[axis]
    return narrow.to_ours(np.moveaxis(b.reshape(*outputs, rank), -1, axis), part)


def _with_inputs(name: Name, rank: int) -> Name:
    """A name of weights whose one dim of inputs is as long as a rank: so B is such weights."""
    return dataclasses.replace(name, sizes={**name.sizes, name.our_dims[0]: rank})


def read_peft_adapters(adapter: Adapter, shapes: Shapes) -> Params:
    """A PEFT directory's adapters in the layout of a decoder with its LoRA keys, float32 and whole on the host.

    Args:
      shapes: of the parameters without adapters, by path.
    Raises:
      UserError: the file's matrices are not those of the model's modules, or contain NaN or an infinity.
    """
    fields = read_object(adapter.base / "config.json")
    kind = family_of(fields, str(adapter.base))
    model = model_of(model_keys(fields, str(adapter.base / "config.json")))
    inputs: dict[str, int] = {}
    for stack, (_, weights) in stacks_of(model).items():
        for path, weight in weights.items():
            if stack and _weight(path) in adapter.targets.split(","):
                inputs[f"{stack}/{path}"] = num_inputs(per_tensor_axes(weight.axes))
    entries = _entries_with(set(inputs), kind, shapes, model)
    _check_modules(adapter, {_module_name(name) for entry in entries for name, _, _ in entry.tensor_names()})
    stored = stored_in(adapter.directory / WEIGHTS)
    found: Leaves = {}
    for entry in entries:
        for part, path in enumerate(entry.paths):
            if path in inputs:
                a, b = _layers_of(entry, part, adapter, stored, shapes[path], inputs[path])
                found |= {f"{path}/a": a, f"{path}/b": b}
    return nested(found)


def _module_name(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _check_modules(adapter: Adapter, modules: set[str]) -> None:
    """Refuses a file that lacks matrices of the model's modules or has others; notes what reading changes."""
    lacking = [module for module in modules - adapter.ranks.keys() if not adapter.fields.leaves_out(module)]
    others = adapter.ranks.keys() - modules
    where = f"{adapter.directory / WEIGHTS} (target_modules of {CONFIG})"
    if lacking:
        raise UserError(f"{where} has no matrices for {any_of(sorted(lacking)[:3])}: all layers have them, or none.")
    if others:
        raise UserError(f"{where} has matrices for {any_of(sorted(others)[:3])}, which this model has no adapters for.")
    ranks = adapter.ranks.values()
    if any(len(each.targets) > 1 and each.whole == each.own <= adapter.rank for each in ranks):
        note = "a matrix A of several weights is copied to each; training changes the copies one by one"
        print(f"{adapter.directory}: {note}", file=sys.stderr)
    if any(each.factor != 1 for each in ranks):
        note = "B takes in the factor of a module whose alpha / r is not that of the others"
        print(f"{adapter.directory}: {note}", file=sys.stderr)


def _layers_of(
    entry: Entry,
    part: int,
    adapter: Adapter,
    stored: Mapping[str, Stored],
    shape: Shape,
    inputs: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The matrices of a weight of this shape, which in each layer is a part of an entry's module."""
    counted = len(entry.layer_dims)
    lengths = shape[counted : counted + inputs]
    # Zeros for a module without an adapter: there the gradients of both matrices are 0.
    of_a = np.zeros((*shape[:counted], *lengths, adapter.rank), np.float32)
    of_b = np.zeros((*shape[:counted], adapter.rank, *shape[counted + inputs :]), np.float32)
    num_in = math.prod(lengths)
    num_out = math.prod(entry.name.their_shape) // num_in
    for name, layer, _ in entry.tensor_names():
        module = _module_name(name)
        if module not in adapter.ranks:
            continue
        targets, width, rank, factor = adapter.ranks[module]
        a = _read(adapter, stored, f"{module}.lora_A", (width, num_in))
        b = np.float32(factor) * _read(adapter, stored, f"{module}.lora_B", (num_out, width))
        if rank < width:
            start = targets.index(_weight(entry.paths[part])) * rank
            a = a[start : start + rank]
            b = b[:, start : start + rank]
        at = np.unravel_index(layer, entry.layer_dims)
        of_a[at][..., :rank] = np.moveaxis(a.reshape(rank, *lengths), 0, -1)
        of_b[at][:rank] = _from_columns(entry.name, part, b, inputs)
    return of_a, of_b


def _read(adapter: Adapter, stored: Mapping[str, Stored], matrix: str, shape: tuple[int, int]) -> np.ndarray:
    file = adapter.directory / WEIGHTS
    name = f"base_model.model.{matrix}.weight"
    if name not in stored or stored[name].shape != shape or stored[name].dtype not in DTYPES:
        there = f"{list(stored[name].shape)} in {stored[name].dtype}" if name in stored else "not there"
        raise UserError(f"{file}: {name} is {there}, and has to be {list(shape)}.")
    values = mapped(stored[name]).astype(np.float32)
    if not is_finite(values):
        raise UserError(f"{file}: {name} holds NaN or infinite numbers.")
    return values
