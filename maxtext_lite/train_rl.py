"""Reinforcement learning (GRPO and its variants) from one config; resumes automatically."""

import sys
from collections.abc import Sequence

from maxtext_lite.cli import ArgumentParser, config_arguments, run_command
from maxtext_lite.config import UserError, load_config
from maxtext_lite.config.phases import phases
from maxtext_lite.train import finish, start_watchdog

DEFAULT_CONFIG = "configs/post_train/rl.yml"


def main(argv: Sequence[str]) -> int:
    """Trains and returns the exit code: 0, 3 (non-finite loss) or 75 (stopped by a signal).

    Raises:
      UserError: with every problem of the config, the prompts or the rewards.
    """
    parser = ArgumentParser(prog="maxtext-lite train_rl", description=__doc__)
    config_arguments(parser, DEFAULT_CONFIG)
    arguments = parser.parse(argv)
    config = load_config(DEFAULT_CONFIG if arguments.config is None else arguments.config, arguments.overrides)
    if config.run_kind != "rl":
        raise UserError(
            f"{arguments.config} is not a config of reinforcement learning, which needs the line "
            "`base: post_train/rl.yml`. `train` takes it as it is."
        )
    start_watchdog(config)
    from maxtext_lite.post_training.rollout_steps import train_rl  # imports jax, once the config is known to be right
    from maxtext_lite.training.compile import keep_compiled

    keep_compiled(config)
    phases.mark("import")
    return finish(train_rl, config)


if __name__ == "__main__":
    sys.exit(run_command(main))
