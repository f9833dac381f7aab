"""Text to token ids and back: bytes, Hugging Face's tokenizer.json, or a sentencepiece model.

Every tokenizer has an end-of-text token. It ends each document of the training data, so that a model learns to stop and
`generate` knows when it has.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from maxtext_lite.config import RunConfig, UserError
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import setting_text, value_text
from maxtext_lite.config.hints import hub_hint
from maxtext_lite.config.json_file import check_file, is_directory, is_there, read_bytes, read_object, user_path

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
"""The pattern by which cl100k and Llama 3 split a text into words."""
_PATTERNS = (
    WORD_PATTERN,
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}",  # Qwen 2 and 3
)


def may_split(stated: dict[str, Any]) -> bool:
    """Whether a `tokenizer.json` describes a tokenizer to which the module's argument applies."""
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
    """The text, cut after at least `most` characters each time, at the first place that changes no token."""
    found: list[str] = []
    start = 0
    while place := _LETTERS_AROUND_A_SPACE.search(text, start + most):
        found.append(text[start : place.start()])
        start = place.start()
    return [*found, text[start:]]


# Names of the end-of-text token in published tokenizers, the most specific first.
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "<|im_end|>")

BREAK = "\U0010ffff"
"""Between the characters of a special token's name it makes these plain; Unicode leaves it to programs."""
_LIKE_SPECIAL = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)  # between signs: <|user|>, [INST]


class PlacedTokens(NamedTuple):
    """The tokens of a text, with the characters that each represents.

    Attributes:
      token_ids: int32 [number of tokens].
      starts: first character of each token; int64. A space that the tokenizer assigns to no token belongs to the next.
      stops: the character after the last of each; int64. A token may represent none, between two others.
    """

    token_ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class Tokenizer(Protocol):
    """A tokenizer as the rest of the framework uses it.

    Attributes:
      vocab_size: the largest token id plus one.
      end_of_text_id: the token that ends a document.
      begin_ids: the tokens that it puts before a text by itself.
      bos_id: its begin-of-text token, whether it adds it or not; None: it has none.
      special_ids: tokens that are not text.
      reads_special: whether `encode` returns special tokens where a text spells them.
      special_tokens: their ids by how they are spelled.
      added_tokens: likewise, also of tokens that were added to a vocabulary and are text, such as <think> of Qwen 3.
      special_like: likewise, special tokens and the added ones that are spelled as such, between signs: <|user|>.
      unknown_token: how the token of unknown words is spelled; "": there is none.
      fingerprint: equal for tokenizers that give equal ids, wherever their files are.
    """

    vocab_size: int
    end_of_text_id: int
    begin_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    special_ids: frozenset[int]
    reads_special: bool = False
    special_tokens: Mapping[str, int] = {}
    added_tokens: Mapping[str, int] = {}
    special_like: Mapping[str, int] = {}
    unknown_token: str = ""
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 [number of tokens], without end-of-text or other additions."""
        ...

    @functools.cached_property
    def control_ids(self) -> frozenset[int]:
        """Tokens that a template may write to end a turn: special tokens and added ones."""
        return self.special_ids | frozenset(self.added_tokens.values())

    def normalize(self, text: str) -> str:
        """The text as its words are looked up: in small letters, for example."""
        return text

    def encode_broken(self, text: str) -> PlacedTokens:
        """The tokens of a text without its `BREAK`s, in which names that have them are characters."""
        (placed,) = self.encode_placed([text.replace(BREAK, "")])
        places = [place for place, letter in enumerate(text) if letter != BREAK]
        kept = np.array(places, np.int64)
        starts = np.append(kept, len(text))[placed.starts]
        stops = np.append(0, kept + 1)[placed.stops]
        return PlacedTokens(placed.token_ids, starts, stops)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Within this, all methods read special tokens that a text spells as characters."""
        yield

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, in parallel if the library can."""
        return [self.encode(text) for text in texts]

    def pieces(self, text: str, most: int) -> list[str]:
        """Parts of about `most` characters whose joined tokens are the text's; the whole text if no cut is safe."""
        return [text]

    def encode_placed(self, texts: Sequence[str]) -> list[PlacedTokens]:
        """`encode` of each text, with the characters that each token represents."""
        ...

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text; special tokens contribute none, or their own."""
        ...

    def spell(self, token_id: int) -> str:
        """How the vocabulary spells a token, also a special one; "" for an id outside it."""
        ...


class TokenizerKeys(Protocol):
    """The keys of a config that name a tokenizer."""

    @property
    def tokenizer_type(self) -> Literal["byte", "huggingface", "sentencepiece"]:
        """The library that reads it."""
        ...

    @property
    def tokenizer_path(self) -> str:
        """Its file or directory; "" for byte."""
        ...


def load_tokenizer(config: TokenizerKeys) -> Tokenizer:
    """The tokenizer that `tokenizer_type` and `tokenizer_path` name.

    Raises:
      UserError: the file is missing, unreadable or has no end-of-text token.
    """
    if config.tokenizer_type == "byte":
        return ByteTokenizer()
    if config.tokenizer_type == "huggingface":
        return HuggingFaceTokenizer(_existing_file(config, "tokenizer.json"))
    return SentencePieceTokenizer(_existing_file(config, "tokenizer.model"))


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses a tokenizer with ids that the embedding table (`vocab_size` rows) lacks.

    Raises:
      UserError: `vocab_size` is smaller than the tokenizer's.
    """
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} tokens. "
            f"Nearest that works: {tokenizer.vocab_size}."
        )


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte, and 256 for end-of-text."""

    vocab_size = 257
    end_of_text_id = 256
    special_ids = frozenset({256})
    fingerprint = "byte"

    def encode(self, text: str) -> np.ndarray:
        """The UTF-8 bytes, int32."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def pieces(self, text: str, most: int) -> list[str]:
        """Parts of exactly `most` characters, except the last."""
        starts = range(0, len(text), most)
        return [text[start : start + most] for start in starts] or [text]

    def encode_placed(self, texts: Sequence[str]) -> list[PlacedTokens]:
        """`encode` of each text; every byte of a character represents it."""
        placed = []
        for text in texts:
            token_ids = self.encode(text)
            # Bytes 0b10xxxxxx continue the character of the byte before.
            starts = np.cumsum((token_ids & 0xC0) != 0x80, dtype=np.int64) - 1
            placed.append(PlacedTokens(token_ids, starts, starts + 1))
        return placed

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text; invalid UTF-8 becomes U+FFFD, and ids of 256 and above have no text."""
        content = bytes(int(i) for i in token_ids if i < 256)
        return content.decode("utf-8", errors="replace")

    def spell(self, token_id: int) -> str:
        """The character of an ASCII byte, another byte as <0xE6>, and END_OF_TEXT_NAMES[0] for end-of-text."""
        if token_id < 128:
            return chr(token_id)
        return f"<0x{token_id:02X}>" if token_id < 256 else END_OF_TEXT_NAMES[0] if token_id == 256 else ""


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
        if getattr(self._tokenizer.model, "dropout", None):  # of BPE: merges left out at random
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
        """The tokens of a text without its `BREAK`s, in which names that have them are characters."""
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
        """Parts cut at spaces, if the file describes a tokenizer for which that is safe."""
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

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text; special tokens contribute none, or their own, and ids outside the vocabulary none."""
        ids = [int(i) for i in token_ids if i < self.vocab_size]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def spell(self, token_id: int) -> str:
        """The token of `tokenizer.json`, such as "Ġking"."""
        return self._tokenizer.id_to_token(token_id) or ""


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model`, whose eos piece is end-of-text, and whose bos piece, if it has one, begins texts.

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

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text; control pieces, which have no text of their own, and ids outside the vocabulary contribute none."""
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
