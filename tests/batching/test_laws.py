"""The laws are those of their papers: every figure here was worked out by hand, with logarithms."""

import math

import pytest

from maxtext_lite.batching.laws import (
    BATCH_LAWS,
    RATE_LAWS,
    Budget,
    Interval,
    adam_b2,
    batch_interval,
    doubling_tokens,
    rate_interval,
    timescale,
    warmup_steps,
    weight_decay,
)

MODELS = {"124M": (124e6, 2.5e9), "1B": (1e9, 20e9), "8B": (8e9, 160e9), "70B": (70e9, 1.4e12)}


def power(coefficient, base, exponent):
    return math.exp(math.log(coefficient) + exponent * math.log(base))


def budget(name, loss=None):
    parameters, tokens = MODELS[name]
    return Budget(parameters, parameters, tokens, loss)


# From the table of laws.md in the project's research, to its two digits: millions of tokens.
@pytest.mark.parametrize(("model", "step", "deepseek", "power_lines", "ladder", "zhang", "critical"), [
    ("124M", 0.13, 0.28, 0.25, 0.36, 0.46, 2.1), ("1B", 0.44, 1.1, 0.55, 1.4, 1.2, 5.5),
    ("8B", 1.5, 4.2, 1.2, 5.8, 3.3, 14), ("70B", 5.0, 17, 2.8, 25, 9.1, 39),
])  # fmt: skip
def test_batches_of_four_models(model, step, deepseek, power_lines, ladder, zhang, critical):
    found = [law.tokens(budget(model)) for law in BATCH_LAWS]
    assert found[-1] is None  # Kaplan's needs a loss
    stated = [step, deepseek, power_lines, ladder, zhang, critical]
    assert [tokens / 1e6 for tokens in found[:-1]] == pytest.approx(stated, rel=0.04)
    N, D = MODELS[model]
    exact = [
        power(0.58, D, 0.571),
        power(0.292, 6 * N * D, 0.3271),
        power(62.6688, D, 0.383),
        power(327680, N / 1.08e8, 2 / 3),
        power(11729.92, D / 1e6, 0.47),
        power(96.4608, D, 0.462),
    ]
    assert found[:-1] == pytest.approx(exact, rel=1e-9)
    assert batch_interval(budget(model), "best") == Interval(min(found[:4]), max(found[:4]))
    assert batch_interval(budget(model), "critical") == Interval(min(found[4:6]), max(found[4:6]))


@pytest.mark.parametrize(("model", "step", "deepseek", "ladder"), [
    ("124M", 2.3e-3, 1.6e-3, 2.2e-3), ("1B", 1.0e-3, 9.6e-4, 1.1e-3), ("8B", 4.3e-4, 5.7e-4, 5.6e-4),
    ("70B", 1.8e-4, 3.3e-4, 2.7e-4),
])  # fmt: skip
def test_learning_rates_of_four_models(model, step, deepseek, ladder):
    found = [law.rate(budget(model)) for law in RATE_LAWS]
    assert found == pytest.approx([step, deepseek, ladder], rel=0.04)
    N, D = MODELS[model]
    exact = [
        power(1.79, N, -0.713) * power(1, D, 0.307),
        power(0.3118, 6 * N * D, -0.125),
        power(0.00235, N / 1.08e8, -1 / 3),
    ]
    assert found == pytest.approx(exact, rel=1e-9)
    assert rate_interval(budget(model)) == Interval(min(found), max(found))


def test_only_the_step_law_leaves_the_embeddings_out():
    with_tables = Budget(8e9, 7e9, 160e9)
    whole = budget("8B")
    assert with_tables.flops == whole.flops == 7.68e21
    for law in BATCH_LAWS:
        assert law.tokens(with_tables) == law.tokens(whole)
    rates = [law.rate(with_tables) / law.rate(whole) for law in RATE_LAWS]
    assert rates == pytest.approx([(8 / 7) ** 0.713, 1, 1])


def test_kaplans_law_is_of_the_loss():
    assert BATCH_LAWS[-1].tokens(budget("8B", loss=2.3)) == pytest.approx(power(2e8, 2.3, -1 / 0.21))
    assert batch_interval(budget("8B", loss=1.0), "critical").high == 2e8


def test_weight_decay_keeps_the_timescale():
    of = budget("1B")
    assert timescale(of) == pytest.approx(power(1.084, 20, -0.527))
    decay = weight_decay(of, 750_000, 1e-3)
    assert 750_000 / (1e-3 * decay * 20e9) == pytest.approx(timescale(of))
    assert decay == pytest.approx(0.1678, rel=1e-3)


def test_the_second_decay_changes_above_half_a_million_tokens():
    assert [adam_b2(tokens) for tokens in (1, 524_288, 524_289)] == [0.99, 0.99, 0.95]


def test_the_warm_up_is_a_token_for_each_parameter_or_2000_steps():
    assert warmup_steps(budget("1B"), 500_000) == {"OLMo ladder": 2000.0, "DeepSeek": 2000.0}
    assert warmup_steps(budget("8B"), 4e6) == {"OLMo ladder": 2000.0, "DeepSeek": 2000.0}


def test_a_batch_doubles_once_it_is_the_critical_one():
    for batch in (1e5, 2.66e6, 4e7):
        start = doubling_tokens(batch)
        low, high = (Budget(1e9, 1e9, tokens) for tokens in (start.low, start.high))
        # By the law that allows it first, the critical batch is this one; by the other one at the end.
        assert batch_interval(low, "critical").high == pytest.approx(batch)
        assert batch_interval(high, "critical").low == pytest.approx(batch)


def test_intervals():
    assert Interval(1, 4).middle == 2
    assert Interval(1, 4).widened(2) == Interval(0.5, 8)
