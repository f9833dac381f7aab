"""Collectives are read from what XLA compiles: kind, axes, times and bytes are those of a program written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.analysis.hlo import collectives, device_groups
from maxtext_lite.parallel import MESH_AXES, make_mesh

TRIPS = 5


def every_kind(x):
    """On each device, of x [8, 16] float32: 512 bytes."""
    looped, _ = jax.lax.scan(
        lambda carry, _: (jnp.sin(jax.lax.psum(carry, "tensor")), None),
        x,
        None,
        length=TRIPS,
    )
    return (
        looped,
        jax.lax.all_gather(x, "data"),
        jax.lax.psum_scatter(x + 1, "tensor", tiled=True),
        jax.lax.all_to_all(x + 2, "data", 0, 1, tiled=True),
        jax.lax.ppermute(x + 3, "tensor", [(0, 1), (1, 0)]),
        jax.lax.psum(x + 4, ("data", "tensor")),
    )


def test_a_program_written_by_hand_has_the_collectives_it_should():
    """On a mesh whose devices are not in the order of their numbers."""
    ones = dict.fromkeys(MESH_AXES, 1)
    mesh = make_mesh(ones | {"data": 2, "fsdp": 2}, ones | {"tensor": 2})
    everywhere = jax.P(mesh.axis_names)
    mapped = jax.shard_map(
        every_kind,
        mesh=mesh,
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    text = (
        jax.jit(mapped)
        .lower(jax.ShapeDtypeStruct((64, 16), "float32"))
        .compile()
        .as_text()
    )
    found = {
        (c.kind, c.axes(mesh), c.times, c.in_loop): c.payload_bytes
        for c in collectives(text)
    }
    whole = 8 * 16 * 4
    scattered = found.pop(
        ("reduce-scatter", ("tensor",), 1, False), None
    )  # or written as a sum
    assert (scattered or found.pop(("all-reduce", ("tensor",), 1, False))) == whole
    assert found == {
        ("all-reduce", ("tensor",), TRIPS, True): whole,
        ("all-gather", ("data",), 1, False): 2 * whole,
        ("all-to-all", ("data",), 1, False): whole,
        ("collective-permute", ("tensor",), 1, False): whole,
        ("all-reduce", ("data", "tensor"), 1, False): whole,
    }


# What accelerators write: pairs of start and done, arrays laid out in tiles, trips that stand in the condition only,
# and between TPU slices a send for each collective.
ACCELERATOR = """HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%condition (p: (s32[], bf16[8,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  %p = (s32[], bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%part (p: bf16[8,128]) -> bf16[16,128] {
  %p = bf16[8,128] parameter(0)
  ROOT %all-gather.9 = bf16[16,128]{1,0} all-gather(%p), channel_id=3, replica_groups={{0,2},{1,3}}, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
}

%all-reduce-scatter (p: f32[4,8]) -> f32[2,8] {
  %p = f32[4,8] parameter(0)
  %all-reduce.10 = f32[4,8]{1,0} all-reduce(%p), channel_id=10, replica_groups={{0,2},{1,3}}, to_apply=%add
  %own = u32[] constant(0)
  ROOT %slice = f32[2,8]{1,0} dynamic-slice(%all-reduce.10, %own, %own), dynamic_slice_sizes={2,8}
}

%body (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %p = (s32[], bf16[8,128]) parameter(0)
  %x = bf16[8,128] get-tuple-element(%p), index=1
  %kernel.1 = f32[8] custom-call(%x), backend_config={"text":{
"lines of their own": {"closed": "so"
}}, metadata={}
  %fusion.1 = bf16[16,128] fusion(%x), kind=kOutput, calls=%part
  %all-gather.8 = bf16[16,128]{1,0} all-gather(%x), channel_id=3, replica_groups={{0,2},{1,3}}, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  %i = s32[] get-tuple-element(%p), index=0
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i, %two)
  ROOT %t = (s32[], bf16[8,128]) tuple(%next, /*index=1*/%x)
}

ENTRY %main (x: bf16[8,128], y: f32[4,8]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %y = f32[4,8]{1,0} parameter(1)
  %while.1 = (s32[], bf16[8,128]) while(%x), condition=%condition, body=%body
  %ags = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%y), channel_id=4, replica_groups=[2,2]<=[4], dimensions={0}
  %agd = f32[8,8]{1,0} all-gather-done(%ags)
  %cps = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(%y), source_target_pairs={{0,1},{1,0}}
  %cpd = f32[4,8]{1,0} collective-permute-done(%cps)
  %rs = f32[2,8]{1,0} reduce-scatter(%y), channel_id=6, replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add
  %fusion.2 = f32[2,8]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter
  %all-reduce.7 = (f32[4,8]{1,0}, /*index=1*/f32[]) all-reduce(%y, %z), channel_id=7, replica_groups={}, to_apply=%add
  %alone = f32[4,8]{1,0} all-reduce(%y), channel_id=8, replica_groups={{0},{1},{2},{3}}, to_apply=%add
  %send.1 = (f32[20,8,128]{2,1,0:T(8,128)}, u32[], token[]) send(%y, %k), channel_id=9, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %r = bf16[8,128] get-tuple-element(%while.1), index=1
}
"""


class FakeDevice:
    """A device of one of two slices."""

    def __init__(self, number):
        self.id, self.slice_index = number, number // 4


class FakeMesh:
    """Two slices of fsdp 2 x tensor 2, data across them."""

    axis_names = ("data", "fsdp", "tensor")
    size = 8
    devices = np.array([FakeDevice(number) for number in range(8)]).reshape(2, 2, 2)


def test_what_accelerators_write_is_read_too():
    found = [
        (c.kind, c.axes(FakeMesh()), c.times, c.payload_bytes)
        for c in collectives(ACCELERATOR)
    ]
    assert found == [
        ("all-gather", ("fsdp",), 6, 16 * 128 * 2),  # written twice, on one channel
        ("reduce-scatter", ("fsdp",), 1, 4 * 8 * 4),  # written as a part of a sum
        ("all-gather", ("tensor",), 1, 8 * 8 * 4),
        ("collective-permute", ("tensor",), 1, 4 * 8 * 4),
        ("reduce-scatter", ("tensor",), 1, 4 * 8 * 4),
        ("all-reduce", ("fsdp", "tensor"), 1, 4 * 8 * 4 + 4),
        ("all-reduce", ("data",), 1, 20 * 8 * 128 * 4),
    ]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        (
            "mesh['data'=2,'fsdp'=1,'tensor'=4] {'data','fsdp'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        (
            "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        ("mesh['data'=8] {'data':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
@pytest.mark.fast
def test_groups_are_read_in_every_notation(text, groups):
    assert device_groups(text) == groups
