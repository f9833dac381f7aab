"""examples/outside_package adds a source, an objective, a hook, a kernel and a layer through entry points alone."""

import itertools
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from maxtext_lite.batching import make_plan
from maxtext_lite.batching.parameters import count_parameters
from maxtext_lite.config import UserError, load_config, registry
from maxtext_lite.inference.decoding import cache_axes, decode, new_cache
from maxtext_lite.training import train
from maxtext_lite.training.state import make_plain_decoder
from tests.processes import quick_python, run_launched
from tests.run_directories import lines_of
from tests.source_tree import REPOSITORY

PACKAGE = REPOSITORY / "examples" / "outside_package"
RUN = [
    "vocab_size=264",
    "base_emb_dim=16",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=4",
    "base_mlp_dim=24",
    "base_num_decoder_layers=4",
    "max_target_length=24",
    "steps=2",
    "warmup_steps=1",
    "learning_rate=0.01",
    "matmul_precision=highest",
    "eval_interval=-1",
    "enable_checkpointing=false",
    "log_to=",
    "per_device_batch_size=-1",
    "global_batch_size=8",
    "tokenizer_type=byte",
    "dataset_type=counting",
    "objective=confident",
    "attention=plain",
    "hooks=tally",
    "layer_pattern=gated_recurrence,global",
]
STAGES = [
    "ici_pipeline_parallelism=2",
    "num_layers_per_pipeline_stage=2",
    "num_pipeline_microbatches=2",
    "ici_data_parallelism=2",
    "ici_fsdp_parallelism=2",
]
COMMAND = """
import runpy, sys
from maxtext_lite.config import registry
sys.path += sys.argv.pop(1).split(":")
registry._targets.cache_clear()
runpy.run_module("maxtext_lite.train", run_name="__main__", alter_sys=True)
"""
"""The command `train` with the package, whose paths are its first argument."""


@pytest.fixture(autouse=True, scope="module")
def package(tmp_path_factory):
    """The folder of an installed package that is only metadata, beside that of its code."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "outside_parts-0.1.dist-info"
    metadata.mkdir()
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-parts\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {target}" for name, target in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    paths = [str(site), str(PACKAGE)]
    sys.path += paths
    registry._targets.cache_clear()
    yield paths
    for path in paths:
        sys.path.remove(path)
    registry._targets.cache_clear()


def decoder_and_params(*keys):
    decoder = make_plain_decoder(load_config(None, [*RUN, *keys]))
    rng = np.random.default_rng(0)
    return decoder, jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32) / 4,
        decoder.abstract_params,
    )


@pytest.mark.parametrize(
    ("key", "wrong", "nearest"),
    [
        ("layer_pattern", "gated_recurence,global", "gated_recurrence,global"),
        ("attention", "plane", "plain"),
        ("hooks", "tali", "tally"),
        ("dataset_type", "countin", "counting"),
        ("objective", "confidnt", "confident"),
        ("base_num_decoder_layers", "1", "layer_pattern=gated_recurrence"),
    ],
)
def test_a_name_that_no_package_has_is_refused_with_the_nearest(key, wrong, nearest):
    with pytest.raises(UserError, match=nearest):
        load_config(None, [*RUN, f"{key}={wrong}"])


def test_parts_of_examples_are_refused_by_name():
    config = load_config(None, [*RUN, "ici_context_parallelism=2", "attention=auto"])
    with pytest.raises(
        UserError, match=r"layer_pattern=.*gated_recurrence, which needs whole"
    ):
        make_plan(config, num_devices=2)


def test_the_plan_has_the_layers_parameters_flops_and_memory():
    configs = [
        load_config(None, [*RUN, f"layer_pattern={kind}"])
        for kind in ("gated_recurrence", "global")
    ]
    recurrent, attending = (make_plan(config, num_devices=1) for config in configs)
    parameters = [count_parameters(config).total for config in configs]
    channels, layers, length = 16, 4, 24
    # Three projections in and one out with a bias, against queries, out and half as many keys and values.
    more = layers * (4 * 16 * channels + channels - 3 * 16 * channels)
    assert parameters[0] - parameters[1] == more
    pairs = layers * length**2 / 2
    own = layers * length * 12 * channels
    matrices = 6 * length * layers * 16 * channels
    assert recurrent.flops_per_example - attending.flops_per_example == pytest.approx(
        matrices + own - 6 * pairs * 2 * channels
    )
    names = {line.name for line in recurrent.memory.lines}
    assert "gated_recurrence of a layer" in names
    assert "attention of a layer" not in names


def test_a_packed_row_has_the_logits_of_its_documents_alone():
    decoder, params = decoder_and_params()
    tokens = np.random.default_rng(1).integers(0, 264, (1, 24)).astype(np.int32)
    cuts = [0, 5, 6, 20]  # the last four tokens are padding

    def row(first, last):
        length = last - first
        segments, positions = np.ones((1, length), np.int32), np.arange(length)[None]
        return tokens[:, first:last], segments, positions

    segments, positions = np.zeros((2, 1, 24), np.int32)
    for number, (first, last) in enumerate(itertools.pairwise(cuts), start=1):
        segments[:, first:last] = number
        positions[:, first:last] = np.arange(last - first)
    hidden = jax.jit(decoder.hidden)
    packed = hidden(params, tokens, segments, positions)
    for first, last in itertools.pairwise(cuts):
        alone = hidden(params, *row(first, last))
        assert_allclose(packed[:, first:last], alone, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("pattern", ["gated_recurrence,global", "gated_recurrence"])
def test_decoding_with_the_state_gives_the_logits_of_the_whole_sequence(pattern):
    """Prompts of different lengths, padded with junk that must change no state."""
    decoder, params = decoder_and_params(f"layer_pattern={pattern}")
    lengths, total = np.array([3, 7]), 12
    tokens = np.random.default_rng(0).integers(0, 264, (2, total)).astype(np.int32)
    prompt = np.where(np.arange(7)[None] < lengths[:, None], tokens[:, :7], 30)
    position = np.tile(np.arange(total), (2, 1))

    @jax.jit
    def run(params):
        whole = decoder.hidden(params, tokens, np.ones_like(tokens), position)
        none = jnp.zeros(2, jnp.int32)
        cache = new_cache(decoder, 2, 16)
        _, cache = decode(decoder, params, prompt, none, cache, jnp.asarray(lengths))

        def step(cache, added):
            at = lengths + added
            token_B1 = jnp.asarray(tokens)[jnp.arange(2), at][:, None]
            x, cache = decode(decoder, params, token_B1, at, cache)
            return cache, x[:, 0]

        return whole, jax.lax.scan(step, cache, jnp.arange(total - 7))[1]

    whole, steps = jax.device_get(run(params))
    for row, length in enumerate(lengths):
        assert_allclose(
            steps[:, row], whole[row, length : length + 5], rtol=1e-4, atol=1e-5
        )
    axes = jax.tree.map(len, cache_axes(decoder), is_leaf=lambda x: type(x) is tuple)
    cache = jax.eval_shape(lambda: new_cache(decoder, 2, 16))
    assert axes == jax.tree.map(lambda x: x.ndim, cache)


def losses(directory):
    return [line["loss"] for line in lines_of(directory)]


def test_a_run_is_the_same_however_it_is_split_also_over_two_hosts(tmp_path, package):
    def words(name, *keys):
        return [*RUN, f"base_output_directory={tmp_path}", f"run_name={name}", *keys]

    train(load_config(None, words("alone", "ici_data_parallelism=8")))
    train(load_config(None, words("stages", *STAGES)))
    keys = words("hosts", "ici_data_parallelism=2", "ici_tensor_parallelism=2")
    command = [*quick_python(), "-c", COMMAND, ":".join(package), *keys]
    ended = run_launched(command, processes=2, devices=2)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "outside_parts: 384 targets in this start" in ended.stdout
    for name in ("stages", "hosts"):
        split, alone = losses(tmp_path / name), losses(tmp_path / "alone")
        assert_allclose(split, alone, rtol=1e-5)
