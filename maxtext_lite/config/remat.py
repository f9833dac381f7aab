"""Rematerialization: which tensors of a layer are kept on the device, kept on the host, or recomputed."""

from typing import NamedTuple

from maxtext_lite.config.sections import NumericsConfig

QKV = ("query_proj", "key_proj", "value_proj")
PROJECTIONS = (*QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")
REMAT_TENSORS = ("decoder_layer_input", *PROJECTIONS, "context", "expert_rows")
"""The tensors of a layer with names: its input, the results of its matmuls (experts' like an mlp's), the output of
attention, and the tokens at their experts."""


class Remat(NamedTuple):
    """The tensors that the forward pass keeps on the device, and those that it moves to pinned host memory."""

    saved: tuple[str, ...]
    offloaded: tuple[str, ...] = ()


REMAT_POLICIES: dict[str, Remat] = {
    "save_dot_products": Remat((*PROJECTIONS, "context")),
    "minimal": Remat(PROJECTIONS),
    "save_qkv_proj": Remat(QKV),
    "minimal_offloaded": Remat((), PROJECTIONS),
    "qkv_proj_offloaded": Remat((), QKV),
    "full": Remat(()),
}
"""What each remat_policy keeps besides the input of each layer; `none` keeps everything, `custom` what is listed."""


def remat_of(config: NumericsConfig) -> Remat | None:
    """The tensors that are kept of each layer; None: all."""
    match config.remat_policy:
        case "none":
            return None
        case "custom":
            return Remat(listed(config.remat_save), listed(config.remat_offload))
        case policy:
            return REMAT_POLICIES[policy]


def listed(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list."""
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)
