"""What the logical axes of a parameter say about it."""


def unstacked(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The logical axes of one layer's parameter, from those of a stack of layers; any others as they are."""
    return tuple(axis for axis in axes if axis not in ("repeats", "layers", "dense_layers"))


def of_one(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The logical axes of one tensor, from those of a stack: of one layer's, and of experts' weights of one expert's.

    Dims of stacks stand before all others.
    """
    return tuple(axis for axis in unstacked(axes) if axis != "experts")


def is_matrix(axes: tuple[str, ...]) -> bool:
    """Whether a parameter multiplies vectors: not one of a norm, a bias or a table that is looked up in."""
    axes = unstacked(axes)
    contracted = {"embed", "expert_embed", "latent", "lora_rank"}
    return not contracted.isdisjoint(axes) and len(axes) > 1 and axes[0] not in ("vocab", "positions")


def num_inputs(axes: tuple[str, ...]) -> int:
    """How many of a matrix's dims, its first, it sums over; the others are its result's.

    Args:
      axes: of one layer's matrix, or of one expert's.
    """
    # Outputs of the others are one dim.
    return 1 if axes[0] in ("embed", "expert_embed", "latent", "lora_rank") else len(axes) - 1
