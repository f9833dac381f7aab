"""The files about a model's tokens: tokenizer, chat template, and the entries of config.json and others."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxtext_lite.config import Config, DataConfig, UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import is_there, read_bytes, read_object, user_path
from maxtext_lite.config.keys import TOKENIZER_FILES
from maxtext_lite.config.whole_file import write_whole
from maxtext_lite.data import Tokenizer, load_tokenizer
from maxtext_lite.hf.directory import CARRIED, files_of_model, hf_directory, paths_of_model, tokenizer_keys
from maxtext_lite.hf.fields import JsonObject, is_whole
from maxtext_lite.hf.stop_tokens import (
    file_hash,
    has_tokenizer,
    special_among,
    stop_ids_in,
    stop_ids_of,
    stop_tokens,
)

_GENERATION = "generation_config.json"
_MODEL_FILES = ("config.json", _GENERATION)
_TOKENIZER_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def tokenizer_file(config: DataConfig) -> Path | None:
    """The file that `tokenizer_path` names; None if it is not there, or for byte."""
    path = user_path(config.tokenizer_path) if config.tokenizer_path else None
    name = TOKENIZER_FILES.get(config.tokenizer_type, "")
    file = path / name if path and path.is_dir() else path
    return file if file and file.is_file() else None


def end_of_text_of(config: Config) -> int | None:
    """The end-of-text of a config's tokenizer; None if it names none, or the model has no such token.

    Raises:
      UserError: the tokenizer cannot be read.
    """
    if config.tokenizer_type != "byte" and not config.tokenizer_path:
        return None
    end = load_tokenizer(config).end_of_text_id
    return end if end < config.vocab_size else None


def store_files(
    config: Config, out: Path, *, learned: Sequence[int] = (), paths: Sequence[str | Path] | None = None
) -> None:
    """Stores the tokenizer and the chat template of a model, and the config.json that it came with, if any.

    Its generation_config.json gets the tokens after which texts end that it lacks. What an earlier start stored is
    removed where it is no longer in use. An export that the user has put there is left as it is.

    Args:
      learned: tokens with which answers end that the run learns.
      paths: where other tokens after which texts end are stated; None: those of the config's model.
    Raises:
      UserError: a file cannot be read, or is another one in an export there.
    """
    origin = files_of_model(config)
    contents = _token_files(config, origin) | (_model_files(config, origin) if origin else {})
    contents |= _with_stops(contents, config, learned, paths_of_model(config) if paths is None else paths)
    if any(out.glob("*.safetensors")):  # of an export: a run stores no weights there
        for name, content in contents.items():
            if not _holds(out, {name: content}):
                raise UserError(f"{out} holds an export, whose {name} is not this run's. Move it.")
        return
    _write(out, contents)
    for name in CARRIED:
        if name not in contents:
            (out / name).unlink(missing_ok=True)


def store_files_of_run(config: Config, out: Path, learned: Sequence[int]) -> list[str]:
    """Stores the files of a run's model, and returns the `new_ends` of the tokens that the run learns.

    Raises:
      UserError: a file cannot be read.
    """
    ends = new_ends(config, learned)
    store_files(config, out, learned=learned)
    return ends


def new_ends(config: Config, learned: Sequence[int]) -> list[str]:
    """The spelling of the tokens from learned answers that did not end the model's texts before."""
    if not learned:
        return []
    tokenizer = load_tokenizer(config)
    before = stop_tokens(paths_of_model(config), tokenizer)
    names = {token_id: name for name, token_id in tokenizer.added_tokens.items()}
    return [names[token_id] for token_id in learned if token_id not in before]


def carry_tokens(config: Config, source: Path, out: Path) -> None:
    """Writes the tokenizer and the chat template of a config, and the generation_config.json of its model.

    Args:
      source: the directory of the run or the imported model.
    """
    carried = hf_directory(source)
    contents = _token_files(config, carried)
    stated = (carried or source / "hf") / _GENERATION
    if is_there(stated):
        contents[_GENERATION] = read_bytes(stated)
    _write(out, contents)


def carry_own_tokens(config: Config, source: Path, base: Path, out: Path) -> None:
    """Writes the tokenizer and the chat template of adapters that were not trained with their base's.

    Also a generation_config.json if their texts end at other tokens.

    Args:
      source: the directory of their run.
    """
    contents = _token_files(config, None)
    of_base = hf_directory(base) or base / "hf"
    if _holds(of_base, contents):
        contents = {}
    if not {*stop_ids_of(source / "hf")} <= {*stop_ids_of(of_base), end_of_text_of(config)}:
        contents[_GENERATION] = read_bytes(source / "hf" / _GENERATION)
    _write(out, contents)


def _token_files(config: DataConfig, origin: Path | None) -> dict[str, bytes]:
    """The tokenizer and the chat template in use, by their names among CARRIED.

    Args:
      origin: the directory of the files that came with the model; None if it was trained from scratch.
    """
    file = tokenizer_file(config)
    directory = file.parent if file else origin if origin and not tokenizer_keys(origin) else None
    names = [name for name in CARRIED if name not in _MODEL_FILES] if directory else []
    contents = {name: read_bytes(directory / name) for name in names if directory and is_there(directory / name)}
    if file:
        if config.tokenizer_type == "sentencepiece":
            contents.pop("tokenizer.json", None)
        contents[TOKENIZER_FILES[config.tokenizer_type]] = read_bytes(file)
    if config.chat_template:
        contents[_TEMPLATE] = _template(config.chat_template)
        contents.pop("chat_template.json", None)
        about = read_object(directory / _TOKENIZER_CONFIG) if directory and _TOKENIZER_CONFIG in contents else {}
        if about.pop("chat_template", None):
            contents[_TOKENIZER_CONFIG] = _json(about)
    if config.add_bos is True and file:  # what starts from the stored tokenizer begins texts likewise
        about = json.loads(contents.get(_TOKENIZER_CONFIG, b"{}"))
        if about.get("add_bos_token") is not True:
            contents[_TOKENIZER_CONFIG] = _json(about | {"add_bos_token": True})
    return contents


def _template(path: str) -> bytes:
    try:
        return read_bytes(user_path(path))
    except UserError as error:
        raise UserError(f"chat_template={value_text(path)} cannot be read: {error}") from None


def _model_files(config: Config, origin: Path) -> dict[str, bytes]:
    """The files that describe a directory's model, with the tokens of the config's tokenizer."""
    names = [name for name in _MODEL_FILES if is_there(origin / name)]
    file = tokenizer_file(config)
    missing = config.tokenizer_type != "byte" and file is None  # of data that need none
    if missing or has_tokenizer(origin, file_hash(file) if file else "byte"):
        return {name: read_bytes(origin / name) for name in names}
    tokenizer = load_tokenizer(config)
    ends = special_among(stop_ids_of(origin), tokenizer)
    end = end_of_text_of(config)
    if end is not None and end not in ends:
        ends.append(end)
    return {name: _json(_with_tokens(read_object(origin / name), ends, tokenizer)) for name in names}


def _with_tokens(fields: JsonObject, ends: list[int], tokenizer: Tokenizer) -> JsonObject:
    """A model file's fields, with the tokens that end a text, and other tokens only if they are special."""
    ids: JsonObject = {"eos_token_id": ends or None}
    if len(ends) == 1:
        ids["eos_token_id"] = ends[0]
    for name in ("bos_token_id", "pad_token_id"):
        value = fields.get(name)
        ids[name] = value if is_whole(value, 0) and value in tokenizer.special_ids else None
    fields = fields | ids
    text = fields.get("text_config")
    if isinstance(text, dict):
        fields["text_config"] = _with_tokens(text, ends, tokenizer)
    return fields


def _with_stops(
    contents: Mapping[str, bytes], config: Config, learned: Sequence[int], paths: Sequence[str | Path]
) -> dict[str, bytes]:
    """The generation_config.json with all tokens that end texts, if these contents do not state them."""
    no_tokenizer = config.tokenizer_type != "byte" and tokenizer_file(config) is None
    if no_tokenizer or not (paths or learned):
        return {}
    tokenizer = load_tokenizer(config)
    model = json.loads(contents.get("config.json", b"{}"))
    generation = json.loads(contents.get(_GENERATION, b"{}"))
    stated = stop_ids_in(generation) + stop_ids_in(model) or [tokenizer.end_of_text_id]
    ends = list(dict.fromkeys([*stated, *stop_tokens(paths, tokenizer), *learned]))
    if set(ends) <= {*stated, tokenizer.end_of_text_id}:
        return {}
    others = {name: model[name] for name in ("bos_token_id", "pad_token_id") if name in model}
    return {_GENERATION: _json(others | generation | {"eos_token_id": ends})}


def _json(fields: JsonObject) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def _holds(directory: Path, contents: Mapping[str, bytes]) -> bool:
    """Whether all these files are in a directory, with these contents."""
    return all(is_there(directory / name) and read_bytes(directory / name) == each for name, each in contents.items())


def _write(out: Path, contents: Mapping[str, bytes]) -> None:
    """Writes files, each whole or not at all; one that has its content already, such as its own source, stays."""
    if contents:
        out.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        file = out / name
        if not file.is_file() or file.read_bytes() != content:
            write_whole(file, content)
