"""Examples in a fixed order, read by Grain, laid out for the devices: sources, tokenizer, packing, order, feed."""

from maxtext_lite.data.feed import Batch, BatchIterator, evaluation_batches, training_batches
from maxtext_lite.data.order import example_ids, examples_hash
from maxtext_lite.data.sources import ExampleSource, open_sources
from maxtext_lite.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

__all__ = [
    "Batch",
    "BatchIterator",
    "ExampleSource",
    "Tokenizer",
    "check_vocabulary",
    "evaluation_batches",
    "example_ids",
    "examples_hash",
    "load_tokenizer",
    "open_sources",
    "training_batches",
]
