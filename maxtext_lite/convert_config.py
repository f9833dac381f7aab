"""The command `convert_config`: translates a config or command line of MaxText into our keys. Imports no jax."""

import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from maxtext_lite.cli import ArgumentParser, run_command, whole_number
from maxtext_lite.config import Config, ConfigError, Refusal, UserError, load_config, packaged_directory, parse_value
from maxtext_lite.config.errors import full_text, setting_text, value_text
from maxtext_lite.config.files import LARGEST_FILE, keys_twice
from maxtext_lite.config.maxtext import Translation, maxtext_defaults, translate
from maxtext_lite.config.yaml_text import YamlValue, parse_mapping

_MOST_BASES = 16
_MOST_DEVICES = 1_000_000
_SECTIONS = ("dpo", "lora")  # of MaxText's keys, whose keys are unique without them
_STARTS = re.compile(r"-|.*\.ya?ml|[A-Za-z_][\w.]*=.*|--(devices|help|version).*|-h", re.DOTALL)
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
    parser.add_argument("--devices", type=whole_number, help="devices of the run, to round a batch as MaxText does")
    start = next((i for i, word in enumerate(argv) if _STARTS.fullmatch(word)), 0)
    arguments = parser.parse_intermixed_args(argv[start:])
    if arguments.devices is not None and not 1 <= arguments.devices <= _MOST_DEVICES:
        message = f"--devices={value_text(arguments.devices)} must be from 1 to {_MOST_DEVICES}."
        raise UserError(str(Refusal("", message, (1 if arguments.devices < 1 else _MOST_DEVICES,))))
    found = translate(_stated(arguments.words), num_devices=arguments.devices)
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


def _stated(words: Sequence[str]) -> dict[str, Any]:
    """The MaxText keys of the file, of its base configs, and of the command line, which wins."""
    found: dict[str, Any] = {}
    if words and "=" not in words[0]:
        found, words = _file_values(words[0]), words[1:]
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"'{value_text(word)}' is not of the form key=value.")
        try:
            _add(found, key, parse_value(text))
        except ValueError as error:
            raise UserError(f"{key}={value_text(text)} {error}.") from None
    return found


def _file_values(name: str, depth: int = 0) -> dict[str, Any]:
    if depth > _MOST_BASES:
        raise UserError(f"{value_text(name)} is the base_config of itself.")
    path = Path(name)
    ours = packaged_directory("configs") / "base.yml"  # found when a MaxText command is given in our checkout
    if path.name == "base.yml" and (not path.exists() or path.resolve() == ours.resolve()):
        return {}  # MaxText's own file of defaults
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
    found: dict[str, Any] = {}
    base = entries["base_config"].text if "base_config" in entries else ""
    if base:  # relative to its own directory or one above
        bases = [str(folder / base) for folder in path.parents]
        found = _file_values(next((file for file in bases if Path(file).is_file()), bases[0]), depth + 1)
    for key, value in entries.items():
        _add(found, key, value)
    return found


def _add(found: dict[str, Any], key: str, stated: YamlValue) -> None:
    """Adds a key, or the keys of a section: dpo.dpo_beta is dpo_beta. Text such as 007 stays text for a text key."""
    if isinstance(stated.value, Mapping) and key in _SECTIONS:
        for part, value in cast("Mapping[str, object]", stated.value).items():
            _add(found, part, YamlValue(value, None))
        return
    section, _, rest = key.partition(".")
    key = rest if section in _SECTIONS and rest else key
    value = stated.value
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d_]*", value):
        value = int(value)  # 10_000, which is text in YAML 1.2
    if stated.text and isinstance(maxtext_defaults().get(key), str):
        value = stated.text
    found[key] = None if value == "None" else value


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
