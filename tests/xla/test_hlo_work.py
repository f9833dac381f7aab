"""ProgramWork is counted right: programs whose FLOPs are known, and texts as accelerators write them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.analysis.hlo import KernelCalls, parse, work

TRIPS = 5
ONE = 2 * 8 * 16 * 16  # of [8, 16] times [16, 16]


def counted(function, *shapes, **options):
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return work(
        parse(jax.jit(function).lower(*arguments).compile().as_text(), **options)
    )


def test_a_matmul_in_a_loop_counts_once_for_each_trip_and_loops_multiply():
    def inner(x, w):
        return jax.lax.scan(
            lambda carry, _: (jnp.tanh(carry @ w), None), x, None, length=TRIPS
        )[0]

    def outer(x, w):
        return jax.lax.scan(
            lambda carry, _: (inner(carry, w), None), x @ w, None, length=3
        )[0]

    assert counted(outer, (8, 16), (16, 16)).matmul_flops == {
        "f32": (1 + 3 * TRIPS) * ONE
    }


def test_a_convolution_counts_products_with_elements_only():
    options = {
        "window_strides": (2,),
        "padding": [(3, 2)],
        "lhs_dilation": (6,),
        "rhs_dilation": (5,),
    }

    # Of ones, the result says how many products each of its elements is made of.
    def convolution(x, w):
        return jax.lax.conv_general_dilated(
            x, w, dimension_numbers=("NWC", "WIO", "NWC"), **options
        )

    x, w = np.ones((2, 11, 3), np.float32), np.ones((4, 3, 5), np.float32)
    compiled = jax.jit(convolution).lower(x, w).compile()
    assert " convolution(" in compiled.as_text()
    assert work(parse(compiled.as_text())).matmul_flops == {
        "f32": 2 * float(np.sum(compiled(x, w)))
    }


# A TPU's text: a batched matmul as a convolution with the batch as a spatial dim, kernels, two memories, slices.
TPU = """HloModule jit_step, is_scheduled=true

%sliced (p.0: f32[10,64,64], p.1: s32[], p.2: f32[10,64]) -> (f32[64,64], f32[10,64]) {
  %p.0 = f32[10,64,64]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %p.2 = f32[10,64]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %same = f32[10,64,64]{2,1,0} bitcast(%p.0)
  %slice = f32[1,64,64]{2,1,0} dynamic-slice(%same, %p.1, %zero, %zero), dynamic_slice_sizes={1,64,64}
  %layer = f32[64,64]{1,0} bitcast(%slice)
  %row = f32[1,64]{1,0} broadcast(%zero), dimensions={}
  %stacked = f32[10,64]{1,0} dynamic-update-slice(%p.2, %row, %p.1, %zero)
  ROOT %both = (f32[64,64], f32[10,64]) tuple(%layer, %stacked)
}

%body (p: (s32[], bf16[4,8,16])) -> (s32[], bf16[4,8,16]) {
  %p = (s32[], bf16[4,8,16]) parameter(0)
  %x = bf16[4,8,16]{2,1,0} get-tuple-element(%p), index=1
  %i = s32[] get-tuple-element(%p), index=0
  %matmul = bf16[4,8,32]{2,1,0} convolution(%x, %x), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0oi->0bf
  %splash_mha_fwd.2 = bf16[4,8,16]{2,1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"body":"abc","cost_estimate":{"flops":"1000","bytes_accessed":"1"}}}
  %splash_mha_fwd.3.remat = bf16[4,8,16]{2,1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
backend_config={"custom_call_config":{"cost_estimate":{"transcendentals":"0","flops":"500"}}}
  %gmm.1.clone.1 = bf16[4,8,16]{2,1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %t = (s32[], bf16[4,8,16]) tuple(%i, %x)
}

%condition (p: (s32[], bf16[4,8,16])) -> pred[] {
  %p = (s32[], bf16[4,8,16]) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (x: bf16[4,8,16], w: f32[10,64,64], i: s32[], h: f32[10,64]) -> bf16[4,8,16] {
  %x = bf16[4,8,16]{2,1,0} parameter(0)
  %w = f32[10,64,64]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %h = f32[10,64]{1,0} parameter(3)
  %rows = f32[4,20,10,1]{3,2,1,0} broadcast(%i)
  %weights = f32[8,6,10,1]{3,2,1,0} broadcast(%i)
  %space = f32[400]{0} custom-call(), custom_call_target="AllocateBuffer"
  %heads = f32[4,20,8,6]{3,1,2,0} convolution(%rows, %weights), window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, \
dim_labels=0bf1_1oi0->0b1f
  %while = (s32[], bf16[4,8,16]) while(%x), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %fusion = (f32[64,64]{1,0:S(1)}, f32[10,64]{1,0}) fusion(%w, %i, %h), kind=kLoop, calls=%sliced, \
backend_config={"estimated_cycles":"70"}
  %start = (f32[64,64]{1,0:S(1)}, f32[64,64]{1,0}, u32[]{:S(2)}) copy-start(%layer)
  %done = f32[64,64]{1,0:S(1)} copy-done(%start)
  ROOT %r = bf16[4,8,16]{2,1,0} get-tuple-element(%while), index=1
}
"""


def test_a_tpus_kernels_are_named_and_its_batched_matmuls_counted():
    found = work(parse(TPU))
    # [4, 20, 10] by the weights of 8 heads, [10, 8, 6]: the window's second dim is the heads, and comes first in them.
    assert found.matmul_flops == {
        "bf16": 3 * 2 * 4 * 8 * 32 * 16,
        "f32": 2 * 4 * 20 * 10 * 8 * 6,
    }
    assert found.kernels[0] == KernelCalls("splash_mha_fwd", 6, 4500.0)
    assert found.kernels[1][:2] == ("gmm", 3)
    assert (found.kernel_flops, found.silent_kernels) == (4500.0, ("gmm",))
    assert found.cycles == 70


def test_traffic_counts_slices_and_updates_in_place_and_no_other_memory():
    before = TPU.replace(
        "%start =", "%layer = f32[64,64]{1,0} bitcast(%fusion)\n  %start ="
    )
    x, result = 2 * 4 * 8 * 16, 2 * 4 * 8 * 32
    loop = 3 * (x + result + 3 * 2 * x)
    sliced = 4 * 64 * 64 + 4  # read, its index too; written to the chip's own memory
    update = 4 * 64
    fetched = 4 * 64 * 64
    heads = (
        2 * 4 * (4 * 20 * 10 + 8 * 6 * 10) + 4 * 4 * 20 * 8 * 6
    )  # operands written and read, and the result
    rest = update + fetched + heads
    assert work(parse(before)).memory_bytes == pytest.approx(
        loop + sliced + rest, abs=64
    )
    assert (
        work(parse(before.replace("S(1)", "S(5)"))).memory_bytes
        == work(parse(before)).memory_bytes
    )
    on_gpu = work(parse(before), memory_spaces=(0, 1)).memory_bytes
    assert on_gpu == pytest.approx(
        work(parse(before)).memory_bytes + 2 * fetched, abs=64
    )


GPU = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: bf16[8,16], w: bf16[16,32]) -> bf16[8,32] {
  %x = bf16[8,16]{1,0} parameter(0)
  %w = bf16[16,32]{1,0} parameter(1)
  %gemm = (bf16[8,32]{1,0}, s8[1024]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"]}}}
  %mha = bf16[8,32]{1,0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  %map.1 = (bf16[8,16,4]{2,1,0}, f32[8]{0}) custom-call(%x), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(f)/vmap(jvp(kernel_tokamax_mosaic))/flash_attention_sm90/mpmd_map"}
  %map.2 = bf16[8,16,4]{2,1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/other"}
  ROOT %r = bf16[8,32]{1,0} get-tuple-element(%gemm), index=0
}
"""


@pytest.mark.fast
def test_cublas_calls_are_matmuls_and_other_calls_are_kernels_by_their_scope_or_target():
    found = work(parse(GPU))
    assert found.matmul_flops == {"bf16": 2 * 8 * 16 * 32}
    assert [kernel.name for kernel in found.kernels] == [
        "__cudnn$fmhaSoftmax",
        "mosaic_gpu_v2",
        "tokamax_mosaic",
    ]
