"""Times the train step in target tokens a second, beside peers where they are installed, and prints ratios as JSON.

    python scripts/bench_train.py                       the 4-layer, d=256 Llama of docs/performance.md, on any device
    python scripts/bench_train.py --model 1b --apart    a 1B-class Llama at 4,096 tokens in bfloat16, for an accelerator
    python scripts/bench_train.py --model 8b --apart    Llama 3 8B at 8,192 tokens: 130 GB of weights and
                                                        optimizer state; --layers 12 of its 32 need 60 GB

Subjects take turns within one run, so that a slow minute of the machine falls on all of them; with --apart each has a
process of its own, one after the other, where the device's memory holds one only. `plain` is the same model written by
hand without any of our kernels; `torch` is transformers' Llama, by torch.compile on a GPU, where its attention is a
flash kernel. `mfu` counts the FLOPs of the model, recomputation left out, by both conventions: attention's full square,
and half of it, as a causal mask needs. `loop_overhead` is the whole training loop (data, metrics, logging) over the
bare compiled step, less 1, both by their medians.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Workload:
    """A Llama and its batch."""

    layers: int
    emb: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    length: int
    batch: int
    remat: str
    tiles: int

    @property
    def tokens(self) -> int:
        """Target tokens of a step."""
        return self.batch * self.length

    def flops(self, *, causal: bool) -> float:
        """Model FLOPs of a step: 6 per matmul weight and token, and attention's full square, or half of it."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.emb * (2 * width + 2 * kv_width) + 3 * self.emb * self.mlp
        attention = 12 * width * self.length / (2 if causal else 1)
        return self.tokens * (6 * (self.layers * layer + self.emb * self.vocab) + self.layers * attention)


WORKLOADS = {
    "small": Workload(4, 256, 4, 4, 64, 768, 8192, 512, 8, "minimal", 8),
    "1b": Workload(16, 2048, 16, 8, 128, 8192, 32768, 4096, 4, "save_qkv_proj", 8),
    "8b": Workload(32, 4096, 32, 8, 128, 14336, 128256, 8192, 1, "full", -1),
}

Step = Callable[[], None]
"""Runs one optimizer step and waits for it."""


def overrides(work: Workload, dtype: str) -> list[str]:
    """The workload as maxtext_lite's keys."""
    return [
        f"base_num_decoder_layers={work.layers}", f"base_emb_dim={work.emb}", f"base_num_query_heads={work.heads}",
        f"base_num_kv_heads={work.kv_heads}", f"head_dim={work.head_dim}", f"base_mlp_dim={work.mlp}",
        f"vocab_size={work.vocab}", f"max_target_length={work.length}", f"per_device_batch_size={work.batch}",
        f"remat_policy={work.remat}", f"num_vocab_tiling={work.tiles}", f"dtype={dtype}", "dataset_type=synthetic",
        "learning_rate=1e-4",
    ]  # fmt: skip


def ours(work: Workload, dtype: str) -> Step:
    """Our compiled train step on one device, alone."""
    import jax

    from maxtext_lite.config import load_config
    from maxtext_lite.parallel import MESH_AXES, accelerator_of, make_mesh, sharding
    from maxtext_lite.training.optimizer import learning_rate_schedule, make_optimizer
    from maxtext_lite.training.state import StepContext, init_state, make_decoder
    from maxtext_lite.training.step import TRAIN_BATCH_AXES, make_train_step

    config = load_config(None, overrides(work, dtype))
    ones = dict.fromkeys(MESH_AXES, 1)
    mesh = make_mesh(ones, ones, jax.devices()[:1])
    decoder = make_decoder(config, accelerator_of(jax.devices()[0]))
    parts = StepContext(decoder, make_optimizer(config, decoder.trained(decoder.axes)), mesh, config)
    state = init_state(parts, 0)
    schedule = learning_rate_schedule(config, last=config.steps)
    step = make_train_step(parts, schedule)
    tokens = np.random.default_rng(0).integers(0, work.vocab, (1, work.batch, work.length + 1), dtype=np.int32)
    shape = tokens[..., 1:].shape
    batch = {
        "tokens": tokens[..., :-1], "targets": tokens[..., 1:], "segments": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(work.length, dtype=np.int32), shape),
        "weights": np.ones(shape, np.float32),
    }  # fmt: skip
    batch = {name: jax.device_put(array, sharding(mesh, TRAIN_BATCH_AXES)) for name, array in batch.items()}
    with jax.set_mesh(mesh):
        compiled = step.lower(state, batch, None).compile()
    holder = [state]

    def run() -> None:
        holder[0], metrics = compiled(holder[0], batch, None)
        jax.block_until_ready(metrics)

    return run


def plain(work: Workload, dtype: str) -> Step:
    """The same Llama by hand: einsums, jax.nn.dot_product_attention, optax.adamw, automatic derivatives."""
    import jax
    import jax.numpy as jnp
    import optax

    keys = iter(jax.random.split(jax.random.key(0), 16))

    def normal(*sizes: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), sizes)

    L, D, N, K, H, F = work.layers, work.emb, work.heads, work.kv_heads, work.head_dim, work.mlp
    layers = {"q": normal(L, D, N, H), "k": normal(L, D, K, H), "v": normal(L, D, K, H), "o": normal(L, N, H, D),
              "gate": normal(L, D, F), "up": normal(L, D, F), "down": normal(L, F, D),
              "norm1": jnp.ones((L, D)), "norm2": jnp.ones((L, D))}  # fmt: skip
    params = {"table": normal(work.vocab, D), "head": normal(D, work.vocab), "norm": jnp.ones(D), "layers": layers}
    angle = np.arange(work.length)[:, None] / 10_000 ** (np.arange(0, H, 2) / H)
    cosine, sine = (jnp.asarray(f(angle), jnp.float32)[None, :, None] for f in (np.cos, np.sin))

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5) * scale).astype(x.dtype)

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1).astype(x.dtype)

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        w = {name: value if "norm" in name else value.astype(x.dtype) for name, value in w.items()}
        y = norm(x, w["norm1"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, w[name]) for name in "qkv")
        y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + jnp.einsum("btnh,nhd->btd", y, w["o"])
        y = norm(x, w["norm2"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    if work.remat != "none":
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, b2=0.95, weight_decay=0.1))

    def loss(params: dict, tokens: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(layer, params["table"][tokens[:, :-1]].astype(dtype), params["layers"])
        logits = (norm(x, params["norm"]) @ params["head"].astype(dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def train_step(params: dict, opt_state: tuple, tokens: jax.Array) -> tuple:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, work.vocab, (work.batch, work.length + 1)), jnp.int32)
    state = [params, jax.jit(optimizer.init)(params)]
    compiled = jax.jit(train_step, donate_argnums=(0, 1)).lower(*state, tokens).compile()

    def run() -> None:
        *state[:], value = compiled(*state, tokens)
        jax.block_until_ready(value)

    return run


def torch_peer(work: Workload, dtype: str) -> Step:
    """transformers' Llama in torch, autocast where the dtype is narrow."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.LlamaConfig(
        vocab_size=work.vocab,
        hidden_size=work.emb,
        intermediate_size=work.mlp,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        head_dim=work.head_dim,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(device)
    if device == "cuda":
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    ids = torch.randint(0, work.vocab, (work.batch, work.length), device=device)

    def run() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return run


SUBJECTS = {"ours": ours, "plain": plain, "torch": torch_peer}


def loop_seconds(work: Workload, dtype: str, steps: int) -> list[float]:
    """Seconds of each step of the whole training loop, from its own metrics, without the first few."""
    from maxtext_lite.config import load_config
    from maxtext_lite.training import train

    with tempfile.TemporaryDirectory() as directory:
        result = train(
            load_config(
                None,
                [
                    *overrides(work, dtype),
                    f"steps={steps + 3}",
                    "eval_interval=-1",
                    "enable_checkpointing=false",
                    f"base_output_directory={directory}",
                ],
            )
        )
        lines = (result.run_directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step_seconds"] for line in lines][3:]


def summary(work: Workload, seconds: list[float]) -> dict[str, float]:
    """Tokens a second: the slowest, the median and the fastest of the repeats."""
    rates = [work.tokens / s for s in seconds]
    return {"min": round(min(rates), 1), "median": round(statistics.median(rates), 1), "max": round(max(rates), 1)}


def measured(
    work: Workload, dtypes: Sequence[str], names: Sequence[str], repeats: int, *, loop: bool
) -> dict[str, Any]:
    """The report of subjects that run in turns."""
    import jax

    from maxtext_lite.batching.devices import device_of_kind

    kind = jax.devices()[0].device_kind
    device = device_of_kind(kind)
    report: dict[str, Any] = {"device": kind, "tokens_per_second": {}, "mfu": {}}
    for dtype in dtypes:
        steps = {name: SUBJECTS[name](work, dtype) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for run in steps.values():
            run()
        for _ in range(repeats):
            for name, run in steps.items():
                started = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - started)
        del steps
        report["tokens_per_second"][dtype] = {name: summary(work, times) for name, times in seconds.items()}
        if device is not None and (peak := device.peak(dtype)):
            report["mfu"][dtype] = {
                name: {
                    convention: round(work.flops(causal=convention == "causal") / min(times) / peak, 4)
                    for convention in ("full_attention", "causal")
                }
                for name, times in seconds.items()
            }
        if loop and "ours" in names:
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
                of_loop = statistics.median(loop_seconds(work, dtype, repeats))
            overhead = of_loop / statistics.median(seconds["ours"]) - 1
            report.setdefault("loop_overhead", {})[dtype] = round(overhead, 4)
    return report


def measured_apart(arguments: argparse.Namespace, dtypes: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """The same report of subjects that have a process each, one after the other."""
    report: dict[str, Any] = {}
    for name in names:
        command = [sys.executable, __file__, "--model", arguments.model, "--repeats", str(arguments.repeats)]
        command += ["--dtypes", ",".join(dtypes), "--subjects", name, *["--no-loop"] * arguments.no_loop]
        command += [] if arguments.layers is None else ["--layers", str(arguments.layers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        report.setdefault("device", found["device"])
        for part in ("tokens_per_second", "mfu"):
            for dtype, of_names in found[part].items():
                report.setdefault(part, {}).setdefault(dtype, {}).update(of_names)
        if "loop_overhead" in found:
            report["loop_overhead"] = found["loop_overhead"]
    return report


def main() -> None:
    """Runs the bench and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS, default="small")
    parser.add_argument("--layers", type=int, default=None, help="that many of the model's layers")
    parser.add_argument("--dtypes", default=None, help="default: float32,bfloat16 for small, bfloat16 for the others")
    parser.add_argument("--subjects", default=None, help=f"of {', '.join(SUBJECTS)}; default: what is installed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-loop", action="store_true", help="leave out loop_overhead")
    parser.add_argument("--apart", action="store_true", help="a process for each subject")
    arguments = parser.parse_args()
    work = WORKLOADS[arguments.model]
    if arguments.layers is not None:
        work = dataclasses.replace(work, layers=arguments.layers)
    dtypes = (arguments.dtypes or ("float32,bfloat16" if arguments.model == "small" else "bfloat16")).split(",")
    versions = {}
    for package in ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers", "tokamax"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    has_peer = {"torch", "transformers"} <= set(versions)
    names = [name for name in (arguments.subjects or ",".join(SUBJECTS)).split(",") if name != "torch" or has_peer]
    if arguments.apart:
        report = measured_apart(arguments, dtypes, names)
    else:
        report = measured(work, dtypes, names, arguments.repeats, loop=not arguments.no_loop)
    fastest = {
        dtype: {name: rate["max"] for name, rate in of.items()} for dtype, of in report["tokens_per_second"].items()
    }
    if "ours" in names:
        report["ratio_to"] = {
            dtype: {name: round(of["ours"] / of[name], 3) for name in names if name != "ours"}
            for dtype, of in fastest.items()
        }
    about = {"workload": dataclasses.asdict(work), "platform": platform.platform(), "cores": os.cpu_count()}
    print(json.dumps(about | {"versions": versions} | report, indent=2))


if __name__ == "__main__":
    main()
