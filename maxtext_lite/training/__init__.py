"""Training: state, loss, accumulation, optimizer, step, evaluation, checkpoints, metrics and the loop over them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxtext_lite.training.hooks import Callback, Hook, LossSpike, NonFiniteLoss
    from maxtext_lite.training.loop import RunResult, train
    from maxtext_lite.training.objective import Loss, Predictions

__all__ = ["Callback", "Hook", "Loss", "LossSpike", "NonFiniteLoss", "Predictions", "RunResult", "train"]

_MODULES = {
    "Callback": "hooks",
    "Hook": "hooks",
    "Loss": "objective",
    "LossSpike": "hooks",
    "NonFiniteLoss": "hooks",
    "Predictions": "objective",
    "RunResult": "loop",
    "train": "loop",
}
"""Names whose modules import Orbax and Grain; they are imported on first use, because `generate` needs neither."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
