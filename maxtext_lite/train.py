"""Pre-train, fine-tune (SFT) or run DPO from one config; resumes automatically."""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from maxtext_lite.cli import ArgumentParser, config_arguments, gigabytes, parse_keys, run_command
from maxtext_lite.config import Config, UserError, load_config
from maxtext_lite.config.bucket import any_path, is_bucket
from maxtext_lite.config.errors import counted, value_text
from maxtext_lite.config.keys import require_trackers
from maxtext_lite.config.load import load_asked
from maxtext_lite.config.phases import observers, phases, process_start
from maxtext_lite.config.types import Flag
from maxtext_lite.console import command_signals, complain, go_on_without_stdout

EXIT_NON_FINITE = 3
EXIT_STOPPED_BY_SIGNAL = 75


class DataOnly(BaseModel):
    """The key=value words of `train` besides the keys of a config.

    Attributes:
      data_only: read the data without a model and without a run directory, and print the speed.
      ids: print the example ids of each step.
      rows: print these rows instead, as A:B; "": none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    data_only: Flag = False
    ids: Flag = False
    rows: str = ""

    @property
    def bounds(self) -> tuple[int, int]:
        """The first row, and the one after the last."""
        first, _, stop = self.rows.partition(":")
        return int(first), int(stop)


def parse_data_only(words: Sequence[str]) -> DataOnly:
    """`DataOnly` from key=value words; of several for a key, the last wins.

    Raises:
      UserError: a value is not true or false, rows are none, or there is `ids` or `rows` without `data_only`.
    """
    asked, problems = parse_keys(DataOnly, words, texts=("rows",), example="train data_only=true ids=true")
    if asked.ids and not asked.data_only:
        problems.append("ids=true has no effect without data_only=true.")
    if asked.rows and not asked.data_only:
        problems.append(f"rows={asked.rows} has no effect without data_only=true.")
    if asked.rows and asked.ids:
        problems.append(f"rows={asked.rows} has no effect with ids=true. Nearest that works: ids=false.")
    if asked.rows and not re.fullmatch(r"[0-9]{1,15}:[0-9]{1,15}", asked.rows):
        problems.append(f"rows={value_text(asked.rows)} is not of the form A:B. Nearest that works: rows=0:4.")
    elif asked.rows and asked.bounds[0] >= asked.bounds[1]:
        problems.append(
            f"rows={asked.rows} is empty. Nearest that works: rows={asked.bounds[0]}:{asked.bounds[0] + 1}."
        )
    if problems:
        raise UserError(problems)
    return asked


def read_arguments(argv: Sequence[str]) -> tuple[Config, DataOnly, float | None]:
    """The config, the words beside it, and `--device-memory-gb`.

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
    own = [word for word in arguments.overrides if word.partition("=")[0] in DataOnly.model_fields]
    asked = parse_data_only(own)
    config = load_config(arguments.config, [word for word in arguments.overrides if word not in own])
    if config.run_kind == "rl":
        raise UserError("a config of reinforcement learning is not for train, but for train_rl.")
    return config, asked, arguments.device_memory_gb


def main(argv: Sequence[str]) -> int:
    """Trains and returns the exit code: 0, 3 (non-finite loss or a spike) or 75 (stopped by a signal).

    Raises:
      UserError: with every problem of the config or the data.
    """
    config, asked, device_memory_gb = read_arguments(argv)
    if asked.rows:
        from maxtext_lite.analysis.row_lines import row_lines

        for line in row_lines(config, *asked.bounds):
            print(line, flush=True)
        return 0
    if asked.data_only:
        from maxtext_lite.analysis.data_only import read_data

        read_data(config, with_ids=asked.ids)
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
