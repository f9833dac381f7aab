import pytest

from maxtext_lite.batching.advice import batch_size_advice, example_efficiency, laws_beside, step_efficiency
from maxtext_lite.config import load_config


def test_at_the_noise_scale_a_step_and_an_example_each_do_half():
    assert step_efficiency(64.0, 64) == 0.5
    assert example_efficiency(64.0, 64) == 0.5


@pytest.mark.parametrize(("noise", "batch", "step", "example"), [(300.0, 100, 0.25, 0.75), (50.0, 200, 0.8, 0.2)])
def test_efficiencies_by_hand(noise, batch, step, example):
    assert step_efficiency(noise, batch) == pytest.approx(step)
    assert example_efficiency(noise, batch) == pytest.approx(example)


def test_a_batch_far_below_the_noise_scale_may_grow():
    text = batch_size_advice(900.0, 0.1, 100)
    assert "about 900 examples (two standard errors: 720 to 1,080)" in text
    assert "a step makes 10% of the progress" in text
    assert "an example gives 90% of what" in text
    # Steps are as 1 + 900/B: 5.5 for 10. Examples are as 1 + B/900: 11/9 for 10/9.
    assert "well below the noise scale" in text
    assert "twice the batch would take about 45% fewer steps and 10% more examples" in text


def test_a_batch_far_above_the_noise_scale_wastes_examples():
    text = batch_size_advice(100.0, 0.1, 400)
    assert "a step makes 80% of the progress" in text
    assert "well above the noise scale" in text
    # Examples are as 1 + B/100: 3 for 5. Steps are as 1 + 100/B: 1.5 for 1.25.
    assert "half the batch would take about 40% fewer examples and 20% more steps" in text


def test_a_batch_like_the_noise_scale_is_left_alone():
    assert "of similar size" in batch_size_advice(110.0, 0.05, 100)


@pytest.mark.parametrize(("noise", "words"), [(250.0, "above twice"), (45.0, "below half")])
def test_an_error_bar_across_a_limit_decides_nothing(noise, words):
    text = batch_size_advice(noise, 0.2, 100)
    assert f"is {words} the batch cannot be told within its error" in text
    assert "well" not in text


@pytest.mark.parametrize("error", [0.5, 0.9, 3.0])
def test_an_estimate_within_two_errors_of_zero_says_nothing(error):
    text = batch_size_advice(1e6, error, 8)
    assert "too uncertain to say anything about the batch of 8 examples" in text
    assert "(two standard errors: 0 to" in text


def test_without_an_error_it_is_a_hint():
    text = batch_size_advice(900.0, None, 100)
    assert "an unknown error" in text
    assert "only a hint" in text
    assert "well below" not in text


@pytest.mark.parametrize("batch", [1, 64])
def test_an_unmeasured_noise_scale_is_explained(batch):
    text = batch_size_advice(None, None, batch)
    assert f"nothing about the batch of {batch} example{'' if batch == 1 else 's'}." in text
    assert "at least two gradients per step" in text
    assert text.count("not known") == 1


@pytest.mark.parametrize("noise", [0.0, -12.5])
def test_an_estimate_that_is_not_above_zero_says_nothing(noise):
    text = batch_size_advice(noise, 0.1, 64)
    assert f"came out as {noise:.3g} examples" in text
    assert "says nothing about the batch of 64 examples" in text


def test_a_sentence_beside_the_noise_scale():
    config = load_config(overrides=["model_name=llama3-8b", "max_target_length=4096"])
    said = laws_beside(config, 160_000_000_000)
    assert said.startswith("For this model and 160,000,000,000 tokens, published laws put the best batch at ")
    assert "299 to 1,415 examples and the critical one at 800 to 3,534" in said
    assert "underestimates" in said


def test_the_batches_of_the_laws_are_counted_in_examples_of_all_their_rows():
    pairs = load_config("post_train/dpo.yml")
    rows = pairs.model_copy(update={"dataset_type": "sft", "max_target_length": 2 * pairs.max_target_length})
    assert (pairs.rows_per_example, rows.rows_per_example) == (2, 1)
    assert laws_beside(pairs, 10**9) == laws_beside(rows, 10**9)
