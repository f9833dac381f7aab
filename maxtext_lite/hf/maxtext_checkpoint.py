"""MaxText's checkpoints: the parameters of its Llama, Gemma, Qwen and Mistral models, with or without scanned layers.

The arithmetic differs in three places. MaxText applies attention's scale to the scores only where queries are normed or
biased; elsewhere the query's kernel includes it. Gemma's embedding table there includes the square root of its width,
and its norms' scales include the 1 that is added here. Llama 3.1 rotates neighbouring dims there; here, the first half
with the second.
Source: the package maxtext 0.2.5, checkpoint_conversion/utils/param_mapping.py, layers/attentions.py and embeddings.py.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import any_of, value_text
from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.hf.maxtext import maxtext_table
from maxtext_lite.hf.names import Leaves, Shapes, flat, nested, some_of
from maxtext_lite.hf.safetensors import Shape
from maxtext_lite.parallel import Params
from maxtext_lite.training.saving import reading

_VOCABULARY = {"embedding/table": 0, "head/projection": 1}  # the dim that MaxText may have padded
_GEMMA3_PERIOD = 6  # layers that are scanned together; the remainder is not scanned


class _Place(NamedTuple):
    """The place of a layer's array.

    Attributes:
      number: index along the scanned dim; None: the array is not scanned.
    """

    path: str
    number: int | None


class _Parameter(NamedTuple):
    """A parameter, and where each of its layers is; outside the layers, it is one array."""

    leaf: jax.ShapeDtypeStruct
    places: list[_Place]
    has_layers: bool

    @property
    def layer_shape(self) -> Shape:
        return self.leaf.shape[int(self.has_layers) :]


def maxtext_items(source: Path) -> Path | None:
    """The newest MaxText parameters in a directory of checkpoints, or one checkpoint's; None without any."""
    found = [parent / str(step) for parent in (source / "checkpoints", source) for step in reversed(steps_in(parent))]
    roots = [step / "items" for step in found] + [source / "items", source]
    return next((root for root in roots if (root / "_METADATA").is_file()), None)


def maxtext_dtype(items: Path) -> str:
    """ "bfloat16" if all parameters are stored in it, otherwise "float32"."""
    stored = {str(leaf.dtype) for leaf in _stored(items)[1].values()}
    return "bfloat16" if stored == {"bfloat16"} else "float32"


def _stored(items: Path) -> tuple[tuple[str, ...], Leaves]:
    """The names above MaxText's parameters, and the parameters' shapes and dtypes by path."""
    with reading(items):
        handler: Any = ocp.PyTreeCheckpointHandler()
        tree: Any = dict(handler.metadata(items))
    above: list[str] = []
    while isinstance(tree, Mapping) and "params" in tree:
        tree = tree["params"]
        above.append("params")
    if not isinstance(tree, Mapping) or "decoder" not in tree:
        raise UserError(f"{items} has no params/decoder: it is not a checkpoint of MaxText's decoder.")
    return tuple(above), flat(tree)


def load_maxtext_parameters(items: Path, abstract_params: Params, config: Config) -> Params:
    """The parameters of a MaxText checkpoint in the shardings of `abstract_params`; the host reads one stack at a time.

    Args:
      items: from `maxtext_items`.
      config: the model's; MaxText does not save it.
    Raises:
      UserError: the config has a feature that MaxText's models of these families lack, or describes another model than
        the checkpoint's.
    """
    _refuse_keys(config)
    above, stored = _stored(items)
    shapes = {name: tuple(array.shape) for name, array in stored.items()}
    parameters: dict[str, _Parameter] = {}
    for path, leaf in flat(abstract_params).items():
        has_layers = path.startswith("layers/")
        parameters[path] = _Parameter(leaf, _places(path, config, shapes), has_layers)
    axis = _scan_axis(parameters, shapes)
    _refuse_differences(items, parameters, shapes, axis)
    loaded: list[jax.Array] = []
    for path, (leaf, places, has_layers) in parameters.items():
        arrays = _read(items, above, {place.path for place in places})
        layers: list[np.ndarray] = []
        for name, number in places:
            layer = arrays[name] if number is None else np.take(arrays[name], number, axis)
            layers.append(_converted(layer, path, config))
        whole = np.stack(layers) if has_layers else layers[0]
        whole = whole.astype(leaf.dtype)
        if not np.isfinite(whole.astype(np.float32)).all():
            raise UserError(f"{items}: {places[0].path} holds NaN or infinite numbers.")
        assert leaf.sharding is not None
        loaded.append(jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index, x=whole: x[index]))
    return jax.tree.unflatten(jax.tree.structure(abstract_params), loaded)


def _refuse_keys(config: Config) -> None:
    rope = None if config.rope_scaling is None else config.rope_scaling.rope_type
    pattern = config.layer_pattern if set(config.pattern) - {"global", "local"} else "global"
    checked = [("layer_pattern", pattern, ["global", "local"]), ("rope_scaling", rope, [None, "llama3", "linear"])]
    for key, values in maxtext_table()["checkpoint"]["expressed"].items():
        checked.append((key, getattr(config, key), values))
    problems: list[str] = []
    for key, value, values in checked:
        if value not in values:
            known = any_of([value_text(each) for each in values])
            why = f"is not of a MaxText model that is read: it must be {known}."
            problems.append(f"{key}={value_text(value)} {why}")
    if problems:
        raise UserError(problems)


def _places(path: str, config: Config, shapes: Shapes) -> list[_Place]:
    """The places of a parameter's layers; for a missing array, its place without scanned layers."""
    table = maxtext_table()["checkpoint"]
    if path in table["root"]:
        return [_Place(table["root"][path], None)]
    names = table["layer"].get(path.removeprefix("layers/"), [])
    places: list[_Place] = []
    for layer in range(config.base_num_decoder_layers):
        tried = [place for name in names for place in _ways(name, layer, config)]
        tried.append(_Place(path, None))
        places.append(next((place for place in tried if place.path in shapes), tried[0]))
    return places


def _ways(name: str, layer: int, config: Config) -> Iterator[_Place]:
    """The possible places of a layer's array: unscanned, scanned, and as Gemma 2 and 3 scan layers of several kinds."""
    module, _, rest = name.partition("/")
    of_kind = f"{module}_{config.layer_kinds[layer]}/{rest}"
    pair = layer // 2
    period, number = divmod(layer, _GEMMA3_PERIOD)
    yield _Place(f"decoder/layers_{layer}/{name}", None)
    yield _Place(f"decoder/layers/{name}", layer)
    yield _Place(f"decoder/layers_{pair}/{of_kind}", None)
    yield _Place(f"decoder/layers/{of_kind}", pair)
    if period < config.base_num_decoder_layers // _GEMMA3_PERIOD:
        yield _Place(f"decoder/layers/layers_{number}/{name}", period)
    else:
        yield _Place(f"decoder/layers_remainder/layers_{number}/{name}", None)


def _scan_axis(parameters: Mapping[str, _Parameter], shapes: Shapes) -> int:
    """param_scan_axis: the axis that the shapes of all scanned arrays allow; the usual 1 if both are possible."""
    allowed = {0, 1}
    for parameter in parameters.values():
        for name, number in parameter.places:
            shape = shapes.get(name)
            if number is not None and shape is not None:
                allowed = {axis for axis in allowed if shape[:axis] + shape[axis + 1 :] == parameter.layer_shape}
    return max(allowed, default=1)


def _refuse_differences(items: Path, parameters: Mapping[str, _Parameter], shapes: Shapes, axis: int) -> None:
    """Refuses arrays that are missing, superfluous or of other shapes than in the config's model."""
    num_layers = Counter(place.path for parameter in parameters.values() for place in parameter.places)
    others: dict[str, None] = {}
    for path, parameter in parameters.items():
        padded = _VOCABULARY.get(path)
        for name, number in parameter.places:
            if name not in shapes:
                continue
            there = list(shapes[name])
            want = list(parameter.layer_shape)
            if number is not None:
                want.insert(axis, num_layers[name])
            if padded is not None and len(there) == 2:
                there[padded] = min(there[padded], want[padded])
            if there != want:
                others[f"{name} is {list(shapes[name])}, not {want}"] = None
    found = {
        "lacks arrays of the model": sorted(num_layers.keys() - shapes.keys()),
        "has arrays that the model has no place for": sorted(shapes.keys() - num_layers.keys()),
        "has arrays of other shapes than the Model keys say": list(others),
    }
    problems = [f"{items} {what}: {some_of(names)}." for what, names in found.items() if names]
    if problems:
        raise UserError(problems)


def _read(items: Path, above: tuple[str, ...], names: set[str]) -> dict[str, np.ndarray]:
    """Some arrays of a checkpoint, read onto the host."""
    paths = ["/".join((*above, name)) for name in sorted(names)]
    wanted = nested({path: ocp.RestoreArgs(restore_type=np.ndarray) for path in paths})
    restore = ocp.args.PyTreeRestore(item=jax.tree.map(lambda _: 0, wanted), restore_args=wanted, partial_restore=True)
    with reading(items), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(items, args=restore)
    for step in above:
        tree = tree[step]
    return flat(tree)


def _converted(x: np.ndarray, path: str, config: Config) -> np.ndarray:
    """Our float32 parameter, or a layer of it, from MaxText's array."""
    name = path.removeprefix("layers/")
    x = x.astype(np.float32)
    if name == "embedding/table":
        x = x[: config.vocab_size]
        return x / np.float32(math.sqrt(config.base_emb_dim)) if config.scale_embeddings else x
    if name == "head/projection":
        return x[:, : config.vocab_size]
    if name.endswith("/scale"):
        return x - np.float32(1) if config.normalization == "rms_norm_plus_one" else x
    scaled_there = config.qk_norm == "head" or config.attention_bias == "qkv"
    if name == "attention/query" and not scaled_there:
        x = x * np.float32(math.sqrt(config.query_pre_attn_scalar or config.head_dim))
    neighbours = config.rope_scaling is not None and config.rope_scaling.rope_type == "llama3"
    if neighbours and name.startswith(("attention/query", "attention/key")):
        x = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    return x
