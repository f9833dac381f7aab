"""Tokenizers from files: Hugging Face's tokenizer.json, or a sentencepiece model."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxtext_lite.config import RunConfig, UserError
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import setting_text, value_text
from maxtext_lite.config.hints import hub_hint
from maxtext_lite.config.json_file import check_file, is_directory, is_there, read_bytes, read_object, user_path
from maxtext_lite.data.tokenizer import BREAK, END_OF_TEXT_NAMES, PlacedTokens, Tokenizer, TokenizerKeys

CONFIG_FILE = "tokenizer_config.json"
_MAP_FILE = "special_tokens_map.json"


class Stated(NamedTuple):
    """What a file says of a special token: its `text`, which the caller checks; None: there is none."""

    text: Any
    file: Path


def special_tokens(directory: Path) -> dict[str, Stated]:
    """The special tokens by name, such as eos_token.

    special_tokens_map.json overrides tokenizer_config.json, and is ignored if that has added_tokens_decoder: it then
    comes from a version of transformers that only writes it for older ones.

    Raises:
      UserError: a file cannot be read.
    """
    found: dict[str, Stated] = {}
    for file in (directory / CONFIG_FILE, directory / _MAP_FILE):
        fields = read_object(file) if is_there(file) else {}
        named = {name: value for name, value in fields.items() if name.endswith("_token")}
        for more in (fields.get("extra_special_tokens"), fields.get("model_specific_special_tokens")):
            named |= more if isinstance(more, dict) else {}
        for name, value in named.items():
            text = value.get("content") if isinstance(value, dict) else value
            found[name] = Stated(text, file)
        if "added_tokens_decoder" in fields:
            break
    return found


_LETTERS_AROUND_A_SPACE = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
"""The pattern that splits text into words for cl100k and Llama 3."""
_PATTERNS = (
    WORD_PATTERN,
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}",  # Qwen 2 and 3
)


def may_split(stated: dict[str, Any]) -> bool:
    """Whether the module's argument applies to the tokenizer of a `tokenizer.json`."""
    model = stated.get("model") or {}
    words = stated.get("pre_tokenizer") or {}
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
    """Cuts the text after at least `most` characters each time, at the first place that changes no token."""
    found: list[str] = []
    start = 0
    while place := _LETTERS_AROUND_A_SPACE.search(text, start + most):
        found.append(text[start : place.start()])
        start = place.start()
    return [*found, text[start:]]


_LIKE_SPECIAL = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)  # between signs: <|user|>, [INST]


def open_tokenizer(config: TokenizerKeys) -> Tokenizer:
    """The tokenizer of the config's file.

    Raises:
      UserError: the file is missing, unreadable or has no end-of-text token.
    """
    if config.tokenizer_type == "huggingface":
        return HuggingFaceTokenizer(_existing_file(config, "tokenizer.json"))
    return SentencePieceTokenizer(_existing_file(config, "tokenizer.model"))


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, read by the `tokenizers` library, which recognizes special tokens in a text.

    End-of-text is the `eos_token` of a tokenizer_config.json or special_tokens_map.json in the same directory (see
    `special_tokens`); without one, it is the first of `END_OF_TEXT_NAMES` that is a special token of the tokenizer.

    Raises:
      UserError: the file cannot be read, or no end-of-text token is found.
    """

    def __init__(self, path: pathlib.Path) -> None:
        import tokenizers  # here, because most runs need neither library

        content = _read(path)
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"tokenizer_path={str(path)!r} is not a tokenizer.json ({value_text(str(error))})."
            ) from error
        self._tokenizer.no_truncation()  # a file may request either, but documents are neither truncated nor padded
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):  # of BPE: merges skipped at random
            self._tokenizer.model.dropout = None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        self.reads_special = True
        self.special_like = self.special_tokens | {
            name: token_id for name, token_id in self.added_tokens.items() if _LIKE_SPECIAL.fullmatch(name)
        }
        self.end_of_text_id = self._find_end_of_text(path)
        self.bos_id = self._named_token(path, "bos_token")
        self.begin_ids = self._find_begin(path)
        stated = json.loads(content)
        self.unknown_token = _unknown_token(stated.get("model") or {})
        self._may_split = may_split(stated)
        self.fingerprint = f"huggingface:{hashlib.sha256(content).hexdigest()}:{self.end_of_text_id}"

    def _named_token(self, path: pathlib.Path, name: str) -> int | None:
        """The id of the token that the files beside the tokenizer state under this name."""
        stated = special_tokens(path.parent).get(name)
        if stated is None or stated.text is None:
            return None
        token_id: int | None = self._tokenizer.token_to_id(stated.text) if _is_text(stated.text) else None
        if token_id is None and name == "eos_token":
            text = value_text(stated.text)
            raise UserError(f"{str(stated.file)!r}: the tokenizer has no token eos_token='{text}'.")
        return token_id

    def _find_begin(self, path: pathlib.Path) -> tuple[int, ...]:
        """The tokens that its post-processor puts before a text, or begin-of-text if `add_bos_token` says so."""
        for text in ("a", "A", "1"):
            whole = self._tokenizer.encode(text)
            if 0 in whole.special_tokens_mask:
                begin = tuple(whole.ids[: whole.special_tokens_mask.index(0)])
                if begin:
                    return begin
                break
        return (self.bos_id,) if self.bos_id is not None and _adds_bos(path) else ()

    def _find_end_of_text(self, path: pathlib.Path) -> int:
        names = self.special_tokens
        stated = self._named_token(path, "eos_token")
        if stated is not None:
            return stated
        for name in END_OF_TEXT_NAMES:
            if name in names:
                return names[name]
        raise UserError(
            f"tokenizer_path={str(path)!r} has no end-of-text token: none of its special tokens "
            f"({', '.join(sorted(names)) or 'it has none'}) is one of {', '.join(END_OF_TEXT_NAMES)}. "
            f"Name it as eos_token in {str(path.parent / CONFIG_FILE)!r}."
        )

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32, without the tokens that the tokenizer's own template would add."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def normalize(self, text: str) -> str:
        """The text as its words are looked up: in small letters, for example."""
        normalizer = self._tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def encode_broken(self, text: str) -> PlacedTokens:
        """The tokens of a text without its `BREAK`s; names that contain them are characters."""
        encoding = self._without_breaks.encode(text, add_special_tokens=False)
        return _placed(encoding.ids, encoding.offsets)

    @functools.cached_property
    def _without_breaks(self) -> Any:
        """The tokenizer, but it deletes `BREAK` after it has looked for special tokens."""
        import tokenizers

        stated = json.loads(self._tokenizer.to_str())
        for token in stated["added_tokens"]:
            token["normalized"] &= token["content"] not in self.special_like
        library: Any = tokenizers.Tokenizer.from_str(json.dumps(stated))
        delete = tokenizers.normalizers.Replace(BREAK, "")
        own = [library.normalizer] if library.normalizer else []
        library.normalizer = tokenizers.normalizers.Sequence([delete, *own])
        return library

    def pieces(self, text: str, most: int) -> list[str]:
        """Parts cut at spaces, if that is safe for the file's tokenizer."""
        return pieces(text, most) if self._may_split else [text]

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Within this, all methods read special tokens that a text spells as characters."""
        self._tokenizer.encode_special_tokens = True
        try:
            yield
        finally:
            self._tokenizer.encode_special_tokens = False

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_placed(self, texts: Sequence[str]) -> list[PlacedTokens]:
        """`encode` of each text, on all cores, with the characters that each token represents."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [_placed(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        """The text; special tokens contribute none, or their own, and ids outside the vocabulary none."""
        ids = [int(i) for i in token_ids if i < self.vocab_size]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def spell(self, token_id: int) -> str:
        """The token of `tokenizer.json`, such as "Ġking"."""
        return self._tokenizer.id_to_token(token_id) or ""


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model`. Its eos piece is end-of-text, and its bos piece, if any, begins texts.

    A text that spells a control piece is only characters to it.

    Raises:
      UserError: the file cannot be read, or the model was trained without an eos piece.
    """

    def __init__(self, path: pathlib.Path) -> None:
        import sentencepiece

        content = _read(path)
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise UserError(f"tokenizer_path={str(path)!r} is not a sentencepiece model.") from error
        self.vocab_size = self._processor.vocab_size()
        self.end_of_text_id = self._processor.eos_id()
        if self.end_of_text_id < 0:
            raise UserError(
                f"tokenizer_path={str(path)!r} has no end-of-text token: the model was trained without an eos piece."
            )
        control = [token_id for token_id in range(self.vocab_size) if self._processor.is_control(token_id)]
        self.special_tokens = {self._processor.id_to_piece(token_id): token_id for token_id in control}
        self.added_tokens = self.special_tokens
        self.special_ids = frozenset(control)
        bos_id = self._processor.bos_id()
        if bos_id >= 0:
            self.bos_id = bos_id
            if _adds_bos(path) is not False:
                self.begin_ids = (bos_id,)
        self.fingerprint = f"sentencepiece:{hashlib.sha256(content).hexdigest()}"

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32."""
        return np.array(self._processor.encode(text, out_type=int), np.int32)

    def encode_placed(self, texts: Sequence[str]) -> list[PlacedTokens]:
        """`encode` of each text, with the characters that each piece represents."""
        found = [self._processor.encode(text, return_type="offset_mapping") for text in texts]
        return [_placed(each["ids"], each["offsets"]) for each in found]

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        """The text. Control pieces, which have no text, and ids outside the vocabulary add nothing."""
        ids = [int(i) for i in token_ids if i < self.vocab_size]
        return self._processor.decode(ids)

    def spell(self, token_id: int) -> str:
        """The piece of the model, such as "▁king"."""
        return self._processor.id_to_piece(token_id) if token_id < self.vocab_size else ""


def _adds_bos(path: pathlib.Path) -> bool | None:
    """Whether texts begin with the begin-of-text token, by the tokenizer_config.json beside a tokenizer."""
    file = path.parent / CONFIG_FILE
    stated = read_object(file).get("add_bos_token") if is_there(file) else None
    return stated if isinstance(stated, bool) else None


def _unknown_token(model: Mapping[str, Any]) -> str:
    """How a tokenizer.json's model spells the token of what it does not know; "": it has none."""
    if isinstance(model.get("unk_id"), int):  # Unigram
        return model["vocab"][model["unk_id"]][0]
    return model.get("unk_token") or ""


def _placed(token_ids: Sequence[Any], offsets: Sequence[tuple[int, int]]) -> PlacedTokens:
    """The tokens with a library's offsets. Spaces that it trimmed between two tokens belong to the second."""
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    ends_before = np.append(0, np.maximum.accumulate(stops))[: len(starts)]
    return PlacedTokens(np.array(token_ids, np.int32), np.minimum(starts, ends_before), stops)


def _existing_file(config: TokenizerKeys, default_name: str) -> pathlib.Path:
    """`tokenizer_path`, or `default_name` inside it if it is a directory."""
    tokenizer_path = config.tokenizer_path
    path = user_path(tokenizer_path)
    if is_directory(path):
        path = path / default_name
    if not is_there(path):
        hint = _stored_by_run(config, default_name) or hub_hint(tokenizer_path, "--include '*token*' '*.jinja'")
        raise UserError(f"tokenizer_path={tokenizer_path!r}: there is no file {str(path)!r}.{hint}")
    try:
        check_file(path)
    except UserError as error:
        raise UserError(f"tokenizer_path={tokenizer_path!r}: {error}") from None
    return path


def _stored_by_run(config: TokenizerKeys, name: str) -> str:
    """A sentence on the copy that an earlier start of the run has stored, if there is one."""
    if not isinstance(config, RunConfig) or is_bucket(config.base_output_directory):
        return ""
    copy = user_path(config.base_output_directory) / config.run_name / "hf" / name
    stated = f"tokenizer_path={setting_text(str(copy))}"
    return f" Nearest that works: {stated}, the copy in the run directory." if is_there(copy) else ""


def _read(path: pathlib.Path) -> bytes:
    try:
        return read_bytes(path)
    except UserError as error:
        raise UserError(f"tokenizer_path={str(path)!r} cannot be read ({error}).") from None


def _is_text(value: object) -> bool:
    """Whether a value is text that can be encoded: JSON can contain half a surrogate pair."""
    return isinstance(value, str) and value.encode("utf-8", "replace").decode() == value
