"""The config for the model of a directory, made by a run or from elsewhere."""

from collections.abc import Sequence
from pathlib import Path

from maxtext_lite.config.bucket import original
from maxtext_lite.config.errors import UserError, setting_text
from maxtext_lite.config.hints import hub_hint
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.keys import Config
from maxtext_lite.config.load import config_of_run, load_config
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
