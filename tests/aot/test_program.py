"""What a config compiles to is known: tables of collectives, and bytes that are those of live arrays."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from maxtext_lite.analysis.hlo import collectives
from maxtext_lite.analysis.memory import DeviceStep, activation_lines
from maxtext_lite.analysis.program import compile_program, total_traffic
from maxtext_lite.batching import make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.kernels import Accelerator
from maxtext_lite.training.state import init_state, make_decoder
from tests.training.conftest import TINY, make_setup

# TINY has two layers of 1,920 matrix elements and two norms of 16, a last norm, and two tables of 264 x 16.
LAYERS, TABLES, NORMS = 2 * 1920 * 4, 2 * 264 * 16 * 4, 5 * 16 * 4  # bytes
STREAM = 8 * 32 * 16 * 4  # of 8 rows on a device: 16 on fsdp 2
IDS = 16 * 32 * 4  # of all 16 rows
PARAMETERS = LAYERS + TABLES + NORMS
TABLE = TABLES // 2


@functools.cache
def program(name="fsdp 8", *more):
    keys, num_devices = REFERENCES[name]
    config = load_config(None, [*TINY, "per_device_batch_size=2", *keys, *more])
    return compile_program(
        config, make_plan(config, num_devices=num_devices), jax.devices()[:num_devices]
    )


REFERENCES = {
    "fsdp 8": ((), 8),
    "data 4, ZeRO-1, accumulation 4": (
        (
            "ici_data_parallelism=4",
            "shard_optimizer_over_data=true",
            "gradient_accumulation_steps=4",
        ),
        4,
    ),
    "data 2 x fsdp 2 x tensor 2, local updates": (
        ("ici_data_parallelism=2", "ici_tensor_parallelism=2", "enable_diloco=true"),
        8,
    ),
}

# (kind, axes): times and bytes per device in a step. All-reduces carry a few scalars beside the gradients: losses,
# counts, norms. A table that changes means that the step exchanges something else than before.
TABLES_OF = {
    "fsdp 8": {
        # Of a layer once forward and once backward; the head; the token ids, which each device looks up in its part of
        # the table, and of which 2 rows of vectors come to it, and 2 of their gradients go.
        ("all-gather", "fsdp"): (30, 2 * LAYERS + TABLE + IDS),
        ("all-to-all", "fsdp"): (2, 2 * STREAM // 4),
        ("all-reduce", "fsdp"): (6, PARAMETERS - TABLE + 120),
    },
    "data 4, ZeRO-1, accumulation 4": {
        ("all-reduce", "data"): (
            16,
            PARAMETERS + 168,
        ),  # once, not four times; a CPU has no reduce-scatter here
        ("all-gather", "data"): (12, PARAMETERS),
    },
    "data 2 x fsdp 2 x tensor 2, local updates": {
        ("all-gather", "fsdp"): (30, (2 * LAYERS + TABLE) // 2 + IDS // 2),
        ("all-to-all", "fsdp"): (2, 2 * STREAM // 2),
        ("all-reduce", "fsdp"): (7, 25016 - TABLE // 2),
        # Two in the forward pass and four in the backward pass of each of two layers, two at the ends.
        ("all-gather", "tensor"): (14, 14 * STREAM // 2),
        # As many sums, and the look-up's and the loss's; logits' maxima and sums; gradients of norms; scalars.
        ("all-reduce", "tensor"): (
            16,
            16 * STREAM // 2 + 2 * STREAM // 32 + NORMS + 620,
        ),
    },
}


def table(rows):
    return {(row.kind, "+".join(row.axes)): (row.times, row.bytes) for row in rows}


@pytest.mark.parametrize("name", REFERENCES)
def test_the_collectives_of_a_reference_config(name):
    assert table(program(name).collectives) == TABLES_OF[name]


def test_what_a_device_sends_on_rings_follows_from_what_it_holds_afterwards():
    rows = {(row.kind, "+".join(row.axes)): row for row in program().collectives}
    gathers, sums, tokens = (
        rows[kind, "fsdp"] for kind in ("all-gather", "all-reduce", "all-to-all")
    )
    assert gathers.sent_bytes == (2 * LAYERS + TABLE + IDS) * 7 / 8
    assert sums.sent_bytes == 2 * (PARAMETERS - TABLE + 120) * 7 / 8
    assert tokens.sent_bytes == 2 * STREAM // 4 * 7 / 8
    assert (
        program().sent_bytes == gathers.sent_bytes + sums.sent_bytes + tokens.sent_bytes
    )
    assert gathers.bytes_by_dtype == {"f32": 2 * LAYERS + TABLE, "s32": IDS}
    assert (gathers.async_times, sums.async_times) == (0, 0)  # a CPU waits for each


def test_of_a_cpu_the_work_is_known_and_the_time_is_not():
    it = program()
    # Two rows on each of 8 devices: forward and twice backward through every weight but the embedding table, and the
    # scores and sums of 4 heads of 4 over 32 tokens: twice forward, as the backward pass repeats the scores alone, and
    # four times backward.
    weights = (LAYERS + TABLES // 2) // 4
    scores = 2 * 2 * 2 * 4 * 32 * 32 * 4  # of the rows and layers
    assert it.work.matmul_flops == {"f32": 2 * 32 * 6 * weights + (2 + 1 + 4) * scores}
    assert it.work.kernels == ()
    assert it.work.memory_bytes > it.memory.arguments
    assert it.roofline.bound is None
    assert math.isnan(it.compiler_seconds)
    assert math.isnan(it.work.cycles)
    assert set(it.versions) == {"jax", "jaxlib"}


def test_only_local_updates_synchronize_and_they_send_their_parameters_once():
    local = program("data 2 x fsdp 2 x tensor 2, local updates")
    assert {key: size for key, (_, size) in table(local.synchronization).items()} == {
        ("all-reduce", "data"): (LAYERS + TABLES) // 4 + NORMS
    }
    assert program().synchronization is None


def test_what_is_exchanged_in_the_loop_counts_once_for_each_micro_batch_though_its_bound_be_traced():
    keys = (
        "enable_rampup_batch_size=true",
        "rampup_mode=gradient_accumulation_steps",
        "per_device_batch_size_start=2",
        "per_device_batch_size_increment=2",
        "per_device_batch_size=6",
        "gradient_accumulation_steps=3",
        "global_rampup_samples=96",
        "steps=40",
    )
    ramp, (times, size) = (
        program("fsdp 8", *keys),
        table(program().collectives)["all-gather", "fsdp"],
    )
    size += 2 * IDS  # of micro-batches of 6 rows a device
    assert table(ramp.collectives)["all-gather", "fsdp"] == (3 * times, 3 * size)
    unknown = total_traffic(collectives(ramp.compiled.as_text()), ramp.mesh)
    assert any(math.isnan(row.times) for row in unknown)


@pytest.mark.parametrize(
    "name",
    ["data 4, ZeRO-1, accumulation 4", "data 2 x fsdp 2 x tensor 2, local updates"],
)
def test_bytes_are_those_of_live_arrays_and_of_what_the_step_takes(name):
    overrides, num_devices = REFERENCES[name]
    it = program(name)
    sizes = {axis: it.mesh.shape[axis] for axis in ("data", "fsdp", "tensor")}
    replicas = sizes["data"] if "enable_diloco=true" in overrides else None
    setup = make_setup(*overrides, **sizes, replicas=replicas)
    state = init_state(setup.parts, 0)

    def held(tree):
        leaves = jax.tree.leaves(tree)
        each = {
            device: sum(
                s.data.nbytes
                for leaf in leaves
                for s in leaf.addressable_shards
                if s.device == device
            )
            for device in setup.mesh.devices.flat
        }
        (size,) = set(each.values())  # every device holds as much
        return size

    leaves = jax.tree.leaves(state.params)
    for parameter, leaf in zip(it.parameters, leaves, strict=True):
        assert (parameter.shape, parameter.dtype) == (leaf.shape, str(leaf.dtype))
        assert parameter.bytes_per_device == held(leaf)
    assert it.state_bytes == {
        "params": held(state.params),
        "opt_state": held(state.opt_state),
        "outer": held(state.outer),
    }
    rows = int(2 * num_devices / (sizes["data"] * sizes["fsdp"]))
    accumulation = 4 if "gradient_accumulation_steps=4" in overrides else 1
    batch = 5 * 4 * accumulation * rows * 32
    assert it.memory.arguments == held(state) + batch
    assert it.memory.aliased == held(state)  # the state is donated
    metrics = it.memory.outputs - it.memory.aliased
    assert 0 < metrics < 1000  # scalars, and a table of pointers
    assert (
        it.memory.total
        == held(state)
        + batch
        + metrics
        + it.memory.temporaries
        + it.memory.generated_code
    )


def test_flops_of_the_model_are_six_per_weight_and_token_and_the_attention():
    it = program()
    weights = (
        LAYERS + TABLES // 2
    ) // 4  # the embedding table is looked up, not multiplied
    attention = 6 * 2 * 32 * 4 * 4
    assert it.model_flops == 16 * 32 * (6 * weights + attention)


@pytest.mark.fast
def test_a_kernel_that_does_not_run_there_is_refused():
    config = load_config(None, [*TINY, "max_target_length=128", "attention=splash"])
    with pytest.raises(UserError, match="attention=splash"):
        compile_program(config, make_plan(config, num_devices=1), jax.devices()[:1])


EXPERTS = ("num_experts=8", "num_experts_per_tok=2", "base_moe_mlp_dim=48")
ROWS, TOKENS, KEPT_LAYERS = 2, 256, 5


def residual_bytes(config):
    """Of a forward pass, without what is small: masks, positions, and a number for each token."""
    decoder = make_decoder(
        config, "cpu", make_plan(config, num_devices=1, platform="cpu")
    )
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)

    def backward(params, *rows):
        return jax.vjp(
            lambda params: decoder.hidden_and_aux(params, *rows)[0],
            decoder.cast(params),
        )[1]

    found = jax.eval_shape(backward, decoder.abstract_params, tokens, tokens, tokens)
    weights = {
        leaf.shape for leaf in jax.tree.leaves(decoder.abstract_params["layers"])
    }
    kept = [
        x
        for x in jax.tree.leaves(found)
        if x.ndim > 2 and x.shape[0] == KEPT_LAYERS and x.shape not in weights
    ]
    return sum(
        x.dtype.itemsize * x.size
        for x in kept
        if x.size >= KEPT_LAYERS * ROWS * TOKENS * 8
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("remat_policy=full", "norm_placement=both"),
        ("remat_policy=minimal", "norm_placement=post"),
        ("remat_policy=save_dot_products", "norm_placement=both"),
        ("remat_policy=none",),
        (*EXPERTS, "remat_policy=minimal"),
        (
            *EXPERTS,
            "remat_policy=custom",
            "remat_save=expert_rows,mlpwi_0",
            "capacity_factor=1.5",
        ),
    ],
    ids=" ".join,
)
def test_what_is_kept_of_a_layer_is_what_its_backward_pass_is_given(overrides):
    mesh = dict.fromkeys(("stage", "data", "fsdp", "expert", "context", "tensor"), 1)
    shape = [
        f"base_num_decoder_layers={KEPT_LAYERS}",
        f"max_target_length={TOKENS}",
        "base_mlp_dim=400",
    ]
    config = load_config(None, [*shape, "dtype=bfloat16", *overrides])
    lines = activation_lines(
        DeviceStep(config, mesh, ROWS, 1, Accelerator("cpu")), "gpipe"
    )
    planned = sum(line.bytes for line in lines if line.name == "kept of layers")
    # Beside it there are log-partitions, the router's probabilities and choices, and what norms divided by.
    assert planned == pytest.approx(residual_bytes(config), rel=0.03)
