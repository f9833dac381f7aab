"""Your own callback: ends the run when the held-out loss has not improved for a few evaluations.

python examples/own_callback.py steps=1000 eval_interval=20
"""

import sys

from maxtext_lite import load_config
from maxtext_lite.training import Callback, train


class EarlyStopping(Callback):
    """Tracks the best held-out loss and the number of evaluations since."""

    def __init__(self, patience: int):
        self.patience, self.best, self.since = patience, float("inf"), 0

    def after_step(self, step, record, state):
        """`record` has numbers on the host, so reading them stalls no device."""
        if record["skipped"]:
            print(f"step {step} was skipped")

    def after_evaluation(self, step, record, state):
        """Returning True ends the run on all hosts, with a checkpoint."""
        self.since = 0 if record["eval_loss"] < self.best else self.since + 1
        self.best = min(self.best, record["eval_loss"])
        return self.since >= self.patience


if __name__ == "__main__":
    result = train(load_config(None, ["run_name=own_callback", *sys.argv[1:]]), callbacks=[EarlyStopping(patience=3)])
    print(f"held-out loss {result.eval_loss:.4f} after {result.step} steps")
