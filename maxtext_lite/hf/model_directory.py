"""The config for the model of a directory, made by a run or from elsewhere."""

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from maxtext_lite.config.bucket import absolute, is_bucket, original
from maxtext_lite.config.errors import UserError, setting_text
from maxtext_lite.config.hints import hub_hint
from maxtext_lite.config.json_file import is_there, read_object, user_path
from maxtext_lite.config.keys import TOKENIZER_FILES, Config, SourceList
from maxtext_lite.config.load import WORKING_DIRECTORY, load_config
from maxtext_lite.hf.adapter import adapter_of
from maxtext_lite.hf.config_json import stored_dtype
from maxtext_lite.hf.directory import has_hf_weights, hf_directory, tokenizer_keys


def hf_config(directory: Path, overrides: Sequence[str] = ()) -> Config:
    """The config for a Hugging Face directory's model: its architecture, tokenizer and number formats.

    Raises:
      UserError: it is no such directory, or its model cannot be expressed.
    """
    if not has_hf_weights(directory):
        raise UserError(
            f"{directory} is not a Hugging Face directory: it has no config.json.{hub_hint(str(directory))}"
        )
    carried = hf_directory(directory)
    assert carried is not None
    stored = stored_dtype(read_object(carried / "config.json"))
    formats = [f"weight_dtype={'bfloat16' if stored == 'bfloat16' else 'float32'}"]
    # Without a tokenizer the model still takes tokens.
    tokens = [] if tokenizer_keys(carried) else ["dataset_type=synthetic", "tokenizer_type=byte"]
    return load_config(None, [f"load_parameters_path={setting_text(str(directory))}", *tokens, *formats, *overrides])


def directory_config(directory: Path, dtype: str) -> Config:
    """The config of a run or of a Hugging Face directory.

    Args:
      dtype: of activations; "": the directory's.
    Raises:
      UserError: it is neither.
    """
    overrides = [f"dtype={dtype}"] if dtype else []
    if (directory / "config.yml").is_file():
        return config_of_run(directory, overrides)
    if (directory / "config.json").is_file() or adapter_of(directory):
        return hf_config(directory, overrides)
    raise UserError(
        f"{original(directory, 'RUN_DIR')} is not a run directory: it has no config.yml. Nor is it a Hugging Face "
        f"directory: it has no config.json.{hub_hint(str(directory))}"
    )


def config_of_run(directory: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a run or an imported model, wherever its directory and the working directory are now.

    Its run directory is this one, and its tokenizer and chat template are those stored there. Other relative paths that
    are not here are taken from the working directory that the run recorded.

    Raises:
      UserError: the config is wrong.
    """
    config = load_config(directory / "config.yml", overrides)
    stated = {word.partition("=")[0] for word in overrides}
    record = directory / "environment.json"
    recorded = read_object(record).get(WORKING_DIRECTORY) if is_there(record) else None
    there = Path(recorded) if isinstance(recorded, str) else None
    found = _stored_tokens(config, directory / "hf", is_whole=there is not None)
    run = absolute(original(directory, "RUN_DIR"))
    found |= {"base_output_directory": str(run.parent), "run_name": run.name}
    if there is not None:
        for key in ("dataset_path", "eval_dataset_path", "excluded_rows", "load_parameters_path"):
            found[key] = _found(getattr(config, key), there)
    return config.model_copy(update={key: value for key, value in found.items() if key not in stated})


def _stored_tokens(config: Config, stored: Path, *, is_whole: bool) -> dict[str, object]:
    """The keys of the tokenizer and the template that a run has stored.

    Args:
      is_whole: what is in use is stored. Older runs stored only what came with their model, for use where the
        tokenizer's own file is gone.
    """
    found = dict[str, object]()
    name, template = TOKENIZER_FILES.get(config.tokenizer_type, ""), stored / "chat_template.jinja"
    if name and is_there(stored / name) and (is_whole or not user_path(config.tokenizer_path).exists()):
        found["tokenizer_path"] = str(stored / name)
    if is_whole and config.chat_template and is_there(template):
        found["chat_template"] = str(template)
    return found


def _found(path: str | SourceList, there: Path) -> str | SourceList:
    """The path of a key. A relative one that exists in the directory `there`, but not here, is taken from there.

    The same goes for each path of a list of sources.
    """
    if isinstance(path, SourceList):
        entries = tuple(each.model_copy(update={"path": _found(each.path, there)}) for each in path.entries)
        return replace(path, entries=entries)
    place = user_path(path)
    if not path or place.is_absolute() or is_bucket(path) or is_there(place) or _matches(path):
        return path
    if is_there(there / place):
        return str(there / place)
    pattern = f"{glob.escape(str(there))}/{path}"
    return pattern if _matches(pattern) else path


def _matches(pattern: str) -> bool:
    return bool(glob.glob(pattern, recursive=True))  # noqa: PTH207 as the reader of texts does
