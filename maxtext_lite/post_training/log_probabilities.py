"""The log-probabilities of a batch's tokens under given parameters, and the frozen reference of the KL divergence."""

import dataclasses
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array

from maxtext_lite.config import UserError
from maxtext_lite.hf.adapter import adapter_of
from maxtext_lite.parallel import (
    Params,
    accelerator_of,
    constrain,
    in_context_order,
    in_token_order,
    sharding,
    tree_shardings,
    vmap_over_data,
)
from maxtext_lite.post_training.keys import RLRunConfig
from maxtext_lite.training.arrays import Rows
from maxtext_lite.training.gradients import TRAIN_BATCH_AXES
from maxtext_lite.training.loss import forward
from maxtext_lite.training.parameter_files import load_parameters, save_parameters
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import StepContext, TrainState, make_decoder

REFERENCE_DIRECTORY = "reference"
"""In the run directory: the reference's parameters, for a run without LoRA."""

_NEEDED = ("tokens", "targets", "segments", "positions", "weights")


def make_log_probabilities(parts: StepContext, temperature: float) -> Callable[[Params, dict[str, Array]], Array]:
    """The jitted function (params, batch) -> log-probabilities of the targets, float32 [A, B, T]; 0 without a target.

    The result has the batch's sharding and token order; one micro-batch is computed at a time. `params` are all of the
    decoder's, as `Decoder.joined` gives them; of the batch's arrays [A, B, T] only those of pre-training are read.

    Args:
      temperature: divides the logits; the policy is their softmax.
    """
    decoder = parts.decoder
    mesh = parts.mesh

    def of_rows(params: Params, rows: Rows) -> Array:
        nll_BT = forward(decoder, params, rows, parts.config).nll(rows["targets"], temperature)
        return jnp.where(rows["weights"] > 0, -nll_BT, 0)

    by_replica = vmap_over_data(of_rows, mesh.shape["data"], rows=(1,))

    def log_probabilities(params: Params, batch: Rows) -> Array:
        batch = in_context_order({name: batch[name] for name in _NEEDED}, TRAIN_BATCH_AXES)
        cast_params = decoder.cast(params)

        def of_micro_batch(rows: Rows) -> Array:
            # Weights are gathered where they are used, as in `gradients.accumulate_micro_batches`.
            here, rows = jax.lax.optimization_barrier((cast_params, rows))
            found_RBT = by_replica(here, rows)
            return constrain(found_RBT.reshape(-1, found_RBT.shape[-1]), TRAIN_BATCH_AXES[1:])

        return in_token_order(cast(Array, jax.lax.map(of_micro_batch, batch)), TRAIN_BATCH_AXES)

    where = sharding(mesh, TRAIN_BATCH_AXES)
    return jax.jit(log_probabilities, in_shardings=(tree_shardings(mesh, decoder.axes), where), out_shardings=where)


class Reference:
    """The log-probabilities of given tokens under the run's starting model.

    Its parameters are a copy in `dtype` on the devices that train: with LoRA of the frozen model, otherwise of the
    parameters before the first step, which are also saved in the run directory for restarts.

    Args:
      state: the run's, restored or new, after `step` steps.
    Raises:
      UserError: a resumed run's reference is gone, or it started without one.
    """

    def __init__(self, run: TrainingRun, config: RLRunConfig, state: TrainState, step: int):
        decoder = run.decoder
        if config.lora_rank:
            without = run.config.model_copy(update={"lora_rank": 0})
            decoder = make_decoder(without, accelerator_of(run.mesh.devices.flat[0]), run.plan)
        where = run.directory / REFERENCE_DIRECTORY
        path = config.load_parameters_path
        if path and adapter_of(path):  # the run starts from the adapted model, not from the frozen one
            raise UserError(
                f"grpo_beta={config.grpo_beta:g} refers to the model that the run begins with, which includes the "
                f"adapter of load_parameters_path={config.load_parameters_path}. Nearest that works: grpo_beta=0, or "
                "the adapter merged: convert import."
            )
        if state.frozen is not None:
            plain = state.frozen
        elif step == 0:
            plain = state.params
            if run.checkpointer:
                save_parameters(where, plain)
        elif (where / "checkpoints").is_dir():
            plain = load_parameters(where, run.abstract_state.plain_params, "run_name")
        else:
            raise UserError(
                f"{where} is not there, which holds the model that grpo_beta={config.grpo_beta:g} refers to, from the "
                "start of a run whose grpo_beta is not 0. Use grpo_beta=0, or another run_name, with "
                f"load_parameters_path={run.directory} to continue from its parameters as a new reference."
            )
        shardings = tree_shardings(run.mesh, decoder.axes)
        # A copy, as the first update donates the trainer's arrays.
        copied = jax.jit(lambda params: jax.tree.map(jnp.copy, decoder.cast(params)), out_shardings=shardings)
        self._params: Params = copied(plain)
        parts = dataclasses.replace(run.parts, decoder=decoder)
        self._find = make_log_probabilities(parts, config.decode_sampling_temperature)

    def of(self, rows: dict[str, Array]) -> Array:
        """Log-probabilities [A, B, T] of the rows' targets."""
        return self._find(self._params, rows)
