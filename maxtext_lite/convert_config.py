"""Translate a MaxText config or command line into maxtext_lite keys. Needs no jax."""

import json
import re
import sys
from collections.abc import Sequence

from maxtext_lite.batching.topology import MOST_DEVICES
from maxtext_lite.cli import ArgumentParser, bounded, run_command, whole_number
from maxtext_lite.config import Config, ConfigError, UserError, load_config
from maxtext_lite.config.errors import full_text, setting_text
from maxtext_lite.hf.maxtext import Translation, read_command, translate

_STARTS = re.compile(r"-|.*\.ya?ml|[A-Za-z_][\w.]*=.*|--(devices|ignore-unknown|help|version).*|-h", re.DOTALL)
_NEEDS: dict[str, tuple[str, object]] = {  # keys without a meaning while another has this value
    "diloco_": ("enable_diloco", False),
    "load_balance_loss_weight": ("num_experts", 1),
    "mtp_loss_scaling_factor": ("mtp_num_layers", 0),
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
    parser.add_argument(
        "words", nargs="*", metavar="[FILE_OR_-] [key=value ...]", help="a MaxText config or command line; -: stdin"
    )
    parser.add_argument(
        "--devices",
        type=bounded(whole_number, 1, MOST_DEVICES),
        help="devices of the run, to round a batch as MaxText does",
    )
    parser.add_argument(
        "--ignore-unknown", action="store_true", help="list keys that MaxText does not have, and do not refuse them"
    )
    start = next((i for i, word in enumerate(argv) if _STARTS.fullmatch(word)), 0)
    arguments = parser.parse_intermixed_args(argv[start:])
    stated = read_command(argv[:start], arguments.words)
    found = translate(
        stated.values,
        num_devices=arguments.devices,
        origins=stated.origins,
        ignore_unknown=arguments.ignore_unknown,
    )
    problems: tuple[str, ...] = ()
    try:
        config = load_config(None, [f"{key}={setting_text(value)}" for key, value in found.values.items()])
    except ConfigError as error:
        problems = error.problems
        config = load_config()
    print("\n".join(_lines(found, config)))
    if problems:
        raise UserError(problems)
    return 0


def _lines(found: Translation, config: Config) -> list[str]:
    """The YAML: stated keys, MaxText's defaults where they differ from ours, then comments on losses and notes."""
    named = load_config(None, [f"model_name={found.values['model_name']}"]).model_dump()
    lines = ["# Translated from MaxText."]
    for key, value in found.values.items():
        theirs = found.sources.get(key, ())
        if not theirs and (_has_no_effect(key, config) or _equal(named[key], value)):
            continue
        comment = "MaxText's default"
        if theirs:
            comment = "" if theirs == (key,) else f"MaxText's {', '.join(theirs)}"
        lines.append(f"{key}: {_yaml(value)}" + (f"  # {comment}" if comment else ""))
    if found.losses:
        lines += ["", "# No equivalent: this config does not do what these ask for."]
        lines += [f"#   {full_text(loss)}" for loss in found.losses]
    if found.notes:
        lines += ["", "# Notes:", *(f"#   {full_text(note)}" for note in found.notes)]
    if found.idle:
        lines += ["", "# Without effect on what is trained here:"]
        lines += [f"#   {reason}: {full_text(', '.join(keys))}" for reason, keys in found.idle.items()]
    return lines


def _has_no_effect(key: str, config: Config) -> bool:
    needs = [need for start, need in _NEEDS.items() if key.startswith(start)]
    return any(getattr(config, needed) == off for needed, off in needs)


def _equal(ours: object, value: object) -> bool:
    """Whether a config has this value; true is another spelling of concat, false of none."""
    return ours == value or (ours is True and value == "concat") or (ours is False and value == "none")


def _yaml(value: object) -> str:
    is_text = isinstance(value, str) and not re.fullmatch(r"[A-Za-z/.][\w./+-]*", value)
    return json.dumps(value, ensure_ascii=False) if is_text else setting_text(value)


if __name__ == "__main__":
    sys.exit(run_command(main))
