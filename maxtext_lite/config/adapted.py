"""LoRA's keys: which weights they name, and the rules about them."""

from difflib import get_close_matches

from maxtext_lite.config.errors import value_text
from maxtext_lite.config.schema import Config
from maxtext_lite.config.sections import ModelConfig
from maxtext_lite.config.violation import Violation, unused
from maxtext_lite.config.weights import model_shape, stacks_of

ALL_TARGETS = "all"
"""What lora_targets says of every weight that can be named."""


def adaptable_weights(config: ModelConfig) -> tuple[str, ...]:
    """Names of the weights in a model's layers that may have adapters: all that tokens are multiplied by, but routers
    and the gate of shared experts.

    Their paths in the parameters end in them; those of experts, of shared experts and of dense layers share a name.
    """
    tables = [table for stack, (_, table) in stacks_of(model_shape(config)).items() if stack]
    matrices = [path.rpartition("/")[2] for table in tables for path, weight in table.items() if weight.is_normal]
    return tuple(dict.fromkeys(name for name in matrices if name not in ("router", "shared_gate")))


def adapted_weights(config: ModelConfig) -> tuple[str, ...]:
    """The names that have adapters, in the model's order; none without LoRA."""
    if config.lora_rank == 0:
        return ()
    named = _named(config)
    return tuple(name for name in adaptable_weights(config) if named == [ALL_TARGETS] or name in named)


def _named(config: ModelConfig) -> list[str]:
    return [name.strip() for name in config.lora_targets.split(",")]


def unknown_targets(config: Config) -> Violation | None:
    """Refuses names of weights that the model does not have, or that have no adapters."""
    if config.lora_rank == 0 or _named(config) == [ALL_TARGETS]:
        return None
    named, known = _named(config), adaptable_weights(config)
    unknown = [name for name in named if name not in known]
    if not unknown:
        return None
    kept = list(dict.fromkeys(name for name in named if name in known))
    alike = [name for name in known if unknown[0] and unknown[0] in name] or get_close_matches(
        unknown[0], known, n=1, cutoff=0.8
    )
    alike = [name for name in alike[:1] if name not in kept]
    legal = ",".join(kept + alike) or ALL_TARGETS
    message = (
        f"lora_targets={value_text(config.lora_targets)} names '{value_text(unknown[0], 40)}'; this model has "
        f"{', '.join(known)}, or all."
    )
    return Violation("lora_targets", message, (legal,))


def unused_adapters(config: Config, defaults: Config) -> Violation | None:
    """Refuses keys that say something about adapters where there are none."""
    usual = {key: getattr(defaults, key) for key in ("lora_alpha", "lora_targets")}
    reason = "has no use with lora_rank=0, which trains all weights"
    return None if config.lora_rank else unused(config, usual, reason, {"lora_rank": 8})
