"""LoRA's adapters in the PEFT library's files: adapter_model.safetensors and adapter_config.json.

Each adapted module of the family's model has lora_A [r, in] and lora_B [out, r]. A module whose weight is several
parameters, one after another, is written with the adapters of those that have one side by side: a wider r, of which
each part of the output uses its own stretch. The file's metadata names them. An adapter from elsewhere has one A for
such a module, and each parameter gets a copy of it.
Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import any_of
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.weights import num_inputs, per_tensor_axes, stacks_of
from maxtext_lite.hf.adapter import CONFIG, SIDE_BY_SIDE, WEIGHTS, Adapter
from maxtext_lite.hf.config_json import family_of, model_keys
from maxtext_lite.hf.fields import Keys
from maxtext_lite.hf.names import INPUTS_FIRST, Entry, Name, Sizes, entries_of, flat, model_of, table_of
from maxtext_lite.hf.safetensors import DTYPES, Tensor, is_finite, mapped, stored_in, write_file
from maxtext_lite.models import Lora
from maxtext_lite.parallel import Params


def export_adapters(
    directory: Path,
    adapters: Params,
    lora: Lora,
    kind: str,
    keys: Keys,
    *,
    shapes: Mapping[str, tuple[int, ...]],
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
    model, leaves = model_of(keys), flat(adapters)
    sizes = model.sizes
    adapted = {path.rpartition("/")[0] for path in leaves}
    entries = [entry for entry in entries_of(table_of(kind), shapes, model, kind) if adapted & set(entry.paths)]
    of_experts = [entry.name.theirs for entry in entries if "E" in entry.name.pattern or entry.name.per_expert]
    if of_experts:
        raise UserError(
            f"lora_targets={','.join(lora.targets)} of the run adapts experts, {', '.join(of_experts)}, which PEFT "
            "has no modules for. Nearest that works: merge_lora=true."
        )
    tensors, ranks, names = [], {}, set()
    for entry in entries:
        present = [part for part, path in enumerate(entry.paths) if path in adapted]
        names |= {_weight(entry.paths[part]) for part in present}
        if len(present) > 1:
            ranks[_module(entry.name.theirs)] = len(present) * lora.rank
        tensors += _tensors(entry, present, leaves, sizes, lora.rank)
    directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / WEIGHTS, tensors, **{SIDE_BY_SIDE: ",".join(sorted(names))})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": _whole(lora.alpha),
        "target_modules": sorted({_module(entry.name.theirs) for entry in entries}),
        # What is added is scaled by alpha / r, which a wider module keeps.
        "rank_pattern": ranks,
        "alpha_pattern": {module: _whole(rank * lora.scale) for module, rank in ranks.items()},
        "fan_in_fan_out": kind in INPUTS_FIRST,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def _weight(path: str) -> str:
    """The name of a parameter among `lora_targets`."""
    return path.rpartition("/")[2]


def _module(theirs: str) -> str:
    """The end of a module's path, the same in all layers."""
    return theirs.partition("{layer}.")[2].removesuffix(".weight")


def _tensors(
    entry: Entry, present: list[int], leaves: Mapping[str, jax.Array], sizes: Sizes, rank: int
) -> Iterator[Tensor]:
    pairs = [[np.asarray(leaves[f"{entry.paths[part]}/{which}"]) for which in "ab"] for part in present]
    num_in, num_out = _widths(entry.name, sizes, pairs[0][0].ndim - 2)
    whole_rank = rank * len(present)
    for name, layer, _ in entry.tensor_names():
        module = f"base_model.model.{name.removesuffix('.weight')}"

        def make_a(layer: int = layer) -> np.ndarray:
            return np.concatenate([_rows(entry.name, a[layer]) for a, _ in pairs])

        def make_b(layer: int = layer) -> np.ndarray:
            of_parts = {part: b[layer] for part, (_, b) in zip(present, pairs, strict=True)}
            return np.concatenate([_columns(entry.name, part, b, sizes) for part, b in of_parts.items()], axis=1)

        dtype = np.dtype(np.float32)
        yield Tensor(f"{module}.lora_A.weight", (whole_rank, num_in), dtype, make_a)
        yield Tensor(f"{module}.lora_B.weight", (num_out, whole_rank), dtype, make_b)


def _widths(name: Name, sizes: Sizes, num_inputs: int) -> tuple[int, int]:
    """Of the module's inputs and outputs."""
    inputs = set(name.our_dims[:num_inputs])
    there = dict(zip(name.their_dims, name.their_shape(sizes), strict=True))
    num_in = math.prod(size for group, size in there.items() if set(group) <= inputs)
    return num_in, math.prod(there.values()) // num_in


def _rows(name: Name, a: np.ndarray) -> np.ndarray:
    """[*in, r] as [r, in]."""
    inputs = name.our_dims[: a.ndim - 1]
    (order,) = [group for group in name.their_dims if set(group) <= set(inputs)]
    return np.moveaxis(a, -1, 0).transpose(0, *(1 + inputs.index(letter) for letter in order)).reshape(a.shape[-1], -1)


def _columns(name: Name, part: int, b: np.ndarray, sizes: Sizes) -> np.ndarray:
    """[r, *out] of a part as [whole out, r], zero in the other parts' rows."""
    rank, num_inputs = b.shape[0], len(name.our_dims) - (b.ndim - 1)
    # As the weights of r inputs: the one dim of inputs then has that length.
    first = name.our_dims[0]
    assert num_inputs == 1 or not name.parts, name
    if num_inputs > 1:
        return b.reshape(rank, -1).T
    narrow = {**sizes, first: rank}
    whole = [
        np.zeros(name.our_shape(other, narrow), b.dtype) if other != part else b for other in range(len(name.ours))
    ]
    there = name.to_theirs(whole, narrow)
    (axis,) = [axis for axis, group in enumerate(name.their_dims) if group == (first,)]
    return np.moveaxis(there, axis, -1).reshape(-1, rank)


def read_peft_adapters(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> Params:
    """The adapters of a PEFT directory as a decoder with its LoRA keys has them, float32 and whole on the host.

    Args:
      shapes: of the parameters without adapters, by path.
    Raises:
      UserError: the file's matrices are not those of the model's modules, or contain NaN or an infinity.
    """
    fields = read_object(adapter.base / "config.json")
    kind, model = family_of(fields, str(adapter.base)), model_of(model_keys(fields, str(adapter.base / "config.json")))
    inputs = {
        f"{stack}/{path}": num_inputs(per_tensor_axes(weight.axes))
        for stack, (_, weights) in stacks_of(model).items()
        for path, weight in weights.items()
        if stack and _weight(path) in adapter.targets.split(",")
    }
    entries = [entry for entry in entries_of(table_of(kind), shapes, model, kind) if inputs.keys() & set(entry.paths)]
    read = _matrices(adapter, {_module_name(name) for entry in entries for name, _, _ in entry.tensor_names()})
    if any(len(each.targets) > 1 and each.whole == each.own <= adapter.rank for each in adapter.ranks.values()):
        note = f"{adapter.directory}: the matrix A of a module that holds several weights is copied to each of them"
        print(f"{note}; training changes the copies one by one", file=sys.stderr)
    if any(each.factor != 1 for each in adapter.ranks.values()):
        note = f"{adapter.directory}: B takes in the factor of a module whose alpha / r is not that of the others"
        print(f"{note}; training goes on with the same scale for all", file=sys.stderr)
    found: dict[str, Any] = {}
    for entry in entries:
        for part, path in enumerate(entry.paths):
            if path not in inputs:
                continue
            parent = found
            for step in path.split("/"):
                parent = parent.setdefault(step, {})
            parent.update(_layers_of(entry, part, adapter, read, shapes[path], inputs[path], model.sizes))
    return found


def _module_name(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _matrices(adapter: Adapter, modules: set[str]) -> Callable[[str, str, tuple[int, int]], np.ndarray]:
    """A function that reads a module's A or B, of the given shape."""
    file, where = adapter.directory / WEIGHTS, f"{adapter.directory / WEIGHTS} (target_modules of {CONFIG})"
    stored = stored_in(file)
    lacking = [module for module in modules - adapter.ranks.keys() if not adapter.fields.leaves_out(module)]
    others = adapter.ranks.keys() - modules
    if lacking:
        raise UserError(f"{where} has no matrices for {any_of(sorted(lacking)[:3])}: all layers have them, or none.")
    if others:
        raise UserError(f"{where} has matrices for {any_of(sorted(others)[:3])}, which this model has no adapters for.")

    def read(module: str, which: str, shape: tuple[int, int]) -> np.ndarray:
        name = f"base_model.model.{module}.lora_{which}.weight"
        if name not in stored or stored[name].shape != shape or stored[name].dtype not in DTYPES:
            there = f"{list(stored[name].shape)} in {stored[name].dtype}" if name in stored else "not there"
            raise UserError(f"{file}: {name} is {there}, and has to be {list(shape)}.")
        matrix = mapped(stored[name]).astype(np.float32)
        if not is_finite(matrix):
            raise UserError(f"{file}: {name} holds NaN or infinite numbers.")
        return matrix

    return read


def _layers_of(
    entry: Entry,
    part: int,
    adapter: Adapter,
    read: Callable[[str, str, tuple[int, int]], np.ndarray],
    shape: tuple[int, ...],
    inputs: int,
    sizes: Sizes,
) -> dict[str, np.ndarray]:
    """The adapter of a weight of this shape; in each layer it is a part of one of the entry's modules."""
    counted, weights = len(entry.layer_dims), [_weight(path) for path in entry.paths]
    lengths = shape[counted : counted + inputs]
    # Zeros for a module without an adapter: there the gradients of both matrices are 0.
    of_a = np.zeros((*shape[:counted], *lengths, adapter.rank), np.float32)
    of_b = np.zeros((*shape[:counted], adapter.rank, *shape[counted + inputs :]), np.float32)
    num_in, num_out = _widths(entry.name, sizes, inputs)
    for name, layer, _ in entry.tensor_names():
        module = _module_name(name)
        if module not in adapter.ranks:
            continue
        targets, width, rank, factor = adapter.ranks[module]
        a, b = read(module, "A", (width, num_in)), np.float32(factor) * read(module, "B", (num_out, width))
        present = [weight for weight in weights if weight in targets]
        start = present.index(weights[part]) * rank if rank < width else 0
        a = a[start : start + rank]
        b = _to_columns(entry.name, part, b[:, start : start + rank], sizes, inputs)
        at = np.unravel_index(layer, entry.layer_dims)
        of_a[at][..., :rank] = _to_rows(entry.name, a, lengths)
        of_b[at][:rank] = b
    return {"a": of_a, "b": of_b}


def _to_rows(name: Name, a: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """[r, in] as [*in, r] with inputs of these lengths, the inverse of `_rows`."""
    inputs = name.our_dims[: len(lengths)]
    (order,) = [group for group in name.their_dims if set(group) <= set(inputs)]
    long = dict(zip(inputs, lengths, strict=True))
    dims = a.reshape(len(a), *(long[letter] for letter in order))
    return np.moveaxis(dims, 0, -1).transpose(*(order.index(letter) for letter in inputs), len(inputs))


def _to_columns(name: Name, part: int, b: np.ndarray, sizes: Sizes, inputs: int) -> np.ndarray:
    """A part's [r, *out] from [whole out, r], the inverse of `_columns`."""
    rank, first = b.shape[1], name.our_dims[0]
    if inputs > 1:
        return b.T.reshape(rank, *(sizes[letter] for letter in name.our_dims[inputs:]))
    narrow = {**sizes, first: rank}
    (axis,) = [axis for axis, group in enumerate(name.their_dims) if group == (first,)]
    outputs = [size for dim, size in enumerate(name.their_shape(narrow)) if dim != axis]
    return name.to_ours(np.moveaxis(b.reshape(*outputs, rank), -1, axis), part, narrow)
