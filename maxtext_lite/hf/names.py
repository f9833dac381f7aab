"""Each parameter's name and layout in a family's checkpoints: the tables, and how their names are read.

A parameter's dims are those of `config.weights`. In a checkpoint a matrix [*in, *out] is stored as torch's Linear has
it, [out, in], a vector in one dim, a table unchanged. For any other layout a line has a pattern such as "D (N H)": the
letters of the tensor's dims, in parentheses for those that are stored as one, with () for a dim of 1. Every line works
in both directions, so what is imported can always be exported.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maxtext_lite.config import Mla, ModelConfig, UserError
from maxtext_lite.config.weights import ModelShape, Weight, model_shape, num_inputs, stacks_of
from maxtext_lite.hf.safetensors import assign

INPUTS_FIRST = ("gpt2",)
"""Families whose matrices are [in, out] in a checkpoint, in place of torch's [out, in]."""


def model_of(keys: Mapping[str, Any]) -> ModelShape:
    """The shape of a model with these keys of the Model section."""
    mla = Mla(**keys["mla"]) if keys["mla"] else None
    return model_shape(ModelConfig.model_construct(**{**keys, "mla": mla}))


@dataclasses.dataclass(frozen=True)
class Name:
    """One tensor of a checkpoint, or one of each layer or expert.

    Attributes:
      ours: the parameters in it, by their paths below a layer or the root of the parameters' tree.
      theirs: its name, in which {layer} and {expert} are numbers.
      pattern: its dims, if they are not the usual ones.
      parts: of several parameters, how much of the dim Z each has: a letter or a number.
      pairs: a dim of the parameter with O rotated dims, the first ones or, in latent attention, the last; the tensor
        has these as pairs where the parameter has halves.
      our_dims: letters of the parameter's dims in one layer (and expert), with Z for its part; see `laid`.
      their_dims: for each of the tensor's dims, the letters that it consists of.
      sizes: how long each dim is.
    """

    ours: tuple[str, ...]
    theirs: str
    pattern: str = ""
    parts: tuple[str, ...] = ()
    pairs: str = ""
    our_dims: tuple[str, ...] = ()
    their_dims: tuple[tuple[str, ...], ...] = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    @property
    def per_expert(self) -> bool:
        """Whether each expert or head has a tensor of its own; the parameter then has a leading dim for them."""
        return "{expert}" in self.theirs

    def laid(self, weights: Sequence[Weight], sizes: Mapping[str, int]) -> "Name | None":
        """The line with the dims of these parameters; None if it is about others."""
        first = weights[0]
        own = int(self.per_expert)
        has_experts = "E" in self.pattern or (self.per_expert and first.is_normal)
        is_router_bias = first.dims == ("E",)  # one tensor for all experts in every layout
        if not is_router_bias and has_experts != (first.axes[0] == "experts"):
            return None
        dims = first.dims[own:]
        if self.parts:
            dims = tuple("Z" if letter == self.parts[0] else letter for letter in dims)
        if self.pattern:
            groups = re.findall(r"\(([^)]*)\)|(\w)", self.pattern)
            theirs = tuple((one,) if one else tuple(many.split()) for many, one in groups)
        elif not first.is_normal:
            theirs = (dims,)
        elif first.axes[0] in ("vocab", "positions"):
            theirs = tuple((letter,) for letter in dims)
        else:
            inputs = num_inputs(first.axes[own:])
            theirs = (dims[inputs:], dims[:inputs])
        return dataclasses.replace(self, our_dims=dims, their_dims=theirs, sizes=sizes)

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(math.prod(map(self._length, group)) for group in self.their_dims)

    def our_shape(self, part: int) -> tuple[int, ...]:
        """The shape of a parameter in one layer (and expert)."""
        return tuple(self._length(self.parts[part] if letter == "Z" else letter) for letter in self.our_dims)

    def to_ours(self, tensor: np.ndarray, part: int) -> np.ndarray:
        """A parameter of one layer (and expert) from a tensor: a view, unless dims must be reordered."""
        ours = self._view(tensor, part)
        if self.pairs:
            axis = self.our_dims.index(self.pairs)
            ours = np.take(ours, self._halves(ours.shape[axis]), axis)
        return ours

    def to_theirs(self, parameters: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor that holds these parameters of one layer (and expert)."""
        tensor = np.empty(self.their_shape, parameters[0].dtype)
        for part, ours in enumerate(parameters):
            if self.pairs:
                axis = self.our_dims.index(self.pairs)
                ours = np.take(ours, np.argsort(self._halves(ours.shape[axis])), axis)
            assign(self._view(tensor, part), ours)
        return tensor

    def reach(self, part: int, of_part: tuple[slice, ...]) -> tuple[slice, ...]:
        """The stretch of each of the tensor's dims that `to_ours(...)[of_part]`, which is not empty, comes from."""
        shape = self.their_shape
        if self.pairs:  # a half comes from all over the dim
            return tuple(slice(0, size) for size in shape)
        stretches: list[slice] = []
        for dim, size in enumerate(shape):
            numbers = np.arange(size).reshape([-1 if other == dim else 1 for other in range(len(shape))])
            found = self._view(np.broadcast_to(numbers, shape), part)[of_part]
            found = found[tuple(slice(None if stride else 1) for stride in found.strides)]
            stretches.append(slice(int(found.min()), int(found.max()) + 1))
        return tuple(stretches)

    def _view(self, tensor: np.ndarray, part: int) -> np.ndarray:
        """The part of a tensor that is a parameter, with that one's dims."""
        letters = list(itertools.chain(*self.their_dims))
        dims = tensor.reshape([self._length(letter) for letter in letters])
        if self.parts:
            axis = letters.index("Z")
            start = sum(map(self._length, self.parts[:part]))
            stretch = slice(start, start + self._length(self.parts[part]))
            dims = dims[(slice(None),) * axis + (stretch,)]
            if "Z" not in self.our_dims:  # each parameter has one number of it
                dims = dims.squeeze(axis)
                letters.remove("Z")
        return dims.transpose([letters.index(letter) for letter in self.our_dims])

    def _length(self, dim: str) -> int:
        if dim == "Z":
            return sum(map(self._length, self.parts))
        return int(dim) if dim.isdigit() else self.sizes[dim]

    def _halves(self, length: int) -> np.ndarray:
        """Each dim's place before pairs became halves: of the rotated dims the even ones, then the odd ones."""
        first = length - self.sizes["O"] if "P" in self.sizes else 0
        end = first + self.sizes["O"]
        pairs = np.arange(first, end)
        return np.concatenate([np.arange(first), pairs[0::2], pairs[1::2], np.arange(end, length)])


@dataclasses.dataclass(frozen=True)
class Table:
    """The names of a family.

    Attributes:
      prefix: of all names but the output projection's; a checkpoint of the model without that may lack it.
      root: tensors outside the layers.
      layer: tensors of each layer. Of two lines for one parameter, the one with its rank applies.
      passed_over: a pattern of the whole names of tensors with nothing learned.
      constants: tensors of one number in each layer, and the number that each must have.
    """

    prefix: str
    root: tuple[Name, ...]
    layer: tuple[Name, ...]
    passed_over: str = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


_LAYER = "model.layers.{layer}."
_GPT2_LAYER = "transformer.h.{layer}."


def _table(layer: tuple[Name, ...]) -> Table:
    """A family's table whose prefix and tensors outside the layers are Llama's."""
    return Table("model.", _ROOT, layer)


def _names(prefix: str, names: Mapping[str, str]) -> tuple[Name, ...]:
    return tuple(Name((ours,), prefix + theirs) for ours, theirs in names.items())


def _in_layer(names: Mapping[str, str]) -> tuple[Name, ...]:
    return _names(_LAYER, names)


def _pairs(*names: Name) -> tuple[Name, ...]:
    """Lines of which queries' and keys' rotated dims lie as pairs."""
    turned = ("attention/query", "attention/key")
    return tuple(dataclasses.replace(name, pairs="H") if name.ours[0].startswith(turned) else name for name in names)


def _normed(names: Mapping[str, str], prefix: str = _LAYER) -> tuple[Name, ...]:
    """Scales and biases of norms."""
    return tuple(
        Name((f"{ours}/{part}",), f"{prefix}{theirs}.{kind}")
        for ours, theirs in names.items()
        for part, kind in (("scale", "weight"), ("bias", "bias"))
    )


_ROOT = _names("", {
    "embedding/table": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "head/projection": "lm_head.weight",
})  # fmt: skip
_NORMS = _in_layer({
    "attention_norm/scale": "input_layernorm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
})  # fmt: skip
_OUT = _in_layer({"attention/out": "self_attn.o_proj.weight", "attention/out_bias": "self_attn.o_proj.bias"})
_ATTENTION = _OUT + _in_layer({
    "attention/query": "self_attn.q_proj.weight",
    "attention/key": "self_attn.k_proj.weight",
    "attention/value": "self_attn.v_proj.weight",
    "attention/query_bias": "self_attn.q_proj.bias",
    "attention/key_bias": "self_attn.k_proj.bias",
    "attention/value_bias": "self_attn.v_proj.bias",
})  # fmt: skip
_HEAD_NORMS = _in_layer({
    "attention/query_norm/scale": "self_attn.q_norm.weight",
    "attention/key_norm/scale": "self_attn.k_norm.weight",
})  # fmt: skip
_DOWN = _in_layer({"mlp/down": "mlp.down_proj.weight", "mlp/down_bias": "mlp.down_proj.bias"})
_MLP = _DOWN + _in_layer({
    "mlp/gate": "mlp.gate_proj.weight",
    "mlp/up": "mlp.up_proj.weight",
    "mlp/gate_bias": "mlp.gate_proj.bias",
    "mlp/up_bias": "mlp.up_proj.bias",
})  # fmt: skip


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Name, ...]:
    of_experts = {"mlp/gate": gate, "mlp/up": up, "mlp/down": down}
    names = {ours: f"{block}.experts.{{expert}}.{theirs}.weight" for ours, theirs in of_experts.items()}
    return _in_layer({"mlp/router": f"{block}.gate.weight", **names})


_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_NUMBERED_EXPERTS = _experts("block_sparse_moe", "w1", "w3", "w2")
_SHARED = _in_layer({
    "mlp/shared/gate": "mlp.shared_experts.gate_proj.weight",
    "mlp/shared/up": "mlp.shared_experts.up_proj.weight",
    "mlp/shared/down": "mlp.shared_experts.down_proj.weight",
})  # fmt: skip
_ROUTER_BIAS = _in_layer({"mlp/router_bias": "mlp.gate.e_score_correction_bias"})
_PAIRED = _pairs(*_ATTENTION)

_LLAMA = _table(_NORMS + _ATTENTION + _MLP)
_QWEN3 = _table(_NORMS + _ATTENTION + _HEAD_NORMS + _MLP)
_POST_NORMS = _in_layer({
    "attention_post_norm/scale": "post_attention_layernorm.weight",
    "mlp_post_norm/scale": "post_feedforward_layernorm.weight",
})  # fmt: skip
_FOUR_NORMS = _POST_NORMS + _in_layer({
    "attention_norm/scale": "input_layernorm.weight",
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
})  # fmt: skip
_GEMMA2 = _table(_FOUR_NORMS + _ATTENTION + _MLP)
_GEMMA3 = _table(_FOUR_NORMS + _ATTENTION + _HEAD_NORMS + _MLP)
_OLMO2 = _table(_ATTENTION + _MLP + _POST_NORMS + _HEAD_NORMS)
_QUERY_KEY_VALUE = ("attention/query", "attention/key", "attention/value")
_GATE_UP = Name(("mlp/gate", "mlp/up"), _LAYER + "mlp.gate_up_proj.weight", parts=("F", "F"))
_PHI3 = _table(_NORMS + _OUT + _DOWN + (
    Name(_QUERY_KEY_VALUE, _LAYER + "self_attn.qkv_proj.weight", parts=("N", "K", "K")),
    _GATE_UP,
))  # fmt: skip
_MIXTRAL = _table(_NORMS + _ATTENTION + _NUMBERED_EXPERTS)
_QWEN3_MOE = _table(_NORMS + _ATTENTION + _HEAD_NORMS + _MLP + _EXPERTS)
_GPT_OSS_EXPERTS = _LAYER + "mlp.experts."
_GPT_OSS = _table(_NORMS + _ATTENTION + _in_layer({
    "attention/sinks": "self_attn.sinks",
    "mlp/router": "mlp.router.weight",
    "mlp/router_logit_bias": "mlp.router.bias",
}) + (
    Name(("mlp/gate", "mlp/up"), _GPT_OSS_EXPERTS + "gate_up_proj", "E D (I Z)", ("1", "1")),
    Name(("mlp/gate_bias", "mlp/up_bias"), _GPT_OSS_EXPERTS + "gate_up_proj_bias", "E (I Z)", ("1", "1")),
    Name(("mlp/down",), _GPT_OSS_EXPERTS + "down_proj", "E I D"),
    Name(("mlp/down_bias",), _GPT_OSS_EXPERTS + "down_proj_bias", "E D"),
))  # fmt: skip
_DEEPSEEK = _table(_NORMS + _MLP + _EXPERTS + _ROUTER_BIAS + _SHARED + (
    Name(("attention/query",), _LAYER + "self_attn.q_proj.weight", pairs="H"),
    Name(("attention/query_up",), _LAYER + "self_attn.q_b_proj.weight", pairs="H"),
    Name(("attention/kv_down",), _LAYER + "self_attn.kv_a_proj_with_mqa.weight", pairs="C"),
    Name(("attention/key_up", "attention/value_up"), _LAYER + "self_attn.kv_b_proj.weight", parts=("P", "W")),
) + _in_layer({
    "attention/query_down": "self_attn.q_a_proj.weight",
    "attention/query_down_norm/scale": "self_attn.q_a_layernorm.weight",
    "attention/kv_down_norm/scale": "self_attn.kv_a_layernorm.weight",
    "attention/out": "self_attn.o_proj.weight",
}))  # fmt: skip
_GLM4_MOE = _table(_NORMS + _ATTENTION + _HEAD_NORMS + _MLP + _EXPERTS + _ROUTER_BIAS + _SHARED)
_QWEN2_MOE = _table(_NORMS + _ATTENTION + _MLP + _EXPERTS + _in_layer({
    "mlp/shared_gate": "mlp.shared_expert_gate.weight",
    "mlp/shared/gate": "mlp.shared_expert.gate_proj.weight",
    "mlp/shared/up": "mlp.shared_expert.up_proj.weight",
    "mlp/shared/down": "mlp.shared_expert.down_proj.weight",
}))  # fmt: skip
_MINIMAX_M2 = _table(_NORMS + _ATTENTION + _HEAD_NORMS + _NUMBERED_EXPERTS + _in_layer({
    "mlp/router_bias": "block_sparse_moe.e_score_correction_bias",
}))  # fmt: skip
_ERNIE4_5_MOE = _table(_NORMS + _PAIRED + _MLP + _EXPERTS + _SHARED + (
    Name(("mlp/router_bias",), _LAYER + "mlp.moe_statics.e_score_correction_bias", "() E"),
))  # fmt: skip
_FEED_FORWARD = _LAYER + "feed_forward."
_LLAMA4 = _table(_NORMS + _PAIRED + _names(_FEED_FORWARD, {
    "mlp/gate": "gate_proj.weight",
    "mlp/up": "up_proj.weight",
    "mlp/down": "down_proj.weight",
    "mlp/router": "router.weight",
    "mlp/shared/gate": "shared_expert.gate_proj.weight",
    "mlp/shared/up": "shared_expert.up_proj.weight",
    "mlp/shared/down": "shared_expert.down_proj.weight",
}) + (
    Name(("mlp/gate", "mlp/up"), _FEED_FORWARD + "experts.gate_up_proj", "E D Z", ("I", "I")),
    Name(("mlp/down",), _FEED_FORWARD + "experts.down_proj", "E I D"),
))  # fmt: skip
_BLOCK_SPARSE = _LAYER + "block_sparse_moe."
_GRANITE_MOE = _table(_NORMS + _ATTENTION + (
    Name(("mlp/router",), _BLOCK_SPARSE + "router.layer.weight"),
    Name(("mlp/gate", "mlp/up"), _BLOCK_SPARSE + "input_linear.weight", "E Z D", ("I", "I")),
    Name(("mlp/down",), _BLOCK_SPARSE + "output_linear.weight", "E D I"),
    Name(("mlp/shared/gate", "mlp/shared/up"), _LAYER + "shared_mlp.input_linear.weight", parts=("S", "S")),
    Name(("mlp/shared/down",), _LAYER + "shared_mlp.output_linear.weight"),
))  # fmt: skip
_FLEX_OLMO = _table(_ATTENTION + _POST_NORMS + _HEAD_NORMS + _EXPERTS)
_HUNYUAN_NORMS = _in_layer({
    "attention/query_norm/scale": "self_attn.query_layernorm.weight",
    "attention/key_norm/scale": "self_attn.key_layernorm.weight",
})  # fmt: skip
_HUNYUAN_MOE = _table(_NORMS + _ATTENTION + _HUNYUAN_NORMS + _EXPERTS[1:] + _in_layer({
    "mlp/router": "mlp.gate.wg.weight",
    "mlp/shared/gate": "mlp.shared_mlp.gate_proj.weight",
    "mlp/shared/up": "mlp.shared_mlp.up_proj.weight",
    "mlp/shared/down": "mlp.shared_mlp.down_proj.weight",
}))  # fmt: skip
_GPT2 = Table(
    "transformer.",
    _names("", {
        "embedding/table": "transformer.wte.weight",
        "embedding/positions": "transformer.wpe.weight",
        "head/projection": "lm_head.weight",
    }) + _normed({"final_norm": "transformer.ln_f"}, ""),
    _normed({"attention_norm": "ln_1", "mlp_norm": "ln_2"}, _GPT2_LAYER) + _names(_GPT2_LAYER, {
        "attention/out_bias": "attn.c_proj.bias",
        "mlp/up_bias": "mlp.c_fc.bias",
        "mlp/down_bias": "mlp.c_proj.bias",
    }) + (  # matrices are [in, out]
        Name(_QUERY_KEY_VALUE, _GPT2_LAYER + "attn.c_attn.weight", "D (Z H)", ("N", "K", "K")),
        Name(tuple(f"{path}_bias" for path in _QUERY_KEY_VALUE), _GPT2_LAYER + "attn.c_attn.bias", "", ("N", "K", "K")),
        Name(("attention/out",), _GPT2_LAYER + "attn.c_proj.weight", "(N H) D"),
        Name(("mlp/up",), _GPT2_LAYER + "mlp.c_fc.weight", "D F"),
        Name(("mlp/down",), _GPT2_LAYER + "mlp.c_proj.weight", "F D"),
    ),
    passed_over=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
)  # fmt: skip


_ENDS = _names("", {"embedding/table": "model.embed_tokens.weight", "head/projection": "lm_head.weight"})
_INPUT_AND_POST = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_BLOCK_NORMS = _normed(_INPUT_AND_POST)
_GLM = _NORMS + _PAIRED + _DOWN + (_GATE_UP,)
_GLM4_NORMS = _in_layer({
    "attention_post_norm/scale": "post_self_attn_layernorm.weight",
    "mlp_post_norm/scale": "post_mlp_layernorm.weight",
})  # fmt: skip


def _fully_connected(up: str, down: str, prefix: str = _LAYER) -> tuple[Name, ...]:
    parts = {"mlp/up": f"mlp.{up}.weight", "mlp/up_bias": f"mlp.{up}.bias",
             "mlp/down": f"mlp.{down}.weight", "mlp/down_bias": f"mlp.{down}.bias"}  # fmt: skip
    return _names(prefix, parts)


_FINAL_NORM = _normed({"final_norm": "model.norm"}, "")
_PHI = Table(
    "model.",
    _ENDS + _names("", {"head/bias": "lm_head.bias"}) + _normed({"final_norm": "model.final_layernorm"}, ""),
    tuple(dataclasses.replace(name, theirs=name.theirs.replace("o_proj", "dense")) for name in _ATTENTION)
    + _normed({
        "attention_norm": "input_layernorm", "attention/query_norm": "self_attn.q_layernorm",
        "attention/key_norm": "self_attn.k_layernorm",
    })
    + _fully_connected("fc1", "fc2"),
)  # fmt: skip
_STARCODER2 = Table("model.", _ENDS + _FINAL_NORM, _BLOCK_NORMS + _ATTENTION + _fully_connected("c_fc", "c_proj"))
_STABLELM = Table("model.", _ENDS + _FINAL_NORM, _BLOCK_NORMS + _ATTENTION + _MLP + _in_layer({
    "attention/query_norm/scale": "self_attn.q_layernorm.norms.{expert}.weight",
    "attention/key_norm/scale": "self_attn.k_layernorm.norms.{expert}.weight",
}))  # fmt: skip
_NEOX_LAYER = "gpt_neox.layers.{layer}."
_GPT_NEOX = Table(
    "gpt_neox.",
    _names("", {"embedding/table": "gpt_neox.embed_in.weight", "head/projection": "embed_out.weight"})
    + _normed({"final_norm": "gpt_neox.final_layer_norm"}, ""),
    _normed(_INPUT_AND_POST, _NEOX_LAYER)
    + _names(_NEOX_LAYER, {"attention/out": "attention.dense.weight", "attention/out_bias": "attention.dense.bias"})
    + _fully_connected("dense_h_to_4h", "dense_4h_to_h", _NEOX_LAYER)
    + (
        Name(_QUERY_KEY_VALUE, _NEOX_LAYER + "attention.query_key_value.weight", "(N Z H) D", ("1", "1", "1")),
        Name(
            tuple(f"{path}_bias" for path in _QUERY_KEY_VALUE), _NEOX_LAYER + "attention.query_key_value.bias",
            "(N Z H)", ("1", "1", "1"),
        ),
    ),
    passed_over=r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)",
)  # fmt: skip
_APERTUS = Table(
    "model.",
    _ROOT,
    _ATTENTION + _HEAD_NORMS + _MLP + _in_layer({
        "attention_norm/scale": "attention_layernorm.weight", "mlp_norm/scale": "feedforward_layernorm.weight",
        "mlp/alpha_p": "mlp.act_fn.alpha_p", "mlp/alpha_n": "mlp.act_fn.alpha_n",
    }),
    constants={_LAYER + "mlp.act_fn.beta": 0.5, _LAYER + "mlp.act_fn.eps": -1e-6},
)  # fmt: skip
_EACH_HEAD = (
    Name(("attention/query_norm/scale",), _LAYER + "self_attn.q_norm.weight", "N H"),
    Name(("attention/key_norm/scale",), _LAYER + "self_attn.k_norm.weight", "K H"),
)
_INTERLEAVED = _table(_NORMS + _PAIRED + _MLP)

TABLES: Mapping[str, Table] = {
    "llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "smollm3": _LLAMA, "qwen3": _QWEN3, "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3, "olmo2": _OLMO2, "phi3": _PHI3, "gpt2": _GPT2, "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE, "gpt_oss": _GPT_OSS, "deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK,
    "gemma": _LLAMA, "ministral": _LLAMA, "ministral3": _LLAMA, "olmo": _LLAMA, "olmo3": _OLMO2, "granite": _LLAMA,
    "glm": _table(_GLM), "glm4": _table(_GLM + _GLM4_NORMS),
    "cohere": _table(_NORMS + _PAIRED + _pairs(*_EACH_HEAD) + _MLP), "cohere2": _INTERLEAVED,
    "phi": _PHI, "starcoder2": _STARCODER2, "stablelm": _STABLELM, "gpt_neox": _GPT_NEOX,
    "nemotron": Table("model.", _ENDS + _FINAL_NORM, _BLOCK_NORMS + _ATTENTION + _MLP), "ernie4_5": _INTERLEAVED,
    "seed_oss": _LLAMA, "hunyuan_v1_dense": _table(_NORMS + _ATTENTION + _HUNYUAN_NORMS + _MLP),
    "exaone4": _table(_POST_NORMS + _ATTENTION + _HEAD_NORMS + _MLP), "apertus": _APERTUS,
    "arcee": _LLAMA, "helium": _INTERLEAVED,
    "qwen2_moe": _QWEN2_MOE, "glm4_moe": _GLM4_MOE, "dots1": _GLM4_MOE, "solar_open": _GLM4_MOE,
    "minimax_m2": _MINIMAX_M2, "ernie4_5_moe": _ERNIE4_5_MOE, "olmoe": _QWEN3_MOE, "flex_olmo": _FLEX_OLMO,
    "hunyuan_v1_moe": _HUNYUAN_MOE, "llama4_text": _LLAMA4, "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "phimoe": Table(
        "model.",
        _ENDS + _FINAL_NORM + _names("", {"head/bias": "lm_head.bias"}),
        _BLOCK_NORMS + _ATTENTION + _NUMBERED_EXPERTS,
    ),
}  # fmt: skip
"""The table of each model_type of `families.FAMILIES`."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of a table, with its parameters in one stack of layers.

    Attributes:
      name: the line, with the dims of its parameters.
      paths: the parameters, from the root of the tree.
      layer_dims: the leading dims that count layers: (), (L,), or (repeats, L / repeats).
      layers: those layers' numbers in the model; (0,) outside of the layers.
      num_experts: tensors of each layer, one for each expert or head; 1 if they share one or there are none.
    """

    name: Name
    paths: tuple[str, ...]
    layer_dims: tuple[int, ...]
    layers: tuple[int, ...]
    num_experts: int

    def tensor_names(self) -> Iterator[tuple[str, int, int]]:
        """Each tensor's name, with the numbers of the layer in the stack and of the expert; 0 if there are none."""
        for layer in range(math.prod(self.layer_dims)):
            for expert in range(self.num_experts):
                yield self.tensor_name(layer, expert), layer, expert

    def tensor_name(self, layer: int, expert: int) -> str:
        """The name of the tensor of a layer and an expert."""
        return self.name.theirs.format(layer=self.layers[layer], expert=expert)


def flat(params: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a tree of parameters by their paths, `layers/attention/query`, in the order of jax."""
    leaves: dict[str, Any] = {}
    for name in sorted(params):
        part = params[name]
        if isinstance(part, Mapping):
            leaves |= {f"{name}/{path}": leaf for path, leaf in flat(part).items()}
        else:
            leaves[name] = part
    return leaves


def entries_of(table: Table, shapes: Mapping[str, tuple[int, ...]], model: ModelShape, where: str) -> list[Entry]:
    """The lines that a decoder needs.

    Args:
      shapes: of its parameters, by path.
      model: the checkpoint's.
      where: what messages call the checkpoint.
    Raises:
      UserError: a parameter has another shape than in the checkpoint, or no name in the family.
    """
    entries: list[Entry] = []
    problems: list[str] = []
    named: set[str] = set()
    for stack, (_, weights) in stacks_of(model).items():
        for line in table.layer if stack else table.root:
            paths = tuple(f"{stack}/{path}" if stack else path for path in line.ours)
            if not (weights.keys() >= {*line.ours} and shapes.keys() >= {*paths}):
                continue
            held = [weights[path] for path in line.ours]
            name = line.laid(held, model.sizes)
            if name is None:
                continue
            layer_dims = shapes[paths[0]][: len(shapes[paths[0]]) - len(held[0].sizes)]
            experts = held[0].sizes[0] if name.per_expert else 1
            entries.append(Entry(name, paths, layer_dims, model.stacks[stack] if stack else (0,), experts))
            named.update(paths)
            for path, weight in zip(paths, held, strict=True):
                there = (*layer_dims, *weight.sizes)
                if shapes[path] != there:
                    problems.append(f"{where}: parameter {path} is {there} there and {shapes[path]} here.")
    problems += [f"{where}: its family has no tensor for parameter {path}." for path in shapes if path not in named]
    if problems:
        raise UserError(problems)
    return entries
