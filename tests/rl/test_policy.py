"""The losses of GRPO and GSPO, and their gradients, are those of the published formulas."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from maxtext_lite.config import load_config
from maxtext_lite.models import DecoderShape
from maxtext_lite.training.loss import WHOLE, Outputs
from tests.responses import (
    LONGEST,
    PAIRS,
    TOKENS,
    rows,
    variant,
)
from tests.training.conftest import TINY

torch = pytest.importorskip("torch")


def published(log_probability, batch, policy):
    """Loss and metrics as TRL publishes them, by torch in the precision of its arguments; aggregations by its names
    grpo, dapo and dr_grpo."""
    mask, advantages, old, reference = (
        torch.tensor(batch[name], dtype=torch.float64)
        for name in (
            "weights",
            "advantages",
            "old_log_probabilities",
            "reference_log_probabilities",
        )
    )
    advantages = advantages[:, :1]
    if policy.on_policy:
        old = log_probability.detach()
    log_ratio = log_probability - old
    if policy.algo == "gspo":
        log_weights = (
            (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
        ).unsqueeze(-1)
    else:
        log_weights = log_ratio
    coef_1 = torch.exp(log_weights)
    coef_2 = torch.clamp(coef_1, 1 - policy.epsilon_low, 1 + policy.epsilon_high)
    losses = -torch.min(coef_1 * advantages, coef_2 * advantages).expand(mask.shape)
    kl = torch.exp(reference - log_probability) - (reference - log_probability) - 1
    away = old.detach() - torch.tensor(
        batch["rollout_log_probabilities"], dtype=torch.float64
    )
    if policy.correction_cap is not None:
        losses = losses * torch.clamp(torch.exp(away), max=policy.correction_cap)
    if policy.beta:
        losses = losses + policy.beta * kl
    loss = {
        "seq_mean_token_mean": lambda: (
            (losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
        ).mean(),
        "token_mean": lambda: (losses * mask).sum() / mask.sum(),
        "seq_mean_token_sum_norm": lambda: (
            (losses * mask).sum() / (losses.size(0) * LONGEST)
        ),
    }[policy.aggregation]()
    mean = lambda x: ((x.expand(mask.shape) * mask).sum() / mask.sum()).item()  # noqa: E731
    metrics = {
        "clip_fraction_low": mean(
            ((coef_1 < 1 - policy.epsilon_low) & (advantages < 0)).double()
        ),
        "clip_fraction_high": mean(
            ((coef_1 > 1 + policy.epsilon_high) & (advantages > 0)).double()
        ),
        "token_nll": mean(-log_probability.detach()),
    }
    if policy.compares:
        metrics |= {
            "rollout_mismatch": mean(away.abs()),
            "rollout_kl": mean(torch.exp(away) - 1 - away),
        }
    if policy.correction_cap is not None:
        metrics["rollout_truncated"] = mean(
            (torch.exp(away) > policy.correction_cap).double()
        )
    return loss, metrics | ({"kl": mean(kl.detach())} if policy.beta else {})


CASES = [
    pytest.param(variant(compares=True), marks=pytest.mark.fast),
    variant(aggregation="seq_mean_token_sum_norm", compares=True, correction_cap=1.3),
    variant(
        on_policy=True, aggregation="token_mean", compares=True, correction_cap=1.3
    ),
    variant(algo="gspo", beta=0.0),
    variant(algo="gspo", aggregation="token_mean", on_policy=True, temperature=1.0),
    variant(
        algo="gspo",
        aggregation="seq_mean_token_sum_norm",
        correction_cap=1.3,
        compares=True,
    ),
]


@pytest.mark.parametrize(
    "policy",
    CASES,
    ids=lambda p: f"{p.algo} {p.aggregation} {p.on_policy} {p.correction_cap}",
)
def test_loss_metrics_and_gradients_are_those_of_trl_s_formulas(policy):
    """Hidden states and output projection at random; from the gradient of log-probabilities, which torch finds in
    double precision, that of both through the tempered softmax by hand."""
    batch, rng = rows(), np.random.default_rng(1)
    x, head = rng.normal(size=(PAIRS, TOKENS, 6)), 0.3 * rng.normal(size=(6, 264))
    logits = x @ head / policy.temperature
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    log_probability = np.log(
        np.take_along_axis(probability, batch["targets"][..., None], -1)[..., 0]
    )
    # Ratios on both sides of the clip range: old policies near this one.
    names = (f"{which}_log_probabilities" for which in ("old", "reference", "rollout"))
    for name, scale in zip(names, (0.6, 0.8, 0.3), strict=True):
        near = log_probability + scale * rng.normal(size=(PAIRS, TOKENS))
        batch[name] = np.where(batch["weights"] > 0, near, 0).astype(np.float32)
    variable = torch.tensor(log_probability, requires_grad=True)
    want, metrics = published(variable, batch, policy)
    want.backward()
    one_hot = np.eye(264)[batch["targets"]]
    dlogits = (
        variable.grad.numpy()[..., None] * (one_hot - probability) / policy.temperature
    )
    if not policy.on_policy and policy.algo == "grpo":
        assert metrics["clip_fraction_low"] > 0.05
        assert metrics["clip_fraction_high"] > 0.05
    if policy.correction_cap is not None:
        assert 0.05 < metrics["rollout_truncated"] < 0.95

    decoder = types.SimpleNamespace(
        head=lambda params: params, shape=DecoderShape(264, 6, 1, 1, 2, 2, 1)
    )
    counted = (
        int(np.sum(batch["weights"])) if policy.divisor == "target_tokens" else PAIRS
    )
    config = load_config(None, [*TINY, "num_vocab_tiling=2"])

    def loss(head_DV, x_BTD, batch):
        outputs = Outputs(decoder, head_DV, x_BTD, {}, config, WHOLE)
        return policy.loss(outputs, batch, jnp.float32(1 / counted))

    with jax.default_matmul_precision("highest"):
        differentiated = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, sums), (dhead, dx) = differentiated(np.float32(head), np.float32(x), batch)
    assert float(sums.loss) == pytest.approx(want.item(), rel=1e-5, abs=1e-7)
    found = {
        name: float(value)
        for name, value in policy.metrics(sums.aux, counted, config).items()
    }
    assert found == {
        name: pytest.approx(value, rel=1e-4) for name, value in metrics.items()
    }
    assert_allclose(dx, dlogits @ head.T, rtol=1e-3, atol=1e-7)
    assert_allclose(dhead, np.einsum("BTD,BTV->DV", x, dlogits), rtol=1e-3, atol=1e-6)


@pytest.mark.fast
def test_a_ratio_that_is_clipped_or_has_no_advantage_and_a_weight_that_is_truncated_may_be_infinite():
    batch = rows()
    batch["advantages"][:] = np.array([1, 0] * 4)[:, None]
    x = np.full((PAIRS, TOKENS), -1.0, np.float32)

    def of(policy, **changed):
        losses = lambda x: jnp.sum(policy.token_losses(x, batch | changed)[0])  # noqa: E731
        return jax.jit(jax.value_and_grad(losses))(x)

    never = np.full((PAIRS, TOKENS), -1000, np.float32)
    loss, gradient = of(variant(beta=0.0), old_log_probabilities=never)
    assert float(loss) == pytest.approx(-1.3 * batch["weights"][::2].sum())
    assert not np.any(gradient)
    policy = variant(on_policy=True, beta=0.0, compares=True, correction_cap=2.0)
    loss, gradient = of(policy, rollout_log_probabilities=never)
    assert float(loss) == pytest.approx(-2 * batch["weights"][::2].sum())
    assert_allclose(gradient, -2 * batch["weights"] * batch["advantages"])
