"""The laws are those of their papers, worked out by hand with logarithms; and what a measured noise scale says."""

import math

import pytest

from maxtext_lite.analysis.laws import (
    BATCH_LAWS,
    RATE_LAWS,
    Budget,
    Interval,
    adam_b2,
    batch_size_advice,
    interval,
    timescale,
    warmup_steps,
    weight_decay,
)

MODELS = {"124M": (124e6, 2.5e9), "8B": (8e9, 160e9), "70B": (70e9, 1.4e12)}


def power(coefficient, base, exponent):
    return math.exp(math.log(coefficient) + exponent * math.log(base))


def budget(name, loss=None):
    parameters, tokens = MODELS[name]
    return Budget(parameters, parameters, tokens, loss)


@pytest.mark.fast
@pytest.mark.parametrize("model", MODELS)
def test_batches_and_learning_rates_of_three_models(model):
    N, D = MODELS[model]
    batches = [
        power(0.58, D, 0.571),
        power(0.292, 6 * N * D, 0.3271),
        power(62.6688, D, 0.383),
        power(327680, N / 1.08e8, 2 / 3),
        power(11729.92, D / 1e6, 0.47),
        power(96.4608, D, 0.462),
    ]
    found = [law.value(budget(model)) for law in BATCH_LAWS]
    assert found[:-1] == pytest.approx(batches, rel=1e-9)
    assert found[-1] is None  # Kaplan's needs a loss
    assert interval(budget(model), "best") == Interval(min(found[:4]), max(found[:4]))
    assert interval(budget(model), "critical") == Interval(
        min(found[4:6]), max(found[4:6])
    )
    rates = [
        power(1.79, N, -0.713) * power(1, D, 0.307),
        power(0.3118, 6 * N * D, -0.125),
        power(0.00235, N / 1.08e8, -1 / 3),
    ]
    assert [law.value(budget(model)) for law in RATE_LAWS] == pytest.approx(
        rates, rel=1e-9
    )
    assert (
        interval(budget(model), "rate").low,
        interval(budget(model), "rate").high,
    ) == pytest.approx((min(rates), max(rates)))


def test_kaplans_law_is_of_the_loss():
    assert BATCH_LAWS[-1].value(budget("8B", loss=2.3)) == pytest.approx(
        power(2e8, 2.3, -1 / 0.21)
    )
    assert interval(budget("8B", loss=1.0), "critical").high == 2e8


def test_decays_and_warm_up_follow_from_batch_and_rate():
    of = Budget(1e9, 1e9, 20e9)
    assert timescale(of) == pytest.approx(power(1.084, 20, -0.527))
    decay = weight_decay(of, 750_000, 1e-3)
    assert 750_000 / (1e-3 * decay * 20e9) == pytest.approx(timescale(of))
    assert decay == pytest.approx(0.1678, rel=1e-3)
    assert [adam_b2(tokens) for tokens in (1, 524_288, 524_289)] == [0.99, 0.99, 0.95]
    # A token for each parameter, or 2,000 steps.
    assert warmup_steps(of, 500_000) == {"OLMo ladder": 2000.0, "DeepSeek": 2000.0}
    assert warmup_steps(budget("70B"), 4e6)["OLMo ladder"] == 70e9 / 4e6


# ---- A measured noise scale ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "error", "batch", "said", "unsaid"),
    [
        # Steps are as 1 + noise / B, examples as 1 + B / noise: 5.5 for 10, and 11 / 9 for 10 / 9.
        (
            900.0,
            0.1,
            100,
            [
                "900 examples",
                "720 to 1,080",
                "10% of",
                "45% fewer steps and 10% more examples",
            ],
            "half the",
        ),
        (
            100.0,
            0.1,
            400,
            ["80% of", "40% fewer examples and 20% more steps"],
            "twice the batch would",
        ),
        (110.0, 0.05, 100, ["of similar size"], "well"),
        (250.0, 0.2, 100, ["above twice", "cannot be told"], "well"),
        (1e6, 0.5, 8, ["too uncertain", "0 to"], "well"),  # within two errors of zero
        (None, None, 64, ["not known"], "well"),
        (-12.5, 0.1, 64, ["-12.5", "nothing"], "well"),
    ],
)
def test_the_advice_is_as_certain_as_the_estimate(noise, error, batch, said, unsaid):
    text = batch_size_advice(noise, error, batch)
    assert all(part in text for part in said), text
    assert unsaid not in text
