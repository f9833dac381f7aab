"""Pre-train, fine-tune (SFT) or run DPO from one config; resumes automatically."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from maxtext_lite.cli import ArgumentParser, config_arguments, gigabytes, run_command
from maxtext_lite.config import Config, UserError, load_config
from maxtext_lite.config.bucket import any_path, is_bucket
from maxtext_lite.config.errors import counted
from maxtext_lite.config.keys import require_trackers
from maxtext_lite.config.load import load_asked
from maxtext_lite.config.phases import observers, phases, process_start
from maxtext_lite.console import command_signals, complain, go_on_without_stdout

if TYPE_CHECKING:
    from maxtext_lite.data_only import DataOnly

EXIT_NON_FINITE = 3
EXIT_STOPPED_BY_SIGNAL = 75
_OF_DATA_ONLY = ("data_only", "ids", "rows")


def read_arguments(argv: Sequence[str]) -> "tuple[Config, DataOnly | None, float | None]":
    """The config, the words beside it where there are any, and `--device-memory-gb`.

    Raises:
      UserError: with every problem of the arguments and the config.
    """
    parser = ArgumentParser(
        prog="maxtext-lite train",
        description=f"{__doc__} data_only=true only reads the data, for its speed, ids=true or rows=A:B.",
    )
    config_arguments(parser)
    parser.add_argument(
        "--device-memory-gb",
        type=gigabytes,
        help="memory limit of a train step per device, in GB (1e9 bytes); default: the device's",
    )
    arguments = parser.parse(argv)
    words = [word for word in arguments.overrides if word.partition("=")[0] in _OF_DATA_ONLY]
    asked = None
    if words:
        from maxtext_lite.data_only import parse_data_only

        asked = parse_data_only(words)
    config = load_config(arguments.config, [word for word in arguments.overrides if word not in words])
    if config.run_kind == "rl":
        raise UserError("a config of reinforcement learning is not for train, but for train_rl.")
    return config, asked, arguments.device_memory_gb


def main(argv: Sequence[str]) -> int:
    """Trains and returns the exit code: 0, 3 (non-finite loss or a spike) or 75 (stopped by a signal).

    Raises:
      UserError: with every problem of the config or the data.
    """
    config, asked, device_memory_gb = read_arguments(argv)
    if asked is not None and asked.data_only:
        from maxtext_lite.data_only import print_data

        print_data(config, asked)
        return 0
    start_watchdog(config)
    from maxtext_lite.training import train  # imports jax, once the config is known to be right
    from maxtext_lite.training.compile import keep_compiled

    keep_compiled(config)
    phases.mark("import")
    return finish(lambda config: train(config, device_memory_gb=device_memory_gb), config)


def start_watchdog(config: Config) -> None:
    """In a command's own process, starts the watchdog and the clock of the phases, and explains an early signal."""
    if not command_signals.installed:
        return
    command_signals.explain("stopped before the first step: there was nothing to save")
    phases.restart(process_start())
    phases.mark("config")
    if not config.hang_timeout_seconds:
        return
    watchdog = load_asked(config, "observer", "watchdog", "hang_timeout_seconds")
    if watchdog is not None:
        base = any_path(config.base_output_directory, "base_output_directory")
        watchdog.start(config.hang_timeout_seconds, None if is_bucket(base) else base / config.run_name)
        observers.append(watchdog)


def finish(train: Callable[[Any], Any], config: Config) -> int:
    """Calls `train(config)`, prints how it ended and returns the exit code."""
    from maxtext_lite.training import LossSpike

    require_trackers(config.log_to)
    go_on_without_stdout()  # the run directory has all output as well
    try:
        result = train(config)
    except LossSpike as error:
        complain(f"error: {error}")
        return EXIT_NON_FINITE
    if result.interrupted and result.is_first_host and config.enable_checkpointing:
        print(f"the same command{' without overwrite=true' if config.starts_over else ''} resumes the run")
    if result.interrupted:
        return EXIT_STOPPED_BY_SIGNAL
    if result.is_first_host and not result.was_complete:
        print(f"{counted(result.step, 'step')} done; run directory: {result.run_directory}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
