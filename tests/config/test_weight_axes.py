"""What logical axes imply about a weight, by hand."""

import pytest

from maxtext_lite.config.weight_axes import is_matrix, num_inputs, num_parts, unstacked


def test_the_axes_of_a_stack_are_dropped():
    assert unstacked(("repeats", "layers", "embed", "mlp")) == ("embed", "mlp")
    assert unstacked(("dense_layers", "norm")) == ("norm",)
    assert unstacked(("vocab", "embed")) == ("vocab", "embed")


@pytest.mark.parametrize(
    ("axes", "inputs"),
    [
        (("embed", "heads", "head_dim"), 1),
        (("heads", "head_dim", "embed"), 2),
        (("embed", "mlp"), 1),
        (("mlp", "embed"), 1),
        (("latent", "heads", "head_dim"), 1),
        (("embed", "latent"), 1),
        (("mlp", "lora_rank"), 1),
        (("heads", "head_dim", "lora_rank"), 2),
        (("lora_rank", "heads", "head_dim"), 1),
    ],
)
def test_matrices_and_how_many_dims_they_sum_over(axes, inputs):
    assert is_matrix(("layers", *axes))
    assert num_inputs(axes) == inputs


@pytest.mark.parametrize(
    "axes", [("layers", "norm"), ("vocab", "embed"), ("positions", "embed"), ("layers", "heads", "head_dim")]
)
def test_norms_tables_and_biases_are_no_matrices(axes):
    assert not is_matrix(axes)


def test_parts_by_hand():
    mesh = {"data": 2, "fsdp": 3, "tensor": 5, "expert": 7, "context": 11}
    assert num_parts("embed", mesh) == 3 * 7 * 11
    assert num_parts("expert_embed", mesh) == 3 * 11
    assert (num_parts("heads", mesh), num_parts("experts", mesh), num_parts("norm", mesh)) == (5, 7, 1)
    assert num_parts("layers", mesh) == 1
