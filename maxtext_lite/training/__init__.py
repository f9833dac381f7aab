"""Training: state, loss, accumulation, optimizer, step, evaluation, checkpoints, metrics and the loop over them."""

from maxtext_lite.training.loop import NonFiniteLoss, RunResult, train

__all__ = ["NonFiniteLoss", "RunResult", "train"]
