"""The parameters of Hugging Face directories, and of adapters in PEFT's layout, for runs that begin with them."""

from pathlib import Path

import jax
from jax.sharding import NamedSharding

from maxtext_lite.hf.adapter import Adapter, adapter_of
from maxtext_lite.hf.directory import has_hf_weights
from maxtext_lite.hf.names import flat
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
    adapter = adapter_of(path)
    return AdapterReader(adapter) if adapter else HuggingFaceReader(path)


class HuggingFaceReader(Reader):
    """The parameters of a Hugging Face directory."""

    def __init__(self, directory: str | Path):
        self.directory = directory

    def load(self, abstract_params: Params, key: str) -> Params:
        return load_hf_parameters(self.directory, abstract_params, key)


class AdapterReader(HuggingFaceReader):
    """The parameters of an adapter's base model, and its matrices."""

    def __init__(self, adapter: Adapter):
        super().__init__(adapter.base)
        self._adapter = adapter
        self.lora = Lora(adapter.rank, adapter.alpha, tuple(adapter.targets.split(",")))

    def load_adapters(self, plain: Params, where: Tree) -> Params:
        shapes = {path: tuple(leaf.shape) for path, leaf in flat(plain).items()}
        read = read_peft_adapters(self._adapter, shapes)
        shardings = jax.tree.map(lambda _: where, read) if isinstance(where, NamedSharding) else where
        return jax.tree.map(
            lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), read, shardings
        )
