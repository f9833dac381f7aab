"""Places where a long text may be cut without changing its tokens.

A tokenizer that splits a text into words by one of the known patterns, and merges bytes within words only, ends a word
before a single space between two letters: no alternative of the patterns continues from a letter into a space, and only
`\\s+(?!\\S)`, which precedes white space, looks beyond its match. So the text on either side of such a space is
tokenized as it is within the whole. Texts are not cut for any other tokenizer.
"""

from __future__ import annotations

import re
from typing import Any

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
