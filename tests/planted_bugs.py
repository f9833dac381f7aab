"""Eight bugs that make a run depend on how its batch is split, to be planted in a process that `equiv` starts.

docs/architecture.md says where else each could be made.
"""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp

from maxtext_lite.models import capacity, mixture
from maxtext_lite.parallel import Pipeline, context_shards
from maxtext_lite.training import equivalence, gradients
from maxtext_lite.training.accumulate import GradientAccumulation
from maxtext_lite.training.gradients import GradientLoop
from maxtext_lite.training.outputs import Outputs, forward


def mean_of_means():
    """Each micro-batch's loss is divided by what it counts itself, and by how many there are."""
    loss_share, whole = GradientLoop._loss_share, {}

    def of_step(self, counts):
        whole["of"] = counts["target_tokens"].shape[0]
        return original(self, counts)

    def with_own_mean(self, params, frozen, factor, rows):
        own = jnp.maximum(jnp.sum(rows["weights"] > 0), 1)
        pieces = whole["of"] * self._parts.config.gradient_accumulation_steps
        return loss_share(self, params, frozen, jnp.float32(1) / (own * pieces), rows)

    original = GradientLoop.whole
    yield mock.patch.object(GradientLoop, "whole", of_step)
    yield mock.patch.object(GradientLoop, "_loss_share", with_own_mean)


def auxiliary_loss_not_summed():
    """The experts' loss is a mean over the micro-batch's rows, whatever share of the step they are."""
    original = Outputs.auxiliary_loss

    def mean(self, weight_BT, example_weight_B):
        whole = jnp.sum(example_weight_B)
        return original(self, weight_BT / whole, example_weight_B / whole)

    yield mock.patch.object(Outputs, "auxiliary_loss", mean)


def auxiliary_metric_not_summed():
    """What is reported of the experts' loss is that of the last micro-batch."""
    original = GradientLoop._with_piece

    def last(self, sums, gradients, losses):
        sums = sums._replace(aux=jax.tree.map(jnp.zeros_like, sums.aux))
        return original(self, sums, gradients, losses)

    yield mock.patch.object(GradientLoop, "_with_piece", last)


def one_key():
    """Dropout of the final hidden states, by the same key in each micro-batch and each replica."""
    yield dropout(lambda rows, shape: jax.random.bernoulli(jax.random.key(0), 0.9, shape))


def key_of_row():
    """No bug: dropout by a key that each row has of its own, whichever micro-batch it is in."""

    def keeps(rows, shape):
        row_B = jnp.sum(rows["tokens"] * jnp.arange(1, shape[1] + 1), axis=1)
        key_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(0), row_B)
        return jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, shape[1:]))(key_B)

    yield dropout(keeps)


def dropout(keeps):
    """What gives the model a dropout, which it does not have; `keeps(rows, shape)` is its mask."""

    def with_dropout(decoder, params, rows, config):
        outputs = forward(decoder, params, rows, config)
        x_BTD = jnp.where(keeps(rows, outputs.x_BTD.shape), outputs.x_BTD / 0.9, 0)
        return dataclasses.replace(outputs, x_BTD=x_BTD)

    return mock.patch.object(gradients, "forward", with_dropout)


def lost_reduction():
    """Each replica's gradients are taken for those of all: here the first one's."""
    original = GradientLoop.total

    def first_alone(self, sums, **how):
        own = jax.tree.map(lambda g_R: jnp.broadcast_to(g_R[:1], g_R.shape), sums.gradients)
        return original(self, sums._replace(gradients=own), **how)

    yield mock.patch.object(GradientLoop, "total", first_alone)


def pipeline_drops_last():
    """The pipeline stops one tick before its last piece has left the last stage."""
    ticks, ticks_1f1b = Pipeline.num_ticks.fget, Pipeline.num_ticks_1f1b
    yield mock.patch.object(Pipeline, "num_ticks", property(lambda self: ticks(self) - 1))
    yield mock.patch.object(Pipeline, "num_ticks_1f1b", lambda self, count: ticks_1f1b(self, count) - 1)


def positions_by_shard():
    """Each context shard counts the positions of its tokens from 0."""
    original = gradients.in_context_order

    def restarted(batch, axes):
        found = original(batch, axes)
        return found | {"positions": found["positions"] % (found["positions"].shape[-1] // context_shards())}

    yield mock.patch.object(gradients, "in_context_order", restarted)


def capacity_by_batch():
    """Experts take a share of the micro-batch's tokens, whichever examples these are of."""
    original = capacity.with_capacity

    def of_batch(x_BTD, routing, weights, shape):
        B, T, _ = x_BTD.shape

        def joined(x):
            return x.reshape(1, B * T, *x.shape[2:])

        one = routing._replace(expert_BTJ=joined(routing.expert_BTJ), share_BTJ=joined(routing.share_BTJ))
        y, dropped = original(joined(x_BTD), one, weights, shape)
        return y.reshape(B, T, -1), jnp.broadcast_to(dropped, B)

    yield mock.patch.object(capacity, "constrain", lambda x, axes: x)
    yield mock.patch.object(mixture, "with_capacity", of_batch)


def stale_optimizer_shard():
    """A replica's share of the optimizer's state stays as it was."""
    original = GradientAccumulation.finish

    def but_for_one(self, gradients, state, *rest):
        params, new = original(self, gradients, state, *rest)
        if not self.over_data:
            return params, new

        def stale(new, old):
            return new if new.ndim < 2 else jnp.where(jnp.arange(new.shape[-1]) < new.shape[-1] // 8, old, new)

        inner = jax.tree.map(stale, new.inner_opt_state, state.inner_opt_state)
        return params, new._replace(inner_opt_state=inner)

    yield mock.patch.object(GradientAccumulation, "finish", but_for_one)


FOUR = "data 2 x fsdp 4, 4 micro-batches with empty slots"
CONTEXT = "data 2 x fsdp 2 x context 2, 2 micro-batches"
STAGES = "data 2 x fsdp 2 x 2 stages, 1f1b, 2 micro-batches"
BUGS = {
    "mean of means": (mean_of_means, FOUR),
    "lost reduction over data": (lost_reduction, "data 8"),
    "auxiliary loss not summed": (auxiliary_loss_not_summed, FOUR),
    "auxiliary metric not summed": (auxiliary_metric_not_summed, STAGES),
    "pipeline drops its last microbatch, gpipe": (pipeline_drops_last, "data 4 x 2 stages, gpipe"),
    "pipeline drops its last microbatch, 1f1b": (pipeline_drops_last, STAGES),
    "positions by shard": (positions_by_shard, CONTEXT),
    "capacity by batch": (capacity_by_batch, "data 8"),
    "stale optimizer shard": (stale_optimizer_shard, "data 8, ZeRO-1, 2 micro-batches"),
}
"""By name, what plants a bug, and the way to split a batch, of those that `equiv` tries, that shows it."""
EVERYWHERE = {"one key": (one_key, FOUR), "key of row": (key_of_row, FOUR)}
"""Those that are planted in the whole batch's run too, which they leave right."""

CONFIG = (
    "num_experts=4", "num_experts_per_tok=2", "capacity_factor=1", "base_moe_mlp_dim=16", "optimizer=sgd",
    "router_z_loss_multiplier=0.001",
)  # fmt: skip
"""That can show all of them."""

TRAIN_ALL = equivalence._train_all


def train_all(path, runs, directory):
    """`equivalence._train_all`, with bugs planted: in run i the one that line i of DIRECTORY/../planted.txt names."""
    planted = [*(directory.parent / "planted.txt").read_text().split("\n"), *[""] * len(runs)]
    for run in runs:
        plant, _ = (BUGS | EVERYWHERE).get(planted[int(run[0])], (list, ""))
        with contextlib.ExitStack() as stack:
            for patch in plant():
                stack.enter_context(patch)
            TRAIN_ALL(path, [run], directory)
