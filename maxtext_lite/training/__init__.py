"""Training: state, loss, accumulation, optimizer, step, evaluation, checkpoints, metrics and the loop over them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxtext_lite.training.custom_loss import Loss, Predictions
    from maxtext_lite.training.hooks import Callback, Hook, LossSpike, NonFiniteLoss
    from maxtext_lite.training.loop import RunResult, train

__all__ = ["Callback", "Hook", "Loss", "LossSpike", "NonFiniteLoss", "Predictions", "RunResult", "train"]

_MODULES = {
    "Callback": "hooks",
    "Hook": "hooks",
    "Loss": "custom_loss",
    "LossSpike": "hooks",
    "NonFiniteLoss": "hooks",
    "Predictions": "custom_loss",
    "RunResult": "loop",
    "train": "loop",
}
"""Names whose modules import Orbax and Grain; they are imported on first use, so that `generate` needs neither."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
