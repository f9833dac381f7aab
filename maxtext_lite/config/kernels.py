"""Attention's kernels: what each runs on, what it knows, and the one that a config gets. Imports no jax."""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from maxtext_lite.config.errors import any_of
from maxtext_lite.config.schema import Config
from maxtext_lite.config.violation import Violation

Platform = Literal["cpu", "gpu", "tpu"]
SPLASH_BLOCK = 128
"""Tokens that splash attention works on at once."""
ASSUMED_CAPABILITY = "9.0"
"""The compute capability of a GPU that there is none of to ask: that of an H100 or H200."""
TOKAMAX_VERSIONS = ("0.0.12", "0.0.17")
"""Those that the kernel is written for, on Python 3.11 and on newer ones: it takes what their public functions hide."""
_NVIDIA_SINCE_AMPERE = ("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")


@dataclass(frozen=True)
class Accelerator:
    """The devices and what is installed beside them, as far as a kernel depends on it.

    Attributes:
      compute_capability: of an NVIDIA GPU.
      tokamax: the version that is installed; None: none is.
      assumed: what of this was not asked of a machine, in words; "": nothing that matters.
    """

    platform: str
    compute_capability: str = ASSUMED_CAPABILITY
    tokamax: str | None = None
    assumed: str = ""

    @classmethod
    def of(cls, platform: "str | Accelerator") -> "Accelerator":
        """Such devices, with what is installed for this Python, of which nothing is imported; or what is given."""
        if isinstance(platform, Accelerator):
            return platform
        return cls(platform, tokamax=installed_tokamax(), assumed=f"compute capability {ASSUMED_CAPABILITY}")

    @classmethod
    def planned(cls, platform: "str | Accelerator") -> "Accelerator":
        """Such devices in a machine that need not exist, with what the extras cuda12 and cuda13 bring; or the given."""
        if isinstance(platform, Accelerator):
            return platform
        assumed = f"compute capability {ASSUMED_CAPABILITY} with tokamax"
        return cls(platform, ASSUMED_CAPABILITY, TOKAMAX_VERSIONS[-1], assumed)


def installed_tokamax() -> str | None:
    """The version of tokamax, which is not imported; None where it is not installed."""
    return None if importlib.util.find_spec("tokamax") is None else importlib.metadata.version("tokamax")


@dataclass(frozen=True)
class Kernel:
    """What a kernel of causal attention runs on and what it knows.

    Attributes:
      platform: None: any.
      documents: rows may hold several.
      windows, soft_caps, sinks: of scores.
      value_widths: values may be of another width than keys.
      most_head_dim, head_dim_multiple: widths of heads; None: any.
      token_multiple: of max_target_length.
      skips_documents: passes over keys of other documents, forwards at least, so that short documents take less time.
      context_shards: works where a row's tokens are split over devices.
      capabilities: compute capabilities of GPUs; (): whatever they are.
      of_tokamax: it is of the package tokamax.
      by_auto: attention=auto may choose it.
    """

    platform: Platform | None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    documents: bool = True
    windows: bool = True
    soft_caps: bool = True
    sinks: bool = True
    value_widths: bool = True
    most_head_dim: int | None = None
    head_dim_multiple: int = 1
    token_multiple: int = 1
    skips_documents: bool = False
    context_shards: bool = False
    capabilities: tuple[str, ...] = ()
    of_tokamax: bool = False
    by_auto: bool = True


_NARROW = ("bfloat16", "float16")
KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "splash": Kernel("tpu", token_multiple=SPLASH_BLOCK, context_shards=True),
        "tokamax_mosaic": Kernel(
            "gpu",
            _NARROW,
            most_head_dim=256,
            head_dim_multiple=8,
            skips_documents=True,
            context_shards=True,
            capabilities=("9.0", "10.0"),
            of_tokamax=True,
        ),
        "cudnn_flash": Kernel(
            "gpu",
            _NARROW,
            documents=False,
            soft_caps=False,
            sinks=False,
            value_widths=False,
            most_head_dim=128,
            head_dim_multiple=8,
            capabilities=_NVIDIA_SINCE_AMPERE,
        ),
        "pallas_mha": Kernel(
            "gpu",
            _NARROW,
            windows=False,
            soft_caps=False,
            sinks=False,
            value_widths=False,
            most_head_dim=128,
            capabilities=_NVIDIA_SINCE_AMPERE,
        ),
        "cudnn_masked": Kernel(
            "gpu",
            _NARROW,
            soft_caps=False,
            sinks=False,
            value_widths=False,
            most_head_dim=128,
            head_dim_multiple=8,
            token_multiple=2,
            capabilities=_NVIDIA_SINCE_AMPERE,
            by_auto=False,
        ),
        "dot_product": Kernel(None, context_shards=True),
    }
)
"""Attention's kernels; `auto` takes the first that can run.

splash: Pallas, TPU. tokamax_mosaic: tokamax's Pallas kernels for Hopper and Blackwell, whose mask is the first key that
each query sees. cudnn_flash: cuDNN's without a mask. pallas_mha: jax's own, by Triton. cudnn_masked: cuDNN's with a
mask of [B, 1, T, T], which takes memory and time in T squared. dot_product: XLA's matmuls in blocks.
"""


@dataclass(frozen=True)
class Needs:
    """What attention asks of a kernel, in a layer or in all of a model's.

    Attributes:
      soft_cap: of scores; 0: none.
      values_differ: values are not as wide as keys.
      documents: a row may hold several.
      chunks: layers keep to chunks of documents.
    """

    head_dim: int
    window: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    values_differ: bool = False
    documents: bool = False
    chunks: bool = False


@dataclass(frozen=True)
class KernelChoice:
    """A kernel by name, and what kept the better ones from being chosen.

    Attributes:
      passed_over: a reason for each better kernel of the platform.
      assumed: what was assumed of the machine and mattered, in words; "": nothing.
    """

    name: str
    passed_over: Mapping[str, str] = field(default_factory=dict[str, str])
    assumed: str = ""

    def __str__(self) -> str:
        kernels_of: dict[str, list[str]] = {}
        for kernel, reason in self.passed_over.items():
            kernels_of.setdefault(reason, []).append(kernel)
        notes = [f"{', '.join(kernels)}: {reason}" for reason, kernels in kernels_of.items()]
        if self.assumed:
            notes.append(f"{self.assumed} is assumed")
        return f"{self.name} ({'; '.join(notes)})" if notes else self.name

    def to_json(self) -> dict[str, object]:
        """The fields, as plan.json has them."""
        return {"name": self.name, "passed_over": dict(self.passed_over), "assumed": self.assumed}


def lacking(kernel: str, needs: Needs) -> list[str]:
    """What is needed and a kernel does not have, in words; [] for a kernel that suits."""
    facts = KERNELS[kernel]
    most, multiple = facts.most_head_dim, facts.head_dim_multiple
    missing = {
        "several documents in a row": needs.documents and not facts.documents,
        "chunks, which are documents to a kernel": needs.chunks and not facts.documents,
        "windows": needs.window and not facts.windows,
        f"a soft cap of scores ({needs.soft_cap})": needs.soft_cap and not facts.soft_caps,
        "attention sinks": needs.sinks and not facts.sinks,
        "values of another width than keys": needs.values_differ and not facts.value_widths,
        f"heads of more than {most} dims ({needs.head_dim})": most is not None and needs.head_dim > most,
        f"heads whose dims are no multiple of {multiple} ({needs.head_dim})": needs.head_dim % multiple,
    }
    return [what for what, is_missing in missing.items() if is_missing]


def token_multiple(kernel: str, num_context_shards: int) -> int:
    """The number of tokens of which a kernel takes multiples; each of the two chunks of a context shard must be one."""
    return KERNELS[kernel].token_multiple * (1 if num_context_shards == 1 else 2 * num_context_shards)


def needs_of(config: Config) -> Needs:
    """What a config's layers and rows ask of a kernel."""
    return Needs(
        head_dim=config.head_dim,
        window=any(kind.startswith("local") for kind in config.pattern)
        and config.sliding_window_size < config.max_target_length,
        chunks="chunked" in config.pattern and config.chunk_attn_window_size < config.max_target_length,
        soft_cap=config.attn_logits_soft_cap,
        sinks=config.attention_sinks,
        values_differ=config.value_dim != config.head_dim,
        documents=bool(config.packing) and config.dataset_type != "synthetic",  # whose rows are one document each
    )


def attention_kernel(config: Config, accelerator: Accelerator, num_context_shards: int = 1) -> KernelChoice:
    """The kernel that `attention` means on these devices; `auto` means the first of KERNELS that can run.

    Args:
      num_context_shards: devices that an example's tokens are split over.
    Raises:
      ValueError: the named kernel cannot run there; says why.
    """
    name, passed_over = config.attention, dict[str, str]()
    if name != "auto":
        if reasons := _obstacles(name, config, accelerator, num_context_shards):
            nearest = attention_kernel(config.model_copy(update={"attention": "auto"}), accelerator, num_context_shards)
            why = " and ".join(reasons)
            raise ValueError(f"attention={name} cannot run: {why}. Nearest that works: {nearest.name}.")
        return KernelChoice(name)
    for kernel, facts in KERNELS.items():
        reasons = _obstacles(kernel, config, accelerator, num_context_shards)
        if not reasons and facts.by_auto:
            return KernelChoice(kernel, passed_over, accelerator.assumed if facts.capabilities else "")
        if reasons and facts.by_auto and facts.platform == accelerator.platform:
            passed_over[kernel] = reasons[0]
    raise AssertionError("dot_product runs everywhere")


def planned_kernel(config: Config, accelerator: Accelerator, num_context_shards: int) -> KernelChoice:
    """`attention_kernel` for a plan: a kernel that is named may be meant for other devices than are planned for."""
    if config.attention != "auto":
        return KernelChoice(config.attention)
    return attention_kernel(config, accelerator, num_context_shards)


def _obstacles(kernel: str, config: Config, accelerator: Accelerator, num_context_shards: int) -> list[str]:
    """What keeps a kernel from running, those first that no other device and nothing installed would change."""
    facts, length = KERNELS[kernel], config.max_target_length
    reasons: list[str] = []
    if config.dtype not in facts.dtypes:
        reasons.append(f"it does not compute in dtype={config.dtype}")
    if lacks := lacking(kernel, needs_of(config)):
        reasons.append(f"it does not know {' or '.join(lacks)}")
    if length % (multiple := token_multiple(kernel, num_context_shards)):
        reasons.append(f"max_target_length={length} is not a multiple of {multiple}")
    if num_context_shards > 1 and not facts.context_shards:
        reasons.append(f"it takes whole examples, not those of {num_context_shards} context shards")
    if facts.platform not in (None, accelerator.platform):
        return [*reasons, f"it runs on {facts.platform}, not on {accelerator.platform}"]
    if facts.capabilities and accelerator.compute_capability not in facts.capabilities:
        known = any_of(facts.capabilities)
        reasons.append(f"it runs on compute capability {known}, not on {accelerator.compute_capability}")
    if facts.of_tokamax and accelerator.tokamax is None:
        reasons.append("tokamax is not installed")
    elif facts.of_tokamax and accelerator.tokamax not in TOKAMAX_VERSIONS:
        reasons.append(f"it needs tokamax {any_of(TOKAMAX_VERSIONS)}, not {accelerator.tokamax}")
    return reasons


def unknown_to_kernel(config: Config) -> Violation | None:
    """Refuses a kernel that is named and that no platform can run with this config."""
    name = config.attention
    if name == "auto":
        return None
    facts, others = KERNELS[name], tuple[object, ...](("dot_product",))
    if config.dtype not in facts.dtypes:
        message = f"attention={name} does not compute in dtype={config.dtype}."
        return Violation("attention", message, ({"dtype": "bfloat16"}, *others))
    multiple, length = facts.token_multiple, config.max_target_length
    if length % multiple:
        message = f"attention={name} needs max_target_length={length} to be a multiple of {multiple}."
        return Violation("attention", message, others)
    if lacks := lacking(name, needs := needs_of(config)):
        if not lacking(name, dataclasses.replace(needs, documents=False)):
            others = ("cudnn_masked", {"packing": False})
        return Violation("attention", f"attention={name} does not know {' or '.join(lacks)}.", others)
    return None
