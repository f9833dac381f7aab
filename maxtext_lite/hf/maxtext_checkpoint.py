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
from maxtext_lite.hf.names import flat
from maxtext_lite.parallel import Params
from maxtext_lite.training.saving import reading

_EXPRESSED: Mapping[str, tuple[object, ...]] = {
    "normalization": ("rms_norm", "rms_norm_plus_one"), "norm_placement": ("pre", "both"), "gated_mlp": (True,),
    "mlp_bias": (False,), "attention_bias": ("none", "qkv"), "qk_norm": ("none", "head"), "num_experts": (1,),
    "attention_sinks": (False,), "mla": (None,), "trainable_position_size": (0,), "partial_rotary_factor": (1.0,),
    "parallel_block": ("none",), "residual_multiplier": (1.0,), "embedding_multiplier": (1.0,),
    "logits_multiplier": (1.0,), "clip_qkv": (0.0,), "inverse_layer_scaling": (False,), "position_temperature": (None,),
}  # fmt: skip
_ROOT = {
    "embedding/table": "token_embedder/embedding",
    "final_norm/scale": "decoder/decoder_norm/scale",
    "head/projection": "decoder/logits_dense/kernel",
}
_VOCABULARY = {"embedding/table": 0, "head/projection": 1}  # the dim that MaxText may have padded
_LAYER = {
    "attention/query": ("self_attention/query/kernel",),
    "attention/key": ("self_attention/key/kernel",),
    "attention/value": ("self_attention/value/kernel",),
    "attention/out": ("self_attention/out/kernel",),
    "attention/query_bias": ("self_attention/query/bias",),
    "attention/key_bias": ("self_attention/key/bias",),
    "attention/value_bias": ("self_attention/value/bias",),
    "attention/query_norm/scale": ("self_attention/query_norm/scale",),
    "attention/key_norm/scale": ("self_attention/key_norm/scale",),
    "attention_norm/scale": ("pre_self_attention_layer_norm/scale", "pre_self_attention_norm/scale"),
    "attention_post_norm/scale": ("post_self_attention_norm/scale",),
    "mlp_norm/scale": ("post_self_attention_layer_norm/scale", "pre_ffw_norm/scale"),
    "mlp_post_norm/scale": ("post_ffw_norm/scale",),
    "mlp/gate": ("mlp/wi_0/kernel",),
    "mlp/up": ("mlp/wi_1/kernel",),
    "mlp/down": ("mlp/wo/kernel",),
}
_GEMMA3_PERIOD = 6  # layers that are scanned together; the remainder is not scanned


class _Place(NamedTuple):
    """The place of a layer's array.

    Attributes:
      number: index along the scanned dim; None: the array is not scanned.
    """

    path: str
    number: int | None


def maxtext_items(source: Path) -> Path | None:
    """The newest MaxText parameters in a directory of checkpoints, or those of one checkpoint; None without any."""
    for parent in (source / "checkpoints", source):
        for step in reversed(steps_in(parent)):
            if (parent / str(step) / "items" / "_METADATA").is_file():
                return parent / str(step) / "items"
    return next((root for root in (source / "items", source) if (root / "_METADATA").is_file()), None)


def maxtext_dtype(items: Path) -> str:
    """ "bfloat16" if all parameters are stored in it, otherwise "float32"."""
    stored = {str(leaf.dtype) for leaf in _stored(items)[1].values()}
    return "bfloat16" if stored == {"bfloat16"} else "float32"


def _stored(items: Path) -> tuple[tuple[str, ...], dict[str, Any]]:
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
    wanted = flat(abstract_params)
    places = {path: list(_places(path, config, stored)) for path in wanted}
    axis = _scan_axis(places, stored, wanted)
    _refuse_differences(items, places, stored, wanted, axis)
    loaded: dict[str, jax.Array] = {}
    for path, leaf in wanted.items():
        arrays = _read(items, above, {place.path for place in places[path]})
        layers: list[np.ndarray] = []
        for name, number in places[path]:
            layer = arrays[name] if number is None else np.take(arrays[name], number, axis)
            layers.append(_converted(layer, path, config))
        whole = (layers[0] if path in _ROOT else np.stack(layers)).astype(leaf.dtype)
        if not np.isfinite(whole.astype(np.float32)).all():
            raise UserError(f"{items}: {places[path][0].path} holds NaN or infinite numbers.")
        assert leaf.sharding is not None
        loaded[path] = jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index, x=whole: x[index])
    return jax.tree.unflatten(jax.tree.structure(abstract_params), [loaded[path] for path in wanted])


def _refuse_keys(config: Config) -> None:
    problems = [
        f"{key}={value_text(getattr(config, key))} is not of a MaxText model that is read: it must be "
        f"{any_of([value_text(value) for value in values])}."
        for key, values in _EXPRESSED.items()
        if getattr(config, key) not in values
    ]
    if any(kind not in ("global", "local") for kind in config.pattern):
        pattern = value_text(config.layer_pattern)
        problems.append(f"layer_pattern={pattern} is not of a MaxText model that is read: it must be global or local.")
    kind = None if config.rope_scaling is None else config.rope_scaling.rope_type
    if kind not in (None, "llama3", "linear"):
        problems.append(f"rope_scaling={kind} is not of a MaxText model that is read: it must be llama3 or linear.")
    if problems:
        raise UserError(problems)


def _places(path: str, config: Config, stored: Mapping[str, Any]) -> Iterator[_Place]:
    """The places of a parameter's layers; for a missing array, its place without scanned layers."""
    if path in _ROOT:
        yield _Place(_ROOT[path], None)
        return
    names = _LAYER.get(path.removeprefix("layers/"), ())
    num_layers = config.base_num_decoder_layers
    for layer, kind in enumerate(config.layer_kinds):
        tried = [place for name in names for place in _ways(name, layer, num_layers, kind)]
        yield next((place for place in tried if place.path in stored), tried[0] if tried else _Place(path, None))


def _ways(name: str, layer: int, num_layers: int, kind: str) -> Iterator[_Place]:
    """The possible places of a layer's array: unscanned, scanned, and as Gemma 2 and 3 scan layers of several kinds."""
    module, _, rest = name.partition("/")
    of_kind = f"{module}_{kind}/{rest}"
    pair = layer // 2
    period, number = divmod(layer, _GEMMA3_PERIOD)
    yield _Place(f"decoder/layers_{layer}/{name}", None)
    yield _Place(f"decoder/layers/{name}", layer)
    yield _Place(f"decoder/layers_{pair}/{of_kind}", None)
    yield _Place(f"decoder/layers/{of_kind}", pair)
    if period < num_layers // _GEMMA3_PERIOD:
        yield _Place(f"decoder/layers/layers_{number}/{name}", period)
    else:
        yield _Place(f"decoder/layers_remainder/layers_{number}/{name}", None)


def _scan_axis(places: Mapping[str, list[_Place]], stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> int:
    """param_scan_axis: the axis that the shapes of all scanned arrays allow; the usual 1 if both are possible."""
    allowed = {1, 0}
    for path, of_path in places.items():
        for name, number in of_path:
            if number is not None and name in stored:
                shape = tuple(stored[name].shape)
                allowed &= {axis for axis in (1, 0) if shape[:axis] + shape[axis + 1 :] == wanted[path].shape[1:]}
    return max(allowed, default=1)


def _refuse_differences(
    items: Path, places: Mapping[str, list[_Place]], stored: Mapping[str, Any], wanted: Mapping[str, Any], axis: int
) -> None:
    """Refuses arrays that are missing, superfluous or of other shapes than in the config's model."""
    num_layers = Counter(place.path for of_path in places.values() for place in of_path)
    shapes: dict[str, None] = {}
    for path, of_path in places.items():
        layer = list(wanted[path].shape[0 if path in _ROOT else 1 :])
        for name, number in of_path:
            if name not in stored:
                continue
            there = list(stored[name].shape)
            want = layer if number is None else [*layer[:axis], num_layers[name], *layer[axis:]]
            padded = _VOCABULARY.get(path)
            if padded is not None and len(there) == 2 and there[padded] > want[padded]:
                there[padded] = want[padded]
            if there != want:
                shapes[f"{name} is {list(stored[name].shape)}, not {want}"] = None
    problems: list[str] = []
    for found, what in (
        (sorted(num_layers.keys() - stored.keys()), "lacks arrays of the model"),
        (sorted(stored.keys() - num_layers.keys()), "has arrays that the model has no place for"),
        (list(shapes), "has arrays of other shapes than the Model keys say"),
    ):
        if found:
            more = f", and {len(found) - 5} more" if len(found) > 5 else ""
            problems.append(f"{items} {what}: {', '.join(map(value_text, found[:5]))}{more}.")
    if problems:
        raise UserError(problems)


def _read(items: Path, above: tuple[str, ...], names: set[str]) -> dict[str, np.ndarray]:
    """Some arrays of a checkpoint, read onto the host."""
    wanted: dict[str, Any] = {}
    for name in sorted(names):
        parent = wanted
        *steps, last = (*above, *name.split("/"))
        for step in steps:
            parent = parent.setdefault(step, {})
        parent[last] = ocp.RestoreArgs(restore_type=np.ndarray)
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
