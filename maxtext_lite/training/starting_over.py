"""The removal of an earlier run, for overwrite=true."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from maxtext_lite.config import Config, SourceList, UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import user_path
from maxtext_lite.config.whole_file import steps_in
from maxtext_lite.training.lease import DIRECTORY as LEASE

_READ = (
    "load_parameters_path",
    "tokenizer_path",
    "chat_template",
    "dataset_path",
    "eval_dataset_path",
    "excluded_rows",
)
"""Keys of what the new run reads."""


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
    for key in _READ:
        for path in _paths(getattr(config, key)):
            if path.resolve().is_relative_to(directory.resolve()):
                raise UserError(
                    f"{key}={value_text(str(path))} is in the run that overwrite=true would remove. Use another "
                    "run_name."
                )


def _paths(value: str | SourceList) -> Iterator[Path]:
    texts = [entry.path for entry in value.entries] if isinstance(value, SourceList) else [value]
    yield from (user_path(text) for text in texts if text)


def remove_run(directory: Path, say: Callable[[str], None]) -> None:
    """Removes everything in a run directory but the lease, which this process holds. May raise OSError."""
    steps = steps_in(directory / "checkpoints")
    # config.yml last: what a killed process leaves can be removed by the next.
    paths = sorted(directory.iterdir(), key=lambda path: path.name == "config.yml")
    for path in paths:
        if path.name == LEASE:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if len(paths) > 1:
        say(f"overwrite=true: removed the earlier run in {directory}" + (f", of {steps[-1]} steps" if steps else ""))
