"""The parameters of Hugging Face directories, and of adapters in PEFT's layout, for runs that begin with them."""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxtext_lite.hf.adapter import Adapter, adapter_of
from maxtext_lite.hf.directory import has_hf_weights
from maxtext_lite.hf.names import flat, shapes_of
from maxtext_lite.hf.peft import read_peft_adapters
from maxtext_lite.hf.weights import load_hf_parameters
from maxtext_lite.models import Lora
from maxtext_lite.parallel import Params, Tree
from maxtext_lite.training.parameter_files import Reader


def open_parameters(path: str | Path) -> Reader | None:
    """The reader of a Hugging Face directory or of an adapter to one; None for everything else.

    Raises:
      UserError: its weights are pickled or missing, or the adapter cannot be read.
    """
    if not has_hf_weights(path):
        return None
    return HuggingFaceReader(path, adapter_of(path))


class HuggingFaceReader(Reader):
    """The parameters of a Hugging Face directory, or those of an adapter's base model and its matrices."""

    def __init__(self, directory: str | Path, adapter: Adapter | None) -> None:
        self.directory = adapter.base if adapter else directory
        self._adapter = adapter
        if adapter:
            self.lora = Lora(adapter.rank, adapter.alpha, tuple(adapter.targets.split(",")))

    def load(self, abstract_params: Params, key: str) -> Params:
        return load_hf_parameters(self.directory, abstract_params, key)

    def load_adapters(self, plain: Params, where: Tree) -> Params:
        assert self._adapter is not None
        shapes = shapes_of(flat(plain))
        read = read_peft_adapters(self._adapter, shapes)
        shardings = jax.tree.map(lambda _: where, read) if isinstance(where, NamedSharding) else where

        def place(x: np.ndarray, at: NamedSharding) -> jax.Array:
            return jax.make_array_from_callback(x.shape, at, lambda index: x[index])

        return jax.tree.map(place, read, shardings)
