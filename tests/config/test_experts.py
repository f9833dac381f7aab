"""The kernel that experts' matmuls get on each platform."""

import importlib.util

import pytest

from maxtext_lite.config.experts import grouped_matmul_kernel


@pytest.mark.parametrize(("platform", "dtype", "tokamax", "kernel"), [
    ("cpu", "bfloat16", True, "ragged_dot"),
    ("tpu", "bfloat16", True, "megablox"),
    ("gpu", "bfloat16", True, "tokamax"),
    ("gpu", "float16", True, "tokamax"),
    ("gpu", "float32", True, "blocks"),
    ("gpu", "bfloat16", False, "blocks"),
])  # fmt: skip
def test_each_platform_has_its_kernel(platform, dtype, tokamax, kernel, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if tokamax else None)
    assert grouped_matmul_kernel(platform, dtype) == kernel
