"""The files of a run other than checkpoints: written in place on a file system, spooled and uploaded for a bucket."""

import importlib.metadata
import json
import platform
import re
import subprocess
from pathlib import Path

import flax
import jax
import numpy as np
import optax
import pytest

from maxtext_lite.config import UserError, load_config
from maxtext_lite.hf import store_files
from maxtext_lite.training import run_files as module
from maxtext_lite.training.run_files import RunFiles, environment, has_checkpoints, run_directory, write_json
from tests.conftest import SIMULATED_DEVICES
from tests.source_tree import REPOSITORY


def test_on_a_file_system_files_are_where_they_are_written(tmp_path):
    files = RunFiles(tmp_path / "run")
    files.make()
    (files.directory / "metrics.jsonl").write_text("1\n")
    files.fetch()
    files.upload()
    files.close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "1\n"


def test_in_a_bucket_they_are_uploaded_whole_and_what_was_not_is_gone_at_the_next_start(bucket):
    """As after a kill: lines that were not uploaded belong to steps after the last checkpoint."""
    url = bucket / "run"
    killed, after = RunFiles(url), RunFiles(url)
    killed.make()
    killed.fetch()
    lines = killed.directory / "metrics.jsonl"
    (killed.directory / "tensorboard").mkdir()
    (killed.directory / "tensorboard" / "events").write_bytes(b"\0")
    lines.write_text("1\n")
    assert not (url / "metrics.jsonl").exists()
    killed.upload()
    assert (url / "metrics.jsonl").read_text() == "1\n"
    assert (url / "tensorboard" / "events").read_bytes() == b"\0"
    lines.write_text("1\n2\n")
    assert after.directory == killed.directory
    after.make()
    after.fetch()
    assert lines.read_text() == "1\n"
    with lines.open("a") as file:
        file.write("3\n")
    after.close()
    assert (url / "metrics.jsonl").read_text() == "1\n3\n"
    assert not after.directory.exists()


def test_what_an_earlier_start_stored_of_its_model_is_fetched_and_removed(bucket):
    """A template that is no longer in use would be taken for the run's."""
    config = load_config(None, ["base_output_directory=gs://bucket/x", "dataset_type=synthetic"])
    words, template = bucket / "run" / "hf" / "config.json", bucket / "run" / "hf" / "chat_template.jinja"
    for file in (words, template, bucket / "run" / "plan.json"):
        file.write_text("{}")
    files = RunFiles(bucket / "run")
    files.make()
    files.fetch()
    assert (files.directory / "hf" / "config.json").read_text() == "{}"
    store_files(config, files.directory / "hf")
    template.unlink()  # as somebody else may, too
    files.remove_gone()
    files.close()
    assert not words.exists()
    assert (bucket / "run" / "plan.json").exists()


def test_only_what_has_changed_is_uploaded(bucket):
    files = RunFiles(bucket / "run")
    files.make()
    files.fetch()
    for name in ("old", "new"):
        (files.directory / name).write_text("1")
    files.upload()
    (bucket / "run" / "old").write_text("not touched")
    (files.directory / "new").write_text("22")
    files.upload()
    assert (bucket / "run" / "old").read_text() == "not touched"
    assert (bucket / "run" / "new").read_text() == "22"


def test_a_bucket_that_is_not_there_is_one_line(bucket):
    config = load_config(None, ["base_output_directory=gs://nowhere/runs", "run_name=a"])
    with pytest.raises(UserError, match=r"^base_output_directory=gs://nowhere/runs/a cannot be reached: there is no"):
        has_checkpoints(run_directory(config))
    assert not has_checkpoints(bucket / "run")
    (bucket / "run" / "checkpoints" / "unfinished-1").write_text("-")
    assert has_checkpoints(bucket / "run")


def test_what_a_kill_left_half_written_is_removed_and_json_is_replaced_whole(tmp_path, monkeypatch):
    files = RunFiles(tmp_path)
    write_json(tmp_path / "plan.json", {"a": 1})
    (tmp_path / "hf").mkdir()
    for name in ("plan.json.1-abcd.partial", "hf/tokenizer.json.1-abcd.partial"):
        (tmp_path / name).write_text("{")
    files.fetch()
    monkeypatch.setattr("os.fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_json(tmp_path / "plan.json", {"a": 2})
    left = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"plan.json": '{\n  "a": 1\n}\n'}


def test_the_name_of_a_run_in_a_bucket_has_no_mark_of_a_pattern():
    """What follows # would be a generation: a resume would find none of the run's files."""
    config = load_config(None, ["base_output_directory=gs://bucket/runs", "run_name=a#1"])
    with pytest.raises(UserError, match=r"^run_name=a#1 has # in a path of a bucket.* Nearest that works: a_1\.$"):
        run_directory(config)


@pytest.mark.parametrize("mark", "*?[]\\")
def test_the_path_of_a_run_has_no_mark_of_a_pattern(mark: str):
    """Orbax would not find what was written below runs[1], and TensorStore would write a\\b as a/b."""
    for key, path in (("run_name", f"a{mark}1"), ("base_output_directory", f"/runs{mark}1")):
        nearest = path.replace(mark, "_")
        with pytest.raises(UserError) as refused:
            run_directory(load_config(None, [f"{key}='{path}'"]))
        assert str(refused.value) == (
            f"{key}={path} has {mark} in a path of checkpoints, where * ? [ ] \\ name other files. "
            f"Nearest that works: {nearest}."
        )
    assert run_directory(load_config(None, ["base_output_directory=/runs", "run_name=a#1"])) == Path("/runs/a#1")


def test_a_spool_that_another_user_made_is_not_used(bucket, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "maxtext_lite-4000000").mkdir()
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)
    with pytest.raises(PermissionError, match="belongs to another user"):
        RunFiles(bucket / "run").make()


def test_versions_are_those_that_are_imported():
    found = environment()
    imported = {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__, "numpy": np.__version__}
    assert imported.items() <= found["packages"].items()
    assert {"jaxlib", "orbax-checkpoint", "grain"} <= set(found["packages"])
    assert found["python"] == platform.python_version()
    assert found["platform"] == platform.platform()


def test_it_names_every_device_and_can_be_written():
    found = environment()
    assert found["devices"] == [jax.devices()[0].device_kind] * SIMULATED_DEVICES
    assert found["num_processes"] == 1
    assert json.loads(json.dumps(found)) == found


def test_the_commit_is_that_of_the_source_not_of_the_working_directory(tmp_path, monkeypatch):
    def git(*arguments):
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.chdir(tmp_path)
    checked_out = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    assert environment()["git_commit"] == (checked_out.stdout.strip() or None)

    source = tmp_path / "source" / "environment.py"
    source.parent.mkdir()
    monkeypatch.setattr(module, "__file__", str(source))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert environment()["git_commit"] is None  # an installed package has none

    git("init", "-q", str(source.parent))
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    git("-C", str(source.parent), *identity, "commit", "-q", "--allow-empty", "-m", "m")
    commit = environment()["git_commit"]
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
    assert commit == git("-C", str(source.parent), "rev-parse", "HEAD")


@pytest.mark.parametrize(
    "git",
    [
        None,  # not there
        "",  # an executable that is none
        "#!/nowhere/sh\n",
        "#!/bin/sh\nexit 3\n",
        "#!/bin/sh\nkill -SEGV $$\n",
        "#!/bin/sh\necho 'warning: HEAD is ambiguous'\n",
        "#!/bin/sh\nprintf '\\377\\376'\n",
        "#!/bin/sh\nsleep 20\n",
    ],
)
def test_without_a_git_that_answers_there_is_no_commit(git, tmp_path, monkeypatch):
    if git is not None:
        (tmp_path / "git").write_text(git)
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if "sleep" not in (git or "") else f"{tmp_path}:/bin")
    monkeypatch.setattr(module, "_SECONDS_FOR_GIT", 0.2)
    assert environment()["git_commit"] is None


def test_the_commit_of_a_checkout_that_ignores_the_source_is_not_its_own(tmp_path, monkeypatch):
    source = tmp_path / "venv" / "environment.py"
    source.parent.mkdir()
    source.touch()
    (tmp_path / ".gitignore").write_text("venv\n")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    monkeypatch.setattr(module, "__file__", str(source))
    assert environment()["git_commit"] is None


def test_a_package_that_is_not_installed_is_left_out(monkeypatch):
    real = importlib.metadata.version

    def version(package):
        if package == "grain":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    packages = environment()["packages"]
    assert "grain" not in packages
    assert packages["jax"] == jax.__version__
