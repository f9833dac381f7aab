"""Kernels of attention and of experts' matmuls: what each runs on, and which one a config gets. Imports no jax."""

import dataclasses
import importlib.metadata
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from maxtext_lite.config.errors import Refusal, any_of, refuse
from maxtext_lite.config.keys import LOCAL_KINDS, Config
from maxtext_lite.config.registry import installed_names, is_there, load, names

Platform = Literal["cpu", "gpu", "tpu"]
SPLASH_BLOCK = 128
"""Tokens in a block of splash attention."""
ASSUMED_CAPABILITY = "9.0"
"""The compute capability assumed for an absent GPU: an H100's or H200's."""
KERNEL_SCOPE = "kernel_"
"""Prefix of the scopes that name kernels which share one target, as all Pallas kernels on GPUs do."""
TOKAMAX_VERSIONS = ("0.0.12", "0.0.17")
"""The versions that tokamax_mosaic is written for, on Python 3.11 and on newer ones: it uses private functions."""
_NVIDIA_SINCE_AMPERE = ("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")


@dataclass(frozen=True)
class Accelerator:
    """The devices and the installed packages that the choice of a kernel depends on.

    Attributes:
      compute_capability: of an NVIDIA GPU.
      tokamax: the installed version; None: not installed.
      assumed: what was assumed rather than read from a machine, in words; "": nothing that matters.
    """

    platform: str
    compute_capability: str = ASSUMED_CAPABILITY
    tokamax: str | None = None
    assumed: str = ""

    @classmethod
    def of(cls, platform: "str | Accelerator") -> "Accelerator":
        """Devices of this platform with the packages installed here, none of them imported; an Accelerator as it is."""
        if isinstance(platform, Accelerator):
            return platform
        return cls(platform, tokamax=installed_tokamax(), assumed=f"compute capability {ASSUMED_CAPABILITY}")

    @classmethod
    def planned(cls, platform: "str | Accelerator") -> "Accelerator":
        """Devices of this platform in a machine that need not exist, with the extras cuda12 or cuda13; or as given."""
        if isinstance(platform, Accelerator):
            return platform
        assumed = f"compute capability {ASSUMED_CAPABILITY} with tokamax"
        return cls(platform, ASSUMED_CAPABILITY, TOKAMAX_VERSIONS[-1], assumed)


def installed_tokamax() -> str | None:
    """The installed version of tokamax, which is not imported; None where there is none."""
    return None if importlib.util.find_spec("tokamax") is None else importlib.metadata.version("tokamax")


@dataclass(frozen=True)
class Kernel:
    """What a causal attention kernel runs on and supports: a value of `attention`, ours or another package's.

    Attributes:
      platform: None: any.
      computes: `module:function` with the arguments of `models.attention.tiled_attention`.
      lacks: what it does not support of several documents in a row, attention windows, soft caps of scores, attention
        sinks, and values of another width than keys.
      most_head_dim, head_dim_multiple: the largest head width (None: any), and its divisor.
      token_multiple: the divisor of max_target_length.
      skips_documents: skips the keys of other documents, at least in the forward pass: short documents take less time.
      context_shards: rows whose tokens are split over devices.
      capabilities: compute capabilities of GPUs; (): any.
      of_tokamax: comes from the package tokamax.
      by_auto: attention=auto may choose it.
      repeats: gives the same bits each time, gradients included.
    """

    platform: Platform | None
    computes: str
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    lacks: tuple[Literal["documents", "windows", "soft_caps", "sinks", "value_widths"], ...] = ()
    most_head_dim: int | None = None
    head_dim_multiple: int = 1
    token_multiple: int = 1
    skips_documents: bool = False
    context_shards: bool = False
    capabilities: tuple[str, ...] = ()
    of_tokamax: bool = False
    by_auto: bool = True
    repeats: bool = True


_NARROW = ("bfloat16", "float16")
SPLASH = Kernel("tpu", "maxtext_lite.kernels.splash:splash_attention", token_multiple=SPLASH_BLOCK, context_shards=True)
TOKAMAX_MOSAIC = Kernel(
    "gpu",
    "maxtext_lite.kernels.mosaic:mosaic_attention",
    _NARROW,
    most_head_dim=256,
    head_dim_multiple=8,
    skips_documents=True,
    context_shards=True,
    capabilities=("9.0", "10.0"),
    of_tokamax=True,
)
CUDNN_FLASH = Kernel(
    "gpu",
    "maxtext_lite.kernels.cudnn:cudnn_attention",
    _NARROW,
    lacks=("documents", "soft_caps", "sinks", "value_widths"),
    most_head_dim=128,
    head_dim_multiple=8,
    capabilities=_NVIDIA_SINCE_AMPERE,
    repeats=False,
)
PALLAS_MHA = Kernel(
    "gpu",
    "maxtext_lite.kernels.cudnn:mha_attention",
    _NARROW,
    lacks=("windows", "soft_caps", "sinks", "value_widths"),
    most_head_dim=128,
    capabilities=_NVIDIA_SINCE_AMPERE,
)
CUDNN_MASKED = Kernel(
    "gpu",
    "maxtext_lite.kernels.cudnn:cudnn_masked_attention",
    _NARROW,
    lacks=("soft_caps", "sinks", "value_widths"),
    most_head_dim=128,
    head_dim_multiple=8,
    token_multiple=2,
    capabilities=_NVIDIA_SINCE_AMPERE,
    by_auto=False,
    repeats=False,
)
DOT_PRODUCT = Kernel(None, "maxtext_lite.models.attention:tiled_attention", context_shards=True)
"""The attention kernels; `auto` takes the first of the registry that can run.

splash: Pallas, TPU. tokamax_mosaic: tokamax's Pallas kernels for Hopper and Blackwell, which take the first key of each
query as the mask. cudnn_flash: cuDNN without a mask. pallas_mha: jax's own, in Triton. cudnn_masked: cuDNN with a
[B, 1, T, T] mask, whose memory and time grow with T squared. dot_product: matmuls in blocks, by XLA.
"""


@dataclass(frozen=True)
class Needs:
    """What the attention of one layer, or of all layers, needs from a kernel.

    Attributes:
      soft_cap: of scores; 0: none.
      values_differ: values are not as wide as keys.
      documents: a row may have several.
      chunks: layers attend within chunks of a document.
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
    """The name of the chosen kernel, and why it is none of the better ones.

    Attributes:
      passed_over: the reason for each better kernel of the platform.
      assumed: what was assumed about the machine, where it mattered, in words; "": nothing.
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
        return dataclasses.asdict(self)


def kernel_named(name: str) -> Kernel:
    """The attention kernel of this name."""
    return load("attention", name)


def lacking(kernel: str, needs: Needs) -> list[str]:
    """The needs that a kernel does not support, in words; [] for a suitable one."""
    traits = kernel_named(kernel)
    most = traits.most_head_dim
    multiple = traits.head_dim_multiple
    missing = {
        "several documents in a row": needs.documents and "documents" in traits.lacks,
        "chunks, which a kernel treats as documents": needs.chunks and "documents" in traits.lacks,
        "windows": needs.window and "windows" in traits.lacks,
        f"a soft cap of scores ({needs.soft_cap})": needs.soft_cap and "soft_caps" in traits.lacks,
        "attention sinks": needs.sinks and "sinks" in traits.lacks,
        "values of another width than keys": needs.values_differ and "value_widths" in traits.lacks,
        f"heads of more than {most} dims ({needs.head_dim})": most is not None and needs.head_dim > most,
        f"heads whose dims are no multiple of {multiple} ({needs.head_dim})": needs.head_dim % multiple,
    }
    return [what for what, is_missing in missing.items() if is_missing]


def token_multiple(kernel: str, num_context_shards: int) -> int:
    """The divisor of a row's tokens that a kernel needs: each context shard has two chunks, each of whole blocks."""
    return kernel_named(kernel).token_multiple * (1 if num_context_shards == 1 else 2 * num_context_shards)


def needs_of(config: Config) -> Needs:
    """What the layers and rows of a config need from a kernel: with `auto`, global layers choose their own."""
    everywhere = config if config.attention == "auto" else config.of_global_layers
    return Needs(
        head_dim=max(config.head_dim, everywhere.head_dim),
        window=not {*LOCAL_KINDS}.isdisjoint(config.pattern) and config.sliding_window_size < config.max_target_length,
        chunks="chunked" in config.pattern and config.chunk_attn_window_size < config.max_target_length,
        soft_cap=config.attn_logits_soft_cap,
        sinks=config.attention_sinks,
        values_differ=config.value_dim != config.head_dim,
        documents=bool(config.packing) and config.dataset_type != "synthetic",  # whose rows are one document each
    )


def attention_kernel(config: Config, accelerator: Accelerator, num_context_shards: int = 1) -> KernelChoice:
    """The kernel that `attention` means on these devices; `auto` means the first of the registry that can run.

    Args:
      num_context_shards: devices that an example's tokens are split over.
    Raises:
      ValueError: the named kernel cannot run there; the message says why.
    """
    name = config.attention
    passed_over = dict[str, str]()
    if name != "auto":
        if reasons := _obstacles(name, config, accelerator, num_context_shards):
            nearest = attention_kernel(config.model_copy(update={"attention": "auto"}), accelerator, num_context_shards)
            why = " and ".join(reasons)
            raise ValueError(f"attention={name} cannot run: {why}. Nearest that works: {nearest.name}.")
        return KernelChoice(name)
    for kernel in names("attention"):
        traits = kernel_named(kernel)
        reasons = _obstacles(kernel, config, accelerator, num_context_shards)
        if not reasons and traits.by_auto:
            return KernelChoice(kernel, passed_over, accelerator.assumed if traits.capabilities else "")
        if reasons and traits.by_auto and traits.platform == accelerator.platform:
            passed_over[kernel] = reasons[0]
    raise AssertionError("dot_product runs everywhere")


def planned_kernel(config: Config, accelerator: Accelerator, num_context_shards: int) -> KernelChoice:
    """`attention_kernel` for a plan: a named kernel is kept, because it may be meant for other devices."""
    if config.attention != "auto":
        return KernelChoice(config.attention)
    return attention_kernel(config, accelerator, num_context_shards)


def _obstacles(kernel: str, config: Config, accelerator: Accelerator, num_context_shards: int) -> list[str]:
    """Why a kernel cannot run; first what no other device and no other package would change."""
    traits = kernel_named(kernel)
    reasons = _unsuited(kernel, config, num_context_shards)
    if traits.platform not in (None, accelerator.platform):
        return [*reasons, f"it runs on {traits.platform}, not on {accelerator.platform}"]
    if traits.capabilities and accelerator.compute_capability not in traits.capabilities:
        known = any_of(traits.capabilities)
        reasons.append(f"it runs on compute capability {known}, not on {accelerator.compute_capability}")
    if traits.of_tokamax and accelerator.tokamax is None:
        reasons.append("tokamax is not installed")
    elif traits.of_tokamax and accelerator.tokamax not in TOKAMAX_VERSIONS:
        reasons.append(f"it needs tokamax {any_of(TOKAMAX_VERSIONS)}, not {accelerator.tokamax}")
    return reasons


def _unsuited(kernel: str, config: Config, num_context_shards: int) -> list[str]:
    """Why a kernel runs a config on no device."""
    traits = kernel_named(kernel)
    length = config.max_target_length
    reasons: list[str] = []
    if not is_there(traits.computes):
        reasons.append("it is not installed")
    if config.dtype not in traits.dtypes:
        reasons.append(f"no support for dtype={config.dtype}")
    if lacks := lacking(kernel, needs_of(config)):
        reasons.append(f"no support for {' or '.join(lacks)}")
    if length % (multiple := token_multiple(kernel, num_context_shards)):
        reasons.append(f"max_target_length={length} is not a multiple of {multiple}")
    if num_context_shards > 1 and not traits.context_shards:
        reasons.append(f"it takes whole examples, not those of {num_context_shards} context shards")
    return reasons


def unknown_to_kernel(config: Config) -> Refusal | None:
    """A kernel named by `attention` that runs this config on no platform."""
    name = config.attention
    reasons = [] if name == "auto" else _unsuited(name, config, 1)
    if not reasons:
        return None
    nearest: tuple[object, ...] = ("dot_product",)
    if len(reasons) == 1 and config.dtype not in kernel_named(name).dtypes:
        nearest = ({"dtype": "bfloat16"}, "dot_product")
    elif not lacking(name, dataclasses.replace(needs_of(config), documents=False)) and "documents" in reasons[0]:
        nearest = ("cudnn_masked", {"packing": False})
    return refuse(config, "attention", f"cannot run: {reasons[0]}", *nearest)


# ---- Experts -------------------------------------------------------------------------------------------------------


GroupedMatmul = Literal["ragged_dot", "blocks", "tokamax", "megablox"]
"""jax's own, a loop over blocks of rows in plain jax (any platform), tokamax (NVIDIA Hopper GPUs), Pallas (TPUs). jax's
own is a kernel on TPUs, and elsewhere a dense matmul of every row with every expert."""


def grouped_matmul_kernel(accelerator: Accelerator, dtype: str) -> GroupedMatmul:
    """The grouped matmul for these devices.

    Args:
      dtype: of activations; tokamax needs two bytes, and has both passes on compute capability 9.0 only.
    """
    installed = installed_names("grouped_matmul")
    if accelerator.platform != "gpu":
        return "megablox" if accelerator.platform == "tpu" and "megablox" in installed else "ragged_dot"
    suits = dtype != "float32" and accelerator.compute_capability == "9.0" and "tokamax" in installed
    return "tokamax" if suits and accelerator.tokamax in TOKAMAX_VERSIONS else "blocks"


ROOM = Fraction(5, 4)
"""Capacity of one round of an exchange, relative to the rows of evenly chosen experts."""


def exchanged_rows(
    *, num_tokens: int, num_per_token: int, num_experts: int, num_shards: int, element_bytes: int
) -> int | None:
    """Rows that two devices exchange in one dropless round; None where gathering all tokens moves fewer bytes.

    Gathering moves (n - 1) x num_tokens tokens of width D to each device and scatters their float32 sums back:
    element_bytes + 4 bytes per element. An exchange moves one row for each choice of an expert, both ways in
    element_bytes; a round has room for `ROOM` times each device's even share. Rounds continue until the longest queue
    is empty: one round if the choices are even, and at most one round more than the rows of gathering.

    Args:
      num_tokens: of one device.
      num_per_token, num_experts: J and E.
      num_shards: n, devices along the expert axis, a divisor of num_experts.
    """
    most = num_tokens * min(num_per_token, num_experts // num_shards)  # from one device to one other
    rows = math.ceil(ROOM * num_tokens * num_per_token / num_shards)
    rows = min(most, -(-rows // 128) * 128 if rows > 128 else rows)  # in whole tiles
    moves_less = 2 * rows * element_bytes < num_tokens * (element_bytes + 4)
    return rows if num_shards > 1 and moves_less else None
