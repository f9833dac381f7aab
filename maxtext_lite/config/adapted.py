"""The keys of LoRA: which weights they name, and the rules about them."""

from difflib import get_close_matches

from maxtext_lite.config.errors import value_text
from maxtext_lite.config.schema import Config
from maxtext_lite.config.sections import ModelConfig
from maxtext_lite.config.violation import Violation, unused, violates
from maxtext_lite.config.weights import model_shape, stacks_of

ALL_TARGETS = "all"
"""The value of lora_targets that names every weight with a name."""


def adaptable_weights(config: ModelConfig) -> tuple[str, ...]:
    """Names of the weights that may have adapters: every matrix of the layers except routers and shared experts' gates.

    A weight's path in the parameters ends in its name, which experts, shared experts and dense layers have in common.
    """
    tables = [table for stack, (_, table) in stacks_of(model_shape(config)).items() if stack]
    matrices = [path.rpartition("/")[2] for table in tables for path, weight in table.items() if weight.is_normal]
    return tuple(dict.fromkeys(name for name in matrices if name not in ("router", "shared_gate")))


def adapted_weights(config: ModelConfig) -> tuple[str, ...]:
    """Names of the weights that have adapters, in the model's order; none without LoRA."""
    if config.lora_rank == 0:
        return ()
    named = _named(config)
    return tuple(name for name in adaptable_weights(config) if named == [ALL_TARGETS] or name in named)


def _named(config: ModelConfig) -> list[str]:
    return [name.strip() for name in config.lora_targets.split(",")]


def unknown_targets(config: Config) -> Violation | None:
    """Names in lora_targets that are not of weights that may have adapters."""
    if config.lora_rank == 0 or _named(config) == [ALL_TARGETS]:
        return None
    named, known = _named(config), adaptable_weights(config)
    wrong = next((name for name in named if name not in known), None)
    if wrong is None:
        return None
    kept = list(dict.fromkeys(name for name in named if name in known))
    alike = [name for name in known if wrong and wrong in name] or get_close_matches(wrong, known, n=1, cutoff=0.8)
    near = [name for name in alike[:1] if name not in kept]
    rule = f"names '{value_text(wrong, 40)}'; this model has {', '.join(known)}, or all"
    return violates(config, "lora_targets", rule, ",".join(kept + near) or ALL_TARGETS)


def unused_adapters(config: Config, defaults: Config) -> Violation | None:
    """Keys about adapters, in a run without any."""
    usual = {key: getattr(defaults, key) for key in ("lora_alpha", "lora_targets")}
    reason = "has no effect with lora_rank=0, which trains all weights"
    return None if config.lora_rank else unused(config, usual, reason, {"lora_rank": 8})
