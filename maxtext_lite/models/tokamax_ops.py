"""tokamax's Mosaic ops for NVIDIA GPUs, by names that are not public: config/kernels.py pins the package.

The public functions have no ranges as masks, and fall back to a dense matmul over all groups if no kernel can run. An
op takes block sizes as its `config`; without one it looks up its exact arguments in tables of measurements, none of
which has ranges, and warns for each lookup that fails.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from absl import flags


def flash_attention() -> tuple[Any, Any]:
    """The attention op, whose `vjp` is an op too, and the type of its masks."""
    return _module("attention.pallas_mosaic_gpu").PallasMosaicGpuFlashAttention(), _module("attention.base").Mask


def ragged_dot() -> Any:
    """The op for a matmul with groups of rows."""
    return _module("ragged_dot.pallas_mosaic_gpu").PallasMosaicGpuRaggedDot()


def with_blocks(op: Any, bound: Any, better: Mapping[str, int]) -> Any:
    """`op` with block sizes: its own choice for the arguments, except for the sizes in `better`.

    Args:
      bound: the arguments after `op.bind`.
    """
    return op.replace(config=dataclasses.replace(bound.heuristics_config, **better))


def _module(name: str) -> Any:
    if not flags.FLAGS.is_parsed():  # tokamax 0.0.12 would otherwise parse this process's command line as absl's flags
        flags.FLAGS.mark_as_parsed()
    return importlib.import_module(f"tokamax._src.ops.{name}")
