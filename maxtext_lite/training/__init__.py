"""Training: state, loss, accumulation, optimizer, step, evaluation, checkpoints, metrics and the loop over them."""

from maxtext_lite.training.ledger import NonFiniteLoss
from maxtext_lite.training.loop import RunResult, train

__all__ = ["NonFiniteLoss", "RunResult", "train"]
