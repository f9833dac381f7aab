from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtext_lite.batching.batch import Batch, derive_batch, not_whole, stated_batch
from maxtext_lite.config import load_config
from maxtext_lite.config.violation import Violation

BASE = load_config()


def derived(num_devices, per_device, accumulation=1, stated=0):
    config = BASE.model_copy(
        update={
            "per_device_batch_size": Fraction(per_device),
            "gradient_accumulation_steps": accumulation,
            "global_batch_size": stated,
        }
    )
    return derive_batch(config, num_devices)


# D15 of the study of MaxText: 28, 2 and 0 examples there, without a word.
@pytest.mark.parametrize(
    ("per_device", "num_devices", "micro"),
    [("0.29", 100, 29), ("0.1", 10, 1), ("1.3", 10, 13), ("0.5", 8, 4), ("1/3", 3, 1), ("0.07", 100, 7), ("16", 1, 16)],
)
def test_a_fraction_times_devices_is_exact(per_device, num_devices, micro):
    batch = derived(num_devices, per_device, 3)
    assert batch == Batch(Fraction(per_device), 3, micro)
    assert batch.global_batch_to_train == 3 * micro


@pytest.mark.parametrize(
    ("per_device", "num_devices", "examples"), [("0.3", 8, "2.4"), ("0.1", 8, "0.8"), ("1.3", 8, "10.4")]
)
def test_a_fraction_of_an_example_is_refused(per_device, num_devices, examples):
    problem = derived(num_devices, per_device)
    assert isinstance(problem, Violation)
    assert problem.message == (
        f"per_device_batch_size={per_device} x {num_devices} devices = {examples} examples, not a whole number."
    )


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 500))
def test_either_key_follows_from_the_global_batch(num_devices, accumulation, micro):
    per_device = Fraction(micro, num_devices)
    batch = Batch(per_device, accumulation, micro)
    assert derived(num_devices, per_device, accumulation) == batch
    assert derived(num_devices, -1, accumulation, micro * accumulation) == batch
    assert derived(num_devices, per_device, -1, micro * accumulation) == batch
    assert derived(num_devices, per_device, accumulation, micro * accumulation) == batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, -1, -1, 0), "per_device_batch_size=-1, or auto, and gradient_accumulation_steps=-1 with "
                         "global_batch_size=0: nothing states the batch size."),
        ((8, -1, -1, 64), "per_device_batch_size=-1 and gradient_accumulation_steps=-1 cannot both follow from "
                          "global_batch_size=64 alone. Set one of them; train chooses both for its devices, and "
                          "plan for those of --device."),
        ((8, -1, 1, 0), "per_device_batch_size=-1 is derived from global_batch_size, which is 0: not stated."),
        ((8, 1, -1, 0), "gradient_accumulation_steps=-1 is derived from global_batch_size, which is 0: not stated."),
        ((8, -1, 3, 64), "global_batch_size=64 / gradient_accumulation_steps=3 = 21.33 examples per micro-batch, not a "
                         "whole number."),
        ((8, 16, -1, 100), "global_batch_size=100 / (per_device_batch_size=16 x 8 devices = 128 examples) = 0.78125 "
                           "accumulation steps, not a whole number."),
        ((1, 999, -1, 1000), "global_batch_size=1000 / (per_device_batch_size=999 x 1 devices = 999 examples) = 1.001 "
                             "accumulation steps, not a whole number."),
        ((8, 16, 2, 100), "global_batch_size=100 contradicts per_device_batch_size=16 x 8 devices x "
                          "gradient_accumulation_steps=2 = 256."),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_follow_is_refused(arguments, message):
    problem = derived(*arguments)
    assert isinstance(problem, Violation)
    assert problem.message == message


def test_the_stated_part_of_a_wrong_batch_is_known():
    config = BASE.model_copy(update={"global_batch_size": 5})
    assert stated_batch(config, 2) == Batch(Fraction(16), 1, 32)
    assert stated_batch(config.model_copy(update={"per_device_batch_size": Fraction(-1)}), 2) is None


def test_neighbours_of_a_fraction_are_whole_over_all_devices():
    problem = not_whole("eval_per_device_batch_size", Fraction("0.3"), 8)
    below, above = map(next, problem.nearest[0]())
    assert below == {"eval_per_device_batch_size": Fraction("0.25")}
    assert above == {"eval_per_device_batch_size": Fraction("0.375")}
