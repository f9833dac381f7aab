"""The wheel has what the commands need, the lock fits the ranges, and no file names the machine it was written on."""

import gzip
import hashlib
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
from maxtext_lite.config import packaged_directory, packaged_file
from tests.source_tree import PACKAGE, REPOSITORY, imports, modules

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = ["3.11", "3.12", "3.13"]
LOCK = [
    Requirement(line)
    for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def locked(python: str) -> dict[str, str]:
    """The exact versions of the lock for a Python on 64-bit Linux."""
    environment = {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    chosen = [entry for entry in LOCK if not entry.marker or entry.marker.evaluate(environment)]
    names = [canonicalize_name(entry.name) for entry in chosen]
    assert len(names) == len(set(names)), f"two versions of one package on Python {python}"
    return {name: str(entry.specifier) for name, entry in zip(names, chosen, strict=True)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without a network by the hatchling of the test extra."""
    directory = tmp_path_factory.mktemp("wheel")
    build = f"from hatchling.build import build_wheel; print(build_wheel({str(directory)!r}))"
    result = subprocess.run([sys.executable, "-c", build], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return zipfile.ZipFile(directory / result.stdout.split()[-1])


def test_the_wheel_holds_the_configs_the_assets_and_the_style_of_reports(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    for file in (REPOSITORY / "configs").rglob("*.yml"):
        assert f"maxtext_lite/{file.relative_to(REPOSITORY).as_posix()}" in names
    for file in (PACKAGE / "assets").iterdir():
        assert f"maxtext_lite/assets/{file.name}" in names
    assert {"maxtext_lite/reporting/page.css", "maxtext_lite/reporting/page.js", "maxtext_lite/py.typed"} <= names


def test_the_version_is_stated_once_and_followed(wheel: zipfile.ZipFile):
    assert "version" in PROJECT["dynamic"]
    assert any(name.startswith(f"maxtext_lite-{maxtext_lite.__version__}.dist-info/") for name in wheel.namelist())
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == maxtext_lite.__version__
    changes = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([\d.]+)", changes, re.MULTILINE)[0] == maxtext_lite.__version__


def test_the_wheel_holds_every_module_and_nothing_else(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    assert {module.path.relative_to(REPOSITORY).as_posix() for module in modules().values()} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"maxtext_lite"}


def test_the_wheel_installs_the_console_script_and_the_licence(wheel: zipfile.ZipFile):
    metadata = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    assert "maxtext-lite = maxtext_lite.cli:main" in wheel.read(f"{metadata}/entry_points.txt").decode()
    assert b"Apache License" in wheel.read(f"{metadata}/licenses/LICENSE")


def test_a_wheel_finds_its_configs_from_any_directory(wheel: zipfile.ZipFile, tmp_path: Path):
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
    )
    site = (tmp_path / "site" / "maxtext_lite").resolve()
    assert result.stdout.split() == ["7", str(site / "configs"), str(site / "assets" / "shakespeare.jsonl.gz")], (
        result.stdout + result.stderr
    )


def test_a_checkout_reads_the_configs_at_its_root():
    assert packaged_directory("configs") == REPOSITORY / "configs"
    assert packaged_file("configs", "configs/base.yml") == REPOSITORY / "configs" / "base.yml"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_an_exact_version_within_the_range_of_every_dependency(python: str):
    versions = locked(python)
    of_extras = [text for extra in ("gcs", "s3", "hf", "prepare", "test") for text in EXTRAS[extra]]
    for text in [*PROJECT["dependencies"], *of_extras]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        elsewhere = requirement.marker and not requirement.marker.evaluate({"python_version": python})
        if name == "maxtext-lite" or elsewhere:
            continue
        assert versions.get(name, "").startswith("=="), f"{name} is not in constraints.txt for Python {python}"
        version = versions[name].removeprefix("==")
        assert requirement.specifier.contains(version), f"{text} does not allow the lock's {version}"


def test_the_lock_is_what_runs_these_tests():
    from importlib.metadata import version

    versions = locked(f"{sys.version_info.major}.{sys.version_info.minor}")
    for text in PROJECT["dependencies"]:
        name = canonicalize_name(Requirement(text).name)
        assert f"=={version(name)}" == versions[name], f"{name}: run scripts/test.sh, which installs the lock"


def test_every_package_that_is_imported_is_declared():
    distributions = {
        "absl": "absl-py",
        "yaml": "pyyaml",
        "orbax": "orbax-checkpoint",
        "tensorboardX": "tensorboardx",
        "pydantic_core": "pydantic",
    }
    base = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    with_gcs, with_hf, with_harness, with_math = (
        base | {canonicalize_name(Requirement(text).name) for text in EXTRAS[extra]}
        for extra in ("gcs", "hf", "harness", "math")
    )
    for module in modules().values():
        declared = with_hf if module.package == "hf" else base
        if module.name == "maxtext_lite.config.bucket":
            declared = with_gcs
        if module.name == "maxtext_lite.harness":
            declared = with_harness
        if module.name == "maxtext_lite.rl.reward_functions":
            declared = with_math
        for found in imports(module):
            top = found.module.partition(".")[0]
            if top in sys.stdlib_module_names or top == "maxtext_lite":
                continue
            name = canonicalize_name(distributions.get(top, top))
            assert name in declared, f"{module.where(found.line)}: {name} is not a dependency in pyproject.toml"


def tracked_files() -> list[Path]:
    """The files of a commit: tracked ones, and new ones that git does not ignore."""
    result = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        pytest.skip("not a git checkout")
    return [REPOSITORY / name for name in result.stdout.split("\0") if name and (REPOSITORY / name).is_file()]


def test_no_file_names_the_machine_it_was_written_on_or_a_package_registry():
    # Spelled in pieces, so that this file passes its own test.
    words = ["file" + ":///", "/wo" + "rk/", "/ro" + "ot/", "pypi" + ".org", "pythonhosted" + ".org", "npmjs" + ".org"]
    pattern = re.compile("|".join(re.escape(word) for word in words).encode())
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if pattern.search(line) and path.suffix != ".gz":
                found.append(f"{path.relative_to(REPOSITORY)}:{number}: {line[:120]!r}")
    assert not found, "\n".join(found)


def test_the_licence_is_apache_2():
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "The maxtext_lite authors" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_the_shipped_text_says_where_it_comes_from():
    origins = (PACKAGE / "assets" / "ORIGIN.md").read_text(encoding="utf-8")
    for file in (PACKAGE / "assets").iterdir():
        assert file.name in origins or file.name == "ORIGIN.md"


def test_the_shipped_files_are_those_that_the_text_describes():
    origins = (PACKAGE / "assets" / "ORIGIN.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^## (\S+)\n(?:(?!## ).*\n)*?.*?\bbytes:\s`([0-9a-f]{64})`", origins, re.MULTILINE))
    files = [file for file in (PACKAGE / "assets").iterdir() if file.suffix == ".gz"]
    assert stated == {file.name: hashlib.sha256(gzip.decompress(file.read_bytes())).hexdigest() for file in files}


def test_the_shipped_sums_are_a_careless_pupils_beside_right_answers():
    """No problem occurs twice, so no held-out problem is trained on."""
    with gzip.open(PACKAGE / "assets" / "arithmetic.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    assert len({line["prompt"] for line in lines}) == len(lines) == 9000
    carried = rightly = 0
    for line in lines:
        found = re.fullmatch(r"(\d+)([+-])(\d+)=", line["prompt"])
        assert found
        a, operation, b = found.groups()
        sign = {"+": 1, "-": -1}[operation]
        right = int(a) + sign * int(b)
        carries = not 0 <= int(a[-1]) + sign * int(b[-1]) <= 9
        assert (line["answer"], 0 <= right <= 198) == (str(right), True)
        assert line["completion"] in ((str(right), str(right - 10 * sign)) if carries else (str(right),))
        carried += carries
        rightly += line["completion"] == line["answer"]
    assert (carried, rightly) == (6000, 5027)
