"""The mesh of devices, the axes over which arrays are laid out, and the collectives over them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from maxtext_lite.batching.topology import MESH_AXES, mesh_key
from maxtext_lite.config import UserError
from maxtext_lite.config.weights import MESH_AXES_OF_WEIGHTS


def make_mesh(ici: Mapping[str, int], dcn: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (default: all), with axis sizes `ici[axis] * dcn[axis]`.

    Every axis is Auto: the compiler propagates shardings from the parameters and the batch.

    Args:
      ici: size of each axis of MESH_AXES within a slice (fast links).
      dcn: size of each axis across slices (slow links); all 1 for one slice.
    Raises:
      ValueError: the sizes do not multiply to the number of devices.
      UserError: the devices are TPU slices whose number is not the product of the `dcn` sizes.
    """
    grid = device_grid(ici, dcn, jax.devices() if devices is None else devices)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def device_grid(ici: Mapping[str, int], dcn: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """The devices as an array with a dim for each axis, `dcn` outside `ici`.

    If the number of slices (TPU slices; GPU hosts or NVLink domains) is the product of the `dcn` sizes, jax arranges
    each by its links. Otherwise devices are split into that many equal parts in the order of slice, process and number.
    """
    devices = list(devices)
    ici_shape = [ici[axis] for axis in MESH_AXES]
    dcn_shape = [dcn[axis] for axis in MESH_AXES]
    num_parts = int(np.prod(dcn_shape))
    if int(np.prod(ici_shape)) * num_parts != len(devices):
        raise ValueError(f"a mesh of {dict(ici)} x {dict(dcn)} does not cover {len(devices)} devices")
    slices = {device.slice_index for device in devices if getattr(device, "slice_index", None) is not None}
    if devices[0].platform == "tpu" and num_parts != max(len(slices), 1):
        there = max(len(slices), 1)
        axes = [axis for axis in MESH_AXES if dcn[axis] > 1] or ["data"]
        stated = " x ".join(f"{mesh_key('dcn', axis)}={dcn[axis]}" for axis in axes)
        raise UserError(
            f"{stated} asks for {num_parts} TPU slices, but there are {there}. "
            f"Nearest that works: dcn_data_parallelism={there} alone."
        )
    if num_parts == 1:
        return mesh_utils.create_device_mesh(ici_shape, devices, allow_split_physical_axes=True)
    if num_parts == len(slices):
        return mesh_utils.create_hybrid_device_mesh(ici_shape, dcn_shape, devices, allow_split_physical_axes=True)
    devices.sort(
        key=lambda device: (
            getattr(device, "slice_index", None) or 0,
            device.process_index,
            device.id,
        )
    )
    parts = np.asarray(devices).reshape(dcn_shape + ici_shape)
    order = np.arange(parts.ndim).reshape(2, -1).T.ravel()  # each axis of dcn before the same axis of ici
    return parts.transpose(order).reshape([i * d for i, d in zip(ici_shape, dcn_shape, strict=True)])


Tree: TypeAlias = Any
"""A pytree of arrays, shapes, shardings or logical axes, depending on the context."""

TreePath: TypeAlias = tuple[Any, ...]
"""The keys from the root of a tree to a leaf."""

Params: TypeAlias = dict[str, Any]
"""A nested dict of the decoder's parameters, of their shapes, shardings or gradients, or the trained part of it. Every
leaf under "layers" has a leading L, or [repeats, L / repeats] in a pipeline with several rounds. In a model with
experts, first layers without them are in "dense_layers"; if layers with and without experts alternate, "layers" has
them as "moe" and "dense". With LoRA, a weight with adapters is an `Adapted`."""

LogicalAxes = Sequence[str | None]
"""The name of each dim of an array; None: not sharded; AS_IT_IS: left to the compiler."""

AS_IT_IS = "as it is"

MESH_AXES_OF: dict[str, tuple[str, ...]] = {
    **MESH_AXES_OF_WEIGHTS,
    # Batch and activations. Inside `vmap_over_data` the replica dim is mapped away, and a batch is one replica's rows.
    "accumulation": (),
    "global_batch": ("data", "fsdp", "expert"),
    "replica": ("data",),
    "batch": ("fsdp", "expert"),
    # Looked-up tokens move from the parts of `embed` to their own devices along one mesh axis after the other.
    "looked_up_batch": ("fsdp",),
    "embed_without_fsdp": ("expert", "context"),
    "embed_of_expert": ("expert",),
    "end_batch": (
        "fsdp",
        "expert",
        "stage",
    ),  # outside the layers, where pipeline stages share the rows
    "token_shards": (
        "fsdp",
        "expert",
        "stage",
        "context",
    ),  # sums over each device's own tokens outside the layers
    "stages": ("stage",),
    "length": ("context",),
    "residual_length": (
        "context",
        "tensor",
    ),  # between blocks, where tokens are independent
    "activation_embed": (),
    "activation_heads": ("tensor",),
    "activation_mlp": ("tensor",),
    "routed_rows": (
        "fsdp",
        "expert",
        "context",
    ),  # each device's results for the tokens sent to its experts
    "exchanged_batch": ("fsdp",),  # rows of tokens that were sent to the devices of their experts
    "activation_vocab": ("tensor",),
}
"""The sharding rules: the mesh axes over which each logical axis is split."""


UNEVEN = {"residual_length": "length"}
"""The axis that replaces an activation's axis with unequal parts: in decoding, which has one token."""


def partition_spec(axes: LogicalAxes) -> PartitionSpec:
    """The PartitionSpec of an array whose dims have these logical axes.

    Raises:
      ValueError: an axis is not in MESH_AXES_OF, or two dims would be split over the same mesh axis.
    """
    used: dict[str, str] = {}
    entries: list[Any] = []
    for axis in axes:
        if axis is None or axis == AS_IT_IS:
            entries.append(None if axis is None else PartitionSpec.UNCONSTRAINED)
            continue
        if axis not in MESH_AXES_OF:
            raise ValueError(f"unknown logical axis {axis!r}; known: {', '.join(MESH_AXES_OF)}")
        for mesh_axis in MESH_AXES_OF[axis]:
            if mesh_axis in used:
                raise ValueError(f"mesh axis {mesh_axis!r} is used twice, by {used[mesh_axis]!r} and {axis!r}")
            used[mesh_axis] = axis
        entries.append(MESH_AXES_OF[axis])
    return PartitionSpec(*entries)


def sharding(mesh: Mesh | AbstractMesh, axes: LogicalAxes = ()) -> NamedSharding:
    """The sharding of an array with these logical axes; without axes, a copy on every device."""
    return NamedSharding(mesh, partition_spec(axes))


def tree_shardings(mesh: Mesh, axes_tree: Tree) -> Tree:
    """`sharding` for each leaf of a tree whose leaves are tuples of logical axes."""
    return jax.tree.map(
        lambda axes: sharding(mesh, axes),
        axes_tree,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def constrain(x: Array, axes: LogicalAxes) -> Array:
    """`x` laid out by its logical axes over the mesh in use (`jax.set_mesh`); `x` itself without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    even = [
        UNEVEN[axis] if axis in UNEVEN and size % num_shards(axis) else axis
        for axis, size in zip(axes, x.shape, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, partition_spec(even))


def axes_in_use(axes: LogicalAxes) -> tuple[str | None, ...]:
    """The logical axes of a weight in use: not split over `fsdp`, whose shards only store it."""
    return tuple(None if axis is not None and "fsdp" in MESH_AXES_OF[axis] else axis for axis in axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather_for_compute(x: Array, used_as: LogicalAxes, lies_as: LogicalAxes) -> Array:
    """`x` laid out by `used_as`, and its gradient by `lies_as`; both are tuples.

    A constraint is its own transpose. By itself it would make each device sum the gradient of the whole weight, where
    the device needs only its own shard.
    """
    del lies_as
    return constrain(x, used_as)


all_gather_for_compute.defvjp(
    lambda x, used_as, lies_as: (constrain(x, used_as), None),
    lambda used_as, lies_as, _, g: (constrain(g, lies_as),),
)


def num_shards(axis: str) -> int:
    """The parts into which the mesh in use (`jax.set_mesh`) splits a logical axis; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[mesh_axis] for mesh_axis in MESH_AXES_OF[axis])


def over_stages(function: Callable[..., Any], *, in_axes: Any = 0) -> Callable[..., Any]:
    """`function` run once per pipeline stage, each on its own part of the arguments; results have a leading dim P."""
    (stage,) = MESH_AXES_OF["stages"]
    return jax.vmap(function, in_axes=in_axes, spmd_axis_name=stage)


def over_experts(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` run once per expert, each on its own part of the arguments; results have a leading dim E."""
    (expert,) = MESH_AXES_OF["experts"]
    return jax.vmap(function, spmd_axis_name=expert)


def over_shards(
    function: Callable[..., Any],
    in_axes: Sequence[Any],
    out_axes: tuple[str | None, ...] | list[tuple[str | None, ...]],
) -> Any:
    """`function` run by each device on its own part of each argument, for kernels that the partitioner cannot split.

    Every mesh axis is manual, so it also works inside `vmap_over_data`. Without a mesh it is `function` itself.

    Args:
      in_axes: logical axes of each argument; or a tree of PartitionSpecs from a kernel that splits its own arrays.
      out_axes: logical axes of the result; a list for a tuple of several results.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return function
    return jax.shard_map(
        function,
        in_specs=tuple(partition_spec(axes) if isinstance(axes, tuple) else axes for axes in in_axes),
        out_specs=tuple(map(partition_spec, out_axes)) if isinstance(out_axes, list) else partition_spec(out_axes),
        check_vma=False,
    )


def per_replica(where: NamedSharding) -> NamedSharding:
    """The sharding of an array [R, ...] that stacks one array per replica, each on its part of `data`."""
    (data,) = MESH_AXES_OF["replica"]
    return NamedSharding(where.mesh, PartitionSpec(data, *where.spec))


def names_in(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def zero1_sharding(where: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """`where` with its first divisible dim also split over the data axis; `where` itself if none is."""
    (data,) = MESH_AXES_OF["replica"]
    spec = [*where.spec, *[None] * (len(shape) - len(where.spec))]
    for dim, axes in enumerate(map(names_in, spec)):
        parts = math.prod(where.mesh.shape[axis] for axis in (*axes, data))
        if shape[dim] % parts == 0:
            spec[dim] = (*axes, data)
            return NamedSharding(where.mesh, PartitionSpec(*spec))
    return where


def with_dims(where: NamedSharding, rank: int, first: int, end: int, count: int) -> NamedSharding:
    """The sharding of an array of that rank after `count` dims that are not split replace dims first..end."""
    spec = [*where.spec, *[None] * (rank - len(where.spec))]
    spec[first:end] = [None] * count
    return NamedSharding(where.mesh, PartitionSpec(*spec))


def over_all_devices(mesh: Mesh, dim: int = 0) -> NamedSharding:
    """The sharding of an array whose `dim` is split over all devices of the mesh, in its order."""
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, mesh.axis_names))


def vmap_over_data(
    function: Callable[..., Any],
    num_replicas: int,
    *,
    own: Sequence[int] = (),
    rows: Sequence[int] = (),
) -> Callable[..., Any]:
    """Runs `function` once per replica of the `data` axis, on its own rows; results have a leading dim R.

    `num_replicas` is a multiple of the axis. Gradients with respect to a shared argument stay separate, one set per
    replica, until the caller sums them: that sum is the only reduction over `data`.

    Args:
      own: positions of the arguments that already have a leading dim R, one entry for each replica.
      rows: positions of the arguments with dims [B, ...], which become [R, B/R, ...].
    """
    axes = MESH_AXES_OF["replica"][0]

    def split(x: Array) -> Array:
        x = x.reshape(num_replicas, x.shape[0] // num_replicas, *x.shape[1:])
        return constrain(x, ("replica", "batch") + (AS_IT_IS,) * (x.ndim - 2))

    def mapped(*arguments: Any) -> Any:
        split_up = [jax.tree.map(split, x) if at in rows else x for at, x in enumerate(arguments)]
        in_axes = [0 if at in rows or at in own else None for at in range(len(arguments))]
        return jax.vmap(function, in_axes=in_axes, spmd_axis_name=axes)(*split_up)

    return mapped


def gathered(x: Array, axis: str, dim: int) -> Array:
    """The parts of all devices along a logical axis, concatenated along `dim`."""
    names = _split_over(axis)
    return jax.lax.all_gather(x, names, axis=dim, tiled=True) if names else x


def exchanged(x: Array, axis: str) -> Array:
    """An all-to-all along a logical axis: the first device receives the first parts of all, in their order."""
    names = _split_over(axis)
    return _exchanged(x, names) if names else x


def scattered_sum(x: Array, axis: str, dim: int) -> Array:
    """This device's part, along `dim`, of the float32 sum over all devices along a logical axis.

    Parts cross in the dtype of x and are added here, because on 16 or more TPU chips XLA turns a reduce-scatter into an
    all-reduce, of twice the bytes.
    """
    names = _split_over(axis)
    if not names:
        return x
    # The parts become a dim of their own, the first: TPUs copy whole tiles for that, whereas moving `dim` itself to the
    # front would take tiles apart.
    count = jax.lax.axis_size(names)
    shape = (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    parts = _exchanged(jnp.moveaxis(x.reshape(shape), dim, 0), names)
    # One at a time: a sum over the dim of parts reads them several times slower on TPUs.
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))


def largest(x: Array, axis: str) -> Array:
    """The maximum over all devices along a logical axis."""
    names = _split_over(axis)
    return jax.lax.pmax(x, names) if names else x


def summed(x: Array, axis: str) -> Array:
    """The sum over all devices along a logical axis."""
    names = _split_over(axis)
    return jax.lax.psum(x, names) if names else x


def shard_index(axis: str) -> Array:
    """Number of this device's part of a logical axis, int32."""
    names = _split_over(axis)
    return jax.lax.axis_index(names) if names else jnp.zeros([], jnp.int32)


def _split_over(axis: str) -> tuple[str, ...]:
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else tuple(name for name in MESH_AXES_OF[axis] if mesh.shape[name] > 1)


def _exchanged(x: Array, names: tuple[str, ...]) -> Array:
    """`exchanged` along mesh axes.

    TPUs lay the first dim out outermost for it. Dims of size 1, such as that of a device's only replica under `vmap`,
    would follow it and be padded to a tile, in whole copies that take longer than the exchange. Such dims are dropped.
    """

    @custom_vmap
    def exchange(x: Array) -> Array:
        return jax.lax.all_to_all(x, names, 0, 0, tiled=True)

    @exchange.def_vmap
    def of_sets(num_sets: int, is_mapped: list[bool], x: Array) -> tuple[Array, bool]:
        del num_sets, is_mapped
        if len(x) == 1:
            return exchange(x[0])[None], True
        return jax.lax.all_to_all(x, names, 1, 1, tiled=True), True

    return exchange(x.reshape(len(x), *(size for size in x.shape[1:] if size > 1))).reshape(x.shape)
