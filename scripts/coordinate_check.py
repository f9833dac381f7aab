#!/usr/bin/env python3
"""Draws docs/images/coordinate_check.svg: activations in the first steps, by width and depth.

python scripts/coordinate_check.py [DIRECTORY]

Models of several sizes train on the bundled text, on one device. With CompleteP all have activations of one size.
"""

import contextlib
import functools
import io
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from draw_batch_size import IMAGES, curve, svg, words

from maxtext_lite import load_config
from maxtext_lite.models import Decoder
from maxtext_lite.models.decoder import Stream, empty_aux
from maxtext_lite.training import Callback, train

WIDTHS = (32, 64, 128, 256)
DEPTHS = (2, 4, 8, 16)
STEPS = (1, 3, 10)
PARAMETERIZATIONS: dict[str, list[str]] = {
    "standard": [],
    "CompleteP": [f"mup_base_emb_dim={WIDTHS[0]}", f"mup_base_num_layers={DEPTHS[0]}"],
}
QUANTITIES = ("stream", "logits")
KEYS = """
head_dim=8 max_target_length=64 global_batch_size=8 per_device_batch_size=-1 warmup_steps=0 learning_rate=0.01
learning_rate_schedule=constant eval_interval=-1 log_to= enable_checkpointing=false
"""

Sizes = dict[str, list[float]]
"""The mean size of each of QUANTITIES after each of STEPS."""


def mean_sizes(decoder: Decoder, params: Any, token_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean |x| of the last layer's output and of the logits."""
    position_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1]), token_BT.shape)
    x_BTD = decoder.embed(params, token_BT, position_BT)
    stream = Stream(x_BTD, jnp.ones_like(token_BT), position_BT, empty_aux(decoder.shape, *token_BT.shape))
    x_BTD = decoder.layers(params["layers"], stream).x_BTD
    logits_BTV = decoder.logits(params, decoder.final_norm(params, x_BTD))
    return jnp.mean(jnp.abs(x_BTD)), jnp.mean(jnp.abs(logits_BTV))


class Activations(Callback):
    """Measures activations on fixed tokens after each of STEPS."""

    wants_state = True

    def __init__(self) -> None:
        self.found: Sizes = {name: [] for name in QUANTITIES}

    def start(self, run, state, counts, say):
        del state, counts, say
        token_BT = jnp.asarray(np.random.default_rng(0).integers(32, 127, (8, 64), np.int32))
        self._measure = jax.jit(functools.partial(mean_sizes, run.decoder, token_BT=token_BT))

    def after_step(self, step, record, state):
        del record
        if step in STEPS:
            for name, size in zip(QUANTITIES, self._measure(state.params), strict=True):
                self.found[name].append(float(f"{size:.3g}"))


def measure(width: int, depth: int, keys: Sequence[str]) -> Sizes:
    """The activations of a model of this width and depth."""
    heads = width // 8
    sizes = f"base_emb_dim={width} base_num_query_heads={heads} base_num_kv_heads={heads} base_mlp_dim={3 * width}"
    overrides = [*KEYS.split(), *sizes.split(), f"base_num_decoder_layers={depth}", f"steps={STEPS[-1]}", *keys]
    activations = Activations()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
        train(load_config(None, [*overrides, f"base_output_directory={directory}"]), callbacks=[activations])
    return activations.found


def panel(left: float, top: float, title: str, sizes: Sequence[int], found: Sequence[Sequence[float]]) -> Iterator[str]:
    """Mean |x| over width or depth, both logarithmic, from 0.01 to 1,000; a curve for each of STEPS."""
    width, height = 150.0, 120.0

    def y(size: float) -> float:
        return top + height * (3 - math.log10(size)) / 5

    yield words(left, top - 10, title, "ink small strong")
    for power in range(-2, 4):
        yield curve(f"M{left},{y(10.0**power):.1f}h{width}", "rule")
        yield words(left - 6, y(10.0**power) + 4, f"1e{power}", "quiet small end")
    step = width / (len(sizes) - 1)
    for number, size in enumerate(sizes):
        yield words(left + number * step, top + height + 16, str(size), "quiet small middle")
    for number in range(len(STEPS)):
        points = [f"{left + place * step:.1f},{y(of_size[number]):.1f}" for place, of_size in enumerate(found)]
        yield curve(f"M{'L'.join(points)}", f"s{number}")


def draw(found: dict[str, dict[str, list[Sizes]]]) -> str:
    """The picture of `main`'s measurements, by parameterization and by width or depth."""
    body: list[str] = []
    for row, (name, by_axis) in enumerate(found.items()):
        column = 0
        for axis, sizes in (("width", WIDTHS), ("depth", DEPTHS)):
            for quantity in QUANTITIES:
                series = [each[quantity] for each in by_axis[axis]]
                title = f"{name}: {quantity} by {axis}"
                body += panel(56 + 206 * column, 40 + 190 * row, title, sizes, series)
                column += 1
    for number, step in enumerate(STEPS):
        body.append(curve(f"M{56 + 110 * number},402h24", f"s{number}"))
        body.append(words(86 + 110 * number, 406, f"step {step}", "ink small"))
    title = "Mean size of activations in the first steps, by width and depth"
    description = "Without CompleteP stream and logits grow with width and depth; with it their curves are flat."
    return svg("coordinate_check", title, description, 856, 420, body)


def main(argv: Sequence[str]) -> int:
    """Measures, prints and draws; the picture goes to docs/images, or to the directory given as an argument."""
    directory = Path(argv[0]) if argv else IMAGES
    found: dict[str, dict[str, list[Sizes]]] = {}
    for name, keys in PARAMETERIZATIONS.items():
        widths = [measure(width, DEPTHS[0], keys) for width in WIDTHS]
        depths = [widths[0], *(measure(WIDTHS[0], depth, keys) for depth in DEPTHS[1:])]
        found[name] = {"width": widths, "depth": depths}
        for axis, sizes in (("width", WIDTHS), ("depth", DEPTHS)):
            for size, each in zip(sizes, found[name][axis], strict=True):
                texts = [f"{quantity} {' '.join(f'{x:.3g}' for x in values)}" for quantity, values in each.items()]
                print(f"{name}  {axis} {size}  {'  '.join(texts)}", flush=True)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "coordinate_check.svg").write_text(draw(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
