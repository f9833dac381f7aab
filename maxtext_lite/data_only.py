"""`train data_only=true`: the data of a run, read without its model."""

import re
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from maxtext_lite.command_keys import parse_keys
from maxtext_lite.config import Config, UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.types import Flag


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


def print_data(config: Config, asked: DataOnly) -> None:
    """Prints the rows, or reads all batches and prints the speed."""
    if not asked.rows:
        from maxtext_lite.analysis.data_only import read_data  # imports jax

        read_data(config, with_ids=asked.ids)
        return
    from maxtext_lite.analysis.row_lines import row_lines

    for line in row_lines(config, *asked.bounds):
        print(line, flush=True)
