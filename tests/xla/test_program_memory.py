"""What a compiled program holds is counted as its arrays are."""

import jax
import jax.numpy as jnp

from maxtext_lite.xla.program_memory import ProgramMemory


def test_arguments_outputs_and_what_is_donated():
    x, y = jnp.zeros((1000,)), jnp.zeros((10,))
    compiled = jax.jit(lambda x, y: (x + 1, y.sum()), donate_argnums=0).lower(x, y).compile()
    found = ProgramMemory.of(compiled)
    assert (found.arguments, found.aliased) == (4040, 4000)
    assert found.outputs >= 4004  # and the table of a tuple
    assert found.total == 40 + found.outputs + found.temporaries + found.generated_code
