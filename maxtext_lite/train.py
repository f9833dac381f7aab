"""The command `train`: pre-training, SFT or DPO from one config; resumes by itself."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from maxtext_lite.cli import ArgumentParser, config_arguments, run_command
from maxtext_lite.config import Config, RLRunConfig, UserError, load_config
from maxtext_lite.process.output import complain, go_on_without_stdout

EXIT_NON_FINITE = 3
EXIT_STOPPED_BY_SIGNAL = 75


def main(argv: Sequence[str]) -> int:
    """Trains what the arguments name and returns the exit code: 0, 3 (non-finite loss) or 75 (stopped by a signal).

    Raises:
      UserError: with every problem of the config or the data.
    """
    parser = ArgumentParser(prog="maxtext-lite train", description=__doc__)
    config_arguments(parser)
    arguments = parser.parse(argv)
    config = load_config(arguments.config, arguments.overrides)
    if isinstance(config, RLRunConfig):
        raise UserError("a config of reinforcement learning is not one that train runs; train_rl does.")
    from maxtext_lite.training import train  # jax, only once the config is known to be right

    return finish(train, config)


def finish(train: Callable[[Any], Any], config: Config) -> int:
    """Trains by `train(config)`, says how it ended and returns the exit code."""
    from maxtext_lite.training import NonFiniteLoss

    go_on_without_stdout()  # what a run says stands in its directory as well
    try:
        result = train(config)
    except NonFiniteLoss as error:
        complain(f"error: {error}")
        return EXIT_NON_FINITE
    if result.interrupted:
        return EXIT_STOPPED_BY_SIGNAL
    if result.is_first_host:
        print(f"{result.step} steps done; run directory: {result.run_directory}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
