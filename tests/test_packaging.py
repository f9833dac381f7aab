"""The wheel has what the commands need, the lock fits the ranges, and no file names the machine it was written on."""

import gzip
import hashlib
import itertools
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import maxtext_lite
from tests.source_tree import PACKAGE, REPOSITORY, imports, modules

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
EXTRAS = PROJECT["optional-dependencies"]
ASSETS = list((PACKAGE / "assets").iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without a network by the hatchling of the test extra."""
    directory = tmp_path_factory.mktemp("wheel")
    build = f"from hatchling.build import build_wheel; print(build_wheel({str(directory)!r}))"
    command = [sys.executable, "-c", build]
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return zipfile.ZipFile(directory / result.stdout.split()[-1])


def test_the_wheel_holds_every_module_config_and_asset_and_nothing_else(wheel):
    names = set(wheel.namelist())
    sources = [module.path for module in modules().values()] + ASSETS
    expected = {path.relative_to(REPOSITORY).as_posix() for path in sources}
    configs = (REPOSITORY / "configs").rglob("*.yml")
    expected |= {
        f"maxtext_lite/{path.relative_to(REPOSITORY).as_posix()}" for path in configs
    }
    pages = (
        "analysis/advice.txt",
        "analysis/charts.yml",
        "analysis/page.css",
        "analysis/page.html",
        "analysis/page.js",
        "analysis/pipeline.svg",
        "py.typed",
    )
    expected |= {f"maxtext_lite/{name}" for name in pages}
    assert expected <= names
    (about,) = {name.split("/")[0] for name in names} - {"maxtext_lite"}
    assert about == f"maxtext_lite-{maxtext_lite.__version__}.dist-info"
    commands = wheel.read(f"{about}/entry_points.txt").decode()
    assert "maxtext-lite = maxtext_lite.cli:main" in commands
    assert b"Apache License" in wheel.read(f"{about}/licenses/LICENSE")


def needed_on(python, texts):
    """The requirements that count for a version of Python on Linux."""
    environment = {
        **default_environment(),
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "python_version": python,
        "python_full_version": f"{python}.5",
    }
    found = map(Requirement, texts)
    return [
        each for each in found if not each.marker or each.marker.evaluate(environment)
    ]


def test_the_citation_and_the_changes_have_the_version():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    changes = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## ([\d.]+)", changes, re.MULTILINE)[1]
    assert citation["version"] == newest == maxtext_lite.__version__


def test_a_wheel_finds_its_configs_from_any_directory(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    program = (
        "import maxtext_lite; from maxtext_lite.config import packaged_directory, packaged_file\n"
        "print(maxtext_lite.load_config('configs/base.yml', ['steps=7']).steps, packaged_directory('configs'))\n"
        "print(packaged_file('assets', maxtext_lite.load_config().dataset_path))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    site = (tmp_path / "site" / "maxtext_lite").resolve()
    asset = site / "assets" / "shakespeare.jsonl.gz"
    expected = ["7", str(site / "configs"), str(asset)]
    assert result.stdout.split() == expected, result.stderr


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_has_one_version_within_the_range_of_every_dependency(python):
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    locked = {}
    for entry in needed_on(python, [x for x in lines if x and not x.startswith("#")]):
        name = canonicalize_name(entry.name)
        assert name not in locked, f"two versions of {name}"
        locked[name] = str(entry.specifier).removeprefix("==")
    extras = [
        EXTRAS[extra] for extra in ("gcs", "s3", "hf", "prepare", "servers", "test")
    ]
    for each in needed_on(python, itertools.chain(PROJECT["dependencies"], *extras)):
        name = canonicalize_name(each.name)
        if name != "maxtext-lite":
            assert each.specifier.contains(locked[name]), each


DISTRIBUTIONS = {
    "absl": "absl-py",
    "yaml": "pyyaml",
    "orbax": "orbax-checkpoint",
    "pydantic_core": "pydantic",
}
EXTRA_OF = {
    "config.bucket": "gcs",
    "harness": "harness",
    "post_training.servers": "servers",
}


@pytest.mark.fast
def test_every_package_that_is_imported_is_declared():
    for module in modules().values():
        extra = (
            "hf"
            if module.package == "hf"
            else EXTRA_OF.get(module.name.removeprefix("maxtext_lite."))
        )
        needed = [*PROJECT["dependencies"], *EXTRAS.get(extra, [])]
        declared = {canonicalize_name(Requirement(text).name) for text in needed}
        for found in imports(module):
            top = found.module.partition(".")[0]
            name = canonicalize_name(DISTRIBUTIONS.get(top, top))
            is_known = top in sys.stdlib_module_names or top == "maxtext_lite"
            assert is_known or name in declared, f"{module.where(found.line)}: {name}"


def tracked_files() -> list[Path]:
    """The files of a commit: tracked ones, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    if result.returncode != 0:
        pytest.skip("not a git checkout")
    return [
        REPOSITORY / name
        for name in result.stdout.split("\0")
        if name and (REPOSITORY / name).is_file()
    ]


def test_no_file_names_the_machine_it_was_written_on_or_a_package_registry():
    # Spelled in pieces, so that this file passes its own test.
    words = "file@:///|/wo@rk/|/ro@ot/|pypi@[.]org|pythonhosted@[.]org|npmjs@[.]org"
    pattern = re.compile(words.replace("@", "").encode())
    files = [path for path in tracked_files() if path.suffix != ".gz"]
    assert not [path for path in files if pattern.search(path.read_bytes())]


def test_the_shipped_files_are_those_whose_origin_is_stated():
    origins = (PACKAGE / "assets" / "ORIGIN.md").read_text(encoding="utf-8")
    stated = dict(
        re.findall(
            r"^## (\S+)\n(?:(?!## ).*\n)*?.*?\bbytes:\s`([0-9a-f]{64})`",
            origins,
            re.MULTILINE,
        )
    )
    files = [file for file in ASSETS if file.suffix == ".gz"]
    assert stated == {
        file.name: hashlib.sha256(gzip.decompress(file.read_bytes())).hexdigest()
        for file in files
    }
    assert all(file.name in origins for file in ASSETS if file.name != "ORIGIN.md")


def test_the_shipped_sums_are_right_and_none_occurs_twice():
    """So no held-out problem is trained on."""
    shipped = gzip.decompress((PACKAGE / "assets" / "arithmetic.jsonl.gz").read_bytes())
    lines = [json.loads(line) for line in shipped.splitlines()]
    assert len({line["prompt"] for line in lines}) == len(lines) == 9000
    for line in lines[::100]:
        assert line["answer"] == str(eval(line["prompt"].rstrip("=")))
