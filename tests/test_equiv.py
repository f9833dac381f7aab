"""The command `equiv`: a line for each split, and an exit code of 1 where one differs."""

import json

import pytest

from maxtext_lite.analysis import equiv as equivalence
from maxtext_lite.analysis.equiv import Verdict
from maxtext_lite.equiv import main

AGREES = Verdict("fsdp 8", "sgd", loss=2e-8, parameters=3e-7)
REFUSED = Verdict(
    "seven shards", "sgd", refused="ici_fsdp_parallelism=7 does not divide 8."
)
DIFFERS = Verdict("data 8", "adamw", difference="step 2: loss 1.0 and 1.1", loss=0.1)


@pytest.mark.parametrize(
    ("verdicts", "code", "last"),
    [
        (
            [AGREES, REFUSED],
            0,
            "1 compared with one device: all agree within 1e-05 (worst: 3.0e-07)",
        ),
        (
            [AGREES, DIFFERS],
            1,
            "2 compared with one device: not all agree within 1e-05 (worst: 1.0e-01)",
        ),
    ],
)
def test_a_line_for_each_split_and_the_exit_code(
    verdicts, code, last, monkeypatch, capsys
):
    monkeypatch.setattr(equivalence, "compare_splits", lambda *_: iter(verdicts))
    assert main(["steps=5"]) == code
    *lines, end = capsys.readouterr().out.splitlines()
    assert end == last
    first = " ".join(lines[0].split())
    assert first == "fsdp 8 sgd loss 2.0e-08 parameters 3.0e-07 agrees"
    assert lines[1].endswith(
        verdicts[1].difference or f"refused: {verdicts[1].refused}"
    )
    assert main(["--json"]) == code
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["agrees"] for each in told] == [each.agrees for each in verdicts]
