"""Texts as a stream of token ids; and places where a long text may be cut without changing its tokens.

A tokenizer that splits a text into words by one of the known patterns, and merges bytes within words only, ends a word
before a single space between two letters: no alternative of the patterns continues from a letter into a space, and only
`\\s+(?!\\S)`, which precedes white space, looks beyond its match. So the text on either side of such a space is
tokenized as it is within the whole. Texts are not cut for any other tokenizer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from maxtext_lite.data.tokenizer import Tokenizer

_CHARACTERS_OF_A_PIECE, _PIECES_AT_ONCE = 2**19, 8

_LETTERS_AROUND_A_SPACE = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
"""The pattern by which cl100k and Llama 3 split a text into words."""
_PATTERNS = (
    WORD_PATTERN,
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}",  # Qwen 2 and 3
)


def may_split(stated: dict[str, Any]) -> bool:
    """Whether a `tokenizer.json` describes a tokenizer to which the module's argument applies."""
    model, words = stated.get("model") or {}, stated.get("pre_tokenizer") or {}
    normalizer = (stated.get("normalizer") or {}).get("type", "NFC")  # a space and a letter compose with nothing
    steps = words.get("pretokenizers", []) if words.get("type") == "Sequence" else [words]
    added = stated.get("added_tokens") or []
    return (
        model.get("type") == "BPE"
        and not (model.get("dropout") or stated.get("truncation") or stated.get("padding"))
        and normalizer == "NFC"
        and bool(steps)
        and all(map(_ends_words_before_spaces, steps))
        and steps[-1].get("type") == "ByteLevel"
        and (steps[-1].get("use_regex") is True or any(step.get("type") == "Split" for step in steps))
        and not any(each["lstrip"] or each["rstrip"] or " " in each["content"] for each in added)
    )


def _ends_words_before_spaces(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:  # with GPT-2's own pattern, or none
            return True
        case {"type": "Digits"}:
            return True
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return pattern in _PATTERNS
        case _:
            return False


def pieces(text: str, most: int) -> list[str]:
    """The text, cut after at least `most` characters each time, at the first place that changes no token."""
    found, start = [], 0
    while place := _LETTERS_AROUND_A_SPACE.search(text, start + most):
        found.append(text[start : place.start()])
        start = place.start()
    return [*found, text[start:]]


def tokenized(tokenizer: Tokenizer, texts: list[str], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """(token ids of the texts, each nonempty one followed by end-of-text; tokens of each, end-of-text included)."""
    encoded = _encoded(tokenizer, texts)
    counts = np.array([len(ids) + 1 for ids in encoded], np.int64)
    stops = np.cumsum(np.where(counts > 1, counts, 0))
    stream = np.full(stops[-1] if len(stops) else 0, tokenizer.end_of_text_id, dtype)
    for ids, count, stop in zip(encoded, counts.tolist(), stops.tolist(), strict=True):
        stream[stop - count : stop - 1] = ids
    return stream, counts


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """The token ids of each text; a long text is encoded in pieces."""
    pieces = [tokenizer.pieces(text, _CHARACTERS_OF_A_PIECE) for text in texts]
    if all(len(of_text) == 1 for of_text in pieces):
        return tokenizer.encode_documents(texts)
    encoded = []
    for of_text in pieces:
        groups = (of_text[first : first + _PIECES_AT_ONCE] for first in range(0, len(of_text), _PIECES_AT_ONCE))
        encoded.append(np.concatenate([ids for group in groups for ids in tokenizer.encode_documents(group)]))
    return encoded
