"""Generation from a run's parameters: new tokens for prompts, one at a time."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_lite.batching.topology import model_dimensions
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import counted, nearest_clause, value_text
from maxtext_lite.config.types import WhichParameters
from maxtext_lite.hf.adapter import adapter_of
from maxtext_lite.hf.directory import has_hf_weights
from maxtext_lite.hf.weights import load_hf_parameters
from maxtext_lite.inference.cache import KVCache
from maxtext_lite.inference.decoding import Sampling, decode, new_cache, sample_token
from maxtext_lite.models import Decoder, root_key
from maxtext_lite.parallel import MESH_AXES, Params, make_mesh
from maxtext_lite.training.state import abstract_on_mesh, make_plain_decoder

_PADDED_TO = 64  # prompts and caches are padded to a multiple of it, so few shapes are compiled
_FIRST_ROOM = 2**15  # new tokens that a cache has room for at first; it doubles whenever it is full


def load_on_mesh(
    directory: Path, config: Config, parallelism: Mapping[str, int], parameters: WhichParameters = "trained"
) -> tuple[Decoder, Params, jax.sharding.Mesh]:
    """The decoder of a run or of a Hugging Face directory, its newest parameters, and their mesh.

    Args:
      parallelism: sizes of mesh axes by name; the others have size 1.
    Raises:
      UserError: there are no parameters, or they belong to another model.
    """
    decoder = make_plain_decoder(config.model_copy(update={"mtp_num_layers": 0}))
    sizes = dict.fromkeys(MESH_AXES, 1) | dict(parallelism)
    mesh = make_mesh(sizes, dict.fromkeys(MESH_AXES, 1), jax.devices()[: math.prod(sizes.values())])
    abstract = abstract_on_mesh(decoder, mesh, " x ".join(f"{axis} {size}" for axis, size in parallelism.items()))
    if has_hf_weights(directory) and adapter_of(directory) is None and parameters == "trained":
        load = load_hf_parameters
    else:
        from maxtext_lite.training.parameter_files import load_parameters  # Orbax, only here

        load = functools.partial(load_parameters, parameters=parameters)
    with jax.set_mesh(mesh):
        return decoder, load(directory, abstract, "run_directory"), mesh


def check_finite(value: float, what: str, dtype: str) -> None:
    """Refuses a log-probability that is not finite: nothing can be sampled or scored by it.

    Args:
      what: what the log-probability is of.
      dtype: of the activations.
    Raises:
      UserError: `value` is NaN or infinite.
    """
    if not math.isfinite(value):
        wider = {"float16": ("dtype=float32", "dtype=bfloat16"), "bfloat16": ("dtype=float32",)}.get(dtype, ())
        why = "the activations overflow, or the parameters are not finite"
        raise UserError(f"{what} has the log-probability {value} in dtype={dtype}: {why}.{nearest_clause(wider)}")


def cast_once(decoder: Decoder, params: Params) -> Params:
    """`Decoder.cast`, or the parameters themselves if they all have their dtypes already."""
    same = jax.tree.map(lambda x, cast: x.dtype == cast.dtype, params, jax.eval_shape(decoder.cast, params))
    return params if all(jax.tree.leaves(same)) else jax.jit(decoder.cast)(params)


def mesh_problems(config: Config, num_devices: int, sizes: Mapping[str, int]) -> list[str]:
    """Why a model cannot be sharded over a mesh of these sizes on `num_devices`: a sentence for each key.

    Args:
      sizes: of the mesh axes tensor, fsdp and data, or some of them.
    """
    width = config.base_mlp_dim if config.num_experts == 1 else config.moe_mlp_dim
    heads = math.gcd(*(size for key, size in model_dimensions(config, "tensor").items() if key.endswith("heads")))
    divided = {
        "tensor": (math.gcd(heads, width, config.vocab_size), "heads, mlp and vocabulary"),
        "fsdp": (config.base_emb_dim, "embedding"),
        "data": (0, "copies"),
    }
    problems: list[str] = []
    for axis, size in sizes.items():
        dim, what = divided[axis]
        most = num_devices * size // math.prod(sizes.values())
        works = [n for n in range(1, most + 1) if dim % n == 0] or [1]
        if size not in works:
            problems.append(
                f"ici_{axis}_parallelism={value_text(size)} does not divide the model's {what} over "
                f"{counted(num_devices, 'device')}. Nearest that works: {min(works, key=lambda n: abs(n - size))}."
            )
    return problems


class Sampler:
    """A decoder with its parameters on a mesh, and the jitted functions that continue prompts."""

    def __init__(self, decoder: Decoder, params: Params, mesh: jax.sharding.Mesh):
        self._decoder = decoder
        self._mesh = mesh
        self._params = cast_once(decoder, params)
        self._prefill = jax.jit(self._first, static_argnames=("num_positions", "sampling"))
        extend = functools.partial(next_token, decoder)
        self._extend = jax.jit(extend, donate_argnums=2, static_argnames=("sampling",))
        self._grow = jax.jit(KVCache.grown, static_argnames=("num_positions",))

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop_token_ids: Sequence[int] = (),
        seed: int = 0,
        name: Callable[[int], str] = "the continuation of prompt {}".format,
    ) -> Iterator[tuple[int, int, float]]:
        """Yields (prompt number, new token, its log-probability under the model) until all prompts are done.

        A prompt is done after `max_new_tokens` or one of `stop_token_ids`, which is yielded. Its draws depend on the
        seed, its number and its tokens, not on the other prompts.

        Args:
          name: what messages call a prompt's continuation, by its number.
        Raises:
          UserError: the log-probability of a token is not finite.
        """
        num_asked = len(prompts)
        prompts = [*prompts, *[[0]] * (-num_asked % self._mesh.shape["fsdp"])]  # rows are split over fsdp
        lengths = np.array([len(prompt) for prompt in prompts])
        token_BT = np.zeros((len(prompts), _round_up(lengths.max())), np.int32)
        for row, prompt in zip(token_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        most_positions = lengths.max() + max_new_tokens
        num_positions = _round_up(min(most_positions, lengths.max() + _FIRST_ROOM))
        root = root_key(seed)
        key_B = jax.vmap(lambda number: jax.random.fold_in(root, number))(jnp.arange(len(prompts)))
        running = [number < num_asked for number in range(len(prompts))]
        # The mesh is set for each call, not around a yield: whoever takes the tokens may stop at any.
        with jax.set_mesh(self._mesh):
            token_B, log_probability_B, cache = self._prefill(
                self._params, token_BT, jnp.asarray(lengths), key_B, num_positions=num_positions, sampling=sampling
            )
        for added in range(max_new_tokens):
            following = None
            if added + 1 < max_new_tokens:  # dispatched before this token is read: the device never waits
                with jax.set_mesh(self._mesh):
                    if lengths.max() + added == num_positions:
                        num_positions = _round_up(min(most_positions, 2 * num_positions))
                        cache = self._grow(cache, num_positions=num_positions)
                    following = self._extend(
                        self._params, token_B, cache, jnp.asarray(lengths + added), key_B, sampling=sampling
                    )
            read = zip(*jax.device_get((token_B, log_probability_B)), strict=True)
            for number, (token, log_probability) in enumerate(read):
                if running[number]:
                    check_finite(float(log_probability), name(number), jnp.dtype(self._decoder.shape.dtype).name)
                    yield number, int(token), float(log_probability)
                    running[number] = int(token) not in stop_token_ids
            if following is None or not any(running):
                return
            token_B, log_probability_B, cache = following

    def _first(
        self,
        params: Params,
        token_BT: jax.Array,
        length_B: jax.Array,
        key_B: jax.Array,
        *,
        num_positions: int,
        sampling: Sampling,
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """`first_token` with a new cache, made inside the jitted function, which shards it as attention needs."""
        cache = new_cache(self._decoder, token_BT.shape[0], num_positions)
        return first_token(self._decoder, params, token_BT, cache, length_B, key_B, sampling=sampling)


def first_token(
    decoder: Decoder,
    params: Params,
    token_BT: jax.Array,
    cache: KVCache,
    length_B: jax.Array,
    key_B: jax.Array,
    *,
    sampling: Sampling,
    scored_at: float = 1.0,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """The first token after each of B prompts, its log-probability (`sample_token`), and the cache with the prompts.

    Args:
      token_BT: prompts; tokens after their `length_B` are ignored.
      cache: empty.
      key_B: of all draws of a sequence; each draw folds in the token's position.
    """
    x_BTD, cache = decode(decoder, params, token_BT, jnp.zeros_like(length_B), cache, length_B)
    last_BTD = jnp.take_along_axis(x_BTD, (length_B - 1)[:, None, None], axis=1)
    return *_draw(decoder, params, last_BTD, length_B, key_B, sampling, scored_at), cache


def next_token(
    decoder: Decoder,
    params: Params,
    token_B: jax.Array,
    cache: KVCache,
    length_B: jax.Array,
    key_B: jax.Array,
    *,
    sampling: Sampling,
    scored_at: float = 1.0,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """The token after token_B, for sequences whose `length_B` tokens before it are in the cache; see `first_token`."""
    x_BTD, cache = decode(decoder, params, token_B[:, None], length_B, cache)
    return *_draw(decoder, params, x_BTD, length_B + 1, key_B, sampling, scored_at), cache


def _draw(
    decoder: Decoder,
    params: Params,
    x_BTD: jax.Array,
    position_B: jax.Array,
    key_B: jax.Array,
    sampling: Sampling,
    scored_at: float,
) -> tuple[jax.Array, jax.Array]:
    logits_BV = decoder.logits(params, x_BTD)[:, 0]
    return sample_token(logits_BV, jax.vmap(jax.random.fold_in)(key_B, position_B), sampling, scored_at)


def _round_up(count: int) -> int:
    return -(-int(count) // _PADDED_TO) * _PADDED_TO
