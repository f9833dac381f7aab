"""Checksums: every file is in one process's share, whatever happens to one is seen and named."""

import contextlib
import hashlib
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext_lite.training.manifest import Damaged, damage, in_items, part_name, read_manifest, write_part
from tests.mutations import SCALARS

FILES = {
    "about/metadata": b"{}",
    "params/_METADATA": b"tree",
    "params/d/ab12": b"x" * 5000,
    "params/ocdbt.process_0/d/cd": b"first",
    "params/ocdbt.process_1/d/ef": b"second",
    "params/array_metadatas/process_1": b"shapes",
    "params/ocdbt.process_7/d/aa": b"of an eighth process",
    "commit_success.txt": b"",
}


@pytest.fixture
def directory(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path


def test_the_shares_of_two_processes_hold_each_file_once(directory):
    hashed = [write_part(directory, process, 2) for process in (0, 1)]
    assert hashed == [sum(map(len, FILES.values())) - len(b"secondshapes"), len(b"secondshapes")]
    assert read_manifest(directory) == {name: hashlib.sha256(text).hexdigest() for name, text in FILES.items()}
    shares = [(directory / part_name(process, 2)).read_text() for process in (0, 1)]
    assert "process_1" not in shares[0]
    assert sorted(line.split("  ")[1] for line in shares[1].splitlines()[:-1]) == [
        "params/array_metadatas/process_1", "params/ocdbt.process_1/d/ef"
    ]  # fmt: skip


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs the command sha256sum")
def test_another_program_reads_the_checksums(directory):
    write_part(directory, 0, 1)
    (directory / "params" / "_METADATA").write_text("tre3")
    done = subprocess.run(["sha256sum", "--check", "--strict", part_name(0, 1)], cwd=directory, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert [line for line in done.stdout.splitlines() if not line.endswith(": OK")] == ["params/_METADATA: FAILED"]


@pytest.mark.parametrize(("change", "said"), [
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is not as it was written"),
    (lambda path: path.write_bytes(path.read_bytes() + b"x"), "is not as it was written"),
    (lambda path: path.unlink(), "is missing"),
    (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
])  # fmt: skip
def test_a_changed_file_is_named(change, said, directory):
    write_part(directory, 0, 1)
    digests = read_manifest(directory)
    assert damage(directory, digests) == (None, sum((directory / name).stat().st_size for name in digests))
    change(directory / "params" / "d" / "ab12")
    assert damage(directory, digests)[0] == f"params/d/ab12 {said}"
    shares = [damage(directory, digests, share=share, num_shares=3)[0] for share in range(3)]
    assert sorted(shares, key=str) == [None, None, f"params/d/ab12 {said}"]
    assert damage(directory, in_items(digests, ["about"]))[0] is None


@pytest.mark.parametrize(("change", "said"), [
    (lambda path: path.unlink(), r"sha256\.1-of-2 is missing"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"sha256\.1-of-2 is not as it was written"),
    (lambda path: path.write_text(path.read_text().replace("d/ef", "d/ee")), r"sha256\.1-of-2 is not as it was"),
    (lambda path: path.write_bytes(b"\xff\xfe"), r"sha256\.1-of-2 cannot be read: it is not UTF-8"),
    (lambda path: path.write_bytes(b""), r"sha256\.1-of-2 is not as it was written"),
    (lambda path: shutil.copy(path.with_name("sha256.0-of-2"), path), r"sha256\.1-of-2 is that of another process"),
])  # fmt: skip
def test_damaged_checksums_are_damage_too(change, said, directory):
    for process in (0, 1):
        write_part(directory, process, 2)
    change(directory / part_name(1, 2))
    with pytest.raises(Damaged, match=said):
        read_manifest(directory)


def test_without_checksums_there_is_nothing_to_compare_with(directory):
    assert read_manifest(directory) is None


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.text(max_size=10) | SCALARS.map(lambda name: f"{'0' * 64}  {name}") | st.just(f"{'0' * 64}  params/d/ab12"),
        max_size=4,
    ),
    st.booleans(),
)
def test_any_file_of_checksums_is_one_or_damaged(directory, lines, with_its_own):
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
    own = f"# sha256 of the lines above: {hashlib.sha256(text).hexdigest()}\n".encode() if with_its_own else b""
    (directory / part_name(0, 1)).write_bytes(text + own)
    with contextlib.suppress(Damaged):
        damage(directory, read_manifest(directory))
        assert with_its_own


@pytest.mark.parametrize("name", ["/etc/hostname", "../other/file", "params/../../file", "a\0b"])
def test_a_checksum_of_a_file_elsewhere_is_refused(directory, name):
    text = f"{'0' * 64}  {name}\n"
    own = f"# sha256 of the lines above: {hashlib.sha256(text.encode()).hexdigest()}\n"
    (directory / part_name(0, 1)).write_text(text + own)
    with pytest.raises(Damaged, match="which is not a file of the checkpoint"):
        read_manifest(directory)
