"""The noise scale against distributions whose noise scale is known."""

import numpy as np
import pytest

from maxtext_lite.training.noise import NoiseScale

DIM = 64
RNG = np.random.default_rng(0)
MEAN = RNG.normal(size=DIM)
DEVIATIONS = RNG.uniform(0.5, 4.0, size=DIM)  # of one token's gradient, by coordinate


def _step(rng, tokens, mean, deviations):
    """The report of a step of groups with these numbers of tokens: sum of w/W |m|^2, groups, norm."""
    tokens = np.asarray(tokens)
    used = tokens[tokens > 0]
    groups = (
        mean
        + rng.normal(size=(len(used), len(mean))) * deviations / np.sqrt(used)[:, None]
    )
    shares = used / used.sum()
    whole = (shares[:, None] * groups).sum(0)
    return {
        "group_squares": float((shares * (groups**2).sum(1)).sum()),
        "groups": len(used),
        "grad_norm": float(np.linalg.norm(whole)),
    }


def test_a_quadratic_with_known_covariance_within_5_percent_after_2000_steps():
    """loss_i(x) = |x - c_i|^2 / 2 has gradients x - c_i: mean x - E[c], covariance that of c, at every x."""
    noise, rng = NoiseScale(), np.random.default_rng(1)
    for step in range(2000):  # of unequal groups, one of which may be empty; in a ramp
        groups, examples = (2, 16) if step < 1000 else (8, 32)
        shares = rng.dirichlet(np.full(groups, 2.0))
        tokens = rng.multinomial(8 * examples, shares)
        found = _step(rng, tokens, MEAN, DEVIATIONS)
        noise = noise.after(**found, examples=examples)
    true = (DEVIATIONS**2).sum() / 8 / (MEAN**2).sum()
    assert noise.examples == pytest.approx(true, rel=0.05)
    assert noise.relative_error < 0.05
    assert noise.record(examples)["gradient_noise_scale_ratio"] == pytest.approx(
        noise.examples / examples
    )


@pytest.mark.parametrize(("noise_scale", "groups"), [(8, 8), (1000, 2)])
def test_the_interval_covers_the_noise_scale_in_about_68_of_100_runs_from_the_second_step_on(
    groups, noise_scale
):
    """At 1000 examples and 8 a step, the gradient itself is lost in its noise for most of these steps."""
    rng, runs, dim = np.random.default_rng(0), 300, 30
    covered: dict[int, list[bool]] = {2: [], 4: [], 8: [], 32: []}
    for _ in range(runs):
        noise = NoiseScale()
        means = rng.normal(size=(32, groups, dim)) * np.sqrt(
            noise_scale / dim / 4
        )  # of 4 examples each
        means[:, :, 0] += 1
        squares, norms = (
            (means**2).sum(2).mean(1),
            np.linalg.norm(means.mean(1), axis=1),
        )
        for step in range(1, 33):
            noise = noise.after(
                group_squares=float(squares[step - 1]),
                groups=groups,
                grad_norm=float(norms[step - 1]),
                examples=4 * groups,
            )
            if step in covered and noise.interval:
                low, high = noise.interval
                covered[step].append(
                    low <= noise_scale and (high is None or noise_scale <= high)
                )
    for step, inside in covered.items():
        assert 0.58 < np.mean(inside) < 0.9, f"step {step}"


@pytest.mark.fast
def test_what_says_nothing_changes_nothing():
    noise = NoiseScale().after(group_squares=3.0, groups=2, grad_norm=1.0, examples=4)
    assert noise.after(group_squares=3.0, groups=1, grad_norm=1.0, examples=4) == noise
    for squares, norm in ((float("nan"), 1.0), (3.0, float("inf"))):
        unknown = noise.after(
            group_squares=squares, groups=2, grad_norm=norm, examples=4
        )
        assert unknown == noise
