"""Training: state, loss, accumulation, optimizer, step, evaluation, checkpoints, metrics and the loop over them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxtext_lite.training.callbacks import Callback
    from maxtext_lite.training.custom_loss import Loss, Predictions
    from maxtext_lite.training.loop import RunResult, train
    from maxtext_lite.training.step_log import LossSpike, NonFiniteLoss

__all__ = ["Callback", "Loss", "LossSpike", "NonFiniteLoss", "Predictions", "RunResult", "train"]

_MODULES = {
    "Callback": "callbacks",
    "Loss": "custom_loss",
    "LossSpike": "step_log",
    "NonFiniteLoss": "step_log",
    "Predictions": "custom_loss",
    "RunResult": "loop",
    "train": "loop",
}
"""Names whose modules import Orbax and Grain; they are imported on first use, so that `generate` needs neither."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
