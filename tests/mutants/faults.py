"""The table of faults, and how one is planted in a copy of the source."""

import ast
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.mutants.reached import functions

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
      function: `path:name` of the function whose tests are run. Stated where `old` is not inside a function.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    function: str = ""

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
        ast.parse(planted)
        path.write_text(planted)
        return text

    def target(self, root: Path) -> str:
        """`path:name` of the innermost function that holds the lines, or the one that is stated."""
        if self.function:
            return (
                self.function
                if ":" in self.function
                else f"{self.file}:{self.function}"
            )
        text = (root / self.file).read_text()
        line = text[: text.index(self.old)].count("\n") + 1
        around: list[tuple[int, str]] = []
        for name, node in functions(text):
            if node.lineno <= line <= (node.end_lineno or 0):
                around.append((node.lineno, name))
        if not around:
            raise ValueError(
                f"{self.name}: its lines are in no function of {self.file}. State the function."
            )
        return f"{self.file}:{max(around)[1]}"


def read_faults(path: Path = TABLE) -> list[Fault]:
    """All faults of the table."""
    return [Fault(**row) for row in yaml.load(path.read_text(), yaml.CSafeLoader)]
