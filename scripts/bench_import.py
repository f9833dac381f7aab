"""Measures the host's peak memory and the time of reading a Hugging Face directory.

    python scripts/bench_import.py                              Llama 3 8B on 8 simulated devices (22 GB of memory)
    python scripts/bench_import.py --layers 4                   the same, with fewer layers
    python scripts/bench_import.py --model mixtral-8x7b --layers 1 --mesh fsdp=4,tensor=2

Makes a checkpoint of zeros in bfloat16, in sparse files that take no disk, reads it onto the mesh, and prints a table
in Markdown. Simulated devices keep their parts in the memory of the process too; what remains when these are taken
off is the host's own, which must stay below 1.3 x the largest tensor and one device's part. Exit code 1 where it
does not.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_MIB = 2**20


def main() -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b", help="a file in configs/models/")
    parser.add_argument("--layers", type=int, default=0, help="decoder layers; 0: as many as the model has")
    parser.add_argument("--mesh", default="fsdp=8", help="sizes of mesh axes, as fsdp=4,tensor=2")
    arguments = parser.parse_args()
    sizes = {axis: int(size) for axis, _, size in (part.partition("=") for part in arguments.mesh.split(","))}
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={math.prod(sizes.values())}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as directory:
        return _measure(Path(directory), arguments.model, arguments.layers, sizes)


def _measure(directory: Path, model: str, layers: int, sizes: dict[str, int]) -> int:
    import jax

    from maxtext_lite.config import load_config
    from maxtext_lite.hf.weights import load_hf_parameters
    from maxtext_lite.parallel import MESH_AXES, make_mesh, tree_shardings
    from maxtext_lite.training.state import make_decoder

    more = [f"base_num_decoder_layers={layers}"] if layers else []
    overrides = [f"model_name={model}", "dataset_type=synthetic", "weight_dtype=bfloat16", *more]
    config = load_config(None, [*overrides, "attention=dot_product"])
    decoder = make_decoder(config, "cpu")
    mesh = make_mesh(dict.fromkeys(MESH_AXES, 1) | sizes, dict.fromkeys(MESH_AXES, 1))
    abstract = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        decoder.abstract_params,
        tree_shardings(mesh, decoder.axes),
    )
    largest, whole = _make_checkpoint(directory, config, abstract)
    share = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * 2 for leaf in jax.tree.leaves(abstract))
    before = _reset_peak()
    begin = time.perf_counter()
    params = load_hf_parameters(directory, abstract, "checkpoint")
    seconds = time.perf_counter() - begin
    on_devices = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    own, allowed = _status("VmHWM") - before - on_devices, 1.3 * largest + share
    print("| checkpoint | largest tensor | one device's part | devices | host's own peak | allowed | seconds |")
    print("|---|---|---|---|---|---|---|")
    amounts = [f"{amount / _MIB:,.0f} MiB" for amount in (whole, largest, share, on_devices, own, allowed)]
    print(f"| {' | '.join(amounts)} | {seconds:.1f} |")
    return int(own > allowed)


def _make_checkpoint(directory: Path, config: Any, abstract: Any) -> tuple[int, int]:
    """Writes config.json and sparse files of about 5 GB; returns the bytes of the largest tensor, and of all."""
    from maxtext_lite.hf.config_json import config_json, model_keys
    from maxtext_lite.hf.names import TABLES, entries_of, flat, model_of

    fields = config_json(config, max_position_embeddings=8192, dtype="bfloat16", original={})
    (directory / "config.json").write_text(json.dumps(fields))
    model = model_of(model_keys(fields, "config.json"))
    shapes = {path: tuple(leaf.shape) for path, leaf in flat(abstract).items()}
    entries = entries_of(TABLES[fields["model_type"]], shapes, model, "checkpoint")
    tensors = {name: entry.name.their_shape for entry in entries for name, _, _ in entry.tensor_names()}
    weight_map: dict[str, str] = {}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + 2 * math.prod(shape)]}
        end += 2 * math.prod(shape)
        weight_map[name] = f"model-{len(set(weight_map.values())) + (not header[name]['data_offsets'][0])}.safetensors"
        if end > 5e9 or name == list(tensors)[-1]:
            text = json.dumps(header).encode()
            with (directory / weight_map[name]).open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.truncate(8 + len(text) + end)
            header, end = {}, 0
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    num_bytes = [2 * math.prod(shape) for shape in tensors.values()]
    return max(num_bytes), sum(num_bytes)


def _reset_peak() -> int:
    """Resets the kernel's record of this process's peak memory; returns its memory now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())
