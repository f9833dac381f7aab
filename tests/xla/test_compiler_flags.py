"""A run adds its compiler's flags to those that the environment names, and changes none of these."""

import os
import subprocess

import pytest

from maxtext_lite.analysis.described import _NOTHING_CAN_BE_TIMED
from maxtext_lite.batching.devices import device_named
from maxtext_lite.parallel.devices import (
    FLAGS,
    GPU_MEMORY,
    SCHEDULED_MEMORY,
    VARIABLES,
    Flag,
    set_compiler_flags,
    set_gpu_memory,
)
from tests.processes import environment, quick_python

ONE, TWO = (
    Flag("xla_one", "1", "for a test"),
    Flag("xla_one_more", "true", "for a test"),
)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "--xla_one=1 --xla_one_more=true"),
        ("--xla_one=5  --xla_other=2", "--xla_one=5 --xla_other=2 --xla_one_more=true"),
        ("--xla_one_more --xla_one=5", "--xla_one_more --xla_one=5"),
    ],
)
@pytest.mark.parametrize("compiler", VARIABLES)
@pytest.mark.fast
def test_flags_are_added_to_those_that_are_given_but_change_none(
    compiler, given, found, monkeypatch
):
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    if given is not None:
        monkeypatch.setenv(VARIABLES[compiler], given)
    set_compiler_flags(compiler, (ONE, TWO))
    assert os.environ[VARIABLES[compiler]] == found
    (other,) = set(VARIABLES.values()) - {VARIABLES[compiler]}
    assert other not in os.environ


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"XLA_CLIENT_MEM_FRACTION": "0.94"}),
        (
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"},
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"},
        ),
    ],
)
def test_jax_may_use_as_much_of_a_gpu_as_plans_do_unless_the_environment_says_otherwise(
    given, found, monkeypatch
):
    names = (
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
    )  # jaxlib refuses both at once
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    set_gpu_memory()
    assert {name: os.environ[name] for name in names if name in os.environ} == found
    # The scheduler is told only what jax may use: 80 % of the memory is its measure.
    assert os.environ.get("XLA_FLAGS") == (
        None if given else "--xla_gpu_memory_limit_slop_factor=115"
    )
    assert 0.8 * int(SCHEDULED_MEMORY.value) / 100 < float(GPU_MEMORY[1])
    h200 = device_named("h200", option="--device")  # nvidia-smi says 143,771 MiB
    assert float(GPU_MEMORY[1]) * 140.4 * 2**30 == pytest.approx(
        h200.memory_bytes, rel=0.01
    )


def test_this_jax_knows_every_flag_of_xla():
    """One that it does not know ends a process that starts jax."""
    flags = [
        f"--{flag.name}={flag.value}"
        for flag in (*FLAGS["gpu"], SCHEDULED_MEMORY, *_NOTHING_CAN_BE_TIMED)
    ]
    known, unknown = (
        subprocess.run(
            [*quick_python(), "-c", "import jax; print(jax.device_count())"],
            env=environment(devices=2) | {"XLA_FLAGS": " ".join(each)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        for each in (flags, [*flags, "--xla_gpu_no_such_flag=1"])
    )
    assert (known.returncode, known.stdout.strip()) == (0, "1")
    assert unknown.returncode != 0
    assert "xla_gpu_no_such_flag" in unknown.stderr
