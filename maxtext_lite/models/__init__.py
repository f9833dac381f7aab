"""Decoders: arrays in, arrays out. Nothing here knows a config file, a mesh or a batch size.

The names of arrays of rank 2 and more end in one letter per dim (global sizes), here and in `training`, `parallel` and
`rl`:

    B examples            T query positions     S key positions       D embedding
    F mlp                 V vocabulary          N query heads         K kv heads
    H head width          L layers              P stages              M pipeline microbatches
    A accumulation        E experts             R data replicas       G query heads per kv head
    J experts of a token  C slots of an expert  U rows given to experts, one for each choice of a token
    W value width (H if the two are equal)      r rank of an adapter
    I ints of a request's key               Z shards of tokens: X of rows times Y of the sequence
"""

from maxtext_lite.config.weights import is_matrix, num_inputs, per_tensor_axes, unstacked
from maxtext_lite.models.attention import Scoring
from maxtext_lite.models.decoder import Decoder, Stream, empty_aux, stream_axes
from maxtext_lite.models.layers import Block, DecoderLayer
from maxtext_lite.models.ops import Adapted, root_key, soft_capped
from maxtext_lite.models.shape import (
    BALANCE,
    DROPPED,
    EXPERT_COUNTS,
    LARGEST_LOGITS,
    ROUTER_Z,
    DecoderShape,
    ExpertShape,
    Lora,
)

__all__ = [
    "BALANCE",
    "DROPPED",
    "EXPERT_COUNTS",
    "LARGEST_LOGITS",
    "ROUTER_Z",
    "Adapted",
    "Block",
    "Decoder",
    "DecoderLayer",
    "DecoderShape",
    "ExpertShape",
    "Lora",
    "Scoring",
    "Stream",
    "empty_aux",
    "is_matrix",
    "num_inputs",
    "per_tensor_axes",
    "root_key",
    "soft_capped",
    "stream_axes",
    "unstacked",
]
