"""The sums that ship are those that the script makes."""

import gzip
import subprocess
import sys

from tests.source_tree import REPOSITORY


def test_the_shipped_sums_are_made_again(tmp_path):
    made = tmp_path / "made.jsonl.gz"
    subprocess.run([sys.executable, str(REPOSITORY / "scripts" / "make_arithmetic.py"), str(made)], check=True)
    shipped = REPOSITORY / "maxtext_lite" / "assets" / "arithmetic.jsonl.gz"
    assert gzip.decompress(made.read_bytes()) == gzip.decompress(shipped.read_bytes())
