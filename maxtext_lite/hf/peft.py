"""LoRA's adapters as the PEFT library reads them: adapter_model.safetensors and adapter_config.json.

Each adapted module of the family's model has lora_A [r, in] and lora_B [out, r]. Where one of its tensors holds
several parameters, one after another, it has the adapters of all of them at once: their inner widths side by side, so
that each part of the output comes of its own.
Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from maxtext_lite.config import UserError
from maxtext_lite.config.hf.fields import Keys
from maxtext_lite.hf.entries import Entry, entries_of, flat
from maxtext_lite.hf.names import Name, Sizes, model_of
from maxtext_lite.hf.safetensors_dir import Tensor, write_file
from maxtext_lite.hf.tables import TABLES
from maxtext_lite.models import Lora
from maxtext_lite.models.decoder import Params

_TRANSPOSED = ("gpt2",)  # families whose linear modules hold [in, out]


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
      keys: the model's keys of the Model section, as `config.hf.config.model_keys` gives them.
      shapes: of the parameters without adapters, by path.
      base: the model that they belong to, a name or a path; "" where it has none.
    Raises:
      UserError: experts have adapters, for which the library's layout has no place.
    """
    model, leaves = model_of(keys), flat(adapters)
    sizes = model.sizes
    adapted = {path.rpartition("/")[0] for path in leaves}
    entries = [entry for entry in entries_of(TABLES[kind], shapes, model, kind) if adapted & set(entry.paths)]
    of_experts = [entry.name.theirs for entry in entries if "E" in entry.name.pattern or entry.name.per_expert]
    if of_experts:
        raise UserError(
            f"lora_targets={','.join(lora.targets)} of the run adapts experts, {', '.join(of_experts)}, which PEFT "
            "has no modules for. Nearest that works: merge_lora=true."
        )
    tensors, ranks = [], {}
    for entry in entries:
        present = [part for part, path in enumerate(entry.paths) if path in adapted]
        if len(present) > 1:
            ranks[_module(entry.name.theirs)] = len(present) * lora.rank
        tensors += _tensors(entry, present, leaves, sizes, lora.rank)
    if jax.process_index() != 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / "adapter_model.safetensors", tensors)
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
        "fan_in_fan_out": kind in _TRANSPOSED,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def _module(theirs: str) -> str:
    """The end of a module's path that all layers share."""
    return theirs.partition("{layer}.")[2].removesuffix(".weight")


def _tensors(
    entry: Entry, present: list[int], leaves: Mapping[str, jax.Array], sizes: Sizes, rank: int
) -> Iterator[Tensor]:
    pairs = [[np.asarray(leaves[f"{entry.paths[part]}/{which}"]) for which in "ab"] for part in present]
    num_in, num_out = _widths(entry.name, sizes, pairs[0][0].ndim - 2)
    whole_rank = rank * len(present)
    for name, layer, _ in entry.tensor_names():
        module = f"base_model.model.{name.removesuffix('.weight')}"

        def make_a(layer=layer) -> np.ndarray:
            return np.concatenate([_rows(entry.name, a[layer]) for a, _ in pairs])

        def make_b(layer=layer) -> np.ndarray:
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
    """[r, *out] of a part as [whole out, r], zero where the other parts are."""
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
