"""Examples in a fixed order, read by Grain and laid out for the devices: sources, tokenizer, packing, order, feed.

The names here need no jax, so neither does `plan`; `feed` and `sources_on_hosts` import it.
"""

from maxtext_lite.data.order import example_ids, examples_hash
from maxtext_lite.data.rows import REFERENCE, field_dtype
from maxtext_lite.data.source import Examples, ExampleSource
from maxtext_lite.data.sources import example_shape, open_sources
from maxtext_lite.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

__all__ = [
    "REFERENCE",
    "ExampleSource",
    "Examples",
    "Tokenizer",
    "check_vocabulary",
    "example_ids",
    "example_shape",
    "examples_hash",
    "field_dtype",
    "load_tokenizer",
    "open_sources",
]
