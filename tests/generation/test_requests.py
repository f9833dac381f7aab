"""The keys of a mesh become its sizes by axis; a value that no run could use is refused."""

import pytest
from pydantic import ValidationError

from maxtext_lite.generation.requests import EvaluateConfig, GenerateConfig


def test_the_keys_of_the_mesh_are_its_sizes_by_axis():
    asked = GenerateConfig(ici_tensor_parallelism=2, ici_data_parallelism=3)
    assert asked.mesh == {"tensor": 2, "fsdp": 1, "data": 3}
    assert EvaluateConfig(ici_fsdp_parallelism=4).mesh == {"tensor": 1, "fsdp": 4}


@pytest.mark.parametrize(("kind", "key", "value"), [
    (GenerateConfig, "temperature", -1.0), (GenerateConfig, "temperature", 1e-40),
    (GenerateConfig, "temperature", 1e7), (GenerateConfig, "top_p", 0.0), (GenerateConfig, "max_new_tokens", 0),
    (GenerateConfig, "seed", 2**32), (EvaluateConfig, "max_length", 1), (EvaluateConfig, "rows_at_once", 0),
    (EvaluateConfig, "dtype", "int8"), (EvaluateConfig, "prompt", "x"),
])  # fmt: skip
def test_a_value_that_nothing_can_be_done_with_is_refused(kind, key, value):
    with pytest.raises(ValidationError, match=key):
        kind(**{key: value})
