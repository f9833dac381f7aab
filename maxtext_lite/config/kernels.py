"""Attention's kernels: what each runs on, what it knows, and the one that a config gets. Imports no jax."""

from collections.abc import Collection
from typing import Literal

from maxtext_lite.config.errors import Refusal
from maxtext_lite.config.schema import Config

Platform = Literal["cpu", "gpu", "tpu"]
KERNELS = ("dot_product", "cudnn_flash", "splash")
"""XLA's matmuls in blocks (any platform), cuDNN's (NVIDIA GPUs), Pallas splash (TPU); the later the faster."""
SPLASH_BLOCK = 128
"""Tokens that splash attention works on at once."""


def splash_tokens(num_context_shards: int) -> int:
    """The number of tokens of which splash attention takes multiples: whole blocks in each of a shard's two chunks."""
    return SPLASH_BLOCK * (1 if num_context_shards == 1 else 2 * num_context_shards)


def lacking(kernel: str, *, soft_caps: Collection[float], sinks: bool, values_differ: bool) -> list[str]:
    """What layers need and a kernel does not have, in words; [] for a kernel that suits them.

    Args:
      soft_caps: of scores, those that are not 0.
      sinks: heads have sinks.
      values_differ: values are not as wide as keys.
    """
    if kernel != "cudnn_flash":  # the others do everything
        return []
    caps = ", ".join(map(str, sorted(soft_caps)))
    needs = {
        f"a soft cap of scores ({caps})": bool(soft_caps),
        "attention sinks": sinks,
        "values of another width than keys": values_differ,
    }
    return [what for what, needed in needs.items() if needed]


def attention_kernel(config: Config, *, platform: str, num_context_shards: int = 1) -> str:
    """The kernel that `attention` means on a platform; `auto` means the fastest that runs there and knows the model.

    Args:
      platform: "cpu", "gpu" or "tpu".
      num_context_shards: devices that an example's tokens are split over; cudnn_flash does not work on several.
    Raises:
      ValueError: the named kernel does not run there, or lacks what the layers need; says what.
    """
    name, dtype, num_tokens = config.attention, config.dtype, config.max_target_length
    alone = num_context_shards == 1
    runs = {
        "dot_product": (True, "nothing"),
        "cudnn_flash": (
            platform == "gpu" and dtype != "float32" and alone,
            "an NVIDIA GPU, dtype=bfloat16 and one context shard",
        ),
        "splash": (
            platform == "tpu" and num_tokens % splash_tokens(num_context_shards) == 0,
            f"a TPU, with a max_target_length that is a multiple of {splash_tokens(num_context_shards)}",
        ),
    }
    if name == "auto":
        return next(kernel for kernel in reversed(KERNELS) if runs[kernel][0] and not _lacking(config, kernel))
    if not runs[name][0]:
        shards = f"{num_context_shards} context shard{'' if alone else 's'}"
        raise ValueError(
            f"attention={name} needs {runs[name][1]}; here are {platform}, {dtype}, {num_tokens} tokens and {shards}. "
            "Nearest that works: dot_product."
        )
    if refusal := kernel_problem(config):
        raise ValueError(str(refusal))
    return name


def kernel_problem(config: Config) -> Refusal | None:
    """Refuses a kernel that is named and that no platform can run with this config."""
    name, others = config.attention, ("dot_product",)
    if name == "cudnn_flash" and config.dtype == "float32":
        message = f"attention={name} does not compute in dtype={config.dtype}."
        return Refusal("attention", message, ({"dtype": "bfloat16"}, *others))
    if name == "splash" and config.max_target_length % SPLASH_BLOCK:
        message = f"attention={name} needs max_target_length={config.max_target_length} to be a multiple of 128."
        return Refusal("attention", message, others)
    if lacks := _lacking(config, name):
        return Refusal("attention", f"attention={name} does not know {' or '.join(lacks)}.", others)
    return None


def _lacking(config: Config, kernel: str) -> list[str]:
    cap = config.attn_logits_soft_cap
    differ = config.value_dim != config.head_dim
    return lacking(kernel, soft_caps=[cap] if cap else [], sinks=config.attention_sinks, values_differ=differ)
