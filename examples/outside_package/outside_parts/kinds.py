"""What configs and plans know of the parts. Imports no jax."""

from typing import Any

from maxtext_lite.config.kernels import Kernel
from maxtext_lite.config.keys import ObjectiveKind, SourceKind
from maxtext_lite.config.weights import Layer, ModelShape, WeightTable

COUNTING = SourceKind("outside_parts.data:open_counting", reads_files=False)
CONFIDENT = ObjectiveKind("outside_parts.training:confident", "text")
PLAIN = Kernel(None, "outside_parts.layers:plain_attention", lacks=("windows", "soft_caps", "sinks"))


class GatedRecurrence(Layer):
    """h = a h + (1 - a) value in each channel, from the start of each document; a head has H channels.

    Source: a and the output's gate as in Qin et al. 2023, arXiv:2311.04823, with a bias in place of lower bounds.
    """

    module = "outside_parts.layers:Recurrence"

    def weights(self, shape: ModelShape) -> WeightTable:
        """Three projections to the channels and one back."""
        table = {name: shape.weight("D N H", "embed heads head_dim") for name in ("value", "decay", "gate")}
        table["decay_bias"] = shape.weight("N H", "heads head_dim", "ones")
        return table | {"out": shape.weight("N H D", "heads head_dim embed")}

    def state(self, shape: ModelShape) -> WeightTable:
        """The channels after the last token: as many bytes for any length."""
        return {"h": shape.weight("N H", "heads head_dim", "zeros")}

    def flops(self, shape: ModelShape, num_tokens: Any) -> Any:
        """Of each channel two products and two sums, and twice as many in the backward pass."""
        return 12 * _channels(shape) * num_tokens

    def named_elements(self, shape: ModelShape) -> dict[str, int]:
        """The projections, under the names of attention's."""
        return dict.fromkeys(("query_proj", "key_proj", "value_proj", "context"), _channels(shape)) | {
            "out_proj": shape.emb_dim
        }

    def kept_elements(self, shape: ModelShape) -> int:
        """The projections, and about ten arrays: decays and values at every level of the scan."""
        return 13 * _channels(shape)

    def used_elements(self, shape: ModelShape) -> int:
        """Those of a layer with their gradients, which are computed level by level."""
        return 20 * _channels(shape)


def _channels(shape: ModelShape) -> int:
    return shape.num_query_heads * shape.head_dim


GATED_RECURRENCE = GatedRecurrence()
