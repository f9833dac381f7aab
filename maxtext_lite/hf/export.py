"""Parameters written as the tensors of a Hugging Face directory, one at a time."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxtext_lite.hf.config import model_keys
from maxtext_lite.hf.copying import as_bits
from maxtext_lite.hf.entries import Entry, entries_of, flat, table_of
from maxtext_lite.hf.fields import JsonObject, Keys
from maxtext_lite.hf.names import Sizes, model_of
from maxtext_lite.hf.safetensors_dir import FILE_BYTES, Tensor, write_safetensors
from maxtext_lite.parallel import Params, on_first_host, sharding


def export_model(directory: Path, params: Params, fields: JsonObject, *, dtype: str) -> None:
    """Writes a directory with a model's tensors and its config.json, which gets these fields. All hosts call it.

    Raises:
      UserError: it cannot be written; on all hosts.
    """
    keys, file = model_keys(fields, "config.json"), directory / "config.json"
    on_first_host(directory, lambda: directory.mkdir(parents=True, exist_ok=True))
    export_parameters(directory, params, fields["model_type"], keys, dtype=dtype)
    on_first_host(file, lambda: file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8"))


def export_parameters(
    directory: Path, params: Params, kind: str, keys: Keys, *, dtype: str, file_bytes: int = FILE_BYTES
) -> None:
    """Writes parameters as a family's tensors. All processes take part; the first one writes.

    The host keeps one tensor and one layer of its parameters at a time.

    Args:
      kind: the family's model_type.
      keys: the model's keys of the Model section, as `config.hf.config.model_keys` gives them.
      dtype: "float32" or "bfloat16"; experts' biases, whose steps are small, stay float32.
      file_bytes: the size at which another file begins.
    Raises:
      UserError: they cannot be written; on all hosts.
    """
    leaves, model, table = flat(params), model_of(keys), table_of(kind)
    entries = entries_of(table, {path: tuple(leaf.shape) for path, leaf in leaves.items()}, model, kind)
    written = np.dtype(jnp.dtype(dtype))
    tensors = list(_tensors(entries, leaves, model.sizes, written))
    for name, value in table.constants.items():
        for layer in range(model.num_layers):
            tensors.append(Tensor(name.format(layer=layer), (), written, lambda value=value: np.asarray(value)))
    num_made, failure = 0, None

    def made(tensor: Tensor) -> np.ndarray:
        nonlocal num_made
        num_made += 1
        return tensor.make()

    if jax.process_index() == 0:
        counted = [tensor._replace(make=functools.partial(made, tensor)) for tensor in tensors]
        try:
            write_safetensors(directory, counted, file_bytes=file_bytes)
        except Exception as error:  # noqa: BLE001  (raised below)
            failure = error
    for tensor in tensors[num_made:]:  # all hosts gather each layer: also the first one, when it can no longer write
        tensor.make()

    def finish() -> None:
        if failure is not None:
            raise failure

    on_first_host(directory, finish)


def _tensors(entries: list[Entry], leaves: Mapping[str, jax.Array], sizes: Sizes, dtype: np.dtype) -> Iterator[Tensor]:
    for entry in entries:
        parts = [_Layers(leaves[path], entry.layer_dims) for path in entry.paths]
        kept = np.dtype(np.float32) if entry.paths[0].endswith("/router_bias") else dtype
        for name, layer, expert in entry.tensor_names():
            make = functools.partial(_tensor, entry, parts, layer, expert, sizes)
            yield Tensor(name, entry.name.their_shape(sizes), kept, make)


def _tensor(entry: Entry, parts: list["_Layers"], layer: int, expert: int, sizes: Sizes) -> np.ndarray:
    """The tensor of a layer and an expert."""
    ours = [part.layer(layer) for part in parts]
    ours = [x[expert] for x in ours] if entry.name.per_expert else ours
    return entry.name.to_theirs([as_bits(x) for x in ours], sizes).view(ours[0].dtype)


class _Layers:
    """A stacked parameter of which the host has one layer at a time, the last one asked for."""

    def __init__(self, stacked: jax.Array, layer_dims: tuple[int, ...]) -> None:
        self._stacked, self._dims = stacked, layer_dims
        self._number, self._layer = -1, np.empty(0)
        self._take = _layer_on_every_host(stacked.sharding.mesh)  # type: ignore[attr-defined]

    def layer(self, number: int) -> np.ndarray:
        """The layer's values."""
        if number != self._number:
            self._layer = np.empty(0)
            where = np.unravel_index(number, self._dims) if self._dims else ()
            taken = self._take(self._stacked, tuple(map(int, where)))
            self._layer, self._number = np.asarray(taken.addressable_data(0)), number
        return self._layer


@functools.cache  # one compilation for all parameters of one shape
def _layer_on_every_host(mesh: Mesh) -> Callable[[jax.Array, tuple[int, ...]], jax.Array]:
    """Takes a layer of a stacked parameter, whole on every host, though each host has only its devices' part."""
    return jax.jit(lambda stacked, index: stacked[index], out_shardings=sharding(mesh))
