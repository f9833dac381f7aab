"""A model's log-likelihoods of given tokens, of continuations and of long texts, and its loss on a file."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_lite.config import Config, UserError
from maxtext_lite.config.bucket import local_copy
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import is_there, user_path
from maxtext_lite.config.keys import source_kind
from maxtext_lite.config.registry import resolve
from maxtext_lite.console import complain
from maxtext_lite.data import ExampleSource
from maxtext_lite.data.prepared import MANIFEST_FILE
from maxtext_lite.data.sources import open_path
from maxtext_lite.data.text_files import PLAIN_SUFFIXES, find_files, is_kind, json_lines, read_documents
from maxtext_lite.inference.decoding import Sampling
from maxtext_lite.inference.questions import Scored, accuracy, continued, perplexity, read_questions, with_blank
from maxtext_lite.inference.requests import EvaluateConfig, GenerateConfig
from maxtext_lite.inference.sampler import (
    Sampler,
    cast_once,
    check_finite,
    load_on_mesh,
    mesh_problems,
)
from maxtext_lite.inference.stream_text import TextTokens, write_texts
from maxtext_lite.models import Decoder
from maxtext_lite.models.layers import OutputHead
from maxtext_lite.parallel import Params, Tree, start_devices
from maxtext_lite.training.evaluation import EVAL_BATCH_AXES
from maxtext_lite.training.loss import Readout, forward, scan_tiles, token_losses
from maxtext_lite.training.objective import ScoredObjective, objective_of

_PADDED_TO = 64  # rows are padded to a power of two times this, so few shapes are compiled
_TILE_TOKENS = 64  # of each row, whose logits exist at one time


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens to score from index `first` on, which is at least 1."""

    tokens: Sequence[int] | np.ndarray
    first: int


class Scorer:
    """A decoder with its parameters on a mesh, and the jitted function that scores rows.

    Args:
      rows_at_once: rows of one forward pass.
    """

    def __init__(self, decoder: Decoder, params: Params, mesh: jax.sharding.Mesh, *, rows_at_once: int):
        self._decoder = decoder
        self._mesh = mesh
        self._params = cast_once(decoder, params)
        shards = mesh.shape["fsdp"]
        self._rows = -(-rows_at_once // shards) * shards
        self._score = jax.jit(functools.partial(_row_scores, decoder))
        # The last token has no target and can be dropped, unless rotary angles depend on the length.
        self._unseen = 0 if decoder.shape.follows_length else 1

    def score(self, spans: Sequence[Span]) -> list[Scored]:
        """The score of each span, in order. Rows of similar length share a forward pass."""
        found: dict[int, Scored] = {}
        longest_first = sorted(range(len(spans)), key=lambda number: -len(spans[number].tokens))
        for begin in range(0, len(spans), self._rows):
            numbers = longest_first[begin : begin + self._rows]
            found.update(zip(numbers, self._batch([spans[number] for number in numbers]), strict=True))
        return [found[number] for number in range(len(spans))]

    def _batch(self, spans: list[Span]) -> Iterator[Scored]:
        length = _padded(max(len(span.tokens) for span in spans) - self._unseen)
        token_BT = np.zeros((self._rows, length), np.int32)
        target_BT = np.zeros((self._rows, length), np.int32)
        first_B = np.zeros(self._rows, np.int32)
        end_B = np.zeros(self._rows, np.int32)
        for row, span in enumerate(spans):
            assert 1 <= span.first < len(span.tokens), "a span scores at least one token, after at least one"
            first_B[row] = span.first - 1
            end_B[row] = len(span.tokens) - 1
            seen = span.tokens[: len(span.tokens) - self._unseen]
            token_BT[row, : len(seen)] = seen
            target_BT[row, : end_B[row]] = span.tokens[1:]
        with jax.set_mesh(self._mesh):
            likelihood_B, is_greedy_B = jax.device_get(
                self._score(self._params, token_BT, target_BT, jnp.asarray(first_B), jnp.asarray(end_B))
            )
        for row, span in enumerate(spans):
            yield Scored(float(likelihood_B[row]), bool(is_greedy_B[row]), len(span.tokens) - span.first)


def _row_scores(
    decoder: Decoder, params: Params, token_BT: jax.Array, target_BT: jax.Array, first_B: jax.Array, end_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-likelihood [B] of the targets at positions first_B ... end_B - 1, and whether each is the likeliest."""
    B, T = token_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    is_real_BT = position_BT < end_B[:, None] + decoder.shape.follows_length
    x_BTD = decoder.hidden(params, token_BT, is_real_BT.astype(jnp.int32), position_BT)
    head = decoder.output_head(params, x_BTD.dtype)
    shape = decoder.shape
    tiles = T // _TILE_TOKENS
    how = Readout(tiles, shape.final_soft_cap, multiplier=shape.logits_multiplier)
    nll_BT = token_losses(x_BTD, head, target_BT, how)
    is_scored_BT = (position_BT >= first_B[:, None]) & (position_BT < end_B[:, None])
    is_likeliest_BT = _likeliest_tokens(x_BTD, head, tiles) == target_BT
    return -jnp.sum(jnp.where(is_scored_BT, nll_BT, 0), axis=1), jnp.all(is_likeliest_BT | ~is_scored_BT, axis=1)


def _likeliest_tokens(x_BTD: jax.Array, head: OutputHead, num_tiles: int) -> jax.Array:
    """The token with the largest logit at each position, int32 [B, T], tile by tile as in `token_losses`.

    The logits are not multiplied or capped, which would keep their order, apart from rounding.
    """

    def tile(carry: None, arrays: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        (x,) = arrays
        return carry, jnp.argmax(Readout().logits(x, head), axis=-1).astype(jnp.int32)

    _, token_BT = scan_tiles(tile, None, Readout(num_tiles), head, x_BTD)
    return token_BT


def _padded(count: int) -> int:
    length = _PADDED_TO
    while length < count:
        length *= 2
    return length


def windows(tokens: Sequence[int], *, length: int, stride: int) -> list[Span]:
    """Spans of at most `length` tokens that together score every token but the first exactly once.

    Args:
      stride: tokens from the start of one window to that of the next; the rest of a window is context that the previous
        window has scored. At most length - 1.
    """
    token_T = np.asarray(tokens)  # the parts of an array share its memory
    spans = []
    scored = 1
    while scored < len(tokens):
        begin = 0 if scored == 1 else scored + stride - length
        end = min(begin + length, len(tokens))
        spans.append(Span(token_T[begin:end], scored - begin))
        scored = end
    return spans


class TextScorer:
    """The log-likelihoods of texts under a directory's model, with its tokenizer; loads the model at its first use.

    Args:
      config: of the directory, from `directory_config`.
      asked: for `max_length`, `rows_at_once`, the mesh and the parameters.
    Attributes:
      encoder: how texts of the model begin and end.
      tokenizer: that of the model's directory.
      is_rendered: contexts and prompts are rendered chat templates, to whose beginning nothing is added.
    Raises:
      UserError: the model cannot take `max_length` tokens, cannot be sharded over the mesh, or lacks a tokenizer; at
        its first use, it lacks parameters.
    """

    def __init__(self, directory: Path, config: Config, asked: EvaluateConfig):
        self._positions = positions = config.trainable_position_size
        if positions and asked.max_length - 1 > positions:
            raise UserError(
                f"max_length={asked.max_length} is more than the model's {positions} learned positions and one. "
                f"Nearest that works: {positions + 1}."
            )
        self._directory = directory
        self._config = config
        self._asked = asked
        self._max_length = asked.max_length
        self._tokens = TextTokens.of(directory, config)
        if problems := mesh_problems(config, len(start_devices()), asked.mesh):
            raise UserError(problems)
        self.encoder = self._tokens.encoder
        self.tokenizer = self._tokens.tokenizer
        self._end_of_text_id = self.tokenizer.end_of_text_id
        # End-of-text precedes each text of a model from scratch, whose texts begin with no other token.
        begins_with_end = not self._tokens.carried and not len(self.encoder.begin_ids)
        self._begin_ids = [self._end_of_text_id] if begins_with_end else []
        self._precision = functools.partial(jax.default_matmul_precision, config.matmul_precision)
        self.is_rendered = False

    @functools.cached_property
    def _model(self) -> tuple[Decoder, Params, jax.sharding.Mesh]:
        return load_on_mesh(self._directory, self._config, self._asked.mesh, self._asked.parameters)

    @functools.cached_property
    def _scorer(self) -> Scorer:
        return Scorer(*self._model, rows_at_once=self._asked.rows_at_once)

    @functools.cached_property
    def _sampler(self) -> Sampler:
        return Sampler(*self._model)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, beginning as in training: as its tokenizer begins texts, or with end-of-text."""
        return self._begin(self.tokenizer.encode(text))

    def _begin(self, token_ids: np.ndarray) -> list[int]:
        return self._begin_ids + self.encoder.begin(token_ids).tolist()

    def _encode_context(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist() if self.is_rendered else self.encode(text)

    def continuations(
        self, pairs: Iterable[tuple[str, str]], name: Callable[[int], str] = "continuation {:,}".format
    ) -> list[Scored]:
        """The score of each (context, continuation); a long context is truncated at its beginning.

        Args:
          name: what a message calls a continuation by its number, which counts from 1.
        Raises:
          UserError: a continuation does not fit into `max_length` tokens after one of its context, or has a
            log-likelihood that is not finite.
        """
        pairs = list(pairs)
        spans = [self._span(*pair) for pair in pairs]
        needed = [len(span.tokens) - span.first + 1 for span in spans]
        for number, tokens in enumerate(needed):
            if tokens > self._max_length:
                works = f"Nearest that works: {max(needed)}."
                if self._positions and max(needed) - 1 > self._positions:
                    works = f"The model has {self._positions} learned positions, so no max_length works: shorten it."
                raise UserError(
                    f"{name(number + 1)} ({value_text(pairs[number][1])}) has {tokens - 1:,} tokens. "
                    f"max_length={self._max_length} has room for {self._max_length - 1:,}, after one of the context. "
                    f"{works}"
                )
        return self._scores(spans, lambda number: f"{name(number)} ({value_text(pairs[number - 1][1])})")

    def _scores(self, spans: Sequence[Span], name: Callable[[int], str]) -> list[Scored]:
        with self._precision():
            found = self._scorer.score(spans)
        for number, scored in enumerate(found, 1):
            check_finite(scored.log_likelihood, name(number), self._config.dtype)
        return found

    def _span(self, context: str, continuation: str) -> Span:
        """The tokens of a continuation, after as many of its context as fit, but at least one."""
        tokens, first = continued(self._encode_context, context, continuation)
        if first == 0:  # no context, and the tokenizer adds no first token
            tokens = [self._end_of_text_id, *tokens]
            first = 1
        drop = max(min(len(tokens) - self._max_length, first - 1), 0)
        return Span(tokens[drop:], first - drop)

    def windows(self, texts: Sequence[str], stride: int, name: str = "the text") -> list[Scored]:
        """The score of each window of each text; windows advance by `stride` tokens.

        Args:
          name: what a message calls the texts.
        Raises:
          UserError: all texts have fewer than two tokens, or a window a log-likelihood that is not finite.
        """
        of_texts = [*map(self._begin, self.encoder.encode(texts)[0])]
        if max(map(len, of_texts), default=0) < 2:
            raise UserError(f"{name} has no text of at least 2 tokens, so it has no perplexity.")
        return self._windows(of_texts, stride, name)

    def unscored(self, texts: Sequence[str]) -> list[str]:
        """The text of each first token that no window scores, because no token precedes it."""
        if self.encode(""):
            return []
        return [self.encoder.first_token(text) for text in texts if text]

    def whole(self, text: str) -> list[Scored]:
        """The scores of a text's windows, from its first token on; none for an empty text.

        Where the tokenizer adds no first token, that of the text follows end-of-text.

        Raises:
          UserError: a window has a log-likelihood that is not finite.
        """
        tokens = self.encode(text)
        if not self.encode(""):
            tokens = [self._end_of_text_id, *tokens]
        return self._windows([tokens], self._max_length - 1, value_text(text)) if len(tokens) > 1 else []

    def _windows(self, of_texts: Sequence[Sequence[int]], stride: int, name: str) -> list[Scored]:
        of_each = (windows(tokens, length=self._max_length, stride=stride) for tokens in of_texts)
        spans = list(itertools.chain.from_iterable(of_each))
        return self._scores(spans, lambda number: f"{name}, window {number:,} of {len(spans):,},")

    def written(self, asked: GenerateConfig) -> str:
        """The model's continuation of the prompt, up to a stop token or one of `stop_strings`.

        A long prompt is truncated at its beginning to fit into `max_length` with the new tokens.

        Raises:
          UserError: no token of a prompt fits, or a token's log-probability is not finite.
        """
        room = self._max_length - asked.max_new_tokens
        if room < 1:
            raise UserError(
                f"max_new_tokens={asked.max_new_tokens} leaves no room for a prompt in max_length={self._max_length}. "
                f"Nearest that works: {self._max_length - 1}."
            )
        prompt = self._encode_context(asked.prompt)[-room:] or [self._end_of_text_id]
        text = self._tokens.begin(asked.stop_strings, prompt=prompt)
        with self._precision():
            tokens = self._sampler.stream(
                [prompt],
                max_new_tokens=asked.max_new_tokens,
                sampling=Sampling(asked.temperature, asked.top_k, asked.top_p),
                stop_token_ids=self._tokens.stop_token_ids,
                seed=asked.seed,
                name=lambda _: f"the continuation of {value_text(asked.prompt)!r}",
            )
            return "".join(piece for _, piece in write_texts(tokens, [text]))


def evaluate(directory: Path, config: Config, asked: EvaluateConfig) -> dict[str, float]:
    """The metrics by name: of the perplexity of texts, or of the accuracy over questions.

    Raises:
      UserError: as `TextScorer`, or the file cannot be read or has another format.
    """
    kind = "choices" if asked.choices else "cloze"
    questions = [] if asked.text else read_questions(asked.choices or asked.cloze, kind)
    scorer = TextScorer(directory, config, asked)
    if asked.text:
        texts = list(read_documents(find_files("text", asked.text), scorer.encoder))
        scored = scorer.windows(texts, asked.stride or asked.max_length - 1, f"text={asked.text}")
        unscored = scorer.unscored(texts)
        return perplexity(scored, texts, unscored) | {"skipped_first_tokens": len(unscored)}
    pairs: list[tuple[str, str]] = []
    names: list[str] = []
    for number, question in enumerate(questions, 1):
        for choice, text in enumerate(question.choices):
            pairs.append((question.context, with_blank(question.context, text)))
            of_choice = f", choice {choice}" if asked.choices else ""
            names.append(f"{kind}={asked.choices or asked.cloze}, question {number:,}{of_choice}")
    return accuracy(questions, scorer.continuations(pairs, lambda number: names[number - 1]))


def file_loss(directory: Path, config: Config, asked: EvaluateConfig) -> dict[str, float | int]:
    """The loss of a file, its target tokens and its examples, which are conversations, pairs, or rows of texts.

    The file is read as a run reads its held-out data, and the loss is the run's `eval_loss`: a mean over target tokens,
    or over pairs.

    Args:
      config: of the directory, from `directory_config`.
    Raises:
      UserError: the file cannot be read or has another format, or the model or the reference of its pairs is missing.
    """
    is_run = is_there(directory / "config.yml")
    changes: dict[str, object] = {"dataset_type": _dataset_type(config, asked.data, is_run=is_run)}
    if not is_run or "max_length" in asked.model_fields_set:
        changes["max_target_length"] = asked.max_length
    config = config.model_copy(update=changes)
    if problems := mesh_problems(config, len(start_devices()), asked.mesh):
        raise UserError(problems)
    source = open_path(config, key="data", path=asked.data, vocab_size=config.vocab_size)
    for note in source.notes:
        complain(f"data={asked.data}: {note}")
    objective = objective_of(config)

    def scores(load: Callable[[], tuple[Decoder, Params, jax.sharding.Mesh]]) -> list[Tree]:
        with jax.default_matmul_precision(config.matmul_precision):
            return list(_scores(config, objective, source, *load(), rows_at_once=asked.rows_at_once))

    found = scores(lambda: load_on_mesh(directory, config, asked.mesh, asked.parameters))
    if against := config.objective_kind.against:
        of_reference = scores(lambda: _reference(config, asked))
        found = [resolve(against)(own, other) for own, other in zip(found, of_reference, strict=True)]
    record = objective.evaluation(found)
    check_finite(record["eval_loss"], f"data={asked.data}", config.dtype)
    return {
        "loss": record["eval_loss"],
        "target_tokens": record["eval_target_tokens"],
        "examples": source.num_sequences,
    }


def _dataset_type(config: Config, path: str, *, is_run: bool) -> str:
    """How to read the file: as the run reads its data, except that a text need not be prepared."""
    kind = config.dataset_type
    if config.run_kind == "rl":
        raise UserError(
            "data: a run of reinforcement learning has rewards, and no loss of a file. Nearest that work: text, "
            "choices or cloze."
        )
    if source_kind(kind).data != "text":
        return kind
    if is_there(user_path(path) / MANIFEST_FILE):
        return "array_record"
    if kind == "megatron" and is_there(user_path(f"{path}.idx")):
        return "megatron"
    return "text" if is_run or _holds_texts(path) else "sft"


_CONVERSATIONS = {"messages", "conversations", "completion", "output"}
"""A line of conversations has one of these fields, and may have a `text` beside it."""


def _holds_texts(path: str) -> bool:
    """Whether a file's first line shows a document rather than a conversation."""
    name, file = find_files("data", path)[0]
    if is_kind(name, PLAIN_SUFFIXES):
        return True
    first = next(json_lines(name, file, wanted='"text"'), None)
    return first is None or (isinstance(first[1].get("text"), str) and not _CONVERSATIONS & first[1].keys())


def _reference(config: Config, asked: EvaluateConfig) -> tuple[Decoder, Params, jax.sharding.Mesh]:
    """The model that a DPO run began with."""
    if path := config.load_parameters_path:
        return load_on_mesh(local_copy(path, "load_parameters_path"), config, asked.mesh)
    raise UserError(
        "data: the run has no load_parameters_path, so the reference of its pairs is not stored. Nearest that works: "
        "its config with eval_dataset_path."
    )


def _scores(
    config: Config,
    objective: ScoredObjective,
    source: ExampleSource,
    decoder: Decoder,
    params: Params,
    mesh: jax.sharding.Mesh,
    *,
    rows_at_once: int,
) -> Iterator[Tree]:
    """The objective's scores of all examples, batch by batch."""

    def scores_of(params: Params, batch: dict[str, jax.Array]) -> Tree:
        rows = objective.rows(batch, EVAL_BATCH_AXES)
        return objective.scores(forward(decoder, params, rows, config), rows)

    score = jax.jit(scores_of)
    params = cast_once(decoder, params)
    shards = mesh.shape["fsdp"]
    examples_at_once = -(-rows_at_once // (objective.rows_per_example * shards)) * shards
    with jax.set_mesh(mesh):
        for first in range(0, len(source), examples_at_once):
            examples = [source[number] for number in range(first, min(first + examples_at_once, len(source)))]
            batch = {name: np.stack([each[name] for each in examples]) for name in source.fields}
            missing = [(0, examples_at_once - len(examples)), (0, 0)]  # empty rows, without targets
            yield jax.device_get(score(params, {name: np.pad(x, missing) for name, x in batch.items()}))
