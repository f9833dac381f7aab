"""Weights of Hugging Face directories onto the mesh and back, slice by slice."""

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import writing
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.weights import MTP_LAYERS, ModelShape
from maxtext_lite.hf.adapter import Adapter, adapter_of
from maxtext_lite.hf.config_json import TOWERS, family_of, model_keys, text_fields, text_tensor
from maxtext_lite.hf.dequantized import open_directory
from maxtext_lite.hf.directory import has_hf_weights
from maxtext_lite.hf.fields import JsonObject, Keys
from maxtext_lite.hf.names import TABLES, Entry, Table, entries_of, flat, model_of, shapes_of, some_of
from maxtext_lite.hf.peft import read_peft_adapters
from maxtext_lite.hf.safetensors import (
    DTYPES,
    FILE_BYTES,
    SafetensorsDir,
    Shape,
    Stored,
    Tensor,
    aligned_empty,
    as_bits,
    assign_cast,
    is_finite,
    write_safetensors,
)
from maxtext_lite.models import Lora
from maxtext_lite.parallel import Params, Tree, on_first_host, sharding
from maxtext_lite.training.parameter_files import MTP_IS_NEW, Reader, without_mtp

Bounds = tuple[tuple[int, int], ...]
"""The first index of each dim, and the one after the last."""


def open_parameters(path: str | Path) -> Reader | None:
    """The reader of a Hugging Face directory or of an adapter to one; None for everything else.

    Raises:
      UserError: its weights are pickled or missing, or the adapter cannot be read.
    """
    if not has_hf_weights(path):
        return None
    return HuggingFaceReader(path, adapter_of(path))


class HuggingFaceReader(Reader):
    """The parameters of a Hugging Face directory, or of an adapter's base model with its matrices."""

    def __init__(self, directory: str | Path, adapter: Adapter | None) -> None:
        self.directory = adapter.base if adapter else directory
        self._adapter = adapter
        if adapter:
            self.lora = Lora(adapter.rank, adapter.alpha, tuple(adapter.targets.split(",")))

    def load(self, abstract_params: Params, key: str) -> Params:
        return load_hf_parameters(self.directory, abstract_params, key)

    def load_adapters(self, plain: Params, where: Tree) -> Params:
        assert self._adapter is not None
        shapes = shapes_of(flat(plain))
        read = read_peft_adapters(self._adapter, shapes)
        shardings = jax.tree.map(lambda _: where, read) if isinstance(where, NamedSharding) else where

        def place(x: np.ndarray, at: NamedSharding) -> jax.Array:
            return jax.make_array_from_callback(x.shape, at, lambda index: x[index])

        return jax.tree.map(place, read, shardings)


def load_hf_parameters(path: str | Path, abstract_params: Params, key: str) -> Params:
    """The parameters of a Hugging Face directory, with the shardings of `abstract_params`.

    No parameter is ever whole on the host, unless a device has it whole: a device's part of a stack of layers is
    allocated, filled from views of the files and handed over before the next one. All hosts call this. Each checks what
    it reads.

    Args:
      abstract_params: shapes, dtypes and shardings of the decoder's parameters.
      key: what messages call the path.
    Raises:
      UserError: tensors are missing, unknown, of another shape, in a format that is not read, or contain NaN or an
        infinity; names them.
    """
    root = Path(path)
    where = f"{key}={path}"
    has_hf_weights(root)
    fields = read_object(root / "config.json")
    kind = family_of(fields, where)
    keys = model_keys(fields, f"{root / 'config.json'}")
    table = TABLES[kind]
    files = open_directory(root, text_fields(fields))
    _rename(files, fields, table, where)
    model = model_of(keys, abstract_params)
    if model.mtp_num_layers and files.tensors.keys().isdisjoint(table.names_ahead(model.stacks[MTP_LAYERS])):
        print(f"{where}: {MTP_IS_NEW}", file=sys.stderr)
        abstract_params = without_mtp(abstract_params)
        model = model_of(keys)
    leaves = flat(abstract_params)
    entries = entries_of(table, shapes_of(leaves), model, where)
    _refuse_other_copies(files, entries, model, where)
    if keys["logits_via_embedding"]:
        entries = [_under_another_name(entry, files) for entry in entries]
    _refuse_other_tensors(files, entries, table, keys, model, where)
    loaded: dict[str, jax.Array] = {}
    wrong: list[str] = []
    for entry in entries:
        for part, path in enumerate(entry.paths):
            loaded[path] = _on_mesh(leaves[path], entry, part, files, wrong)
    if wrong:
        raise UserError(list(dict.fromkeys(wrong)))
    for path in leaves.keys() - loaded.keys():  # the experts' load, which is even at first
        leaf = leaves[path]
        zeros = np.zeros(leaf.shape, leaf.dtype)
        loaded[path] = jax.make_array_from_callback(leaf.shape, leaf.sharding, zeros.__getitem__)
    return jax.tree.unflatten(jax.tree.structure(abstract_params), [loaded[path] for path in leaves])


def _rename(files: SafetensorsDir, fields: JsonObject, table: Table, where: str) -> None:
    """Gives tensors the names of the table: without those for images, and with the prefix of a whole model."""
    if fields.get("model_type") in TOWERS:
        names = {name: text_tensor(name) for name in files.tensors}
        seen = list(names.values()).count(None)
        files.rename({name: renamed for name, renamed in names.items() if renamed is not None})
        print(f"{where}: {seen} tensors for images are passed over: the text part alone is loaded", file=sys.stderr)
    if not any(name.startswith(table.prefix) for name in files.tensors):
        heads = [line.tensor for line in table.root if not line.tensor.startswith(table.prefix)]
        files.rename({name: name if name in heads else table.prefix + name for name in files.tensors})


_HEAD = "lm_head.weight"
_TABLE = ("embedding/table",)


def _under_another_name(entry: Entry, files: SafetensorsDir) -> Entry:
    """The line of a tied model's table, with the output projection's name if only that tensor is stored."""
    stored_as_head = _HEAD in files.tensors and entry.tensor_name(0, 0) not in files.tensors
    if entry.paths == _TABLE and stored_as_head:
        return dataclasses.replace(entry, name=dataclasses.replace(entry.name, tensor=_HEAD))
    return entry


_COPIES = {"embedding/table": "embed_tokens", "head/projection": "shared_head.head"}
"""What layers of multi-token prediction share with the model, of which checkpoints hold copies for each."""


def _copies(entries: list[Entry], model: ModelShape) -> Iterator[Entry]:
    """The lines of those copies, after `entries`, those of the model's own."""
    for entry in entries:
        copied = _COPIES.get(entry.paths[0])
        for layer in model.stacks.get(MTP_LAYERS, ()) if copied else ():
            yield dataclasses.replace(
                entry, name=dataclasses.replace(entry.name, tensor=f"model.layers.{layer}.{copied}.weight")
            )


def _refuse_other_copies(files: SafetensorsDir, entries: list[Entry], model: ModelShape, where: str) -> None:
    """Refuses layers of multi-token prediction with a table or an output projection of their own."""
    shared = {entry.paths: entry.tensor_name(0, 0) for entry in entries}
    for copy in _copies(entries, model):
        name = copy.tensor_name(0, 0)
        if {name, shared[copy.paths]} <= files.tensors.keys() and not _are_equal(files, name, shared[copy.paths]):
            needed = "Nearest that works: mtp_num_layers=0, without these layers."
            raise UserError(f"{where}: {name} is not {shared[copy.paths]}, which it shares here. {needed}")


def _refuse_other_tensors(
    files: SafetensorsDir, entries: list[Entry], table: Table, keys: Keys, model: ModelShape, where: str
) -> None:
    there = files.tensors
    copies = [copy.tensor_name(0, 0) for copy in _copies(entries, model)]
    count = sum(math.prod(entry.layer_dims) * entry.num_experts for entry in entries)
    if count > 2 * len(there) + 1000:
        raise UserError(f"{where} has {len(there)} tensors, where the model of its config.json has {count:,}.")
    wanted: dict[str, Shape] = {}
    for entry in entries:
        wanted |= dict.fromkeys((name for name, _, _ in entry.tensor_names()), entry.name.their_shape)
    constants = _constants(table, keys["base_num_decoder_layers"])
    unknown: list[str] = []
    others: list[str] = []
    num_heads = 0
    for name, stored in there.items():
        if name in wanted:
            others += _difference(name, stored, wanted[name])
        elif name in constants:
            value = float(files.view(name).reshape(-1)[0])
            if not math.isclose(value, constants[name], rel_tol=0.01):
                others.append(f"{name} is {value}, not {constants[name]}, in {stored.file.name}")
        elif 0 in stored.shape or re.fullmatch(table.passed_over, name):
            continue
        elif _is_further_head(name, keys):
            num_heads += name not in copies
        else:
            unknown.append(name)
    if num_heads:
        print(f"{where}: {num_heads} tensors of heads that predict further tokens are ignored", file=sys.stderr)
    missing = [name for name in wanted if name not in there]
    if keys["logits_via_embedding"] and _HEAD in unknown and not missing:
        _refuse_untied(files, entries, where)
        unknown.remove(_HEAD)
    problems: list[str] = []
    if missing:
        tied = " If the embedding table is also the head, set tie_word_embeddings=true in its config.json."
        problems.append(f"{where} lacks tensors of the model: {some_of(missing)}.{tied if missing == [_HEAD] else ''}")
    if unknown:
        problems.append(f"{where} has tensors that the model has no place for: {some_of(unknown)}.")
    if others:
        problems.append(f"{where} has other tensors than config.json says: {some_of(others)}.")
    if problems:
        raise UserError(problems)


def _difference(name: str, stored: Stored, shape: Shape) -> list[str]:
    """What is wrong with a tensor of the model."""
    if stored.shape != shape:
        return [f"{name} is {list(stored.shape)}, not {list(shape)}, in {stored.file.name}"]
    if stored.dtype not in DTYPES:
        return [f"{name} is {stored.dtype}, none of {', '.join(DTYPES)}, in {stored.file.name}"]
    return []


def _constants(table: Table, num_layers: int) -> dict[str, float]:
    """The tensors of one number, with the number that each must have."""
    found: dict[str, float] = {}
    for name, value in table.constants.items():
        found |= {name.format(layer=layer): value for layer in range(num_layers)}
    return found


def _is_further_head(name: str, keys: Keys) -> bool:
    """Whether a tensor is of a head for further tokens that is not read, or a copy of what it shares with the model.

    DeepSeek-V3 and GLM-4.5 store these as layers after the last, ERNIE 4.5 as model.mtp_, K-EXAONE and Mellum as mtp.
    """
    if name.startswith("mtp."):
        return True
    found = re.match(r"model\.(layers\.(?P<layer>\d+)\.|mtp_)", name)
    if not keys["routed_bias"] or found is None:
        return False
    return found["layer"] is None or int(found["layer"]) >= keys["base_num_decoder_layers"]


def _refuse_untied(files: SafetensorsDir, entries: list[Entry], where: str) -> None:
    """Refuses an output projection that differs from a tied model's table; a second copy is allowed."""
    (table,) = (entry.tensor_name(0, 0) for entry in entries if entry.paths == _TABLE)
    if not _are_equal(files, _HEAD, table):
        needed = "If they are to differ, config.json needs tie_word_embeddings=false."
        raise UserError(f"{where}: {_HEAD} is not {table}. {needed}")


def _are_equal(files: SafetensorsDir, name: str, other: str) -> bool:
    one = files.view(name)
    two = files.view(other)
    return one.dtype == two.dtype and np.array_equal(as_bits(one), as_bits(two))


def _on_mesh(leaf: jax.ShapeDtypeStruct, entry: Entry, part: int, files: SafetensorsDir, wrong: list[str]) -> jax.Array:
    """One parameter, device by device; devices with the same part get one copy each.

    Args:
      wrong: a sentence is appended for each tensor with a NaN or an infinity.
    """
    where = leaf.sharding
    assert where is not None
    devices: dict[Bounds, list[Any]] = {}
    for device, index in where.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None
        bounds = tuple(slice_.indices(size)[:2] for slice_, size in zip(index, leaf.shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    arrays: list[jax.Array] = []
    for bounds, holders in devices.items():
        block = aligned_empty([end - start for start, end in bounds], leaf.dtype)
        for name, into in _filled(block, bounds, entry, part, files):
            if not is_finite(into):
                wrong.append(f"{files.tensors[name].file}: {name} holds NaN or infinite numbers in {into.dtype}.")
        arrays += jax.block_until_ready([jax.device_put(block, device) for device in holders])
    return jax.make_array_from_single_device_arrays(leaf.shape, where, arrays)


def _filled(
    block: np.ndarray, bounds: Bounds, entry: Entry, part: int, files: SafetensorsDir
) -> Iterator[tuple[str, np.ndarray]]:
    """Fills `block`, the parameter between `bounds`, from the files.

    Yields each tensor's name with the part of `block` just copied from it, while that is still in the cache.
    """
    name = entry.name
    counted = len(entry.layer_dims)
    numbers = np.arange(math.prod(entry.layer_dims)).reshape(entry.layer_dims)
    slices = [slice(*bound) for bound in bounds]
    layers = numbers[tuple(slices[:counted])]
    experts = range(*bounds[counted]) if name.per_expert else range(1)
    rest = tuple(slices[counted + name.per_expert :])
    for place in np.ndindex(layers.shape):
        for slot, expert in enumerate(experts):
            stored = entry.tensor_name(int(layers[place]), expert)
            tensor = files.part(stored, lambda: name.reach(part, rest))
            into = block[(*place, slot) if name.per_expert else place]
            with np.errstate(over="ignore"):  # the caller looks for infinities
                assign_cast(into, tensor, name.to_ours(as_bits(tensor), part)[rest])
            yield stored, into


def export_model(directory: Path, params: Params, fields: JsonObject, *, dtype: str) -> Params:
    """Writes a directory with a model's tensors and its config.json, which gets these fields. All hosts call it.

    Returns:
      The parameters that are written: without layers of multi-token prediction if the family has no place for them.

    Raises:
      WriteError: it cannot be written.
    """
    keys = model_keys(fields, "config.json")
    file = directory / "config.json"
    if MTP_LAYERS in params and TABLES[fields["model_type"]].names_ahead((0,)):
        fields = {**fields, "num_nextn_predict_layers": model_of(keys, params).mtp_num_layers}
    elif MTP_LAYERS in params:
        print(f"{fields['model_type']} has no place for multi-token prediction, which is left out", file=sys.stderr)
        params = without_mtp(params)
    on_first_host(directory, lambda: directory.mkdir(parents=True, exist_ok=True))
    export_parameters(directory, params, fields["model_type"], keys, dtype=dtype)
    on_first_host(file, lambda: file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8"))
    return params


def export_parameters(
    directory: Path, params: Params, kind: str, keys: Keys, *, dtype: str, file_bytes: int = FILE_BYTES
) -> None:
    """Writes parameters as a family's tensors. All processes take part; the first one writes.

    The host keeps the tensors of one file and one layer of a parameter at a time.

    Args:
      kind: the family's model_type.
      keys: the model's keys of the Model section, as `config_json.model_keys` gives them.
      dtype: "float32" or "bfloat16"; experts' biases, whose steps are small, stay float32.
      file_bytes: the size at which another file begins.
    Raises:
      WriteError: they cannot be written.
    """
    leaves = flat(params)
    model = model_of(keys, params)
    table = TABLES[kind]
    entries = entries_of(table, shapes_of(leaves), model, kind)
    entries += [*_copies(entries, model)]
    written = np.dtype(jnp.dtype(dtype))
    tensors = list(_tensors(entries, leaves, written))
    for name, value in _constants(table, model.num_layers).items():
        tensors.append(Tensor(name, (), written, lambda value=value: np.asarray(value)))
    if jax.process_index() == 0:
        with writing(directory):
            write_safetensors(directory, tensors, file_bytes=file_bytes)
    else:
        for tensor in tensors:  # all hosts gather each layer
            tensor.make()


def _tensors(entries: list[Entry], leaves: Mapping[str, jax.Array], dtype: np.dtype) -> Iterator[Tensor]:
    for entry in entries:
        parts = [_Layers(leaves[path], entry.layer_dims) for path in entry.paths]
        kept = np.dtype(np.float32) if entry.paths[0].endswith("/router_bias") else dtype
        for name, layer, expert in entry.tensor_names():
            make = functools.partial(_tensor, entry, parts, layer, expert)
            yield Tensor(name, entry.name.their_shape, kept, make)


def _tensor(entry: Entry, parts: list["_Layers"], layer: int, expert: int) -> np.ndarray:
    """The tensor of a layer and an expert."""
    ours = [part.layer(layer) for part in parts]
    if entry.name.per_expert:
        ours = [x[expert] for x in ours]
    tensor = entry.name.to_theirs([as_bits(x) for x in ours])
    return tensor.view(ours[0].dtype)


class _Layers:
    """A stacked parameter that keeps one layer at a time on the host, the last one requested."""

    def __init__(self, stacked: jax.Array, layer_dims: Shape) -> None:
        self._stacked = stacked
        self._dims = layer_dims
        self._number = -1
        self._layer = np.empty(0)
        self._take = _layer_on_every_host(stacked.sharding.mesh)  # type: ignore[attr-defined]

    def layer(self, number: int) -> np.ndarray:
        """The layer's values."""
        if number != self._number:
            self._layer = np.empty(0)
            where = np.unravel_index(number, self._dims) if self._dims else ()
            taken = self._take(self._stacked, tuple(map(int, where)))
            self._layer = np.asarray(taken.addressable_data(0))
            self._number = number
        return self._layer


@functools.cache  # one compilation for all parameters of one shape
def _layer_on_every_host(mesh: Mesh) -> Callable[[jax.Array, tuple[int, ...]], jax.Array]:
    """Takes a layer of a stacked parameter, whole on every host, though each host has only its devices' part."""
    return jax.jit(lambda stacked, index: stacked[index], out_shardings=sharding(mesh))
