"""Your own decoder block: attention and mlp in parallel, on one norm.

    python examples/own_block.py steps=100 ici_tensor_parallelism=2

Source: Wang & Komatsuzaki 2021, GPT-J; Chowdhery et al. 2022, arXiv:2204.02311, section 2.
"""

import functools
import sys

from flax import nnx

from maxtext_lite import load_config
from maxtext_lite.models import Decoder, DecoderLayer, DecoderShape
from maxtext_lite.training import train


class ParallelBlock(DecoderLayer):
    """x + attention(norm x) + mlp(norm x). Parts, shardings and KV cache are the library's."""

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        super().__init__(shape, rngs=rngs)
        self.mlp_norm = None  # an unused parameter would still be stored

    def __call__(self, x_BTD, rotation, attend, real_BT, *, drop=True):
        """See `models.layers.Block`."""
        normed_BTD = self.attention_norm(x_BTD)
        context_BTD, kept = self.attention(normed_BTD, rotation, attend)
        return x_BTD + context_BTD + self.mlp(normed_BTD), kept, {}


if __name__ == "__main__":
    config = load_config(None, ["run_name=own_block", *sys.argv[1:]])
    train(config, model=functools.partial(Decoder, block=ParallelBlock))
