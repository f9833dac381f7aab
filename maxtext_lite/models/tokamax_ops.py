"""tokamax's Mosaic ops for NVIDIA GPUs, by names that the package shows in no public way: config/kernels.py pins it.

The public functions hide ranges as masks, and choose a dense matmul over all groups where no kernel can run. An op
takes sizes of blocks as its `config`; without one it looks for its exact arguments in tables of measurements, of which
none has ranges, and warns of each that it does not find.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from absl import flags


def flash_attention() -> tuple[Any, Any]:
    """The op of attention, whose `vjp` is one too, and the type of its masks."""
    return _module("attention.pallas_mosaic_gpu").PallasMosaicGpuFlashAttention(), _module("attention.base").Mask


def ragged_dot() -> Any:
    """The op of a matmul with groups of rows."""
    return _module("ragged_dot.pallas_mosaic_gpu").PallasMosaicGpuRaggedDot()


def with_blocks(op: Any, bound: Any, better: Mapping[str, int]) -> Any:
    """`op` with sizes of blocks: those that it takes for its arguments by itself, but for those in `better`.

    Args:
      bound: what `op.bind` makes of the arguments.
    """
    return op.replace(config=dataclasses.replace(bound.heuristics_config, **better))


def _module(name: str) -> Any:
    if not flags.FLAGS.is_parsed():  # else tokamax 0.0.12 would read this process's command line as absl's flags
        flags.FLAGS.mark_as_parsed()
    return importlib.import_module(f"tokamax._src.ops.{name}")
