"""Reading and writing of parameters alone, without the rest of a run's state."""

import functools
import math
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from maxtext_lite.config import Config, ModelConfig, UserError
from maxtext_lite.config.bucket import absolute, original, reaching
from maxtext_lite.config.errors import full_text, setting_text, value_text
from maxtext_lite.config.hints import no_directory
from maxtext_lite.config.load import defaults_of
from maxtext_lite.config.registry import load_installed
from maxtext_lite.config.types import WhichParameters
from maxtext_lite.config.weights import MTP_LAYERS
from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.models import Lora
from maxtext_lite.models.lora import joined, merged
from maxtext_lite.parallel import Params, Tree, over_all_devices, sharding
from maxtext_lite.training.parameter_layout import (
    AVERAGE,
    StageLayout,
    frozen_directory,
    has_average,
    layer_dims_of,
    parameter_items,
    reshaped,
)
from maxtext_lite.training.saving import check, read_about, read_arrays, reading, save_alone, saved_shapes

PARAMETERS = ("params", "about")
"""The items of a checkpoint that are needed to read its parameters."""
_LOAD = "router_load"


class Reader:
    """The parameters in a directory of another program, read by a function of the registry's kind `parameters`.

    Attributes:
      directory: of the model; for an adapter, of the model that it adapts.
      lora: the adapters' rank, alpha and targets; None: there are no adapters.
    """

    directory: str | Path
    lora: Lora | None = None

    def load(self, abstract_params: Params, key: str) -> Params:
        """The model's parameters, without adapters, in the shapes and shardings of `abstract_params`.

        Args:
          key: what messages call the directory.
        Raises:
          UserError: they cannot be read, or belong to another model.
        """
        raise NotImplementedError

    def load_adapters(self, plain: Params, where: Tree) -> Params:
        """The adapters, float32.

        Args:
          plain: the parameters that they adapt, or their shapes.
          where: one sharding for all, or a tree of shardings.
        Raises:
          UserError: they cannot be read.
        """
        raise NotImplementedError


def reader_of(path: str | Path) -> Reader | None:
    """What reads a directory's parameters; None: a checkpoint of ours, or nothing that is known.

    Raises:
      UserError: its files are damaged or missing.
    """
    for open_parameters in load_installed("parameters"):
        reader = open_parameters(path)
        if reader is not None:
            return reader
    return None


def checkpoints_in(path: str | Path, key: str) -> list[Path]:
    """The checkpoints of a run directory, newest first, or the one that `path` itself is; their files are not read.

    Raises:
      UserError: there is none; names `key`.
    """
    root = original(path, key)
    with reaching(root, key):
        if (root / "params").is_dir():
            return [absolute(root)]
        for parent in (root / "checkpoints", root):
            if steps := steps_in(parent):
                return [absolute(parent / str(step)) for step in reversed(steps)]
    raise UserError(
        no_directory(str(root), key)
        or f"{key}={value_text(str(root))} is neither a run directory with a checkpoint nor a checkpoint."
    )


def check_start(config: Config, *, resumes: bool) -> None:
    """Checks that load_parameters_path, if it is stated, names parameters; their files are not read.

    Args:
      resumes: whether the run has checkpoints of its own.
    Raises:
      UserError: it does not.
    """
    path = config.load_parameters_path
    try:
        if path and reader_of(path) is None:
            checkpoints_in(path, "load_parameters_path")
    except UserError as error:
        if not resumes or config.run_kind == "rl":  # whose reference may be read there again
            raise
        nearest = "Nearest that works: load_parameters_path= (empty), as the run resumes with its own parameters."
        raise UserError(f"{error} {nearest}") from None


def whole_checkpoint(path: str | Path, key: str, items: Collection[str] = ()) -> Path:
    """The newest checkpoint of a run directory with these items intact (none: all items), or the one that `path` is.

    Prints a note where a damaged one is skipped; none is moved. All hosts call it.

    Raises:
      UserError: there is none; names `key`.
    """
    problems = []
    for directory in checkpoints_in(path, key):
        problem = check(directory, items)
        if problem is None:
            if problems and jax.process_index() == 0:
                print(f"note: {full_text('; '.join(problems))}. {directory} is taken instead", file=sys.stderr)
            return directory
        problems.append(f"{directory} is damaged: {problem}")
    raise UserError(f"{key}={value_text(path)}: {'; '.join(problems)}.")


def parameters_in(path: str | Path, key: str, parameters: WhichParameters) -> tuple[Path, str]:
    """The newest checkpoint whose parameters are intact, and the item that has them.

    Raises:
      UserError: there is none, or it has no average; names `key`.
    """
    item = AVERAGE if parameters == "ema" else "params"
    directory = whole_checkpoint(path, key, (item, "about"))
    if item == AVERAGE and not has_average(directory):
        raise _no_average(f"{directory} was saved with ema_decay=0")
    return directory, item


def _no_average(why: str) -> UserError:
    return UserError(f"parameters=ema: {why}. Nearest that works: parameters=trained.")


def save_parameters(directory: Path, params: Params) -> None:
    """Writes parameters as the only checkpoint of a run directory, replacing an existing one. All hosts call it.

    `load_parameters` reads it back.

    Raises:
      WriteError: they cannot be written.
    """
    save_alone(absolute(directory / "checkpoints" / "0"), parameter_items(params))


def load_parameters(
    path: str | Path, abstract_params: Params, key: str, parameters: WhichParameters = "trained"
) -> Params:
    """The parameters of a checkpoint, or of what a `Reader` reads, in the shapes and shardings of `abstract_params`.

    A checkpoint may have been saved from another pipeline. Adapters are merged into their frozen parameters.

    Args:
      abstract_params: without adapters.
    Raises:
      UserError: there is no checkpoint at `path`, or its parameters have other shapes; names `key`.
    """
    if reader := reader_of(path):
        if parameters == "ema":
            raise _no_average(f"{path} is no run")
        plain = reader.load(abstract_params, key)
        if reader.lora is None:
            return plain
        whole = sharding(jax.tree.leaves(plain)[0].sharding.mesh)
        return _merged(reader.lora, reader.load_adapters(plain, whole), plain)
    directory, item = parameters_in(path, key, parameters)
    mesh = jax.tree.leaves(abstract_params)[0].sharding.mesh
    found = load_adapters(directory, mesh, item)
    if found is None:
        return _read_parameters(directory, path, abstract_params, key, item)
    lora, adapters = found
    frozen = frozen_directory(directory.parent.parent)
    if not (frozen / "params").is_dir():
        raise UserError(
            f"{key}={path} holds the adapters of a run with lora_rank={lora.rank}, without {frozen}, where that run "
            "had the parameters that they belong to. Keep the two together."
        )
    whole_checkpoint(frozen, key, PARAMETERS)
    params = _read_parameters(frozen, path, abstract_params, key)
    layer_dims = layer_dims_of(params)
    adapters = _with_layer_dims(adapters, (math.prod(layer_dims),), (*layer_dims[:-1], -1))
    return _merged(lora, adapters, params)


def _merged(lora: Lora, adapters: Params, params: Params) -> Params:
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    merge = jax.jit(
        lambda params, adapters: merged(joined(lora, adapters, params)), donate_argnums=0, out_shardings=shardings
    )
    return merge(params, adapters)


def load_adapters(directory: Path, mesh: Mesh, item: str = "params") -> tuple[Lora, Params] | None:
    """The adapters of a checkpoint, replicated, with leaves of layers [L, ...]; None if it has none."""
    if not (directory / "about").is_dir():
        return None
    about = read_about(directory)
    keys = about.get("fingerprint", {})  # parameters alone have none
    if not keys.get("lora_rank"):
        return None
    whole = sharding(mesh)
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), saved_shapes(directory, item)
    )
    restored = read_arrays(directory, {item: wanted})[item]
    adapters = _with_layer_dims(restored, tuple(about["layer_dims"]), (-1,))
    return Lora(keys["lora_rank"], keys["lora_alpha"], tuple(keys["lora_targets"].split(","))), adapters


def _with_layer_dims(params: Params, before: tuple[int, ...], after: tuple[int, ...]) -> Params:
    """Parameters with the layers' first dims reshaped from `before` to `after`."""
    layers = jax.tree.map(lambda x: x.reshape(*after, *x.shape[len(before) :]), params.get("layers", {}))
    return params | ({"layers": layers} if layers else {})


def _read_parameters(
    directory: Path, path: str | Path, abstract_params: Params, key: str, item: str = "params"
) -> Params:
    saved = saved_shapes(directory, item)
    with reading(directory):  # damage to an older checkpoint may only show here
        as_saved = StageLayout.of(abstract_params, layer_dims_of(saved)).as_saved(abstract_params)
    whole = sharding(jax.tree.leaves(abstract_params)[0].sharding.mesh)
    as_saved = _with_loads(as_saved, saved, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole))
    if (MTP_LAYERS in saved) != (MTP_LAYERS in abstract_params):
        is_passed_over = MTP_LAYERS in saved
        as_saved, abstract_params = map(without_mtp, (as_saved, abstract_params))
        if is_passed_over:
            as_saved[MTP_LAYERS] = jax.tree.map(functools.partial(_anywhere, whole), saved[MTP_LAYERS])
        if jax.process_index() == 0:
            print(f"{key}={path}: {MTP_PASSED_OVER if is_passed_over else MTP_IS_NEW}", file=sys.stderr)
    if problems := _shape_differences(saved, as_saved):
        raise UserError(f"{key}={path}: {'; '.join(problems[:3])}.{_model_keys_of(directory)}")
    found = read_arrays(directory, {item: as_saved})[item]
    found = {name: found[name] for name in abstract_params}
    return reshaped(_with_loads(found, abstract_params, _zeros), abstract_params)


MTP_PASSED_OVER = "its layers of multi-token prediction are passed over"
MTP_IS_NEW = "layers of multi-token prediction are new: it has none that are read"


def without_mtp(params: Params) -> Params:
    """The parameters without layers of multi-token prediction."""
    return {name: part for name, part in params.items() if name != MTP_LAYERS}


def _anywhere(whole: NamedSharding, leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array that is read to be dropped, split over all devices if a dim of it divides."""
    where = whole
    for dim, size in enumerate(leaf.shape):
        if size % whole.mesh.size == 0:
            where = over_all_devices(cast(Mesh, whole.mesh), dim)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _with_loads(params: Params, other: Params, make: Callable[[Any], Any]) -> Params:
    """The parameters with routers' loads where `other` has them, and nowhere else; `make` makes those that lack.

    A load belongs to the previous step: a new run can do without, and load_balance_over may change.
    """
    found: Params = {}
    for name, value in params.items():
        if isinstance(value, dict):
            found[name] = _with_loads(value, other.get(name, {}), make)
        elif name != _LOAD or name in other:
            found[name] = value
    if _LOAD in other and _LOAD not in found:
        found[_LOAD] = make(other[_LOAD])
    return found


def _zeros(leaf: jax.ShapeDtypeStruct) -> Array:
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, np.zeros(leaf.shape, leaf.dtype).__getitem__)


def _model_keys_of(directory: Path) -> str:
    """A sentence on the keys that set a checkpoint's model apart from the default, if it records them."""
    keys = ModelConfig.model_fields.keys() - {"lora_targets"}  # which adapts a model
    usual = defaults_of(Config).model_dump(include=keys)
    recorded = read_about(directory).get("fingerprint", {})
    own = [key for key in usual if key in recorded and recorded[key] != usual[key]]
    return f" The model there has {' '.join(f'{key}={setting_text(recorded[key])}' for key in own)}." if own else ""


def _shape_differences(saved: Tree, wanted: Tree) -> list[str]:
    there = _shapes_by_name(saved)
    here = _shapes_by_name(wanted)
    return [
        f"parameter {name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def _shapes_by_name(tree: Tree) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
