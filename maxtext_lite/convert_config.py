"""The command `convert_config`: translates a config or command line of MaxText into our keys. Imports no jax."""

import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from maxtext_lite.batching.topology import MOST_DEVICES
from maxtext_lite.cli import ArgumentParser, bounded, run_command, whole_number
from maxtext_lite.config import Config, ConfigError, UserError, load_config, packaged_directory, parse_value
from maxtext_lite.config.errors import full_text, setting_text, value_text
from maxtext_lite.config.load import LARGEST_FILE, keys_twice
from maxtext_lite.config.yaml import YamlValue, parse_mapping
from maxtext_lite.hf.maxtext import (
    Translation,
    keys_without_part_in,
    maxtext_defaults,
    reason_without_effect,
    translate,
)

_MOST_BASES = 16
_DEVICES = bounded(whole_number, 1, MOST_DEVICES)
_SECTIONS = ("dpo", "lora")  # of MaxText's keys, whose keys are unique without them
_OLD_NAMES = {"cosine_learning_rate_final_fraction": "learning_rate_final_fraction"}  # of versions before 0.2
_STARTS = re.compile(r"-|.*\.ya?ml|[A-Za-z_][\w.]*=.*|--(devices|ignore-unknown|help|version).*|-h", re.DOTALL)
_TRAINERS: dict[str, dict[str, Any]] = {  # by the end of the module's name: MaxText's file where a command names none
    "train_sft": {
        "use_sft": True,
        "sft_train_on_completion_only": True,
        "learning_rate": 2e-5,
        "dataset_type": "hf",
    },
    "train_dpo": {"use_dpo": True, "packing": False, "learning_rate": 5e-7, "dataset_type": "hf"},
    "train_rl": {"rl": {}},
    "train_distill": {"student_overrides": {"model_name": ""}},
}
_NEEDS: dict[str, tuple[str, object]] = {  # keys without a meaning while another has this value
    "diloco_": ("enable_diloco", False),
    "load_balance_loss_weight": ("num_experts", 1),
    "norm_topk_prob": ("num_experts", 1),
    "routed_bias_update_rate": ("routed_bias", False),
    "weight_decay_on_norms": ("weight_decay", 0),
}


def main(argv: Sequence[str]) -> int:
    """Prints a config of MaxText as a config of maxtext_lite; returns the exit code.

    Raises:
      UserError: with every problem of the arguments, of the config, or of what it becomes.
    """
    parser = ArgumentParser(
        prog="maxtext-lite convert_config",
        description=f"{__doc__} The beginning of a MaxText command, such as `python3 -m MaxText.train`, may stay. "
        "Comments list what has no equivalent.",
    )
    parser.add_argument("words", nargs="*", metavar="[FILE_OR_-] [key=value ...]", help="of MaxText; -: stdin")
    parser.add_argument(
        "--devices",
        type=_DEVICES,
        help="devices of the run, to round a batch as MaxText does",
    )
    parser.add_argument("--ignore-unknown", action="store_true", help="list keys that MaxText does not have as losses")
    start = next((i for i, word in enumerate(argv) if _STARTS.fullmatch(word)), 0)
    arguments = parser.parse_intermixed_args(argv[start:])
    stated = _read(arguments.words, argv[:start])
    found = translate(
        stated.values,
        num_devices=arguments.devices,
        in_files=stated.in_files,
        in_base_files=stated.in_base_files,
        ignore_unknown=arguments.ignore_unknown,
    )
    said = {key: setting_text(value) for key, value in found.values.items()}
    problems: tuple[str, ...] = ()
    try:
        config = load_config(None, [f"{key}={text}" for key, text in said.items()])
    except ConfigError as error:
        problems, config = error.problems, load_config()
    print("\n".join(_lines(found, config)))
    if problems:
        raise UserError(problems)
    return 0


@dataclass
class _Stated:
    """MaxText's keys as files and a command line state them, and which of them come from files."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    in_files: set[str] = field(default_factory=set[str])
    in_base_files: set[str] = field(default_factory=set[str])
    in_defaults: set[str] = field(default_factory=set[str])  # MaxText's own file

    def add(
        self, key: str, stated: YamlValue, *, is_file: bool = False, is_base: bool = False, is_default: bool = False
    ) -> None:
        """Adds a key, or the keys of a section: dpo.dpo_beta is dpo_beta. 007 stays text for a text key."""
        defaults = maxtext_defaults()
        if isinstance(stated.value, Mapping) and key in _SECTIONS:
            for part, value in cast("Mapping[str, object]", stated.value).items():
                self.add(part, YamlValue(value, None), is_file=is_file, is_base=is_base, is_default=is_default)
            return
        section, _, rest = key.partition(".")
        key = rest if section in _SECTIONS and rest else key
        key = _OLD_NAMES.get(key, key)
        value = stated.value
        if isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d_]*", value):
            value = int(value)  # 10_000, which is text in YAML 1.2
        if stated.text and isinstance(defaults.get(key), str):
            value = stated.text
        value = None if value == "None" else value
        if is_base and key not in self.values and key in defaults and value == defaults[key]:
            return
        self.values[key] = value
        places = (self.in_files, is_file), (self.in_base_files, is_base), (self.in_defaults, is_default)
        for keys, belongs in places:
            keys.add(key) if belongs else keys.discard(key)


def _read(words: Sequence[str], command: Sequence[str]) -> _Stated:
    """The keys of the file and of the files it is based on, and of the command line, which wins."""
    found = _Stated()
    if words and "=" not in words[0]:
        _read_file(found, words[0])
        words = words[1:]
    else:
        trainer = next((part for part in _TRAINERS if any(word.endswith(f".{part}") for word in command)), "")
        for key, value in _TRAINERS.get(trainer, {}).items():
            found.add(key, YamlValue(value, None), is_file=True)
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"'{value_text(word)}' is not of the form key=value.")
        try:
            found.add(key, parse_value(text))
        except ValueError as error:
            raise UserError(f"{key}={value_text(text)} {error}.") from None
    for key in found.in_defaults & keys_without_part_in(found.values):
        del found.values[key]
    return found


def _read_file(found: _Stated, name: str, depth: int = 0) -> None:
    if depth > _MOST_BASES:
        raise UserError(f"{value_text(name)} is the base_config of itself.")
    path = Path(name)
    ours = packaged_directory("configs") / "base.yml"  # found when a MaxText command is given in our checkout
    if path.name == "base.yml" and (not path.exists() or path.resolve() == ours.resolve()):
        return  # MaxText's own file of defaults
    try:
        with contextlib.nullcontext(sys.stdin) if name == "-" else path.open(encoding="utf-8") as opened:
            text = opened.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise ValueError(f"has more than the {LARGEST_FILE:,} characters of the largest config")
        stated = parse_mapping(text)
    except OSError as error:
        raise UserError(f"{value_text(name)} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{value_text(name)} is not UTF-8 text.") from None
    except ValueError as error:
        raise UserError(f"{value_text(name)} {error}.") from None
    if twice := keys_twice(stated, value_text(name)):
        raise UserError(twice)
    entries = dict(stated)
    base = entries["base_config"].text if "base_config" in entries else ""
    if base:  # relative to its own directory or one above, or in MaxText's `configs` there
        folders = [place for folder in path.absolute().parents for place in (folder, folder / "configs")]
        above = next((str(folder / base) for folder in folders if (folder / base).is_file()), "")
        _read_file(found, above or str(path.parent / base), depth + 1)
    is_base = depth > 0 or (path.name == "base.yml" and not base)
    is_default = is_base and not base
    for key, value in entries.items():
        if not is_default or reason_without_effect(key) is None:  # of MaxText's own file most keys have no effect
            found.add(key, value, is_file=True, is_base=is_base, is_default=is_default)


def _lines(found: Translation, config: Config) -> list[str]:
    """The YAML: stated keys, MaxText's defaults where they differ from ours, then comments on losses and notes."""
    named = load_config(None, [f"model_name={found.values['model_name']}"]).model_dump()
    lines = ["# Translated from MaxText."]
    for key, value in found.values.items():
        theirs = found.sources.get(key, ())
        needed, off = next((need for start, need in _NEEDS.items() if key.startswith(start)), ("", ""))
        idle = needed and getattr(config, needed) == off
        if (not theirs and idle) or (not theirs and _equal(named[key], value)):
            continue
        why = ", ".join(theirs) if theirs != (key,) else ""
        why = f"MaxText's {why}" if why else "" if theirs else "MaxText's default"
        lines.append(f"{key}: {_yaml(value)}" + (f"  # {why}" if why else ""))
    if found.losses:
        lines += ["", "# No equivalent: this config does not do what these ask for."]
        lines += [f"#   {full_text(loss)}" for loss in found.losses]
    if found.notes:
        lines += ["", "# Notes:", *(f"#   {full_text(note)}" for note in found.notes)]
    if found.idle:
        lines += ["", "# Without effect on what is trained here:"]
        lines += [f"#   {reason}: {full_text(', '.join(keys))}" for reason, keys in found.idle.items()]
    return lines


def _equal(ours: object, value: object) -> bool:
    """Whether a config has this value; true is another spelling of concat, false of none."""
    return ours == value or (ours is True and value == "concat") or (ours is False and value == "none")


def _yaml(value: object) -> str:
    is_text = isinstance(value, str) and not re.fullmatch(r"[A-Za-z/.][\w./+-]*", value)
    return json.dumps(value, ensure_ascii=False) if is_text else setting_text(value)


if __name__ == "__main__":
    sys.exit(run_command(main))
