"""Training: state, loss, accumulation, optimizer, step, evaluation, checkpoints, metrics and the loop over them."""

from maxtext_lite.training.callbacks import Callback
from maxtext_lite.training.custom_loss import Loss, Predictions
from maxtext_lite.training.loop import RunResult, train
from maxtext_lite.training.step_log import NonFiniteLoss

__all__ = ["Callback", "Loss", "NonFiniteLoss", "Predictions", "RunResult", "train"]
