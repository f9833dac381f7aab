"""Check on simulated devices that splitting the batch of a config, or of a run directory, changes nothing."""

import dataclasses
import os
import sys
from collections.abc import Sequence

from maxtext_lite.analysis.scratch import scratch_directory
from maxtext_lite.cli import EXIT_FAILED, ArgumentParser, config_arguments, run_command
from maxtext_lite.config.records import json_text
from maxtext_lite.console import complain


def main(argv: Sequence[str]) -> int:
    """Runs a scaled-down config in every split; returns 0 if all agree with one device's whole batch, otherwise 1.

    Raises:
      UserError: with every problem of the config or the arguments.
    """
    parser = ArgumentParser(prog="maxtext-lite equiv", description=__doc__)
    config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object for each split")
    arguments = parser.parse(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"  # also where there are other devices
    from maxtext_lite.analysis.equiv import TOLERANCE, compare_splits

    agrees, worst, count = True, 0.0, 0
    with scratch_directory("maxtext_lite-equiv-") as directory:
        for verdict in compare_splits(arguments.config, arguments.overrides, directory, complain):
            agrees &= verdict.agrees
            count += not verdict.refused
            worst = max(worst, verdict.loss or 0.0, verdict.parameters or 0.0)
            if arguments.json:
                print(json_text({**dataclasses.asdict(verdict), "agrees": verdict.agrees}), flush=True)
                continue
            said = f"refused: {verdict.refused}" if verdict.refused else verdict.difference or "agrees"
            apart = "" if verdict.loss is None else f"  loss {verdict.loss:.1e}"
            apart += "" if verdict.parameters is None else f"  parameters {verdict.parameters:.1e}"
            print(f"{verdict.split:<52} {verdict.optimizer:<9}{apart:<34} {said}", flush=True)
    if not arguments.json:
        how = "all agree" if agrees else "not all agree"
        print(f"{count} compared with one device: {how} within {TOLERANCE:g} (worst: {worst:.1e})")
    return 0 if agrees else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(run_command(main))
