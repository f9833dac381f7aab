"""What is measured, in which order, and that the fastest is found: with times that are made up."""

import dataclasses

import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.batching.memory_ladder import REMAT_ORDER
from maxtext_lite.batching.tuning import Candidate, Timing, least_seconds, tune
from maxtext_lite.config import UserError, load_config
from tests.batching.test_ranking import DEVICE, MODEL, ranked

BATCH = ["per_device_batch_size=4", "gradient_accumulation_steps=2", "base_num_decoder_layers=4"]


class Machine:
    """Eight devices that need a time for each micro-batch and each row, more where layers are computed again."""

    def __init__(self, *words, most_rows=100, per_micro_batch=1.0, per_row=1.0):
        self.config = load_config(None, [*BATCH, *words])
        self.most_rows, self.per_micro_batch, self.per_row = most_rows, per_micro_batch, per_row
        self.measured = []

    def plan(self, config):
        return make_plan(config, num_devices=8)

    def __call__(self, candidate):
        plan, policy = candidate.plan, REMAT_ORDER.index(candidate.config.remat_policy)
        self.measured.append((plan.gradient_accumulation_steps, candidate.config.remat_policy))
        assert plan.global_batch_to_train == 64
        if plan.per_device_batch_size > self.most_rows * (1 + policy):
            return Timing(None, None)
        rows = plan.per_device_batch_size * plan.gradient_accumulation_steps
        seconds = self.per_micro_batch * plan.gradient_accumulation_steps + self.per_row * float(rows) * (
            1 + policy / 10
        )
        return Timing(seconds, 1)

    def tune(self, **keys):
        return [(candidate.keys, timing.seconds) for candidate, timing in tune(self.config, self.plan, self, **keys)]


@pytest.mark.parametrize("machine", [
    {}, {"most_rows": 4}, {"most_rows": 2}, {"most_rows": 2, "per_micro_batch": 0.01},
], ids=str)  # fmt: skip
def test_the_best_candidate_is_the_best_of_a_full_search(machine):
    short, full = Machine(**machine), Machine(**machine)
    found, every = short.tune(), full.tune(full=True)
    assert found[0] == every[0]
    fits = [seconds for _, seconds in every if seconds is not None]
    assert fits == sorted(fits)
    assert len(every) == len({str(keys) for keys, _ in every}) == 4 * len(REMAT_ORDER)  # 8, 4, 2 or 1 row per device
    assert len(short.measured) < len(full.measured)


def test_candidates_that_do_not_fit_retry_with_less_kept_and_come_last():
    machine = Machine(most_rows=4)
    found = machine.tune()
    assert machine.measured[:3] == [(1, "none"), (1, "save_dot_products"), (2, "none")]
    assert found[-1] == (
        {"per_device_batch_size": 8, "gradient_accumulation_steps": 1, "remat_policy": "none"}, None
    )  # fmt: skip


@pytest.mark.parametrize(("batch", "devices", "expected"), [
    (12, 8, [1, 2]),  # 16 slots in each of these, but 3 x 8, 4 x 8, 6 x 8 and 12 x 8 otherwise
    (13, 7, [1]), (100, 8, [1]), (64, 8, [1, 2, 4, 8]),
])  # fmt: skip
def test_of_batches_that_leave_slots_empty_those_that_leave_the_fewest_are_measured(batch, devices, expected):
    words = ["per_device_batch_size=-1", "gradient_accumulation_steps=1", f"global_batch_size={batch}",
             "remat_policy=full", "ici_fsdp_parallelism=1", "ici_data_parallelism=-1"]  # fmt: skip
    config, measured = load_config(None, words), []

    def measure(candidate):
        measured.append(candidate.plan.gradient_accumulation_steps)
        return Timing(1.0, 1)

    assert tune(config, lambda config: make_plan(config, num_devices=devices), measure)
    assert list(dict.fromkeys(measured)) == expected


def test_where_none_of_the_fullest_splits_fits_those_with_more_empty_slots_are_measured():
    words = ["per_device_batch_size=-1", "gradient_accumulation_steps=1", "global_batch_size=100",
             "remat_policy=full", "ici_fsdp_parallelism=1", "ici_data_parallelism=-1"]  # fmt: skip

    def measure(candidate):
        return Timing(1.0 if candidate.plan.per_device_batch_size < 10 else None, 1)

    found = tune(load_config(None, words), lambda config: make_plan(config, num_devices=8), measure)
    plans = [candidate.plan for candidate, _ in found]
    assert [plan.gradient_accumulation_steps for plan in plans] == [2, 1]
    assert [plan.empty_slots_per_micro_batch for plan in plans] == [6, 4]


def test_stated_keys_stay():
    machine = Machine("remat_policy=full")
    found = machine.tune()
    assert {policy for _, policy in machine.measured} == {"full"}
    assert all("remat_policy" not in keys for keys, _ in found)


def test_pieces_of_a_pipeline_are_tried():
    found = Machine("ici_pipeline_parallelism=2", "remat_policy=none").tune()
    assert {keys["num_pipeline_microbatches"] for keys, _ in found} == {2, 4, 8, 16}
    stated = Machine("ici_pipeline_parallelism=2", "remat_policy=none", "num_pipeline_microbatches=4").tune()
    assert all("num_pipeline_microbatches" not in keys for keys, _ in stated)


def test_the_shorter_of_two_medians_counts_for_the_three_fastest():
    machine = Machine("remat_policy=full")
    times = iter([9.0, 3.0, 2.0, 4.0, 5.0, 2.5, 1.0])
    found = [timing.seconds for _, timing in tune(machine.config, machine.plan, lambda _: Timing(next(times), 1))]
    assert found == [1.0, 2.0, 2.5, 9.0]


def test_a_ramp_is_refused():
    machine = Machine("enable_rampup_batch_size=true")
    with pytest.raises(UserError, match="tune measures one batch"):
        machine.tune()


def test_the_least_time_is_that_by_which_plans_are_ranked():
    for each in ranked(load_config(None, [*MODEL, "ici_pipeline_parallelism=2"]), 4, 24):
        candidate = Candidate(dict(each.keys), each.config, each.plan)
        assert least_seconds(candidate, DEVICE) == pytest.approx(each.time.seconds)
    assert least_seconds(candidate, None) is None
    assert least_seconds(candidate, dataclasses.replace(DEVICE, peak_flops={})) is None
