"""What each parameter is called in a family's checkpoints, and how it lies there.

A line of a table names a parameter, a tensor, and a pattern such as "(N H) D -> D N H": the tensor's dims on the left,
where those in parentheses are one dim, and the parameter's on the right. A pattern is read in both directions, so
that what is imported can always be exported.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxtext_lite.hf.copying import assign

Sizes = Mapping[str, int]
"""How long each dim of the patterns is.

    V vocabulary   D embedding      T learned positions   N query heads    K kv heads      H head width
    F mlp          E experts        I one expert          S shared expert  Q latent query  R latent keys and values
    P dims of a head that are not rotated    O those that are    C R + O    W width of a value    Z parts, one after
    another, of which each is a parameter
"""


def sizes_of(keys: Mapping[str, Any]) -> Sizes:
    """The sizes of a model with these keys of the Model section."""
    width = keys["base_moe_mlp_dim"] if keys["base_moe_mlp_dim"] != -1 else keys["base_mlp_dim"]
    sizes = {
        "V": keys["vocab_size"], "D": keys["base_emb_dim"], "T": keys["trainable_position_size"],
        "N": keys["base_num_query_heads"], "K": keys["base_num_kv_heads"], "H": keys["head_dim"],
        "F": keys["base_mlp_dim"], "E": keys["num_experts"], "I": width, "S": keys["shared_experts"] * width,
    }  # fmt: skip
    if mla := keys["mla"]:
        names = {"Q": "q_lora_rank", "R": "kv_lora_rank", "P": "qk_nope_head_dim", "O": "qk_rope_head_dim",
                 "W": "v_head_dim"}  # fmt: skip
        sizes |= {letter: mla[name] for letter, name in names.items()}
        sizes["C"] = sizes["R"] + sizes["O"]
    return sizes


@dataclasses.dataclass(frozen=True)
class Name:
    """One tensor of a checkpoint, or one of each layer or expert.

    Attributes:
      ours: the parameters that it holds: paths below a layer's, or below the root of, the parameters' tree.
      theirs: its name, in which {layer} and {expert} are numbers.
      pattern: how it becomes a parameter.
      parts: where it holds several, how much of the dim Z each has: a letter or a number.
      pairs: a dim of the parameter whose last O are rotated and lie there as pairs, in place of halves.
    """

    ours: tuple[str, ...]
    theirs: str
    pattern: str
    parts: tuple[str, ...] = ()
    pairs: str = ""

    @property
    def per_expert(self) -> bool:
        """Whether each expert has a tensor of its own; the parameter then has a leading E."""
        return "{expert}" in self.theirs

    @property
    def rank(self) -> int:
        """Dims of the parameter in one layer."""
        return len(_parsed(self.pattern)[1]) + self.per_expert

    @property
    def our_dims(self) -> tuple[str, ...]:
        """Letters of the parameter's dims in one layer, but for experts with a tensor each."""
        return _parsed(self.pattern)[1]

    @property
    def their_dims(self) -> tuple[tuple[str, ...], ...]:
        """For each of the tensor's dims, the letters that it is made of."""
        return _parsed(self.pattern)[0]

    def their_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The tensor's shape."""
        groups, _ = _parsed(self.pattern)
        whole = self._whole(sizes)
        return tuple(int(np.prod([whole[letter] for letter in group])) for group in groups)

    def our_shape(self, part: int, sizes: Sizes) -> tuple[int, ...]:
        """The shape of a parameter in one layer."""
        of_part = self._whole(sizes) | ({"Z": _length(self.parts[part], sizes)} if self.parts else {})
        shape = tuple(of_part[letter] for letter in _parsed(self.pattern)[1])
        return (sizes["E"], *shape) if self.per_expert else shape

    def to_ours(self, tensor: np.ndarray, part: int, sizes: Sizes) -> np.ndarray:
        """A parameter of one layer (and expert) in a tensor: a view of it, where it need not be rearranged."""
        groups, right = _parsed(self.pattern)
        left = [letter for group in groups for letter in group]
        whole = self._whole(sizes)
        dims = tensor.reshape([whole[letter] for letter in left])
        if self.parts:
            lengths = [_length(each, sizes) for each in self.parts]
            start = sum(lengths[:part])
            dims = np.moveaxis(np.moveaxis(dims, left.index("Z"), 0)[start : start + lengths[part]], 0, left.index("Z"))
            if "Z" not in right:  # one of each
                dims = dims.squeeze(left.index("Z"))
                left.remove("Z")
        ours = dims.transpose([left.index(letter) for letter in right])
        if self.pairs:
            ours = np.take(ours, _halves(ours.shape[right.index(self.pairs)], sizes["O"]), axis=right.index(self.pairs))
        return ours

    def to_theirs(self, parameters: Sequence[np.ndarray], sizes: Sizes) -> np.ndarray:
        """The tensor that holds these parameters of one layer (and expert)."""
        groups, right = _parsed(self.pattern)
        left = [letter for group in groups for letter in group]
        whole = self._whole(sizes)
        dims = np.empty([whole[letter] for letter in left], parameters[0].dtype)
        end = 0
        for part, ours in enumerate(parameters):
            if self.pairs:
                order = np.argsort(_halves(ours.shape[right.index(self.pairs)], sizes["O"]))
                ours = np.take(ours, order, axis=right.index(self.pairs))
            letters = list(right)
            if self.parts and "Z" not in right:
                ours, letters = ours[..., None], [*right, "Z"]
            into = dims
            if self.parts:
                start, end = end, end + _length(self.parts[part], sizes)
                into = dims[(slice(None),) * left.index("Z") + (slice(start, end),)]
            assign(into, ours.transpose([letters.index(letter) for letter in left]))
        return dims.reshape(self.their_shape(sizes))

    def _whole(self, sizes: Sizes) -> dict[str, int]:
        return {**sizes, "Z": sum(_length(part, sizes) for part in self.parts)}


def _length(part: str, sizes: Sizes) -> int:
    return int(part) if part.isdigit() else sizes[part]


@functools.cache
def _parsed(pattern: str) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    left, right = pattern.split(" -> ")
    groups = re.findall(r"\(([^)]*)\)|(\w)", left)
    return tuple(tuple(many.split()) if many else (one,) for many, one in groups), tuple(right.split())


def _halves(length: int, rotated: int) -> np.ndarray:
    """Where each dim of halves stands among pairs: the last `rotated` first their even ones, then their odd ones."""
    kept = np.arange(length - rotated)
    pairs = np.arange(length - rotated, length)
    return np.concatenate([kept, pairs[0::2], pairs[1::2]])


@dataclasses.dataclass(frozen=True)
class Table:
    """The names of a family.

    Attributes:
      prefix: what the names of a checkpoint without an output projection of its own may lack.
      root: tensors outside the layers.
      layer: tensors of each layer. Of two lines for one parameter, that with the rank it has is meant.
      passed_over: tensors that hold nothing to learn, as a pattern of their whole names.
    """

    prefix: str
    root: tuple[Name, ...]
    layer: tuple[Name, ...]
    passed_over: str = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"

    def named(self, theirs: str) -> "Table":
        """The names without the prefix, where a checkpoint has none of those with it."""
        if not self.prefix or theirs.startswith(self.prefix):
            return self
        cut = functools.partial(_without, self.prefix)
        passed_over = self.passed_over.replace(self.prefix.replace(".", r"\."), "")
        return Table("", tuple(map(cut, self.root)), tuple(map(cut, self.layer)), passed_over)


def _without(prefix: str, name: Name) -> Name:
    return dataclasses.replace(name, theirs=name.theirs.removeprefix(prefix))


def _one(ours: str, theirs: str, pattern: str, **more: Any) -> Name:
    return Name((ours,), theirs, pattern, **more)


def _layer(*names: Name) -> tuple[Name, ...]:
    return tuple(dataclasses.replace(name, theirs=f"model.layers.{{layer}}.{name.theirs}") for name in names)


_ROOT = (
    _one("embedding/table", "model.embed_tokens.weight", "V D -> V D"),
    _one("final_norm/scale", "model.norm.weight", "D -> D"),
    _one("head/projection", "lm_head.weight", "V D -> D V"),
)
_NORMS = _layer(
    _one("attention_norm/scale", "input_layernorm.weight", "D -> D"),
    _one("mlp_norm/scale", "post_attention_layernorm.weight", "D -> D"),
)
_OUT = _layer(
    _one("attention/out", "self_attn.o_proj.weight", "D (N H) -> N H D"),
    _one("attention/out_bias", "self_attn.o_proj.bias", "D -> D"),
)
_ATTENTION = _OUT + _layer(
    _one("attention/query", "self_attn.q_proj.weight", "(N H) D -> D N H"),
    _one("attention/key", "self_attn.k_proj.weight", "(K H) D -> D K H"),
    _one("attention/value", "self_attn.v_proj.weight", "(K H) D -> D K H"),
    _one("attention/query_bias", "self_attn.q_proj.bias", "(N H) -> N H"),
    _one("attention/key_bias", "self_attn.k_proj.bias", "(K H) -> K H"),
    _one("attention/value_bias", "self_attn.v_proj.bias", "(K H) -> K H"),
)
_HEAD_NORMS = _layer(
    _one("attention/query_norm/scale", "self_attn.q_norm.weight", "H -> H"),
    _one("attention/key_norm/scale", "self_attn.k_norm.weight", "H -> H"),
)
_DOWN = _layer(
    _one("mlp/down", "mlp.down_proj.weight", "D F -> F D"),
    _one("mlp/down_bias", "mlp.down_proj.bias", "D -> D"),
)
_MLP = _DOWN + _layer(
    _one("mlp/gate", "mlp.gate_proj.weight", "F D -> D F"),
    _one("mlp/up", "mlp.up_proj.weight", "F D -> D F"),
    _one("mlp/gate_bias", "mlp.gate_proj.bias", "F -> F"),
    _one("mlp/up_bias", "mlp.up_proj.bias", "F -> F"),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Name, ...]:
    return _layer(
        _one("mlp/router", f"{block}.gate.weight", "E D -> D E"),
        _one("mlp/gate", f"{block}.experts.{{expert}}.{gate}.weight", "I D -> D I"),
        _one("mlp/up", f"{block}.experts.{{expert}}.{up}.weight", "I D -> D I"),
        _one("mlp/down", f"{block}.experts.{{expert}}.{down}.weight", "D I -> I D"),
    )


_LLAMA = Table("model.", _ROOT, _NORMS + _ATTENTION + _MLP)
_QWEN3 = Table("model.", _ROOT, _NORMS + _ATTENTION + _HEAD_NORMS + _MLP)
_FOUR_NORMS = _layer(
    _one("attention_norm/scale", "input_layernorm.weight", "D -> D"),
    _one("attention_post_norm/scale", "post_attention_layernorm.weight", "D -> D"),
    _one("mlp_norm/scale", "pre_feedforward_layernorm.weight", "D -> D"),
    _one("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "D -> D"),
)
_GEMMA2 = Table("model.", _ROOT, _FOUR_NORMS + _ATTENTION + _MLP)
_GEMMA3 = Table("model.", _ROOT, _FOUR_NORMS + _ATTENTION + _HEAD_NORMS + _MLP)
_OLMO2 = Table("model.", _ROOT, _ATTENTION + _MLP + _layer(
    _one("attention_post_norm/scale", "post_attention_layernorm.weight", "D -> D"),
    _one("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "D -> D"),
    _one("attention/query_norm/scale", "self_attn.q_norm.weight", "(N H) -> N H"),
    _one("attention/key_norm/scale", "self_attn.k_norm.weight", "(K H) -> K H"),
))  # fmt: skip
_PHI3 = Table("model.", _ROOT, _NORMS + _OUT + _DOWN + _layer(
    Name(("attention/query", "attention/key", "attention/value"), "self_attn.qkv_proj.weight", "(Z H) D -> D Z H",
         ("N", "K", "K")),
    Name(("mlp/gate", "mlp/up"), "mlp.gate_up_proj.weight", "Z D -> D Z", ("F", "F")),
))  # fmt: skip
_MIXTRAL = Table("model.", _ROOT, _NORMS + _ATTENTION + _experts("block_sparse_moe", "w1", "w3", "w2"))
_QWEN3_MOE = Table(
    "model.", _ROOT, _NORMS + _ATTENTION + _HEAD_NORMS + _experts("mlp", "gate_proj", "up_proj", "down_proj")
)
_GPT_OSS = Table("model.", _ROOT, _NORMS + _ATTENTION + _layer(
    _one("attention/sinks", "self_attn.sinks", "N -> N"),
    _one("mlp/router", "mlp.router.weight", "E D -> D E"),
    _one("mlp/router_logit_bias", "mlp.router.bias", "E -> E"),
    Name(("mlp/gate", "mlp/up"), "mlp.experts.gate_up_proj", "E D (I Z) -> E D I", ("1", "1")),
    Name(("mlp/gate_bias", "mlp/up_bias"), "mlp.experts.gate_up_proj_bias", "E (I Z) -> E I", ("1", "1")),
    _one("mlp/down", "mlp.experts.down_proj", "E I D -> E I D"),
    _one("mlp/down_bias", "mlp.experts.down_proj_bias", "E D -> E D"),
))  # fmt: skip
_DEEPSEEK = Table("model.", _ROOT, _NORMS + _MLP + _experts("mlp", "gate_proj", "up_proj", "down_proj") + _layer(
    _one("attention/query", "self_attn.q_proj.weight", "(N H) D -> D N H", pairs="H"),
    _one("attention/query_down", "self_attn.q_a_proj.weight", "Q D -> D Q"),
    _one("attention/query_down_norm/scale", "self_attn.q_a_layernorm.weight", "Q -> Q"),
    _one("attention/query_up", "self_attn.q_b_proj.weight", "(N H) Q -> Q N H", pairs="H"),
    _one("attention/kv_down", "self_attn.kv_a_proj_with_mqa.weight", "C D -> D C", pairs="C"),
    _one("attention/kv_down_norm/scale", "self_attn.kv_a_layernorm.weight", "R -> R"),
    Name(("attention/key_up", "attention/value_up"), "self_attn.kv_b_proj.weight", "(N Z) R -> R N Z", ("P", "W")),
    _one("attention/out", "self_attn.o_proj.weight", "D (N W) -> N W D"),
    _one("mlp/router_bias", "mlp.gate.e_score_correction_bias", "E -> E"),
    _one("mlp/shared/gate", "mlp.shared_experts.gate_proj.weight", "S D -> D S"),
    _one("mlp/shared/up", "mlp.shared_experts.up_proj.weight", "S D -> D S"),
    _one("mlp/shared/down", "mlp.shared_experts.down_proj.weight", "D S -> S D"),
))  # fmt: skip


def _gpt2_layer(*names: Name) -> tuple[Name, ...]:
    return tuple(dataclasses.replace(name, theirs=f"transformer.h.{{layer}}.{name.theirs}") for name in names)


_QUERY_KEY_VALUE = ("attention/query", "attention/key", "attention/value")
_GPT2 = Table(
    "transformer.",
    (
        _one("embedding/table", "transformer.wte.weight", "V D -> V D"),
        _one("embedding/positions", "transformer.wpe.weight", "T D -> T D"),
        _one("final_norm/scale", "transformer.ln_f.weight", "D -> D"),
        _one("final_norm/bias", "transformer.ln_f.bias", "D -> D"),
        _one("head/projection", "lm_head.weight", "V D -> D V"),
    ),
    _gpt2_layer(
        _one("attention_norm/scale", "ln_1.weight", "D -> D"),
        _one("attention_norm/bias", "ln_1.bias", "D -> D"),
        Name(_QUERY_KEY_VALUE, "attn.c_attn.weight", "D (Z H) -> D Z H", ("N", "K", "K")),
        Name(tuple(f"{path}_bias" for path in _QUERY_KEY_VALUE), "attn.c_attn.bias", "(Z H) -> Z H", ("N", "K", "K")),
        _one("attention/out", "attn.c_proj.weight", "(N H) D -> N H D"),
        _one("attention/out_bias", "attn.c_proj.bias", "D -> D"),
        _one("mlp_norm/scale", "ln_2.weight", "D -> D"),
        _one("mlp_norm/bias", "ln_2.bias", "D -> D"),
        _one("mlp/up", "mlp.c_fc.weight", "D F -> D F"),
        _one("mlp/up_bias", "mlp.c_fc.bias", "F -> F"),
        _one("mlp/down", "mlp.c_proj.weight", "F D -> F D"),
        _one("mlp/down_bias", "mlp.c_proj.bias", "D -> D"),
    ),
    passed_over=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
)

TABLES: Mapping[str, Table] = {
    "llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "smollm3": _LLAMA, "qwen3": _QWEN3, "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3, "olmo2": _OLMO2, "phi3": _PHI3, "gpt2": _GPT2, "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE, "gpt_oss": _GPT_OSS, "deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK,
}  # fmt: skip
"""The table of each model_type of `config.hf_config.FAMILIES`."""
