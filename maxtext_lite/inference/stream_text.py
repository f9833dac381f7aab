"""Streamed text, token by token: where it ends, and its speed."""

import time
from collections.abc import Iterator, Mapping, Sequence

from maxtext_lite.data.text_encoder import without_stand_ins
from maxtext_lite.data.tokenizer import StreamDecoder


class StopText:
    """A filter that passes text on once it cannot be part of a stop string.

    Attributes:
      found: a stop string has been found; nothing more is passed on.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = tuple(stop_strings)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that can be passed on after this piece."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back so far, at the end of the stream."""
        held, self._held = self._held, ""
        return "" if self.found else held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, other than all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


class WrittenText:
    """A growing text that ends before a stop token or a stop string.

    Args:
      stand_ins: what stands in `stop_strings` for special tokens, by their ids.
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
        self._stop, self._decoder, self._stand_ins = frozenset(stop_ids), decoder, stand_ins or {}
        self._until = StopText(stop_strings)
        self.ended = False
        self.text = ""

    def push(self, token: int) -> str:
        """The new part of the text after this token."""
        if self.ended:
            return ""
        if token in self._stop:
            return self.end()
        return self._add(self._until.push(self._decoder.push(token) + self._stand_ins.get(token, "")))

    def end(self) -> str:
        """Ends the text; returns its rest, "" if it had already ended."""
        if self.ended:
            return ""
        piece = self._until.push(self._decoder.flush())
        piece = self._add(piece if self._until.found else piece + self._until.flush())
        self.ended = True
        return piece

    def _add(self, piece: str) -> str:
        piece = without_stand_ins(piece)
        self.text += piece
        self.ended = self._until.found
        return piece


class TimedTokens:
    """A stream of tokens that measures its speed; the first two rounds, which compile, are timed apart.

    Args:
      tokens: (prompt number, token, log-probability) from `Sampler.stream`.
    """

    def __init__(self, tokens: Iterator[tuple[int, int, float]]) -> None:
        self._tokens, self._begin = tokens, time.perf_counter()
        self._count = self._warm_count = 0
        self._rounds: dict[int, int] = {}
        self._first: float | None = None
        self._warm: float | None = None

    def __iter__(self) -> "TimedTokens":
        return self

    def __next__(self) -> tuple[int, int, float]:
        index, token, log_probability = next(self._tokens)
        now = time.perf_counter()
        self._first = self._first or now
        self._rounds[index] = self._rounds.get(index, 0) + 1
        if self._rounds[index] > 2:
            self._warm_count += 1
        elif self._rounds[index] == 2:
            self._warm = now
        self._count, self._last = self._count + 1, now
        return index, token, log_probability

    def __str__(self) -> str:
        if self._first is None:
            return "no tokens"
        since = f"{self._count} tokens in {self._last - self._begin:.2f} s"
        since += f", the first after {self._first - self._begin:.2f} s with compilation"
        if not self._warm_count or self._warm is None:
            return since
        return f"{since}; then {self._warm_count / max(self._last - self._warm, 1e-9):,.1f} tokens/s"
