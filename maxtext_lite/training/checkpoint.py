"""Checkpoints by Orbax: the state, the counts beside it, and a fingerprint of what it may be continued with."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

from maxtext_lite.config import Config, ModelConfig, RLRunConfig, RunConfig, UserError, adapted_weights
from maxtext_lite.config.hf_config import has_hf_weights
from maxtext_lite.interop import load_hf_parameters
from maxtext_lite.models import Lora, joined, merged
from maxtext_lite.parallel import sharding, with_dims
from maxtext_lite.training.local_updates import OuterState
from maxtext_lite.training.noise import NoiseScale
from maxtext_lite.training.state import TrainState

_FORMAT = 2  # 1 had no progress, noise scale or local updates
_DATA = "dataset_path"  # whose content, not whose name, a continuation must share


@dataclasses.dataclass(frozen=True)
class Counts:
    """How far a run has come; all that its data order and schedule depend on.

    Attributes:
      step: optimizer steps done, skipped ones included.
      examples_seen: examples consumed, which is where the data order goes on.
      tokens_seen: target tokens consumed.
      skipped_in_a_row: steps up to this one that were skipped for a gradient that was not finite.
      noise: what is known of the gradient noise scale.
    """

    step: int = 0
    examples_seen: int = 0
    tokens_seen: int = 0
    skipped_in_a_row: int = 0
    noise: NoiseScale = dataclasses.field(default_factory=NoiseScale)


def fingerprint(config: Config, data: str, num_replicas: int | None) -> dict[str, Any]:
    """What a run's continuation must share with it: the model, the optimizer's kind and the order of the data.

    Args:
      num_replicas: of local updates; None without.
      data: the training source's own fingerprint (content, tokenizer, length, packing, split).
    """
    keys = [key for key in ModelConfig.model_fields if key not in ("model_name", "initializer_range")]
    keys += ["weight_dtype", "optimizer", "data_shuffle_seed", "dataset_type", "tokenizer_type", "max_target_length"]
    keys += ["packing"]
    values = config.model_dump(include=set(keys))  # in what JSON can hold
    values["lora_targets"] = ",".join(adapted_weights(config))
    values["dtype is float16"] = config.dtype == "float16"  # its loss scale is part of the state
    if config.weight_dtype != "float32":  # whether there is a float32 master copy
        values["shard_optimizer_over_data"] = config.shard_optimizer_over_data
    values["diloco_num_replicas"] = num_replicas
    if num_replicas is not None:
        values["diloco_outer_momentum is 0"] = config.diloco_outer_momentum == 0
    if config.optimizer == "sgd":
        values["sgd_momentum is 0"] = config.sgd_momentum == 0
    if isinstance(config, RLRunConfig):  # with which pairs become prompts, and steps batches
        values["num_generations"], values["num_iterations"] = config.num_generations, config.num_iterations
    # A held-out text of its own leaves the whole of the training text to train on, as no evaluation does.
    values["eval_fraction"] = 0.0 if config.eval_dataset_path else config.eval_fraction
    return values | {_DATA: data}


class Checkpointer:
    """The checkpoints of one run directory, newest last. Writing is atomic: a checkpoint is whole or absent."""

    def __init__(self, run_directory: Path, config: RunConfig, fingerprint: dict[str, Any]):
        self._directory = (run_directory / "checkpoints").absolute()
        self._frozen_directory = frozen_directory(run_directory)
        self._fingerprint = fingerprint
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=config.max_num_checkpoints_to_keep,
                enable_async_checkpointing=config.async_checkpointing,
                cleanup_tmp_directories=True,
            ),
        )

    def latest_step(self) -> int | None:
        """Step of the newest whole checkpoint; None where there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, counts: Counts, unfinished: Any = None) -> None:
        """Saves the state after `counts.step` steps; with async_checkpointing, returns once it is copied.

        Frozen parameters are written with a run's first checkpoint, beside the checkpoints: they never change.

        Args:
          unfinished: a tree of arrays of a batch that more steps are to be made on; None: there is none.
        """
        if self._manager.latest_step() == counts.step:
            return
        if state.frozen is not None and self._manager.latest_step() is None:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**_handlers())) as checkpointer:
                args = ocp.args.Composite(params=ocp.args.StandardSave(state.frozen))
                checkpointer.save(self._frozen_directory, args=args, force=True)
        layer_dims = list(_layer_dims(state.plain_params))
        counted = dataclasses.asdict(counts)
        about = {"format": _FORMAT, **counted, "layer_dims": layer_dims, "fingerprint": self._fingerprint}
        parts = {
            "params": ocp.args.StandardSave(state.model_params),
            "update_state": ocp.args.StandardSave(_update_state(state)),
            "about": ocp.args.JsonSave(about),
        }
        if unfinished is not None:
            parts["unfinished"] = ocp.args.StandardSave(unfinished)
        self._manager.save(counts.step, args=ocp.args.Composite(**parts), force=True)

    def restore_unfinished(self, abstract: Any) -> Any:
        """The batch that the newest checkpoint was saved amid, a tree like `abstract` and laid out as it says.

        Raises:
          UserError: the arrays have other shapes there.
        """
        step = self._manager.latest_step()
        assert step is not None, "restore_unfinished() without a checkpoint"
        path = self._directory / str(step)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**_handlers())) as checkpointer:
            saved = checkpointer.metadata(path).item_metadata["unfinished"]
            shapes, wanted = ({name: tuple(leaf.shape) for name, leaf in tree.items()} for tree in (saved, abstract))
            if shapes != wanted:
                raise UserError(
                    f"the checkpoint of step {step} in {self._directory} was saved between two updates on one batch, "
                    f"whose arrays have the shapes {shapes}, here {wanted}. Go on with the batch_size, "
                    "micro_batch_size, grpo_beta and devices that it was saved with; after that batch they may change."
                )
            args = ocp.args.Composite(unfinished=ocp.args.StandardRestore(abstract))
            return checkpointer.restore(path, args=args)["unfinished"]

    def restore(self, abstract: TrainState) -> tuple[TrainState, Counts]:
        """The newest checkpoint, laid out as `abstract` says, whatever mesh and pipeline it was saved from.

        Raises:
          UserError: the checkpoint belongs to another model, optimizer or data order; says what differs.
        """
        step = self._manager.latest_step()
        assert step is not None, "restore() without a checkpoint"
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        if about["format"] != _FORMAT:
            raise UserError(
                f"the checkpoint of step {step} in {self._directory} has format {about['format']}; this version "
                f"reads {_FORMAT}. Use another run_name, with load_parameters_path={self._directory.parent} for "
                "its parameters."
            )
        self._refuse_other_run(step, about["fingerprint"])
        wanted = {"params": abstract.model_params, "update_state": _update_state(abstract)}
        dealing = _Dealing(_layer_dims(abstract.plain_params), tuple(about["layer_dims"]))
        # With local updates, all of the update's state has replicas before layers.
        before = {"params": 0, "update_state": int(abstract.outer is not None)}
        as_saved = {name: dealing.as_saved(tree, before[name]) for name, tree in wanted.items()}
        arguments = {name: ocp.args.StandardRestore(tree) for name, tree in as_saved.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**arguments))
        restored = {name: _reshaped(restored[name], tree) for name, tree in wanted.items()}
        counts = Counts(**{field.name: about[field.name] for field in dataclasses.fields(Counts)})
        counts = dataclasses.replace(counts, noise=NoiseScale(**about["noise"]))
        steps_done = jax.device_put(jax.numpy.asarray(step, abstract.step.dtype), abstract.step.sharding)
        state = _joined(restored["params"], restored["update_state"], steps_done)
        if abstract.frozen is not None:
            frozen = load_parameters(self._frozen_directory, abstract.frozen, "run_name")
            state = dataclasses.replace(state, frozen=frozen)
        return state, counts

    def _refuse_other_run(self, step: int, saved: dict[str, Any]) -> None:
        here = self._fingerprint
        keys = sorted(key for key in saved.keys() | here.keys() if saved.get(key) != here.get(key))
        where = f"the checkpoint of step {step} in {self._directory}"
        differing = [
            f"{key}={here.get(key)} contradicts {where}, which has {key}={saved.get(key)}. "
            f"Use {key}={saved.get(key)}, or another run_name."
            for key in keys
            if key != _DATA
        ]
        if keys == [_DATA]:  # where a key differs, the content does too
            differing = [
                f"{_DATA}: its content or its tokenizer is not that of {where}. Use the text and the tokenizer that "
                "the run began with, or another run_name."
            ]
        if differing:
            raise UserError(differing)

    def wait(self) -> None:
        """Returns once every save has been written; raises what went wrong in the background."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for saves under way and lets go of the directory."""
        self._manager.close()


def _update_state(state: TrainState) -> dict[str, Any]:
    """All of a state but the parameters that are evaluated and the number of steps, which is the checkpoint's name."""
    parts = {"opt_state": state.opt_state, "progress": state.progress}
    if state.outer is not None:
        parts["replica_params"] = state.params
        if state.outer.momentum is not None:
            parts["outer_momentum"] = state.outer.momentum
    return parts


def _joined(params: Any, parts: dict[str, Any], step: jax.Array) -> TrainState:
    """The state of which `model_params`, `_update_state` and `step` are the parts."""
    common = parts["opt_state"], parts["progress"], step
    if "replica_params" not in parts:
        return TrainState(params, *common)
    return TrainState(parts["replica_params"], *common, OuterState(params, parts.get("outer_momentum")))


def checkpoint_directory(path: str | Path, key: str) -> Path:
    """The newest checkpoint under a run directory, or the checkpoint itself.

    Raises:
      UserError: there is none; names `key`.
    """
    root = Path(path)
    if (root / "params").is_dir():
        return root.absolute()
    for parent in (root / "checkpoints", root):
        steps = [child for child in parent.glob("*") if child.name.isdigit() and (child / "params").is_dir()]
        if steps:
            return max(steps, key=lambda child: int(child.name)).absolute()
    raise UserError(f"{key}={path} is neither a run directory with a checkpoint nor a checkpoint.")


def save_parameters(directory: Path, params: Any) -> None:
    """Writes parameters alone as the one checkpoint of a run directory, in the place of one that is there already:
    `load_parameters` reads it back."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**_handlers())) as checkpointer:
        where = (directory / "checkpoints" / "0").absolute()
        checkpointer.save(where, args=ocp.args.Composite(params=ocp.args.StandardSave(params)), force=True)


def frozen_directory(run_directory: Path) -> Path:
    """Where a run with LoRA has its frozen parameters, as a checkpoint of parameters alone."""
    return (run_directory / "frozen").absolute()


def _handlers() -> dict[str, Any]:
    """What reads each part of a checkpoint: Orbax warns of parts that it does not know how to read."""
    state = ocp.StandardCheckpointHandler
    return {"params": state(), "update_state": state(), "unfinished": state(), "about": ocp.JsonCheckpointHandler()}


def load_parameters(path: str | Path, abstract_params: Any, key: str) -> Any:
    """The parameters of a checkpoint, or of a Hugging Face directory, laid out as `abstract_params` says.

    A checkpoint may have been saved from another pipeline. Those of a run with LoRA are its frozen ones with what its
    adapters add to them.

    Args:
      abstract_params: without adapters.
    Raises:
      UserError: there is no checkpoint at `path`, or its parameters have other shapes; names `key`.
    """
    if has_hf_weights(path):
        return load_hf_parameters(path, abstract_params, key)
    directory = checkpoint_directory(path, key)
    mesh = jax.tree.leaves(abstract_params)[0].sharding.mesh
    found = load_adapters(directory, mesh)
    if found is None:
        return _read_parameters(directory, path, abstract_params, key)
    lora, adapters = found
    frozen = frozen_directory(directory.parent.parent)
    if not (frozen / "params").is_dir():
        raise UserError(
            f"{key}={path} holds the adapters of a run with lora_rank={lora.rank}, without {frozen}, where that run "
            "had the parameters that they belong to. Keep the two together."
        )
    params = _read_parameters(frozen, path, abstract_params, key)
    layer_dims = _layer_dims(params)
    adapters = _with_layer_dims(adapters, (math.prod(layer_dims),), layer_dims)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    merge = jax.jit(
        lambda params, adapters: merged(joined(lora, adapters, params)), donate_argnums=0, out_shardings=shardings
    )
    return merge(params, adapters)


def load_adapters(directory: Path, mesh: Mesh) -> tuple[Lora, Any] | None:
    """The adapters that a checkpoint holds, whole on every device, leaves of layers [L, ...]; None if it holds none."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**_handlers())) as checkpointer:
        if not (directory / "about").is_dir():
            return None
        about = checkpointer.restore(directory, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        keys = about["fingerprint"]
        if not keys.get("lora_rank"):
            return None
        whole = sharding(mesh)
        wanted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
            dict(checkpointer.metadata(directory).item_metadata["params"]),
        )
        restored = checkpointer.restore(directory, args=ocp.args.Composite(params=ocp.args.StandardRestore(wanted)))
    adapters = _with_layer_dims(restored["params"], tuple(about["layer_dims"]), (-1,))
    return Lora(keys["lora_rank"], keys["lora_alpha"], tuple(keys["lora_targets"].split(","))), adapters


def _with_layer_dims(params: Any, before: tuple[int, ...], after: tuple[int, ...]) -> Any:
    """Parameters whose layers' first dims, `before`, are `after`."""
    layers = jax.tree.map(lambda x: x.reshape(*after, *x.shape[len(before) :]), params.get("layers", {}))
    return params | ({"layers": layers} if layers else {})


def _read_parameters(directory: Path, path: str | Path, abstract_params: Any, key: str) -> Any:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**_handlers())) as checkpointer:
        saved = checkpointer.metadata(directory).item_metadata["params"]
        dealing = _Dealing(_layer_dims(abstract_params), _layer_dims(saved))
        as_saved = dealing.as_saved(abstract_params)
        problems = _shape_differences(saved, as_saved)
        if problems:
            raise UserError([f"{key}={path}: {problem}" for problem in problems])
        wanted = ocp.args.Composite(params=ocp.args.StandardRestore(as_saved))
        return _reshaped(checkpointer.restore(directory, args=wanted)["params"], abstract_params)


class _Dealing(NamedTuple):
    """The first dims of layers' parameters, [L] or [repeats, L / repeats], here and in a checkpoint."""

    here: tuple[int, ...]
    saved: tuple[int, ...]

    def as_saved(self, abstract: Any, before: int = 0) -> Any:
        """A tree of shapes and shardings with the layers dealt as in the checkpoint.

        Args:
          before: dims that stand before those of the layers.
        """
        if self.here == self.saved or math.prod(self.here) != math.prod(self.saved):
            return abstract
        end = before + len(self.here)

        def change(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            in_layers = any(isinstance(entry, jax.tree_util.DictKey) and entry.key == "layers" for entry in path)
            if not in_layers or leaf.shape[before:end] != self.here:
                return leaf
            assert isinstance(leaf.sharding, NamedSharding)
            # The dim that stages split need not divide there.
            where = with_dims(leaf.sharding, leaf.ndim, before, end, len(self.saved))
            shape = (*leaf.shape[:before], *self.saved, *leaf.shape[end:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

        return jax.tree_util.tree_map_with_path(change, abstract)


def _layer_dims(params: Any) -> tuple[int, ...]:
    """The first dims of the layers' parameters: all but the last of the norms' scales, which are vectors."""
    return min((tuple(leaf.shape) for leaf in jax.tree.leaves(params["layers"])), key=len)[:-1]


def _reshaped(tree: Any, abstract: Any) -> Any:
    """The arrays in the shapes and shardings of `abstract`; those that have them are not touched."""

    def change(x: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        if x.shape == wanted.shape:
            return x
        return jax.jit(lambda x: x.reshape(wanted.shape), out_shardings=wanted.sharding)(x)

    return jax.tree.map(change, tree, abstract)


def _shape_differences(saved: Any, wanted: Any) -> list[str]:
    saved_shapes = {
        jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(saved)
    }
    wanted_shapes = {
        jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)
    }
    return [
        f"parameter {name} is {saved_shapes.get(name, 'absent')} there and {wanted_shapes.get(name, 'absent')} here."
        for name in sorted(saved_shapes.keys() | wanted_shapes.keys())
        if saved_shapes.get(name) != wanted_shapes.get(name)
    ]
