"""The rows of a prepared dataset as a source."""

from __future__ import annotations

from maxtext_lite.config import DataConfig, UserError
from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.json_file import user_path
from maxtext_lite.config.registry import load
from maxtext_lite.data.cache import IndexPlace
from maxtext_lite.data.prepared import open_prepared
from maxtext_lite.data.rows import TokenizedDocuments
from maxtext_lite.data.sources import Opened, open_rows
from maxtext_lite.data.text_encoder import TextEncoder, spelled_notes
from maxtext_lite.data.tokenizer import Tokenizer


def open_prepared_rows(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    key: str,
    path: str,
    eval_fraction: float = 0.0,
    vocab_size: int | None = None,
) -> Opened:
    """The rows of a prepared dataset; arguments and errors as for `open_text`."""
    del vocab_size
    directory, shards = user_path(path), None
    if is_bucket(path):
        directory, shards = load("fetch", "prepared")(key, path)
    stream, starts = open_prepared(key, directory, shards)
    manifest, encoder = stream.manifest, TextEncoder(config, tokenizer)
    if manifest.tokenizer != tokenizer.fingerprint:
        raise UserError(
            f"{key}={path!r} was prepared with the tokenizer {_short(manifest.tokenizer)}, not with that of "
            f"tokenizer_type={config.tokenizer_type} tokenizer_path={config.tokenizer_path!r} "
            f"({_short(tokenizer.fingerprint)}). Set both keys to the tokenizer of the data, or prepare them again."
        )
    if problem := encoder.disagreement(manifest.begin_ids, add_eos=manifest.add_eos):
        raise UserError(f"{key}={path!r}: {problem} Or prepare the data again.")
    place = IndexPlace(directory / "rows", manifest.fingerprint)
    notes = spelled_notes(manifest.spelled_special_tokens, manifest.special_tokens_in_text)
    documents = TokenizedDocuments(stream, starts, manifest.fingerprint, place, notes)
    return open_rows(config, documents, f"{key}={path!r} has no document.", eval_fraction)


def _short(fingerprint: str) -> str:
    """A tokenizer's fingerprint with the first digits of its hash."""
    return ":".join(part[:13] for part in fingerprint.split(":"))
