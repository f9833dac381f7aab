"""The removal of an earlier run, for overwrite=true."""

import contextlib
import glob
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from maxtext_lite.config import Config, SourceList, UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import is_there, user_path
from maxtext_lite.config.whole_file import TEMPORARY, steps_in
from maxtext_lite.data.text_files import find_files
from maxtext_lite.training.parameter_files import reader_of
from maxtext_lite.training.run_files import LEASE

READ_KEYS = (
    "load_parameters_path",
    "tokenizer_path",
    "chat_template",
    "dataset_path",
    "eval_dataset_path",
    "excluded_rows",
)
"""Keys of what the new run reads."""

_WRITTEN = re.compile(
    r"config\.yml|(plan|environment|memory|goodput|trackers)\.json|(metrics|rollouts|timeline|excluded_rows)\.jsonl"
    r"|(reference|rollouts-\d+)\.npz|profile|stacks-\d+\.txt|tensorboard|wandb|checkpoints|hf|frozen|reference|rollout_weights"
    rf"|.*{re.escape(TEMPORARY)}"
)
"""Names that runs write into their directory, other than the lease."""


def check_removable(config: Config, directory: Path) -> None:
    """Refuses to remove what is no run, or what the new run needs.

    Raises:
      UserError: names the directory or the key.
    """
    if not directory.is_dir():
        return
    if not (directory / "config.yml").exists() and any(path.name != LEASE for path in directory.iterdir()):
        raise UserError(
            f"overwrite=true removes an earlier run, and {directory} holds files of something else: it has no "
            "config.yml. Use another run_name."
        )
    for key in READ_KEYS:
        value = getattr(config, key)
        texts = [entry.path for entry in value.entries] if isinstance(value, SourceList) else [value]
        for text in texts:
            for path in _paths(key, text):
                if path.resolve().is_relative_to(directory.resolve()):
                    what = "" if path == user_path(text) else f": {path}"
                    raise UserError(
                        f"{key}={value_text(text)}{what} is in the run that overwrite=true would remove. Use another "
                        "run_name."
                    )


def _paths(key: str, text: str) -> list[Path]:
    """The files that a value names, including a pattern's matches and an adapter's base."""
    if not text:
        return []
    paths = [user_path(text)]
    if glob.has_magic(text) and not is_there(paths[0]):
        with contextlib.suppress(UserError):  # of a key that takes no pattern
            paths += [file for _, file in find_files(key, text)]
    if key == "load_parameters_path" and (reader := reader_of(text)):
        paths.append(Path(reader.directory))
    return paths


def remove_run(directory: Path, say: Callable[[str], None]) -> None:
    """Removes what runs write into a directory but the lease, which this process holds. May raise OSError.

    Whatever else is there stays, and is named.
    """
    steps = steps_in(directory / "checkpoints")
    # config.yml last: what a killed process leaves can be removed by the next.
    paths = sorted(directory.iterdir(), key=lambda path: path.name == "config.yml")
    left: list[str] = []
    for path in paths:
        if path.name == LEASE:
            continue
        if not _WRITTEN.fullmatch(path.name) or any(path.glob("*.safetensors")):  # runs write no weights into hf
            left.append(path.name)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if len(paths) > 1:
        say(f"overwrite=true: removed the earlier run in {directory}, of {steps[-1] if steps else 0} steps")
    if left:
        say(f"left in {directory}: {', '.join(sorted(left))}")
