"""What docs/parallelism.md says about experts."""

import re
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
from maxtext_lite.config.kernels import ROOM
from maxtext_lite.models.capacity import with_capacity
from maxtext_lite.models.dropless import dropless
from maxtext_lite.models.moe import ExpertShape, ExpertWeights, Routing
from maxtext_lite.parallel import MESH_AXES, make_mesh, sharding
from maxtext_lite.xla.hlo import collectives

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "parallelism.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## Mixture of experts") :].partition("\n## ")[0]


def _rows(heading):
    """Cells of the table whose first column has this heading."""
    block = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", SECTION, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block[1].splitlines()]


def test_every_family_can_be_planned():
    for family, keys in _rows("family"):
        overrides = keys.partition("`")[2].partition("`")[0].split()
        plan = make_plan(load_config(None, [*overrides, "ici_expert_parallelism=8"]), num_devices=64)
        assert plan.mesh["expert"] == 8, family


B, T, D, F, E, J = 8, 16, 6, 5, 8, 2


def _received(axis, factor):
    """Vectors of D that come over the expert axis to a device in the forward pass, for each of its own tokens.

    Of an exchange without limit, in its first round; the others are in a loop.
    """
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | {"expert": axis}, dict.fromkeys(MESH_AXES, 1), jax.devices()[:axis])
    shape = ExpertShape(E, J, F, capacity_factor=factor)
    weight_axes = [("experts", "expert_embed", "mlp")] * 2 + [("experts", "mlp", "expert_embed")]

    def array(axes, *sizes, dtype="float32"):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding(mesh, axes))

    rows = ("batch", "length", None)
    weights = [array(axes, E, *dims) for axes, dims in zip(weight_axes, ((D, F), (D, F), (F, D)), strict=True)]

    def forward(x, expert, share, weights):
        if factor is None:
            return dropless(x, expert, share, ExpertWeights(*weights), shape)
        return with_capacity(x, Routing(expert, share, {}), ExpertWeights(*weights), shape)[0]

    with jax.set_mesh(mesh):
        arguments = array(rows, B, T, D), array(rows, B, T, J, dtype="int32"), array(rows, B, T, J)
        jitted = jax.jit(forward, out_shardings=sharding(mesh, rows))
        compiled = jitted.lower(*arguments, weights).compile()
    elements = 0
    for found in collectives(compiled.as_text()):
        if found.in_loop:
            continue
        result = found.line.split(" = ")[1].partition(f" {found.kind}")[0]
        count = sum(np.prod([int(n) for n in s.split(",")]) for s in re.findall(rf"f32\[([\d,]*{D})\]", result))
        elements += count * {"all-gather": (axis - 1) / axis, "all-reduce": 0 if count == 0 else np.nan,
                             "all-to-all": (axis - 1) / axis}[found.kind]  # fmt: skip
    return elements / (B * T // axis * D)


@pytest.mark.parametrize("row", _rows("expert axis"), ids=lambda row: row[0])
def test_the_traffic_is_that_of_the_compiled_program(row):
    axis, without, with_slots = int(row[0]), float(row[1]), float(row[2])
    assert _received(axis, None) == without == min(2 * (axis - 1), 2 * float(ROOM) * J * (axis - 1) / axis)
    assert _received(axis, Fraction(5, 4)) == with_slots == 2 * 1.25 * J * (axis - 1) / axis
