"""The ranking is that of all legal plans that fit, found here by trying every one; what the user stated is kept."""

import functools
import itertools
import math

import pytest

from maxtext_lite import load_config, make_plan
from maxtext_lite.analysis.expected import least_step
from maxtext_lite.analysis.ranking import _legal_meshes, choose, rank
from maxtext_lite.analysis.smaller_step import REMAT_ORDER
from maxtext_lite.analysis.step_time import StepModel, flops_of_example
from maxtext_lite.analysis.tuning import Timing, tune
from maxtext_lite.batching import Topology, wants_solving
from maxtext_lite.batching.devices import device_named
from maxtext_lite.batching.plan import resolve
from maxtext_lite.batching.topology import MeshSizes
from maxtext_lite.config import UserError
from maxtext_lite.config.kernels import Accelerator

DEVICE = device_named("v6e", option="--device")
L4 = device_named("l4", option="--device")
MODEL = [
    "base_emb_dim=512",
    "base_mlp_dim=2048",
    "base_num_query_heads=8",
    "base_num_kv_heads=2",
    "head_dim=64",
    "base_num_decoder_layers=4",
    "vocab_size=4096",
    "max_target_length=1024",
    "dtype=bfloat16",
    "global_batch_size=8",
    "per_device_batch_size=-1",
    "gradient_accumulation_steps=-1",
]
AXES = [
    f"ici_{axis}_parallelism"
    for axis in ("pipeline", "data", "fsdp", "expert", "context", "tensor")
]
FEW = [
    "global_batch_size=2",
    "max_target_length=2048",
]  # examples, for fewer plans to try
REMAT = (
    "none",
    "save_dot_products",
    "minimal",
    "save_qkv_proj",
    "full",
    "minimal_offloaded",
    "qkv_proj_offloaded",
)
TOPOLOGY = Topology(4, accelerator=Accelerator.planned("tpu"))


def plan_of(num_devices, memory_gb):
    return lambda config: make_plan(
        config, num_devices=num_devices, device_memory_gb=memory_gb, platform="tpu"
    )


def ranked(words=(), num_devices=4, memory_gb=32, device=DEVICE, **keys):
    topology = Topology(num_devices, accelerator=Accelerator.planned("tpu"))
    config = load_config(None, [*MODEL, *words])
    return rank(config, topology, device, plan_of(num_devices, memory_gb), **keys)


@functools.cache
def all_plans(num_devices):
    """(seconds, bytes) of every legal plan, the fastest first."""
    config, found = load_config(None, [*MODEL, *FEW]), []
    for sizes in itertools.product((1, 2, 4), repeat=len(AXES)):
        if math.prod(sizes) != num_devices:
            continue
        for steps, pieces in itertools.product(
            (1, 2), (1, 2) if sizes[0] > 1 else (0,)
        ):
            mesh = dict(zip(AXES, sizes, strict=True)) | {
                "gradient_accumulation_steps": steps
            }
            if pieces:
                mesh["num_pipeline_microbatches"] = sizes[0] * pieces
            split = config.model_copy(update=mesh)
            if isinstance(resolve(split, Topology(num_devices)), list):
                continue
            for remat, offload in itertools.product(REMAT, (False, True)):
                keys = {"remat_policy": remat, "optimizer_memory_host_offload": offload}
                each = split.model_copy(update=keys)
                plan = plan_of(num_devices, None)(each)
                model = StepModel(
                    each,
                    MeshSizes(plan.ici_mesh, plan.dcn_mesh),
                    DEVICE,
                    plan.memory,
                    flops=flops_of_example(each),
                )
                rows = plan.micro_batch_slots * plan.rows_per_example
                time = model.step(
                    each, rows, plan.global_batch_to_train, plan.pipeline_shape
                )
                found.append((time.seconds, plan.memory.total))
    return sorted(found)


def test_it_finds_the_best_of_all_that_fit():
    found = [
        (each.time.seconds, each.plan.memory.total)
        for each in ranked(FEW, memory_gb=0.3, most=40)
    ]
    expected = [each for each in all_plans(4) if each[1] <= 0.3e9]
    assert 40 < len(expected) < len(all_plans(4))
    assert [seconds for seconds, _ in found] == pytest.approx(
        [seconds for seconds, _ in expected[:40]]
    )
    assert set(found) <= set(expected)


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_no_step_is_below_the_bound_of_its_mesh_and_few_meshes_are_expanded(
    kind, monkeypatch
):
    splits = []
    least = StepModel.least

    def compared(model, rows, examples, shape):
        time = least(model, rows, examples, shape)
        splits.append(model)
        assert model.bound(examples) <= time.seconds
        return time

    monkeypatch.setattr(StepModel, "least", compared)
    device = device_named("v5p" if kind == "tpu" else "h100", option="--device")
    config = load_config(None, ["model_name=qwen3-30b-a3b", *MODEL[-3:]])
    rank(config, Topology(64), device, plan_of(64, 80), most=1)
    meshes = [*_legal_meshes(config, Topology(64), device)]
    assert len(set(map(id, splits))) < len(meshes) / 4


def test_where_nothing_fits_it_says_what_comes_nearest_and_by_how_much():
    least = min(memory for _, memory in all_plans(4))
    with pytest.raises(
        UserError, match=f"needs {least / 1e6:.1f} MB: {(least - 1e7) / 1e6:.1f} MB"
    ):
        ranked(FEW, memory_gb=0.01)


def test_keys_that_were_stated_are_kept():
    stated = {
        "ici_tensor_parallelism": 2,
        "ici_data_parallelism": 1,
        "ici_fsdp_parallelism": -1,
        "remat_policy": "full",
        "optimizer_memory_host_offload": False,
    }
    found = ranked(
        [f"{key}={str(value).lower()}" for key, value in stated.items()], num_devices=8
    )
    assert {(each.plan.mesh["tensor"], each.plan.mesh["data"]) for each in found} == {
        (2, 1)
    }
    assert len({each.plan.mesh["context"] for each in found}) > 1
    for each in found:
        assert not each.keys.keys() & stated.keys()
        assert {key: getattr(each.config, key) for key in stated} == stated


def test_a_stated_pipeline_is_split_into_pieces_and_stated_replicas_stay():
    for word in ("diloco_num_replicas=2", "ici_data_parallelism=2"):
        assert {
            each.plan.diloco_num_replicas
            for each in ranked(["enable_diloco=true", word])
        } == {2}
    found = ranked(["ici_pipeline_parallelism=2", "remat_policy=full"], most=60)
    assert {each.plan.num_pipeline_stages for each in found} == {2}
    assert {each.plan.num_pipeline_microbatches for each in found} >= {2, 4, 8}
    each = found[0]  # as `tune` reports it
    assert least_step(each.config, each.plan, DEVICE) == each.time


@pytest.mark.fast
def test_the_settings_of_the_best_plan_it_and_a_run_takes_them():
    best = ranked(memory_gb=0.3)[0]
    alone = load_config(None, [*MODEL, *best.settings])
    assert not wants_solving(alone)
    assert plan_of(4, 0.3)(alone) == best.plan
    assert choose(load_config(None, MODEL), TOPOLOGY, DEVICE, plan_of(4, 0.3))[
        0
    ] == dict(best.keys)


def test_rates_that_are_not_known_are_an_error_and_not_a_guess():
    with pytest.raises(UserError, match="--device=l4"):
        ranked(memory_gb=24, device=L4)
    assert ranked(num_devices=1, memory_gb=24, device=L4)


# ---- Tuning: what is measured, in which order, and that the fastest is found, with times that are made up ----------

BATCH = [
    "per_device_batch_size=4",
    "gradient_accumulation_steps=2",
    "base_num_decoder_layers=4",
]
SPLIT = [
    "per_device_batch_size=-1",
    "gradient_accumulation_steps=1",
    "remat_policy=full",
    "ici_fsdp_parallelism=1",
    "ici_data_parallelism=-1",
]


class Machine:
    """Eight devices that need a time for each micro-batch and each row, more where layers are computed again."""

    def __init__(self, *words, most_rows=100, per_micro_batch=1.0):
        self.config = load_config(None, [*BATCH, *words])
        self.most_rows, self.per_micro_batch = most_rows, per_micro_batch
        self.measured = []

    def __call__(self, candidate):
        plan, policy = candidate.plan, REMAT_ORDER.index(candidate.config.remat_policy)
        self.measured.append(
            (plan.gradient_accumulation_steps, candidate.config.remat_policy)
        )
        assert plan.global_batch_to_train == 64
        if plan.per_device_batch_size > self.most_rows * (1 + policy):
            return Timing(math.inf, None)
        rows = plan.per_device_batch_size * plan.gradient_accumulation_steps
        return Timing(
            self.per_micro_batch * plan.gradient_accumulation_steps
            + float(rows) * (1 + policy / 10),
            1,
        )

    def tune(self, **keys):
        found = tune(
            self.config, lambda config: make_plan(config, num_devices=8), self, **keys
        )
        return [(candidate.keys, timing.seconds) for candidate, timing in found]


@pytest.mark.parametrize(
    "machine",
    [
        {},
        {"most_rows": 2, "per_micro_batch": 0.01},
    ],
    ids=str,
)
def test_the_best_candidate_is_the_best_of_a_full_search(machine):
    short, full = Machine(**machine), Machine(**machine)
    found, every = short.tune(), full.tune(full=True)
    assert found[0] == every[0]
    fits = [seconds for _, seconds in every if seconds < math.inf]
    assert fits == sorted(fits)
    assert (
        len(every) == len({str(keys) for keys, _ in every}) == 4 * len(REMAT_ORDER)
    )  # 8, 4, 2 or 1 row per device
    assert len(short.measured) < len(full.measured)


def test_candidates_that_do_not_fit_retry_with_less_kept_and_come_last():
    machine = Machine(most_rows=4)
    keys, seconds = machine.tune()[-1]
    assert machine.measured[:3] == [(1, "none"), (1, "save_dot_products"), (2, "none")]
    assert (keys["per_device_batch_size"], keys["remat_policy"], seconds) == (
        8,
        "none",
        math.inf,
    )


@pytest.mark.parametrize(
    ("batch", "devices", "most_rows", "expected"),
    [
        (
            12,
            8,
            99,
            [1, 2],
        ),  # 16 slots in each of these, but 3 x 8, 4 x 8, 6 x 8 and 12 x 8 otherwise
        (64, 8, 99, [1, 2, 4, 8]),
        (100, 8, 9, [1, 2]),  # the fullest does not fit
    ],
)
def test_splits_with_the_fewest_empty_slots_that_fit_are_measured(
    batch, devices, most_rows, expected
):
    measured = []

    def measure(candidate):
        measured.append(candidate.plan.gradient_accumulation_steps)
        return Timing(
            1.0 if candidate.plan.per_device_batch_size < most_rows else math.inf, 1
        )

    config = load_config(None, [*SPLIT, f"global_batch_size={batch}"])
    assert tune(config, lambda config: make_plan(config, num_devices=devices), measure)
    assert list(dict.fromkeys(measured)) == expected
