"""Conversion of Hugging Face directories to run directories, and of runs or their adapters to Hugging Face's format."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import jax

from maxtext_lite.batching.topology import resolve_mesh
from maxtext_lite.config import Config, Refusal, UserError, load_config, write_resolved
from maxtext_lite.config.bucket import absolute, any_path
from maxtext_lite.config.json_file import read_object
from maxtext_lite.config.keys import MeshConfig, ModelConfig
from maxtext_lite.config.types import WhichParameters
from maxtext_lite.config.weights import MTP_LAYERS
from maxtext_lite.hf.adapter import CONFIG, adapter_of, missing_base
from maxtext_lite.hf.carried import carry_own_tokens, carry_tokens, end_of_text_of, store_files
from maxtext_lite.hf.config_json import model_keys, stored_dtype
from maxtext_lite.hf.directory import TOKENIZER_KEYS, hf_directory, run_config_json, tokenizer_keys, tokenizer_values
from maxtext_lite.hf.fields import JsonObject
from maxtext_lite.hf.maxtext_checkpoint import load_maxtext_parameters, maxtext_dtype, maxtext_items
from maxtext_lite.hf.model_directory import config_of_run, hf_config
from maxtext_lite.hf.names import flat, shapes_of
from maxtext_lite.hf.peft import export_adapters
from maxtext_lite.hf.weights import export_model
from maxtext_lite.parallel import Params, make_mesh, on_first_host, start_devices
from maxtext_lite.training.arrays import num_elements
from maxtext_lite.training.parameter_files import (
    load_adapters,
    load_parameters,
    parameters_in,
    save_parameters,
)
from maxtext_lite.training.state import abstract_on_mesh, make_plain_decoder

MESH_KEYS = tuple(key for key in MeshConfig.model_fields if key.startswith(("ici_", "dcn_")))
"""The keys of the mesh that converts parameters."""


def import_directory(source: Path, out: Path, overrides: Sequence[str]) -> str:
    """Converts a Hugging Face directory, an adapter's directory or a MaxText checkpoint to a run directory.

    Args:
      overrides: for a MaxText checkpoint, also the Model keys.
    Returns:
      A summary of the conversion.
    Raises:
      UserError: the directory, its model or the mesh is wrong, or `out` cannot be written.
    """
    items = maxtext_items(source)
    if items is not None:
        return _import_maxtext(items, out, overrides)
    of_maxtext = {*TOKENIZER_KEYS, *ModelConfig.model_fields} - {"mtp_num_layers"}
    stated = [word for word in overrides if word.partition("=")[0] in of_maxtext]
    if stated:
        raise UserError(f"{stated[0]} has no effect with {source}: it is for a checkpoint of MaxText.")
    adapter = adapter_of(source)
    base = adapter.base if adapter else source
    config = hf_config(base, overrides)
    params = load_parameters(source, _abstract_params(config), "HF_DIR")
    if config.mtp_num_layers and MTP_LAYERS not in params:
        key = f"mtp_num_layers={config.mtp_num_layers}"
        raise UserError(f"{key}: {base} has no such layers to import. Nearest that works: mtp_num_layers=0.")

    def write() -> None:
        tokens = tokenizer_values(str(source), {})  # an adapter may have its own
        store_files(config.model_copy(update=tokens), out / "hf", paths=[source])
        _write_config(out, config)

    on_first_host(out, write)
    save_parameters(out, params)
    merged = f", with the adapter of {source} merged" if adapter else ""
    return f"{num_elements(params):,} parameters in {out}, in {config.weight_dtype}{merged}"


def _import_maxtext(items: Path, out: Path, overrides: Sequence[str]) -> str:
    usual = [f"weight_dtype={maxtext_dtype(items)}"]
    if not any(word.startswith(TOKENIZER_KEYS) for word in overrides):
        usual += ["dataset_type=synthetic", "tokenizer_type=byte"]
    config = load_config(None, [*usual, *overrides])
    params = load_maxtext_parameters(items, _abstract_params(config), config)
    on_first_host(out, lambda: _write_config(out, config))
    save_parameters(out, params)
    return f"{num_elements(params):,} parameters of MaxText in {out}, in {config.weight_dtype}"


def _write_config(out: Path, config: Config) -> None:
    """Writes config.yml as if `out` were a run's directory."""
    changed = {
        "load_parameters_path": "",
        "run_name": out.name or "imported",
        "base_output_directory": str(out.parent),
        **tokenizer_keys(out.absolute() / "hf"),
    }
    origins = dict(config.origins) | dict.fromkeys(changed, "convert import")
    out.mkdir(parents=True, exist_ok=True)
    write_resolved(config.model_copy(update=changed).with_origins(origins), out / "config.yml")


def export_directory(
    source: Path,
    out: Path,
    overrides: Sequence[str],
    *,
    merge_lora: bool | None = None,
    parameters: WhichParameters = "trained",
) -> str:
    """Converts a run directory, or an imported one, to a Hugging Face directory; returns a summary.

    The weights have the number format of the Hugging Face directory that the model came from, unless weight_dtype is
    among the overrides; those of a model that came from none have the run's.

    Args:
      merge_lora: for a run with LoRA, whether to merge the adapters into the model; otherwise they are exported alone,
        in PEFT's format.
    Raises:
      UserError: the directory or the mesh is wrong, no family expresses its model, or `out` cannot be written.
    """
    if not (source / "config.yml").is_file():
        raise UserError(f"{source} is neither a run directory nor an imported one: it has no config.yml.")
    # The mesh is this machine's, not that of the training run.
    mesh = [f"{key}={-1 if key == 'ici_fsdp_parallelism' else 1}" for key in MESH_KEYS]
    config = config_of_run(source, [*mesh, *overrides])
    if merge_lora is not None and not config.lora_rank:
        merge = f"merge_lora={str(merge_lora).lower()}"
        raise UserError(f"{merge} has no effect with {source}, whose lora_rank is 0. Remove it.")
    dtype, why = _export_dtype(source, config, overrides)
    fields = run_config_json(
        source,
        config,
        num_positions=config.max_target_length,
        dtype=dtype,
        end_of_text_id=end_of_text_of(config),
    )
    if config.lora_rank:  # the sum of weights and adapters is rounded to the exported format, not to the run's
        config = config.model_copy(update={"weight_dtype": dtype})
    abstract = _abstract_params(config)
    if config.lora_rank and not merge_lora:
        return _export_adapters(source, out, abstract, fields, config, parameters)
    params = load_parameters(source, abstract, "RUN_DIR", parameters)
    # Before the weights, which take time: what cannot be read is refused.
    on_first_host(out, lambda: carry_tokens(config, source, out))
    written = export_model(out, params, fields, dtype=dtype)
    return f"{num_elements(written):,} parameters in {out}, as {fields['model_type']} in {dtype}{why}"


def _export_dtype(source: Path, config: Config, overrides: Sequence[str]) -> tuple[str, str]:
    """The number format of exported weights, and a clause on it if it is not the run's."""
    trained = config.weight_dtype
    carried = hf_directory(source)
    if carried is None or any(word.startswith("weight_dtype=") for word in overrides):
        return trained, ""
    stored = stored_dtype(read_object(carried / "config.json"))
    if stored not in ("float32", "bfloat16") or stored == trained:
        return trained, ""
    return stored, f", that of the model it came from (weight_dtype={trained} keeps the run's)"


def _export_adapters(
    source: Path, out: Path, abstract: Params, fields: JsonObject, config: Config, parameters: WhichParameters
) -> str:
    kind = fields["model_type"]
    keys = model_keys(fields, "config.json")
    mesh = jax.tree.leaves(abstract)[0].sharding.mesh
    directory, item = parameters_in(source, "RUN_DIR", parameters)
    found = load_adapters(directory, mesh, item)
    if found is None:
        raise UserError(f"{source} has lora_rank={config.lora_rank} in its config.yml, but no adapters.")
    lora, adapters = found
    shapes = shapes_of(flat(abstract))
    base, note = _base(config)

    def write() -> None:
        export_adapters(out, adapters, lora, kind, keys, shapes=shapes, base=base)
        carry_own_tokens(config, source, Path(base), out)

    on_first_host(out, write)
    return f"{num_elements(adapters):,} parameters of adapters in {out}, for {kind} in PEFT's layout, in float32{note}"


def _base(config: Config) -> tuple[str, str]:
    """The model of a run's adapters, "" if it has no path; and a line for the user if it is a run."""
    path = config.load_parameters_path
    if not path:
        return "", ""
    if (gone := missing_base(path)) is not None:
        return gone, ""
    adapter = adapter_of(path)
    base = absolute(adapter.base if adapter else any_path(path, "load_parameters_path"))
    if not (base / "config.yml").is_file():
        return str(base), ""
    export = f"convert export {shlex.quote(str(base))} BASE"
    return str(base), f"\nTheir base is a run: {export}, and name BASE as base_model_name_or_path in {CONFIG}"


def _abstract_params(config: Config) -> Params:
    """Shapes and shardings of a model's parameters on this machine's devices.

    Raises:
      UserError: the mesh does not cover them.
    """
    start_devices()
    sizes = resolve_mesh(config, jax.device_count())
    if isinstance(sizes, Refusal):
        raise UserError(sizes.message)
    mesh = make_mesh(sizes.ici, sizes.dcn)
    uneven = f"the mesh of {mesh.size} devices. Set ici_fsdp_parallelism=1 and ici_data_parallelism=-1: a copy on each."
    return abstract_on_mesh(make_plain_decoder(config), mesh, uneven)
