"""The table of faults, and how one is planted in a copy of the source."""

import ast
from dataclasses import dataclass
from pathlib import Path

import yaml

TABLE = Path(__file__).parent / "faults.yml"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A wrong edit of the library that a test must see.

    Attributes:
      name: What is wrong.
      area: What it would cost: a heading of the table.
      file: Path of the source, below the root of the repository.
      old: The lines that are replaced. They occur once in the file.
      new: The lines that replace them.
      seen_by: The test that must fail, as pytest names it.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    seen_by: str

    def plant(self, root: Path) -> str:
        """Replaces the lines under `root`; returns the file's text as it was.

        Raises:
          ValueError: The lines are not there, not there only once, or what replaces them is no Python.
        """
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(
                f"{self.name}: {self.file} has its lines {found} times. Port the fault to the new source."
            )
        planted = text.replace(self.old, self.new)
        parse = ast.parse if path.suffix == ".py" else yaml.safe_load
        parse(planted)
        path.write_text(planted)
        return text


def read_faults() -> list[Fault]:
    """All faults of the table."""
    return [Fault(**row) for row in yaml.load(TABLE.read_text(), yaml.CSafeLoader)]
