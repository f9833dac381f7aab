"""The step compiled for eight v5e chips that are not there: kernels, one reduction over `data`, nothing whole.

Needs libtpu, of the extra tpu; no TPU. Structure is asserted here, figures are those of scripts/bench_aot.py.
"""

import functools

import pytest

from maxtext_lite.analysis.described import topology_devices
from maxtext_lite.analysis.hlo import Module, collectives, parse
from maxtext_lite.analysis.program import Program, compile_program
from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config

pytest.importorskip("libtpu", reason="libtpu, of the extra tpu, is not installed")

LAYERS = 3
SMALL = (
    "dataset_type=synthetic",
    "steps=100",
    "dtype=bfloat16",
    "vocab_size=2048",
    "base_emb_dim=256",
    "base_num_query_heads=4",
    "base_num_kv_heads=4",
    "head_dim=64",
    "base_mlp_dim=512",
    f"base_num_decoder_layers={LAYERS}",
    "max_target_length=384",
    "per_device_batch_size=1",
)
PROGRAMS = {
    "data 2 x fsdp 4, A = 2": (
        "ici_data_parallelism=2",
        "gradient_accumulation_steps=2",
    ),
    "fsdp 2 x tensor 4": ("ici_tensor_parallelism=4", "remat_policy=minimal"),
    "data 4 x fsdp 2, ZeRO-1": (
        "ici_data_parallelism=4",
        "shard_optimizer_over_data=true",
    ),
    "fsdp 2 x expert 4": ("model_name=mixtral-8x7b", "ici_expert_parallelism=4"),
}


@functools.cache
def program(name: str) -> tuple[Program, Module]:
    devices = topology_devices("v5e:2x4")
    config = load_config(None, [*SMALL, *PROGRAMS[name]])
    plan = make_plan(config, num_devices=8, num_hosts=1, platform="tpu")
    compiled = compile_program(config, plan, devices)
    return compiled, parse(compiled.compiled.as_text())


def whole_stacks(module: Module, it: Program) -> set[str]:
    """Instructions that hold every layer of a weight whole, on a mesh that shards it."""
    sharded = {
        tuple(sorted(size for size in parameter.shape if size > 1))
        for parameter in it.parameters
        if parameter.name.startswith("layers.")
        and any(map(len, parameter.partition_spec[1:]))
    }
    return {
        instruction.line
        for _, instruction, _ in module.scheduled()
        for array in instruction.arrays
        if tuple(sorted(size for size in array.dims if size > 1)) in sharded
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_attention_is_splash_in_both_directions(name):
    compiled, _ = program(name)
    kernels = {kernel.name: kernel.times for kernel in compiled.work.kernels}
    micro_batches = 2 if "A = 2" in name else 1
    for direction in ("splash_mha_fwd", "splash_mha_dkv"):
        times = [
            count for kernel, count in kernels.items() if kernel.startswith(direction)
        ]
        assert len(times) == 1
        assert times[0] % (LAYERS * micro_batches) == 0
    # Those of experts have no name of their own: three matmuls, each once forward and twice backward.
    others = sum(
        count for kernel, count in kernels.items() if not kernel.startswith("splash")
    )
    assert others == (9 * LAYERS if "expert" in name else 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_device_holds_a_sharded_stack_of_layers_whole(name):
    compiled, module = program(name)
    assert whole_stacks(module, compiled) == set()


def test_the_check_finds_a_stack_that_is_planted():
    compiled, _ = program("data 2 x fsdp 4, A = 2")
    text = compiled.compiled.as_text()
    entry = text.index("{\n", text.index("\nENTRY ")) + 2
    planted = f"  %planted = bf16[{LAYERS},512,256]{{2,1,0}} broadcast(%nothing)\n"
    (found,) = whole_stacks(parse(text[:entry] + planted + text[entry:]), compiled)
    assert found == planted.strip()


def test_gradients_cross_data_once_a_step_after_the_loop():
    compiled, module = program("data 2 x fsdp 4, A = 2")
    across = [c for c in collectives(module) if "data" in c.axes(compiled.mesh)]
    assert across
    assert not [c.line for c in across if c.in_loop]
    gradients = sum(parameter.bytes_per_device for parameter in compiled.parameters)
    moved = sum(c.payload_bytes * (c.times or 0) for c in across)
    assert gradients <= moved < 1.01 * gradients


def test_sharded_optimizer_states_cost_no_copy_of_the_parameters():
    """Which XLA makes of donated arrays that are gathered into, and of what has been gathered."""
    compiled, module = program("data 4 x fsdp 2, ZeRO-1")
    across = [
        c
        for c in collectives(module)
        if c.kind == "all-gather" and "data" in c.axes(compiled.mesh)
    ]
    parameters = sum(parameter.bytes_per_device for parameter in compiled.parameters)
    assert sum(c.payload_bytes * (c.times or 0) for c in across) == pytest.approx(
        parameters, rel=0.01
    )
    stack = max(
        (p for p in compiled.parameters if p.name.startswith("layers.")),
        key=lambda p: p.bytes_per_device,
    )
    copies = [
        instruction.line
        for _, instruction, _ in module.scheduled()
        for array in instruction.arrays
        if instruction.opcode == "copy"
        and array.dtype == "f32"
        and array.num_bytes == stack.bytes_per_device
    ]
    assert copies == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_machine_would_do_is_known(name):
    compiled, _ = program(name)
    assert compiled.work.cycles > 0
    assert compiled.compiler_seconds == pytest.approx(compiled.work.cycles / 1.5e9)
    assert 0 < compiled.roofline.most_mfu < 1
    # All matmuls run in the activations' dtype, but for the small ones of the router.
    flops = compiled.work.matmul_flops
    assert flops["bf16"] > 0.95 * sum(flops.values())
