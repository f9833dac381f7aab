"""A tiny decoder, ragged packed rows, and one way to lay them out and run them on any mesh."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import load_config
from maxtext_lite.models import Decoder
from maxtext_lite.parallel import sharding, tree_shardings
from maxtext_lite.training.checkpoint import Checkpointer, TrainProgress, fingerprint
from maxtext_lite.training.gradients import step_gradients
from maxtext_lite.training.local_updates import LocalUpdates
from maxtext_lite.training.noise import NoiseScale
from maxtext_lite.training.objective import objective_of
from maxtext_lite.training.optimizer import (
    GradientAccumulation,
    learning_rate_schedule,
    make_optimizer,
)
from maxtext_lite.training.state import (
    StepContext,
    abstract_state,
    make_decoder,
    state_from,
    state_shardings,
)
from maxtext_lite.training.step import TRAIN_BATCH_AXES, make_train_step
from tests.meshes import mesh_of

_TINY = """
vocab_size=264 base_emb_dim=16 base_num_query_heads=4 base_num_kv_heads=2 head_dim=4 base_mlp_dim=24
base_num_decoder_layers=2 max_target_length=32 steps=10 warmup_steps=2 matmul_precision=highest learning_rate=1e-2
"""
TINY = tuple(_TINY.split())
ROWS, LENGTH = 16, 32


def norm(tree):
    """Of all tensors together, in float64."""
    squares = (np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree))
    return np.sqrt(sum(squares))


ONE_DEVICE = mesh_of()
NOT_OF_PARAMETERS = {
    "attention": "dot_product",
    "context_strategy": "all_gather",
    "saved": None,
    "offloaded": (),
}
"""What a decoder's shape says besides its parameters, as all setups have it while these are drawn."""


@functools.cache
def plain_parameters(shape):
    """The parameters of seed 0, drawn once for each shape, on the host, without adapters or pipeline."""
    with jax.set_mesh(ONE_DEVICE):
        return jax.device_get(jax.jit(Decoder(shape).init)(jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class Setup:
    """A config on a mesh, with the parts of its training."""

    config: Any
    mesh: jax.sharding.Mesh
    decoder: Decoder
    optimizer: GradientAccumulation
    local: LocalUpdates | None = None
    objective: Any = None

    @property
    def parts(self):
        """The parts of its step."""
        objective = self.objective or objective_of(self.config)
        return StepContext(
            self.decoder, self.optimizer, self.mesh, self.config, objective, self.local
        )

    @property
    def abstract(self):
        """Shapes and shardings of the state."""
        return abstract_state(self.parts)

    @functools.cached_property
    def initial(self):
        """The same state on the host, from parameters shared by all setups of a shape, as no mesh changes it."""
        without_adapters = Decoder(
            dataclasses.replace(self.decoder.shape, lora=None), self.decoder.pipeline
        )
        params = jax.tree.map(
            lambda x, like, where: jax.device_put(x.reshape(like.shape), where),
            plain_parameters(
                dataclasses.replace(without_adapters.shape, **NOT_OF_PARAMETERS)
            ),
            without_adapters.abstract_params,
            tree_shardings(ONE_DEVICE, without_adapters.axes),
        )
        return jax.device_get(
            state_from(dataclasses.replace(self.parts, mesh=ONE_DEVICE), params, 0)
        )

    def state(self):
        """A new copy of the initial state on the mesh, as a step donates its argument."""
        return jax.device_put(self.initial, state_shardings(self.parts))

    def batch(self, rows, accumulation, slots):
        """Rows as [A, slots, T]: row j in micro-batch j % A, slot j // A; slots without a row are zeros."""
        laid_out = {}
        for name, array in rows.items():
            full = np.zeros((accumulation, slots, array.shape[1]), array.dtype)
            for j, row in enumerate(array):
                full[j % accumulation, j // accumulation] = row
            laid_out[name] = jax.device_put(full, sharding(self.mesh, TRAIN_BATCH_AXES))
        return laid_out

    def abstract_batch(self, accumulation, slots, length):
        """The shapes of a batch [A, slots, T]."""
        where = sharding(self.mesh, TRAIN_BATCH_AXES)
        batch = {}
        for name in ("tokens", "targets", "segments", "positions", "weights"):
            dtype = np.float32 if name == "weights" else np.int32
            batch[name] = jax.ShapeDtypeStruct(
                (accumulation, slots, length), dtype, sharding=where
            )
        return batch

    def compile_step(self, batch, num_micro_batches=None):
        step = make_train_step(
            self.parts, learning_rate_schedule(self.config, last=self.config.steps)
        )
        with jax.set_mesh(self.mesh), jax.default_matmul_precision("highest"):
            return step.lower(self.abstract, batch, num_micro_batches).compile()

    def gradients(
        self, params, batch, num_micro_batches=None, loss_scale=None, frozen=None
    ):
        with jax.set_mesh(self.mesh), jax.default_matmul_precision("highest"):
            function = functools.partial(step_gradients, self.parts)
            return jax.device_get(
                jax.jit(function)(params, batch, num_micro_batches, loss_scale, frozen)
            )

    def run(self, compiled, batch, steps, num_micro_batches=None):
        """State and metrics of each of `steps` steps on the same batch."""
        state, metrics = self.state(), []
        for _ in range(steps):
            state, step_metrics = compiled(state, batch, num_micro_batches)
            metrics.append(
                jax.device_get(step_metrics)
            )  # waits: see feed_steps.py on simulated devices
        return jax.device_get(state), metrics


@functools.cache
def make_setup(*overrides, replicas=None, pipeline=None, objective=None, **mesh_sizes):
    config = load_config(None, [*TINY, *overrides])
    stages = {"stage": pipeline.num_stages} if pipeline else {}
    mesh = mesh_of(**mesh_sizes, **stages)
    decoder = Decoder(make_decoder(config, "cpu").shape, pipeline)
    optimizer = make_optimizer(config, decoder.trained(decoder.axes))
    local = None if replicas is None else LocalUpdates.of(config, replicas)
    return Setup(config, mesh, decoder, optimizer, local, objective)


@pytest.fixture(scope="session")
def setup():
    return make_setup


NOISE = NoiseScale().after(group_squares=1.5, groups=2, grad_norm=1.0, examples=4)
COUNTS = TrainProgress(
    step=7,
    examples_seen=112,
    tokens_seen=3_000_000_000,
    skipped_in_a_row=1,
    noise=NOISE,
)


@pytest.fixture(scope="session")
def saved(tmp_path_factory, setup):
    """A run directory with checkpoints of steps 5, 6 and 7, of which two are kept, and the setup it was saved from.

    The parameters of step 7 are the initial ones, those of step 6 twice them. To change the directory, copy it.
    """
    directory = tmp_path_factory.mktemp("run")
    it = setup("optimizer=adamw", data=2, fsdp=2, tensor=2)
    config = load_config(
        None, [*TINY, "optimizer=adamw", "max_num_checkpoints_to_keep=2"]
    )
    checkpointer = Checkpointer(directory, config, fingerprint(config, "text", None))
    assert checkpointer.latest_step() is None
    for step in (5, 6, 7):
        state = it.state()
        if step == 6:
            state = dataclasses.replace(
                state, params=jax.tree.map(lambda x: x * 2, state.params)
            )
        checkpointer.save(state, dataclasses.replace(COUNTS, step=step))
    checkpointer.close()
    return directory, it


@pytest.fixture(scope="session")
def rows():
    """Ragged, packed rows: documents of many lengths, uneven weights, a row with one target and one with none."""
    rng = np.random.default_rng(0)
    segment = np.cumsum(rng.random((ROWS, LENGTH)) < 0.15, axis=1) + 1
    used = rng.integers(1, LENGTH + 1, ROWS)
    used[3], used[5] = 1, LENGTH
    real = np.arange(LENGTH)[None] < used[:, None]
    starts = np.concatenate(
        [np.ones((ROWS, 1), bool), segment[:, 1:] != segment[:, :-1]], axis=1
    )
    position = np.arange(LENGTH)[None] - np.maximum.accumulate(
        np.where(starts, np.arange(LENGTH)[None], 0), axis=1
    )
    weights = real * rng.choice([0.0, 0.5, 1.0, 1.0], (ROWS, LENGTH))
    weights[7] = 0
    whole = {
        "tokens": rng.integers(0, 264, (ROWS, LENGTH)),
        "targets": rng.integers(0, 264, (ROWS, LENGTH)),
        "segments": segment,
        "positions": position,
    }
    found = {name: np.where(real, x, 0).astype(np.int32) for name, x in whole.items()}
    return found | {"weights": weights.astype(np.float32)}


def pairs_of_answers(num_examples):
    """Examples [num_examples, 2 T] of up to 3 pairs with ragged answers, of which one has none; and a reference."""
    rng = np.random.default_rng(3)
    shape = (num_examples, 2, LENGTH)
    rows = {
        name: np.zeros(shape, np.int32)
        for name in ("tokens", "targets", "segments", "positions")
    }
    rows |= {name: np.zeros(shape, np.float32) for name in ("weights", "reference")}
    for example, side in np.ndindex(num_examples, 2):
        first = 0
        for segment in range(1, 1 + (example + 3) % 4):
            length = int(rng.integers(2, LENGTH // 3))
            here = (example, side, slice(first, first + length))
            rows["tokens"][here], rows["targets"][here] = rng.integers(
                0, 264, (2, length)
            )
            rows["segments"][here], rows["positions"][here] = segment, np.arange(length)
            rows["weights"][here] = rng.random(length) < 0.7
            rows["weights"][example, side, first + length - 1] = 1
            rows["reference"][example, side, first] = -5 + rng.normal()
            first += length
    return {name: x.reshape(num_examples, 2 * LENGTH) for name, x in rows.items()}


@pytest.fixture(scope="session")
def agrees():
    """The project's meaning of two runs agreeing, for trees of tensors."""

    def check(a, b):
        whole = norm(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            apart = norm(np.asarray(x, np.float64) - np.asarray(y, np.float64))
            assert apart <= 1e-5 * norm(y) + 1e-7 * whole, (apart, norm(y), whole)

    return check


@pytest.fixture(scope="session")
def mean_loss():
    """sum(weight * nll) / number of targets of all rows at once, by plain log_softmax: differentiable, no kernels."""

    def loss(decoder, params, rows):
        x = decoder.hidden(params, rows["tokens"], rows["segments"], rows["positions"])
        log_probability = jax.nn.log_softmax(
            jnp.einsum("BTD,DV->BTV", x, decoder.head(params))
        )
        nll = -jnp.take_along_axis(log_probability, rows["targets"][..., None], -1)[
            ..., 0
        ]
        return jnp.sum(rows["weights"] * nll) / jnp.sum(rows["weights"] > 0)

    return loss
