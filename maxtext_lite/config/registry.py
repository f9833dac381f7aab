"""Tables of the names that a config can select, with the module of each, which is imported on use.

The core reaches every optional part of the library through this table, and no other way: a part whose folder is absent
is simply not there. Other packages add names through entry points, whose group is `maxtext_lite.KIND`:

    [project.entry-points."maxtext_lite.source"]
    parquet_stream = "their_package.source:KIND"    # a config.keys.SourceKind
"""

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from maxtext_lite.config.errors import UserError

_BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "attention": {
        "splash": "maxtext_lite.config.kernels:SPLASH",
        "tokamax_mosaic": "maxtext_lite.config.kernels:TOKAMAX_MOSAIC",
        "cudnn_flash": "maxtext_lite.config.kernels:CUDNN_FLASH",
        "pallas_mha": "maxtext_lite.config.kernels:PALLAS_MHA",
        "cudnn_masked": "maxtext_lite.config.kernels:CUDNN_MASKED",
        "dot_product": "maxtext_lite.config.kernels:DOT_PRODUCT",
    },
    "batch": {"rl": "maxtext_lite.post_training.batch:rl_batch"},
    "choose": {
        "split": "maxtext_lite.analysis.ranking:choose",
    },
    "config_provider": {"huggingface": "maxtext_lite.hf.directory:provide"},
    "estimate": {
        "activations": "maxtext_lite.analysis.memory:estimate_activations",
        "evaluation": "maxtext_lite.analysis.memory:evaluation_warnings",
        "memory": "maxtext_lite.analysis.memory:estimate_memory",
        "step": "maxtext_lite.analysis.expected:expected",
    },
    "diagnosis": {
        "nonfinite": "maxtext_lite.operations.nonfinite:origin_of_nonfinite",
        "out_of_memory": "maxtext_lite.analysis.smaller_step:refusal_of",
    },
    "documents": {"chat": "maxtext_lite.post_training.conversations:Renderer"},
    "fetch": {"prepared": "maxtext_lite.preparation.fetched:find_prepared"},
    "grouped_matmul": {
        "megablox": "maxtext_lite.kernels.grouped_matmul:on_tpu",
        "tokamax": "maxtext_lite.kernels.grouped_matmul:on_hopper",
    },
    "hook": {
        "goodput": "maxtext_lite.operations.goodput:GoodputHook",
        "memory": "maxtext_lite.operations.step_memory:MemoryHook",
        "trackers": "maxtext_lite.operations.trackers:TrackersHook",
        "profiler": "maxtext_lite.operations.profiler:ProfileHook",
        "kernel_check": "maxtext_lite.operations.kernel_check:KernelCheckHook",
        "advice": "maxtext_lite.analysis.advice_hook:AdviceHook",
        "spikes": "maxtext_lite.operations.spikes:SpikesHook",
    },
    "lock": {"lease": "maxtext_lite.operations.lock:hold"},
    "model_files": {"huggingface": "maxtext_lite.hf.carried:store_files_of_run"},
    "moments": {
        "float32": "maxtext_lite.kernels.moments:widen",
        "bfloat16": "maxtext_lite.kernels.moments:to_bfloat16",
        "int8": "maxtext_lite.kernels.moments:to_int8",
    },
    "objective": {
        "pretrain": "maxtext_lite.config.keys:PRETRAIN",
        "sft": "maxtext_lite.post_training.kinds:SFT",
        "dpo": "maxtext_lite.post_training.kinds:DPO",
        "grpo": "maxtext_lite.post_training.kinds:GRPO",
    },
    "observer": {"watchdog": "maxtext_lite.operations.watchdog:watchdog"},
    "parameters": {"huggingface": "maxtext_lite.hf.weights:open_parameters"},
    "quantization": {
        "int8": "maxtext_lite.kernels.eight_bits:INT8",
        "fp8": "maxtext_lite.kernels.eight_bits:FP8",
        "fp8_full": "maxtext_lite.kernels.eight_bits:FP8_FULL",
    },
    "rows": {"columns": "maxtext_lite.preparation.row_files:read_rows"},
    "run": {"post_train/rl.yml": "maxtext_lite.post_training.keys:RLRunConfig"},
    "source": {
        "text": "maxtext_lite.config.keys:TEXT",
        "array_record": "maxtext_lite.config.keys:PREPARED",
        "megatron": "maxtext_lite.preparation.megatron:MEGATRON",
        "synthetic": "maxtext_lite.config.keys:SYNTHETIC",
        "sft": "maxtext_lite.post_training.kinds:ANSWERS",
        "dpo": "maxtext_lite.post_training.kinds:PAIRS",
        "prompts": "maxtext_lite.post_training.kinds:PROMPTS",
        "arithmetic": "maxtext_lite.post_training.kinds:ARITHMETIC",
    },
}
"""`module:attribute` of each name of each kind.

- `attention`: a `Kernel` of config/kernels.py; `auto` takes the first that can run.
- `grouped_matmul`, `quantization`: kernels and number formats.
- `batch`: the batch of a kind of run whose rows are sampled; see `batching.batch.SampledBatch`.
- `choose`: the split of a batch for per_device_batch_size=auto.
- `config_provider`: a function from the directory of load_parameters_path to the keys that it decides; see
  `config.load.Provided`.
- `diagnosis`: a sentence on why a step was not finite, or on the nearest step that needs less memory.
- `documents`: what renders a prepared dataset's documents that are conversations.
- `estimate`: what a plan says about memory and the time of a step.
- `fetch`: a function from the path of a prepared dataset in a bucket to where it is read.
- `hook`: makes a hook, see `training.hooks`: the library's own, and for the key hooks those of other packages.
- `layer`: a `Layer` of config/weights.py, for layer_pattern; attention is no name here.
- `lock`: keeps two runs from one run directory.
- `model_files`: a function that keeps files about a model's tokens beside a run; see `training.run`.
- `moments`: from a state with float32 moments and a key to one with narrow ones; float32: back, without a key.
- `objective`, `source`: values of the keys objective and dataset_type, as config/keys.py describes them.
- `observer`: what follows a process from before jax; see `config.phases`.
- `parameters`: a function from a directory to its parameters; see `training.parameter_files.Reader`.
- `rows`: a function that reads the rows of files with columns, Parquet and Arrow.
- `run`: the config class of a kind of run, by the file below configs/ that is the base of its configs.
"""


class NotInstalled(UserError):
    """The object of a name is in a part of the library, or in a package, that is absent."""


def names(kind: str) -> tuple[str, ...]:
    """The names of a kind: ours in the order of the table, then those of other packages."""
    return tuple(_targets(kind))


def added_names(kind: str) -> tuple[str, ...]:
    """The names of a kind that other packages add."""
    return tuple(name for name in names(kind) if name not in _BUILT_IN.get(kind, {}))


def installed_names(kind: str) -> tuple[str, ...]:
    """The names of a kind whose modules are there. Imports none of them."""
    return tuple(name for name, target in _targets(kind).items() if is_there(target))


@cache
def is_there(target: str) -> bool:
    """Whether there is the module of a `module:attribute`. Imports none."""
    package, *below = target.partition(":")[0].split(".")
    if package != "maxtext_lite":
        return importlib.util.find_spec(package) is not None
    path = Path(__file__).parent.parent.joinpath(*below)  # a spec would import the packages above it
    return path.is_dir() or path.with_suffix(".py").is_file()


def is_installed(kind: str, name: str) -> bool:
    """Whether `load` would find the name. Imports it."""
    try:
        load(kind, name)
    except NotInstalled:
        return False
    return True


def load(kind: str, name: str) -> Any:
    """The object registered under a name.

    Raises:
      KeyError: no table has the name.
      NotInstalled: the module that holds it is absent.
    """
    target = _targets(kind)[name]
    try:
        return resolve(target)
    except NotInstalled as absent:
        raise NotInstalled(f"{kind} {name!r} {absent}") from None


def resolve(target: str) -> Any:
    """The object at `module:attribute`.

    Raises:
      NotInstalled: there is no such module, or a part of the library that it needs is absent.
      UserError: the module has no such attribute.
    """
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        absent = error.name or ""
        if f"{module_name}.".startswith(f"{absent}.") or absent.startswith("maxtext_lite."):
            raise NotInstalled(f"is not installed: there is no module {absent}.") from None
        raise
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UserError(f"the entry point {target} names nothing: {module_name} has no {attribute!r}.") from None


def load_installed(kind: str) -> list[Any]:
    """The objects of all names of a kind whose modules are there, in the order of `names`."""
    found: list[Any] = []
    for name in names(kind):
        try:
            found.append(load(kind, name))
        except NotInstalled:
            continue
    return found


@cache
def _targets(kind: str) -> Mapping[str, str]:
    targets = dict(_BUILT_IN.get(kind, {}))
    for point in entry_points(group=f"maxtext_lite.{kind}"):
        if targets.setdefault(point.name, point.value) != point.value:
            raise UserError(f"the entry point {point.value} has the name of another {kind}: {point.name}.")
    return targets
