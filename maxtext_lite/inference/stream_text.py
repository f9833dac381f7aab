"""Streamed text, token by token: how a model's texts begin and end, and their speed."""

import collections
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from maxtext_lite.config import Config
from maxtext_lite.data import Tokenizer, check_vocabulary, load_tokenizer
from maxtext_lite.data.text_encoder import TextEncoder
from maxtext_lite.hf.directory import hf_directory
from maxtext_lite.hf.stop_tokens import stop_tokens
from maxtext_lite.hf.turns import TurnEncoder

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_BYTES = 4  # of a character in UTF-8
_SEAM = 8  # tokens of a prompt on which the first characters after it depend
_FIRST_STAND_IN = 0xD800  # halves of surrogate pairs, which no text from a file has
_STAND_INS = re.compile("[\ud800-\udfff]")


def decode_after(
    tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Iterable[int], *, skip_special_tokens: bool = True
) -> str:
    """The text that the tokens add to a prompt's, with a space at the seam if they have one."""
    seam = _seam(tokenizer, prompt)
    token_ids = [*token_ids]
    before = tokenizer.decode(seam)
    whole = tokenizer.decode([*seam, *token_ids], skip_special_tokens=skip_special_tokens)
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def _seam(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt that are text."""
    seam: list[int] = []
    for token_id in reversed(prompt):
        if len(seam) == _SEAM:
            break
        if token_id not in tokenizer.special_ids:
            seam.insert(0, int(token_id))
    for _ in range(_MOST_BYTES - 1):  # it may begin inside a character of several byte tokens
        if tokenizer.decode(seam).startswith(_REPLACEMENT):
            seam = seam[1:]
    return seam


class StreamDecoder:
    """Turns tokens that arrive one at a time into text, never splitting a character.

    The concatenated results of `push` and `flush` equal `Tokenizer.decode` of the tokens. The newest tokens are decoded
    after a few earlier ones on which their text may depend (spaces, joined bytes).

    Args:
      prompt: tokens of the text that it continues.

    DecodeStream of the tokenizers library (0.23) takes 0.6 microseconds per token, this 7; but it never returns an
    incomplete character at the end, and sentencepiece has no equivalent.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        before = _seam(tokenizer, prompt)
        self._tokenizer = tokenizer
        self._ids = before
        self._context_start = 0  # the first token to decode again
        self._emitted_end = len(before)  # tokens before this one have been returned as text
        self._newest = collections.deque[int](maxlen=_MOST_BYTES)  # tokens with text

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        self._ids.append(token_id)
        if token_id in self._tokenizer.special_ids or token_id >= self._tokenizer.vocab_size:
            return ""
        self._newest.append(token_id)
        # A character of several byte tokens decodes to U+FFFD until its last byte arrives. Some of the newest tokens
        # are all of it, and fewer than all since the last text.
        newest = [*self._newest]
        ends = (self._tokenizer.decode(newest[-count:]) for count in range(1, len(newest) + 1))
        if all(text.endswith(_REPLACEMENT) for text in ends):
            return ""
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._context_start = self._emitted_end
        self._emitted_end = len(self._ids)
        return text

    def flush(self) -> str:
        """The remaining text, an incomplete character as U+FFFD; resets the decoder."""
        text = self._new_text()
        self._ids = []
        self._context_start = 0
        self._emitted_end = 0
        self._newest.clear()
        return text

    def _new_text(self) -> str:
        context = self._tokenizer.decode(self._ids[self._context_start : self._emitted_end])
        return self._tokenizer.decode(self._ids[self._context_start :])[len(context) :]


def marked_stops(encoder: TextEncoder, texts: Sequence[str]) -> tuple[list[str], dict[int, str]]:
    """What to look for in a text with stand-ins for special tokens; and the stand-ins, by token id.

    A stop string may spell special tokens, and matches whether a model writes these or their characters.
    """
    names = sorted({name for text in texts for name in encoder.spelled.findall(text)})
    stand_ins = {name: chr(_FIRST_STAND_IN + number) for number, name in enumerate(names)}
    marked = [encoder.spelled.sub(lambda found: stand_ins[found[0]], text) for text in texts]
    by_id = {encoder.tokenizer.special_tokens[name]: stand_in for name, stand_in in stand_ins.items()}
    return list(dict.fromkeys([*texts, *marked])), by_id


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, other than all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class WrittenText:
    """A growing text that ends before a stop token or a stop string.

    Args:
      stand_ins: what replaces special tokens in `stop_strings`, by their ids.
    Attributes:
      text: the text so far, without what a stop string may still remove.
      ended: nothing more is added.
    """

    def __init__(
        self,
        decoder: StreamDecoder,
        stop_ids: Sequence[int],
        stop_strings: Sequence[str],
        stand_ins: Mapping[int, str] | None = None,
    ) -> None:
        self._stop_ids = frozenset(stop_ids)
        self._stop_strings = stop_strings
        self._decoder = decoder
        self._stand_ins = stand_ins or {}
        self._held = ""  # may be the beginning of a stop string
        self.ended = False
        self.text = ""

    def push(self, token: int) -> str:
        """The new part of the text after this token."""
        if self.ended:
            return ""
        if token in self._stop_ids:
            return self.end()
        return self._add(self._decoder.push(token) + self._stand_ins.get(token, ""))

    def end(self) -> str:
        """Ends the text; returns its rest, "" if it had already ended."""
        if self.ended:
            return ""
        piece = self._add(self._decoder.flush(), is_last=True)
        self.ended = True
        return piece

    def _add(self, piece: str, *, is_last: bool = False) -> str:
        text = self._held + piece
        places = [place for stop in self._stop_strings if (place := text.find(stop)) >= 0]
        end = min(places, default=len(text))
        if not places and not is_last:
            end -= max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self.ended = bool(places)
        self._held = text[end:]
        added = _STAND_INS.sub("", text[:end])  # they are no part of a text
        self.text += added
        return added


@dataclass(frozen=True)
class TextTokens:
    """The conversion between texts and a model's tokens.

    Attributes:
      carried: the directory of the files that came with the model; None if it was trained from scratch.
      stop_token_ids: tokens after which a text ends.
    """

    encoder: TurnEncoder
    carried: Path | None
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, directory: Path, config: Config) -> "TextTokens":
        """The conversion for a directory's model.

        Raises:
          UserError: there is no tokenizer, or it has more tokens than the model.
        """
        tokenizer = load_tokenizer(config)
        check_vocabulary(tokenizer, config.vocab_size)
        stop = stop_tokens([directory], tokenizer)
        return cls(TurnEncoder(config, tokenizer), hf_directory(directory), stop)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.encoder.tokenizer

    def begin(
        self, stop_strings: Sequence[str], stop_token_ids: Sequence[int] | None = None, *, prompt: Sequence[int] = ()
    ) -> WrittenText:
        """An empty text that ends before any of `stop_strings`, and at these tokens or the model's.

        Args:
          prompt: the tokens of the text that it continues; none for an answer, which is a text by itself.
        """
        stop = self.stop_token_ids if stop_token_ids is None else stop_token_ids
        strings, stand_ins = marked_stops(self.encoder, stop_strings)
        return WrittenText(StreamDecoder(self.tokenizer, prompt), stop, strings, stand_ins)


def write_texts(tokens: Iterable[tuple[int, int, float]], written: Sequence[WrittenText]) -> Iterator[tuple[int, str]]:
    """Adds streamed tokens to their texts until all have ended; yields the number of a text and its new part.

    Args:
      tokens: (number of a text, token, log-probability) from `Sampler.stream`.
    """
    for number, token, _ in tokens:
        yield number, written[number].push(token)
        if all(text.ended for text in written):
            break
    for number, text in enumerate(written):
        yield number, text.end()


class TimedTokens:
    """A stream of tokens that measures its speed; the first two rounds, which compile, are timed apart.

    Args:
      tokens: (prompt number, token, log-probability) from `Sampler.stream`.
    """

    def __init__(self, tokens: Iterator[tuple[int, int, float]]) -> None:
        self._tokens = tokens
        self._begin = time.perf_counter()
        self._rounds = collections.Counter[int]()
        self._warm_count = 0
        self._first: float | None = None
        self._warm: float | None = None

    def __iter__(self) -> "TimedTokens":
        return self

    def __next__(self) -> tuple[int, int, float]:
        index, token, log_probability = next(self._tokens)
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._rounds[index] += 1
        if self._rounds[index] > 2:
            self._warm_count += 1
        elif self._rounds[index] == 2:
            self._warm = self._last
        return index, token, log_probability

    def __str__(self) -> str:
        if self._first is None:
            return "no tokens"
        since = f"{self._rounds.total()} tokens in {self._last - self._begin:.2f} s"
        since += f", the first after {self._first - self._begin:.2f} s with compilation"
        if not self._warm_count or self._warm is None:
            return since
        return f"{since}; then {self._warm_count / max(self._last - self._warm, 1e-9):,.1f} tokens/s"
