"""The optimizer's settings for a batch other than the one they were tuned for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from maxtext_lite.batching.batch import Batch, smaller_batches
from maxtext_lite.config import Config
from maxtext_lite.config.errors import number_text, short_text
from maxtext_lite.config.violation import Violation


@dataclass(frozen=True)
class OptimizerScaling:
    """Scaled optimizer settings, for m = target batch / batch that they were tuned for.

    Attributes:
      rule: learning_rate_scaling.
      batch_ratio: m; during a ramp it is that of the target; 1 without scaling.
      learning_rate_multiplier: m (linear), its square root (sqrt), or 1.
      configured: learning_rate, adam_b1, adam_b2 and adam_eps in the config.
      scaled: the same in the run.
    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.1 (linear, for SGD); Malladi et al. 2022, arXiv:2205.10287,
      definition of the square root scaling rule for Adam (sqrt, betas and epsilon).
    """

    rule: Literal["none", "linear", "sqrt"]
    batch_ratio: Fraction
    learning_rate_multiplier: float
    configured: Mapping[str, float]
    scaled: Mapping[str, float]


def scaling_violations(config: Config, batch: Batch | None) -> list[Violation]:
    """Refuses scaling without a base batch, and scaled decays outside [0, 1). `batch` is None where it is unknown."""
    if config.learning_rate_scaling == "none":
        return []
    base = config.base_global_batch_size
    if base == 0:
        key = "base_global_batch_size"
        return [
            Violation(
                key,
                f"{key}=0 does not state the batch that learning_rate was tuned for, from which "
                f"learning_rate_scaling={config.learning_rate_scaling} scales.",
                () if batch is None else (batch.global_batch_to_train,),
            )
        ]
    if batch is None or not config.scale_adam_with_batch:
        return []
    ratio = Fraction(batch.global_batch_to_train, base)
    broken: list[Violation] = []
    for key, decay in (("adam_b1", config.adam_b1), ("adam_b2", config.adam_b2)):
        forgotten = 1 - _exact(decay)
        if ratio * forgotten <= 1:
            continue
        largest = math.floor(Fraction(base) / forgotten)
        # The smallest decay that works, rounded up at enough digits to stay below 1.
        digits: int = 10 ** (2 + len(str(math.ceil(ratio))))
        smallest = float(Fraction(math.ceil((1 - 1 / ratio) * digits), digits))
        broken.append(
            Violation(
                key,
                f"{key}={number_text(decay)} becomes 1 - {short_text(ratio)} x (1 - {number_text(decay)}) = "
                f"{short_text(1 - ratio * forgotten)} with scale_adam_with_batch=true (m = global batch "
                f"{batch.global_batch_to_train} / base_global_batch_size={base}), not in [0, 1); the largest batch "
                f"that works is {largest}.",
                (*smaller_batches(config, batch, largest)[:1], smallest, {"scale_adam_with_batch": False}),
            )
        )
    return broken


def scale_optimizer(config: Config, global_batch_to_train: int) -> OptimizerScaling:
    """The optimizer's settings for this batch, for a config without `scaling_violations`."""
    rule = config.learning_rate_scaling
    ratio = Fraction(1) if rule == "none" else Fraction(global_batch_to_train, config.base_global_batch_size)
    multiplier = math.sqrt(ratio) if rule == "sqrt" else float(ratio)
    configured = {
        "learning_rate": config.learning_rate,
        "adam_b1": config.adam_b1,
        "adam_b2": config.adam_b2,
        "adam_eps": config.adam_eps,
    }
    scaled = configured | {"learning_rate": config.learning_rate * multiplier}
    if config.scale_adam_with_batch:
        scaled["adam_b1"] = float(1 - ratio * (1 - _exact(config.adam_b1)))
        scaled["adam_b2"] = float(1 - ratio * (1 - _exact(config.adam_b2)))
        scaled["adam_eps"] = config.adam_eps / math.sqrt(ratio)
    return OptimizerScaling(rule, ratio, multiplier, configured, scaled)


def scaling_warnings(config: Config, scaling: OptimizerScaling) -> list[str]:
    """What a scaling does that is probably a mistake."""
    warnings: list[str] = []
    ratio = scaling.batch_ratio
    if scaling.rule == "linear" and ratio > 1 and config.warmup_steps == 0:
        warnings.append(
            f"learning_rate_scaling=linear raises learning_rate {short_text(ratio)} times with warmup_steps=0: large "
            "batches need a warm-up (Goyal et al. 2017, section 2.2)."
        )
    if scaling.rule == "linear" and ratio != 1 and config.optimizer == "adamw":
        warnings.append(
            "learning_rate_scaling=linear is the rule for SGD; for optimizer=adamw it is sqrt (Malladi et al. 2022)."
        )
    return warnings


def _exact(decay: float) -> Fraction:
    return Fraction(repr(decay))  # the decimal that the user wrote; 1 - 0.95 in floats is not 0.05
