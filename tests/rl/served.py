"""The model of the test server, its clients for every interface, and access to its log of requests."""

import functools
import json
import urllib.request

import jax

from maxtext_lite.config import load_config
from maxtext_lite.models import Sampling
from maxtext_lite.parallel import tree_shardings
from maxtext_lite.rl.http_engine import HttpEngine
from maxtext_lite.rl.rollout import LocalEngine, Request
from maxtext_lite.rl.transfer import sampling_mesh
from maxtext_lite.training.state import make_plain_decoder
from tests.training.conftest import TINY

STOP, MOST = 3, 16
GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.8, top_k=40, top_p=0.95)
REQUESTS = [Request([5 + number, 40, 7], (0, number)) for number in range(6)]
CONFIG = load_config(None, [*TINY, "vocab_size=48", "initializer_range=0.4", "dataset_type=synthetic"])
MESH = sampling_mesh(jax.devices()[:2], {"data": 1, "fsdp": 2, "tensor": 1})


@functools.cache
def parameters(decoder, seed):
    """Parameters on a mesh, as a trainer has them."""
    return jax.jit(decoder.init, out_shardings=tree_shardings(MESH, decoder.axes))(jax.random.key(seed))


@functools.cache
def local_engine():
    return LocalEngine(
        make_plain_decoder(CONFIG), MESH, num_slots=4, max_prompt_tokens=MOST, max_new_tokens=MOST,
        stop_token_ids=[STOP], seed=0,
    )  # fmt: skip


def local_responses(params, sampling=GREEDY):
    engine = local_engine()
    engine.update(params, 0)
    return engine.generate(REQUESTS, sampling=sampling, max_new_tokens=MOST)


def engine_at(server, directory, kind="http", **how):
    """A client that does not wait long."""
    settings = {"stop_token_ids": [STOP], "seed": 0, "wait_seconds": 0.01, "attempts": 3} | how
    url = server if kind == "sglang" else f"{server}/v1"  # either will do
    return HttpEngine(kind, url, CONFIG, directory, **settings)


def generate(engine, sampling=GREEDY, requests=REQUESTS):
    return engine.generate(requests, sampling=sampling, max_new_tokens=MOST)


def misbehave(server, **how):
    body = json.dumps(how).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{server}/misbehave", body)) as answered:
        assert answered.status == 200


def heard(server):
    """The server's log of requests."""
    with urllib.request.urlopen(f"{server}/requests") as answered:
        return json.load(answered)
