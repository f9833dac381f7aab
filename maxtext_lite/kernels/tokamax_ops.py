"""tokamax's Mosaic ops for NVIDIA GPUs, by names that are not public: config/kernels.py pins the package.

The public functions have no ranges as masks, and fall back to a dense matmul over all groups if no kernel can run. An
op takes block sizes as its `config`; without one it looks up its exact arguments in tables of measurements, which have
no ranges, and warns for each lookup that fails.
"""

import contextlib
import dataclasses
import importlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags


def flash_attention() -> tuple[Any, Any]:
    """The attention op, whose `vjp` is an op too, and the type of its masks."""
    return _module("attention.pallas_mosaic_gpu").PallasMosaicGpuFlashAttention(), _module("attention.base").Mask


def ragged_dot() -> Any:
    """The op for a matmul with groups of rows."""
    return _module("ragged_dot.pallas_mosaic_gpu").PallasMosaicGpuRaggedDot()


_MENDING = threading.Lock()  # steps of later stages are traced in a thread of their own


@contextlib.contextmanager
def waiting_for_each_matmul() -> Iterator[None]:
    """Mends the kernels for Hopper that are traced within: each matmul is waited for before the next is issued.

    The sum over a group's rows masks them in registers, and both versions overwrite these for the next block while the
    matmul before may still read them. On an H200 (0.0.17, jax 0.11.2) that made errors of 7 % in the gradients of
    experts; with this wait, all rows count once.
    """
    module = _module("ragged_dot.pallas_mosaic_gpu_kernel_sm90")
    with _MENDING:
        original = module.plgpu
        module.plgpu = _Waiting(module.plgpu)
        try:
            yield
        finally:
            module.plgpu = original


class _Waiting:
    """Pallas for GPUs that waits for all matmuls instead of all but the latest."""

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def wgmma_wait(self, unfinished: int) -> None:
        del unfinished
        self._original.wgmma_wait(0)


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
