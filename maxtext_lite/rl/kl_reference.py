"""The frozen reference of the KL divergence: the model from which the run started."""

import dataclasses

import jax
import jax.numpy as jnp

from maxtext_lite.config import RLRunConfig, UserError
from maxtext_lite.config.hf.adapter import adapter_of
from maxtext_lite.data import PromptSource
from maxtext_lite.models import Decoder
from maxtext_lite.parallel import Params, accelerator_of, tree_shardings
from maxtext_lite.rl.log_probabilities import make_log_probabilities
from maxtext_lite.training.parameter_files import load_parameters, save_parameters
from maxtext_lite.training.run import TrainingRun
from maxtext_lite.training.state import TrainState, make_decoder

DIRECTORY = "reference"
"""In the run directory: the reference's parameters, for a run without LoRA."""


class Reference:
    """The log-probabilities of given tokens under the model from which the run started.

    Its parameters are a copy in `dtype` on the devices that train: with LoRA of the frozen model, otherwise of the
    parameters before the first step, which are also saved in the run directory for restarts.

    Args:
      state: the run's, restored or new, after `step` steps.
    Raises:
      UserError: a resumed run's reference is gone, or it started without one.
    """

    def __init__(self, run: TrainingRun[PromptSource], config: RLRunConfig, state: TrainState, step: int):
        decoder = _without_adapters(run, config)
        where = run.directory / DIRECTORY
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
                save_parameters(where, plain, run.failures)
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

    def of(self, rows: dict[str, jax.Array]) -> jax.Array:
        """Log-probabilities [A, B, T] of the rows' targets."""
        return self._find(self._params, rows)


def _without_adapters(run: TrainingRun[PromptSource], config: RLRunConfig) -> Decoder:
    if not config.lora_rank:
        return run.decoder
    return make_decoder(
        run.config.model_copy(update={"lora_rank": 0}), accelerator_of(run.mesh.devices.flat[0]), run.plan
    )
