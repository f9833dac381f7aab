"""Wrong kernels are told from right ones, and a run with a wrong one is refused."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.models import Scoring
from maxtext_lite.models.attention import attention
from maxtext_lite.operations import kernel_comparison
from maxtext_lite.operations.kernel_check import KernelCheckHook
from maxtext_lite.operations.kernel_comparison import compare

T, N, K, H = 256, 4, 2, 16
SEGMENT = np.array([[1] * 150 + [2] * 90 + [0] * 16])


@jax.custom_vjp
def _key_gradient_off(k):
    return k


_key_gradient_off.defvjp(lambda k: (k, None), lambda _, g: (1.2 * g,))


def kernels():
    """A right kernel, and one for each planted mistake."""
    right = functools.partial(attention, kernel="dot_product", strategy="ring")
    late = (np.arange(T) >= 128)[None, :, None, None]
    return {
        "right": lambda q, k, v: right(q, k, v, SEGMENT),
        "ignores documents": lambda q, k, v: right(q, k, v, np.ones_like(SEGMENT)),
        "scale of groups": lambda q, k, v: right(
            q, k, v, SEGMENT, scoring=Scoring(scale=(H * N // K) ** -0.5)
        ),
        "dk": lambda q, k, v: right(q, _key_gradient_off(k), v, SEGMENT),
        "past 128 tokens": lambda q, k, v: right(
            jnp.where(late, 0.8 * q, q), k, v, SEGMENT
        ),
    }


def test_each_planted_mistake_is_beyond_its_bound_and_what_is_right_is_not():
    """In bfloat16, whose bound is the wider one."""
    dtype = "bfloat16"
    plain = kernels()["right"]
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(1, T, heads, H)).astype(jnp.dtype(dtype))
        for heads in (N, K, K)
    ]

    @jax.jit
    def all_of_them(*arrays):
        least = kernel_comparison.LEAST[dtype]
        return {
            name: compare(kernels()[name], plain, arrays, least, jax.random.key(0))
            for name in kernels()
        }

    found = {
        name: np.asarray(numbers) for name, numbers in all_of_them(*arrays).items()
    }
    beyond = {
        name: [bool(error > bound) for error, bound in numbers]
        for name, numbers in found.items()
    }
    planted = {  # in the result, dq, dk and dv
        "right": [False, False, False, False],
        "ignores documents": [True, True, True, True],
        "scale of groups": [True, True, True, True],
        "dk": [False, False, True, False],
        "past 128 tokens": [True, True, True, True],
    }
    assert beyond == planted, found


@pytest.fixture
def begun(setup, rows, tmp_path):
    """A function that checks the kernels of a run whose decoder has an attention kernel of that name."""
    about = tmp_path / "environment.json"
    about.write_text('{"python": "3"}')

    def begin(name):
        it = setup("optimizer=sgd")
        decoder = types.SimpleNamespace(
            shape=dataclasses.replace(it.decoder.shape, attention=name)
        )
        note = lambda **found: about.write_text(json.dumps(found))  # noqa: E731
        parts, said = dataclasses.replace(it.parts, decoder=decoder), []
        run = types.SimpleNamespace(parts=parts, note_environment=note)
        hook = KernelCheckHook()
        hook.start(run, None, None, said.append)
        with jax.set_mesh(it.mesh):
            hook.before_first_step({name: array[None] for name, array in rows.items()})
        return said

    return begin, about


def test_a_run_with_a_wrong_kernel_does_not_begin_and_its_errors_are_kept(
    begun, monkeypatch
):
    def without_documents(q, k, v, segment, *, kernel, **how):
        if kernel == "splash":
            segment = jnp.ones_like(segment)
        return attention(q, k, v, segment, kernel="dot_product", **how)

    monkeypatch.setattr(kernel_comparison, "attention", without_documents)
    begin, about = begun
    with pytest.raises(UserError) as caught:
        begin("splash")
    (problem,) = caught.value.problems
    assert problem.startswith(
        "attention=splash is further from plain arithmetic than its bound, in result and dq and "
    )
    assert problem.endswith("Use attention=dot_product.")
    errors = json.loads(about.read_text())["kernels"]["attention=splash"]
    assert errors.keys() == {"result", "dq", "dk", "dv"}
    assert min(error / bound for error, bound in errors.values()) > 10
