"""The runs of the golden record, as runs.yml has them."""

import dataclasses
import shlex
from pathlib import Path

import yaml

HERE = Path(__file__).parent
TABLE = yaml.load((HERE / "runs.yml").read_text(), yaml.CSafeLoader)


@dataclasses.dataclass(frozen=True)
class GoldenRun:
    """One run of the record.

    Attributes:
      legs: the overrides of each command that the run takes.
      devices: simulated devices of the process that it runs in.
      file: the config file.
      tolerance: relative, of losses, where machines or versions differ.
    """

    name: str
    legs: list[list[str]]
    devices: int
    file: str
    tolerance: float


def runs_of(group: dict) -> list[GoldenRun]:
    """Those of one group of the table."""
    shared = [TABLE["words"][name] for name in group["words"].split()]
    file = f"post_train/{group['file']}.yml" if "file" in group else "base.yml"
    runs = []
    for name, own in group["runs"].items():
        commands = own if isinstance(own, list) else [own]
        texts = [" ".join([*shared, command]) for command in commands]
        legs = [shlex.split(text.replace("HERE", str(HERE))) for text in texts]
        tolerance = TABLE["tolerances"].get(name, 1e-5)
        devices = group.get("devices", 1)
        runs.append(GoldenRun(name, legs, devices, f"configs/{file}", tolerance))
    return runs


RUNS = {run.name: run for group in TABLE["groups"] for run in runs_of(group)}
