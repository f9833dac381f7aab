"""Compile the train step ahead of time, for this machine or one you do not have."""

import argparse
import sys
from collections.abc import Sequence

from maxtext_lite.cli import ArgumentParser, at_least_one, config_arguments, run_command, whole_number
from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.records import json_text


def main(argv: Sequence[str]) -> int:
    """Prints what the train step of a config compiles to; returns the exit code.

    Raises:
      UserError: with every problem of the config or the arguments.
    """
    parser = ArgumentParser(prog="maxtext-lite compile", description=__doc__)
    config_arguments(parser)
    parser.add_argument(
        "--devices", type=whole_number, metavar="N", help="simulate N CPU devices (default: the real ones)"
    )
    parser.add_argument("--hosts", type=at_least_one, metavar="H", help="with --devices: number of hosts")
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="a machine you do not have: v5e:4x4, 2*v5e:2x2 (slices; both need libtpu), h100:8 (CUDA plugin)",
    )
    parser.add_argument(
        "--slices", type=at_least_one, metavar="S", help="with --topology: number of equal slices (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse(argv)
    _refuse_contradictions(arguments)
    config = load_config(arguments.config, arguments.overrides)
    import jax  # only once the config is known to be right

    from maxtext_lite.analysis.program import compile_for
    from maxtext_lite.analysis.program_tables import program_json, program_text

    program = compile_for(
        config,
        num_devices=arguments.devices,
        num_hosts=arguments.hosts or 1,
        topology=arguments.topology,
        num_slices=arguments.slices,
    )
    if jax.process_index() == 0:
        print(json_text(program_json(program), indent=2) if arguments.json else program_text(program))
    return 0


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    problems: list[str] = []
    if arguments.devices is not None and arguments.topology is not None:
        problems.append("--devices and --topology contradict each other; give one of them.")
    for option, value, owner, owned in (
        ("--hosts", arguments.hosts, "--devices", arguments.devices),
        ("--slices", arguments.slices, "--topology", arguments.topology),
    ):
        if value is not None and owned is None:
            problems.append(f"{option}={value_text(value)} needs {owner}, which is not given.")
    if problems:
        raise UserError(problems)


if __name__ == "__main__":
    sys.exit(run_command(main))
