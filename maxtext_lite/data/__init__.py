"""Examples in a fixed order, read by Grain and laid out for the devices: sources, tokenizer, packing, order, feed."""

import importlib
from typing import TYPE_CHECKING

from maxtext_lite.data.answers import PairSource, example_shape
from maxtext_lite.data.balance import Balance
from maxtext_lite.data.chat import ChatTemplate
from maxtext_lite.data.mixture_source import MixtureSource, hash_of_run, named_sources, open_mixture
from maxtext_lite.data.order import example_ids, examples_hash
from maxtext_lite.data.own_examples import Examples, own_examples
from maxtext_lite.data.packing import REFERENCE, field_dtype
from maxtext_lite.data.prompts import Prompt, PromptSource, open_prompts
from maxtext_lite.data.sources import ExampleSource, open_sources
from maxtext_lite.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

if TYPE_CHECKING:
    from maxtext_lite.data.feed import DeviceBatch, evaluation_batches, training_batches
    from maxtext_lite.data.sources_on_hosts import open_sources_on_hosts, source_tokens_of_run, target_tokens_of_run

__all__ = [
    "REFERENCE",
    "Balance",
    "ChatTemplate",
    "DeviceBatch",
    "ExampleSource",
    "Examples",
    "MixtureSource",
    "PairSource",
    "Prompt",
    "PromptSource",
    "Tokenizer",
    "check_vocabulary",
    "evaluation_batches",
    "example_ids",
    "example_shape",
    "examples_hash",
    "field_dtype",
    "hash_of_run",
    "load_tokenizer",
    "named_sources",
    "open_mixture",
    "open_prompts",
    "open_sources",
    "open_sources_on_hosts",
    "own_examples",
    "source_tokens_of_run",
    "target_tokens_of_run",
    "training_batches",
]

_WITH_JAX = {
    "DeviceBatch": "feed",
    "evaluation_batches": "feed",
    "training_batches": "feed",
    "open_sources_on_hosts": "sources_on_hosts",
    "source_tokens_of_run": "sources_on_hosts",
    "target_tokens_of_run": "sources_on_hosts",
}
"""Names whose modules import jax, directly or through grain; they load on first use, so that `plan` needs no jax."""


def __getattr__(name: str) -> object:
    if name not in _WITH_JAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_JAX[name]}"), name)
