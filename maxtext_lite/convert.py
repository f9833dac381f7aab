"""The command `convert`: a model from a Hugging Face directory, or to one."""

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxtext_lite.cli import ArgumentParser, local_path, run_command
from maxtext_lite.config import Config, UserError, load_config, write_resolved
from maxtext_lite.config.errors import writing
from maxtext_lite.config.hf.config import (
    has_hf_weights,
    hf_directory,
    model_keys,
    run_config_json,
    stored_dtype,
    tokenizer_keys,
)
from maxtext_lite.config.hints import key_hint
from maxtext_lite.config.json_file import read_object, user_path
from maxtext_lite.config.schema import MeshConfig

TAKEN = (*(key for key in MeshConfig.model_fields if key.startswith(("ici_", "dcn_"))), "dtype", "weight_dtype")
"""The keys that `convert` takes: the mesh that the parameters pass through, and number formats. And `merge_lora`."""


def main(argv: Sequence[str]) -> int:
    """Converts what the arguments name; returns the exit code.

    Raises:
      UserError: with every problem of the arguments, the directory or the model.
    """
    parser = ArgumentParser(
        prog="maxtext-lite convert",
        description=f"{__doc__} `import HF_DIR OUT` makes a directory like that of a run, for load_parameters_path, "
        "generate and export; `export RUN_DIR OUT` makes safetensors, config.json and tokenizer files; of a run with "
        "LoRA, unless merge_lora=true, its adapters as the PEFT library reads them.",
    )
    parser.keys = (*TAKEN, _MERGE)
    parser.add_argument("direction", choices=("import", "export"))
    parser.add_argument(
        "source", type=local_path, help="import: a Hugging Face directory; export: a run or an imported directory"
    )
    parser.add_argument("out", type=local_path, help="a directory that does not exist yet, or is empty")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="mesh keys, dtype, weight_dtype, merge_lora")
    arguments = parser.parse_intermixed_args(argv)
    for word in arguments.overrides:
        key, equals, _ = word.partition("=")
        if not equals or key not in (*TAKEN, _MERGE):
            raise UserError(
                f"'{word}' is not key=value with a key that convert takes.{key_hint(key, (*TAKEN, _MERGE))}"
            )
    source, out = arguments.source, arguments.out
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} is there already and not an empty directory. Name another one.")
    overrides = [word for word in arguments.overrides if not word.startswith(f"{_MERGE}=")]
    merge = _merge([word for word in arguments.overrides if word not in overrides])
    if arguments.direction == "export":
        _export(source, out, overrides, merge)
    elif merge is not None:
        raise UserError(f"{_MERGE}={str(merge).lower()} has no use in an import. Remove it.")
    else:
        _import(source, out, overrides)
    return 0


_MERGE = "merge_lora"


def _merge(words: list[str]) -> bool | None:
    """The last that is said of merge_lora; None where nothing is."""
    if not words:
        return None
    value = words[-1].partition("=")[2]
    if value not in ("true", "false"):
        raise UserError(f"{words[-1]} is neither true nor false. Nearest that work: {_MERGE}=true or {_MERGE}=false.")
    return value == "true"


def hf_config(directory: Path, overrides: Sequence[str] = ()) -> Config:
    """The config with which a Hugging Face directory's model is used: its architecture, tokenizer and number formats.

    Raises:
      UserError: it is not such a directory, or its model cannot be expressed.
    """
    if not has_hf_weights(directory):
        raise UserError(f"{directory} is not a Hugging Face directory: it has no config.json.")
    stored = stored_dtype(read_object(directory / "config.json"))
    formats = [f"weight_dtype={'bfloat16' if stored == 'bfloat16' else 'float32'}"]
    # Without a tokenizer there is no text; the model still takes tokens.
    tokens = [] if tokenizer_keys(directory) else ["dataset_type=synthetic", "tokenizer_type=byte"]
    return load_config(None, [f"load_parameters_path={directory}", *tokens, *formats, *overrides])


def _import(source: Path, out: Path, overrides: Sequence[str]) -> None:
    config = hf_config(source, overrides)
    import jax

    from maxtext_lite.hf import carry_files
    from maxtext_lite.training.parameter_files import load_parameters, save_parameters

    abstract = _abstract_params(config)
    params = load_parameters(source, abstract, "HF_DIR")
    if jax.process_index() == 0:
        with writing(out):
            carry_files(source, out / "hf")
            _write_config(out, config)
    save_parameters(out, params)
    _report(f"{_count(params):,} parameters in {out}, in {config.weight_dtype}")


def _write_config(out: Path, config: Config) -> None:
    """Writes config.yml, as that of a run whose directory this is."""
    tokenizer = {key: str(Path(value).absolute()) if key == "tokenizer_path" else value
                 for key, value in tokenizer_keys(out / "hf").items()}  # fmt: skip
    changed = {"load_parameters_path": "", "run_name": out.name or "imported", **tokenizer}
    changed["base_output_directory"] = str(out.parent)
    origins = dict(config.origins) | dict.fromkeys(changed, "convert import")
    write_resolved(config.model_copy(update=changed).with_origins(origins), out / "config.yml")


def _export(source: Path, out: Path, overrides: Sequence[str], merge: bool | None) -> None:
    if not (source / "config.yml").is_file():
        raise UserError(f"{source} is neither a run directory nor an imported one: it has no config.yml.")
    # The mesh is that of this machine, not of the one that trained.
    mesh = [f"{key}=1" for key in TAKEN if key.startswith(("ici_", "dcn_")) and key != "ici_fsdp_parallelism"]
    config = load_config(source / "config.yml", [*mesh, "ici_fsdp_parallelism=-1", *overrides])
    if merge is not None and not config.lora_rank:
        raise UserError(f"{_MERGE}={str(merge).lower()} has no use with {source}, whose lora_rank is 0. Remove it.")
    fields = run_config_json(
        source,
        config,
        num_positions=config.max_target_length,
        dtype=config.weight_dtype,
        end_of_text_id=_end_of_text_id(config),
    )
    import jax

    from maxtext_lite.hf import export_model
    from maxtext_lite.training.parameter_files import load_parameters

    abstract = _abstract_params(config)
    if config.lora_rank and not merge:
        keys = model_keys(fields, "config.json")
        _export_adapters(source, out, abstract, fields["model_type"], keys, config)
        return
    params = load_parameters(source, abstract, "RUN_DIR")
    with writing(out):
        export_model(out, params, fields, dtype=config.weight_dtype)
        if jax.process_index() == 0:
            _write_tokenizer(out, hf_directory(source), config)
    _report(f"{_count(params):,} parameters in {out}, as {fields['model_type']} in {config.weight_dtype}")


def _export_adapters(
    source: Path, out: Path, abstract: Any, kind: str, keys: Mapping[str, Any], config: Config
) -> None:
    import jax

    from maxtext_lite.hf import export_adapters, flat
    from maxtext_lite.training.parameter_files import PARAMETERS, load_adapters, whole_checkpoint

    mesh = jax.tree.leaves(abstract)[0].sharding.mesh
    found = load_adapters(whole_checkpoint(source, "RUN_DIR", PARAMETERS), mesh)
    if found is None:
        raise UserError(f"{source} has lora_rank={config.lora_rank} in its config.yml, but no adapters.")
    lora, adapters = found
    shapes = {path: tuple(leaf.shape) for path, leaf in flat(abstract).items()}
    with writing(out):
        export_adapters(out, adapters, lora, kind, keys, shapes=shapes, base=config.load_parameters_path)
    print(f"{_count(adapters):,} parameters of adapters in {out}, for {kind} in PEFT's layout, in float32")


def _tokenizer_file(config: Config) -> Path | None:
    """The file that `tokenizer_path` names, where it still lies there."""
    path = user_path(config.tokenizer_path) if config.tokenizer_path else None
    name = _TOKENIZER_FILES.get(config.tokenizer_type, "")
    file = path / name if path and path.is_dir() else path
    return file if file and file.is_file() else None


_TOKENIZER_FILES = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}


def _end_of_text_id(config: Config) -> int | None:
    from maxtext_lite.data import load_tokenizer

    there = config.tokenizer_type == "byte" or _tokenizer_file(config)
    end = load_tokenizer(config).end_of_text_id if there else None
    return end if end is not None and end < config.vocab_size else None


def _write_tokenizer(out: Path, carried: Path | None, config: Config) -> None:
    """Copies the tokenizer's files: those that were carried along, or the one that the config names."""
    from maxtext_lite.hf import carry_files

    if carried:
        carry_files(carried, out, but=["config.json"])
    file = _tokenizer_file(config)
    if file and not tokenizer_keys(out):
        carry_files(file.parent, out, but=["config.json", "generation_config.json"])
        shutil.copyfile(file, out / _TOKENIZER_FILES[config.tokenizer_type])


def _abstract_params(config: Config) -> Any:
    """Shapes and places of a model's parameters on this machine's devices.

    Raises:
      UserError: the mesh does not cover them.
    """
    import jax

    from maxtext_lite.batching.topology import resolve_mesh
    from maxtext_lite.config.violation import Violation
    from maxtext_lite.parallel import make_mesh, start_devices, tree_shardings
    from maxtext_lite.training.state import make_plain_decoder

    start_devices()
    sizes = resolve_mesh(config, jax.device_count())
    if isinstance(sizes, Violation):
        raise UserError(sizes.message)
    mesh = make_mesh(sizes.ici, sizes.dcn)
    decoder = make_plain_decoder(config)

    def laid_out(path: Any, leaf: Any, where: Any) -> Any:
        try:
            where.shard_shape(leaf.shape)
        except ValueError:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UserError(
                f"parameter {name} of shape {leaf.shape} cannot be split evenly over the mesh of {mesh.size} devices. "
                "Set ici_fsdp_parallelism=1 and ici_data_parallelism=-1: a copy on each."
            ) from None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    shardings = tree_shardings(mesh, decoder.axes)
    return jax.tree_util.tree_map_with_path(laid_out, decoder.abstract_params, shardings)


def _report(line: str) -> None:
    """Prints a line once, whatever the number of processes."""
    import jax

    if jax.process_index() == 0:
        print(line)


def _count(params: Any) -> int:
    import jax

    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


if __name__ == "__main__":
    sys.exit(run_command(main))
