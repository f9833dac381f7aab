"""The ranking is that of all legal plans that fit, found here by trying every one; what the user stated is kept."""

import dataclasses
import functools
import itertools
import math
import re

import pytest

from maxtext_lite import load_config, make_plan
from maxtext_lite.batching import Topology, choose, rank, ranking, wants_solving
from maxtext_lite.batching.devices import device_named
from maxtext_lite.batching.solve import resolve
from maxtext_lite.batching.step_time import StepModel
from maxtext_lite.config import UserError
from maxtext_lite.config.kernels import Accelerator

DEVICE = device_named("v6e", option="--device")
MODEL = ["base_emb_dim=512", "base_mlp_dim=2048", "base_num_query_heads=8", "base_num_kv_heads=2", "head_dim=64",
         "base_num_decoder_layers=4", "vocab_size=4096", "max_target_length=1024", "dtype=bfloat16",
         "global_batch_size=8", "per_device_batch_size=-1", "gradient_accumulation_steps=-1"]  # fmt: skip
AXES = [f"ici_{axis}_parallelism" for axis in ("pipeline", "data", "fsdp", "expert", "context", "tensor")]
REMAT = ("none", "save_dot_products", "minimal", "save_qkv_proj", "full", "minimal_offloaded", "qkv_proj_offloaded")


def plan_of(num_devices, memory_gb):
    return lambda config: make_plan(config, num_devices=num_devices, device_memory_gb=memory_gb, platform="tpu")


def ranked(config, num_devices, memory_gb, **keys):
    topology = Topology(num_devices, accelerator=Accelerator.planned("tpu"))
    return rank(config, topology, DEVICE, plan_of(num_devices, memory_gb), **keys)


@functools.cache
def all_plans(num_devices):
    """(seconds, bytes) of every legal plan, the fastest first."""
    config, found = load_config(None, MODEL), []
    for sizes in itertools.product((1, 2, 4), repeat=len(AXES)):
        if math.prod(sizes) != num_devices:
            continue
        for steps, pieces in itertools.product((1, 2, 4, 8), (1, 2, 4, 8) if sizes[0] > 1 else (0,)):
            mesh = dict(zip(AXES, sizes, strict=True)) | {"gradient_accumulation_steps": steps}
            if pieces:
                mesh["num_pipeline_microbatches"] = sizes[0] * pieces
            split = config.model_copy(update=mesh)
            if isinstance(resolved := resolve(split, Topology(num_devices)), list):
                continue
            for remat, offload in itertools.product(REMAT, (False, True)):
                keys = {"remat_policy": remat, "optimizer_memory_host_offload": offload}
                each = split.model_copy(update=keys)
                plan = plan_of(num_devices, None)(each)
                model = StepModel(each, resolved[0].mesh, DEVICE, plan.memory)
                rows = plan.micro_batch_slots * plan.rows_per_example
                time = model.step(each, rows, plan.global_batch_to_train, plan.pipeline_shape)
                found.append((time.seconds, plan.memory.total))
    return sorted(found)


@pytest.mark.parametrize("memory_gb", [32, 0.3])
def test_it_finds_the_best_of_all_that_fit(memory_gb):
    config = load_config(None, MODEL)
    found = [(each.time.seconds, each.plan.memory.total) for each in ranked(config, 4, memory_gb, most=40)]
    expected = [each for each in all_plans(4) if each[1] <= memory_gb * 1e9]
    assert 40 < len(expected) < len(all_plans(4)) + (memory_gb == 32)
    assert [seconds for seconds, _ in found] == pytest.approx([seconds for seconds, _ in expected[:40]])
    assert all(memory <= memory_gb * 1e9 for _, memory in found)
    assert set(found) <= set(expected)


def test_less_memory_leaves_slower_plans():
    config = load_config(None, MODEL)
    best = [ranked(config, 4, memory_gb, most=1)[0].time.seconds for memory_gb in (32, 0.15, 0.1)]
    assert best[0] < best[1] < best[2]


def test_keys_that_were_stated_are_kept():
    stated = {"ici_tensor_parallelism": 2, "ici_data_parallelism": 1, "ici_fsdp_parallelism": -1,
              "remat_policy": "full", "optimizer_memory_host_offload": False}  # fmt: skip
    config = load_config(None, [*MODEL, *(f"{key}={str(value).lower()}" for key, value in stated.items())])
    found = ranked(config, 8, 32)
    assert {(each.plan.mesh["tensor"], each.plan.mesh["data"]) for each in found} == {(2, 1)}
    assert len({each.plan.mesh["context"] for each in found}) > 1
    for each in found:
        assert not each.keys.keys() & stated.keys()
        assert {key: getattr(each.config, key) for key in stated} == stated


def test_a_stated_pipeline_is_split_into_pieces():
    config = load_config(None, [*MODEL, "ici_pipeline_parallelism=2", "remat_policy=full"])
    found = ranked(config, 4, 32, most=60)
    assert {each.plan.num_pipeline_stages for each in found} == {2}
    assert {each.plan.num_pipeline_microbatches for each in found} >= {2, 4, 8}
    named = load_config(None, [*MODEL, "ici_pipeline_parallelism=2", "num_pipeline_microbatches=4"])
    assert {each.plan.num_pipeline_microbatches for each in ranked(named, 4, 32)} == {4}


def test_the_answer_is_always_the_same_and_its_settings_plan_it():
    config = load_config(None, MODEL)
    first, again = (ranked(config, 4, 0.3) for _ in range(2))
    assert [each.to_json() for each in first] == [each.to_json() for each in again]
    best = first[0]
    alone = load_config(None, [*MODEL, *best.settings])
    assert not wants_solving(alone)
    assert plan_of(4, 0.3)(alone) == best.plan


def test_where_nothing_fits_it_says_what_comes_nearest_and_by_how_much():
    config = load_config(None, MODEL)
    with pytest.raises(UserError, match=r"no legal plan fits into the 10\.0 MB of a device\.") as refused:
        ranked(config, 4, 0.01)
    least = min(memory for _, memory in all_plans(4))
    assert f"needs {least / 1e6:.1f} MB: {(least - 1e7) / 1e6:.1f} MB too much." in str(refused.value)


def test_what_no_mesh_can_mend_is_refused_as_make_plan_does():
    config = load_config(None, [*MODEL, "ici_tensor_parallelism=3"])
    with pytest.raises(UserError, match="ici_tensor_parallelism=3"):
        ranked(config, 4, 32)


def test_links_that_are_not_known_are_an_error_and_not_a_guess():
    device = device_named("l4", option="--device")
    with pytest.raises(UserError) as refused:
        rank(load_config(None, MODEL), Topology(4), device, plan_of(4, 24))
    assert str(refused.value) == (
        "--device=l4: what it sends to others on a machine of so many is not known, so that no step can be predicted. "
        "Nearest that works: per_device_batch_size=2 gradient_accumulation_steps=1."
    )
    assert rank(load_config(None, MODEL), Topology(1), device, plan_of(1, 24))


def test_where_the_rate_to_the_host_is_not_known_what_fits_only_there_is_not_counted_on():
    device = dataclasses.replace(DEVICE, host_bytes_per_second=None)
    topology = Topology(4, accelerator=Accelerator.planned("tpu"))

    def least(device, memory_gb):
        with pytest.raises(UserError, match="no legal plan fits") as refused:
            rank(load_config(None, MODEL), topology, device, plan_of(4, memory_gb))
        return float(re.search(r"needs ([\d.]+) MB", str(refused.value))[1])

    with_host, without = least(DEVICE, 0.01), least(device, 0.01)
    assert with_host < without
    assert least(device, (with_host + without) / 2000) == without


def test_a_run_takes_the_first_of_them():
    config, topology = load_config(None, MODEL), Topology(4, accelerator=Accelerator.planned("tpu"))
    assert choose(config, topology, DEVICE, plan_of(4, 32)) == (
        dict(ranked(config, 4, 32)[0].keys), "predicted to be the fastest"
    )  # fmt: skip


@pytest.mark.parametrize("device", [None, device_named("l4", option="--device")])
def test_where_a_device_has_too_few_figures_it_is_the_fewest_micro_batches_that_fit(device):
    config, topology = load_config(None, MODEL), Topology(4)
    sizes = [
        plan_of(4, None)(config.model_copy(update={"gradient_accumulation_steps": steps})).memory.total
        for steps in (1, 2)
    ]
    assert sizes[1] < sizes[0]
    assert choose(config, topology, device, plan_of(4, None)) == (
        {"per_device_batch_size": 2, "gradient_accumulation_steps": 1}, "the fewest micro-batches"
    )  # fmt: skip
    between = sum(sizes) / 2e9
    assert choose(config, topology, device, plan_of(4, between))[0]["gradient_accumulation_steps"] == 2
    with pytest.raises(UserError, match=r"no legal plan fits into the 1\.0 MB of a device"):
        choose(config, topology, device, plan_of(4, 1e-3))
    config = load_config(None, [*MODEL, "base_num_query_heads=8", "ici_tensor_parallelism=3"])
    with pytest.raises(UserError, match="ici_tensor_parallelism=3"):
        choose(config, topology, device, plan_of(4, None))


def test_devices_of_different_hosts_send_over_the_network():
    device = device_named("h100", option="--device")
    config = load_config(None, [*MODEL, "ici_fsdp_parallelism=4", "remat_policy=full"])

    def collectives(num_hosts):
        def plan(config):
            return make_plan(config, num_devices=4, num_hosts=num_hosts)

        return rank(config, Topology(4, num_hosts), device, plan, most=1)[0].time.collectives_seconds

    assert collectives(4) == pytest.approx(9 * collectives(1))  # 50 GB/s, and not 450
    assert collectives(2) == pytest.approx(4.5 * collectives(1))  # two devices of a host send at once


RAMP = ["enable_rampup_batch_size=true", "per_device_batch_size_start=1", "per_device_batch_size_increment=1",
        "global_rampup_samples=20"]  # fmt: skip


@pytest.mark.parametrize("device", [DEVICE, None])
@pytest.mark.parametrize(("words", "refusals"), [
    ([*RAMP, "num_epochs=1"], [
        "enable_rampup_batch_size=true: the batches of a ramp follow from per_device_batch_size and "
        "gradient_accumulation_steps, both open. Nearest that work: gradient_accumulation_steps=1 or "
        "enable_rampup_batch_size=false."]),
    (["enable_diloco=true"], [
        "diloco_num_replicas=-1: the number of replicas follows from the data axis, which is open. "
        "Nearest that works: 1."]),
    (["enable_diloco=true", "ici_data_parallelism=-1", "ici_fsdp_parallelism=2"], [
        "diloco_num_replicas=-1: the number of replicas follows from the data axis, which is open. "
        "Nearest that works: 2."]),
])  # fmt: skip
def test_what_would_let_the_choice_change_the_training_is_refused(words, refusals, device):
    def plan(config):
        return make_plan(config, num_devices=4, num_examples=20, device_memory_gb=32, platform="tpu")

    topology = Topology(4, accelerator=Accelerator.planned("tpu"))
    with pytest.raises(UserError) as refused:
        choose(load_config(None, [*MODEL, *words]), topology, device, plan)
    assert list(refused.value.problems) == refusals
    for near in str(refused.value).partition("work: ")[2].rstrip(".").split(" or ") if "ramp" in words[0] else []:
        mended = load_config(None, [*MODEL, *words, near])
        assert choose(mended, topology, device, plan) if wants_solving(mended) else plan(mended)


def test_the_split_of_a_ramp_that_is_suggested_fits():
    def plan(config):
        return make_plan(config, num_devices=4, num_examples=20, device_memory_gb=1.5)

    with pytest.raises(UserError, match=r"Nearest that work: gradient_accumulation_steps=8 or "):  # 4 need 1.93 GB
        choose(load_config(None, [*MODEL, *RAMP, "global_batch_size=256"]), Topology(4), DEVICE, plan)


@pytest.mark.parametrize("words", [["diloco_num_replicas=2"], ["ici_data_parallelism=2"]])
def test_all_that_are_ranked_have_the_replicas_that_were_stated(words):
    found = ranked(load_config(None, [*MODEL, "enable_diloco=true", *words]), 4, 32)
    assert {each.plan.diloco_num_replicas for each in found} == {2}


def test_a_search_tries_only_sizes_that_divide_the_model(monkeypatch):
    """720,720 devices have 3.4 million meshes; of these, about two thousand split 4 layers and widths of 2^n evenly."""
    tried = []
    monkeypatch.setattr(ranking, "resolve", lambda config, _: tried.append(config) or [])
    config = load_config(None, [*MODEL[:-3], "global_batch_size=1", *MODEL[-2:]])
    with pytest.raises(UserError, match="no mesh and batch that the config leaves open are legal"):
        rank(config, Topology(720720), DEVICE, lambda _: None)
    assert len(tried) < 2000
