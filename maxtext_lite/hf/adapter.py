"""An adapter of the PEFT library: its adapter_config.json, read into the LoRA keys, and its base model.

Like a config.json it decides its keys. A field that cannot be expressed, or that is not known to leave the numbers
unchanged, is refused by name.
Source: https://huggingface.co/docs/peft/package_reference/lora
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from maxtext_lite.config.bucket import local_copy
from maxtext_lite.config.errors import UserError, any_of, value_text
from maxtext_lite.config.hints import hub_hint
from maxtext_lite.config.json_file import check_file, is_directory, is_there, read_object, user_path
from maxtext_lite.hf.fields import TABLE, JsonObject, is_off
from maxtext_lite.hf.names import TABLES
from maxtext_lite.hf.safetensors import check_format

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
SIDE_BY_SIDE = "lora_targets"
"""The entry of the weights' metadata where an export names the weights with adapters of their own.

Those of one module then are side by side: the first columns of its B are for the first of them alone.
"""

_PICKLED = "adapter_model.bin"
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
_PREFIX = "base_model.model."
_MERGE = "Nearest that works: merge_and_unload of peft, and save that."
_COMPILED = "_orig_mod."
_WITHOUT_EFFECT = TABLE["adapters_without_effect"].split()


def _modules_of_layers() -> dict[str, tuple[str, ...]]:
    """The modules with a matrix in a layer of any family, each with the weights in it, in our names."""
    modules: dict[str, tuple[str, ...]] = {}
    for table in TABLES.values():
        for line in table.layer:
            module, is_weight, _ = line.tensor.partition("{layer}.")[2].partition(".weight")
            weights = tuple(path.rpartition("/")[2] for path in line.ours)
            if is_weight and weights[0] not in ("scale", "router", "shared_gate"):
                modules[module] = weights
    return modules


_MODULES = _modules_of_layers()


def _check_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"it is no regular expression ({error})") from None
    return text


_Pattern = Annotated[str, AfterValidator(_check_pattern)]
_Rank = Annotated[int, Field(ge=1, lt=2**31)]
_Alpha = Annotated[float, Field(gt=0, lt=1e30)]


class LoraFields(BaseModel, strict=True, extra="allow", frozen=True):
    """The fields of an adapter_config.json that change numbers, with PEFT's defaults.

    Of the ways to initialize, the base model is left unchanged by these; for pissa, olora and others peft subtracts the
    initial values from its weights.
    """

    peft_type: Literal["LORA"]
    r: _Rank = 8
    lora_alpha: _Alpha = 8
    use_rslora: bool = False
    init_lora_weights: Literal[True, False, "true", "false", "gaussian", "eva", "orthogonal"] = True
    rank_pattern: dict[_Pattern, _Rank] = {}
    alpha_pattern: dict[_Pattern, _Alpha] = {}
    target_modules: list[str] | _Pattern = []
    exclude_modules: list[str] | _Pattern = []
    layers_to_transform: list[int] | int = []
    layers_pattern: list[str] | _Pattern = []

    def scale(self, rank: int, alpha: float) -> float:
        """The factor of a product of matrices of this rank."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def leaves_out(self, module: str) -> str:
        """The field that makes PEFT give a module no adapter; "" if it gives one."""
        if self.exclude_modules and _is_among(module, self.exclude_modules):
            return "exclude_modules"
        if self.target_modules != "all-linear" and not _is_among(module, self.target_modules):
            return "target_modules"
        layers = [self.layers_to_transform] if isinstance(self.layers_to_transform, int) else self.layers_to_transform
        if not layers or isinstance(self.target_modules, str) or module in self.target_modules:
            return ""
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        for pattern in patterns or [r"[^.]*"]:
            found = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module)
            if found:
                return "" if int(found[1]) in layers else "layers_to_transform"
        return "layers_to_transform"


def _is_among(module: str, names: list[str] | str) -> bool:
    """Whether a pattern matches a module, or one of these names is its own or the end of it."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names)


class ModuleRank(NamedTuple):
    """The ranks of a module's matrices.

    Attributes:
      targets: the weights in it that have adapters, in our names.
      whole: of the matrices in the file.
      own: of the adapter of each weight; less than `whole` if the metadata names several that are side by side.
      factor: its scale over that of the whole adapter.
    """

    targets: tuple[str, ...]
    whole: int
    own: int
    factor: float


class Adapter(NamedTuple):
    """An adapter.

    Attributes:
      directory: of the adapter.
      base: the Hugging Face directory of its base model.
      rank: the largest rank of a weight; narrower adapters are padded with zeros, whose gradients are 0.
      alpha: a product is multiplied by alpha / rank, after `use_rslora` is taken into account.
      targets: the weights that it adapts, in the names of `lora_targets`.
      ranks: of the modules that its file has matrices for, by their names from the model's root.
      fields: its adapter_config.json.
    """

    directory: Path
    base: Path
    rank: int
    alpha: float
    targets: str
    ranks: dict[str, ModuleRank]
    fields: LoraFields

    @property
    def keys(self) -> JsonObject:
        """The LoRA keys that it decides."""
        return {"lora_rank": self.rank, "lora_alpha": self.alpha, "lora_targets": self.targets}


def adapter_of(path: str | Path) -> Adapter | None:
    """The adapter in this directory; None if it is not an adapter's.

    Raises:
      UserError: it cannot be expressed, or its files or its base model are missing; names the field.
    """
    root = local_copy(path, "load_parameters_path")
    there = [name for name in (CONFIG, WEIGHTS, _PICKLED) if is_there(root / name)]
    if not there:
        return None
    if CONFIG not in there:
        raise UserError(f"{root}: {there[0]} belongs to an adapter in PEFT's layout, whose {CONFIG} is not there.")
    if WEIGHTS not in there:
        pickled = f" {_PICKLED} is pickled, and could run any code." if _PICKLED in there else ""
        raise UserError(f"{root} is an adapter in PEFT's layout without {WEIGHTS}.{pickled}")
    stated = {name: value for name, value in read_object(root / CONFIG).items() if value is not None}
    fields = _checked(root, stated)
    base = _base(root, stated)
    modules, side_by_side = _modules(root / WEIGHTS)
    for module in modules:
        if not _targets(module):
            why = f"target_modules names {value_text(module)}, which is not a weight that can have adapters. {_MERGE}"
            raise UserError(f"{root / CONFIG}: {why}")
        if field := fields.leaves_out(module):
            why = f"excludes {value_text(module)}, but {WEIGHTS} has matrices for it."
            raise UserError(f"{root / CONFIG}: {field}={value_text(stated.get(field))} {why}")
    ranks = {module: _rank_of(module, fields, side_by_side) for module in modules}
    targets = {target for each in ranks.values() for target in each.targets}
    rank = max(each.own for each in ranks.values())
    alpha = fields.lora_alpha * (math.sqrt(fields.r) if fields.use_rslora else 1.0)
    if rank != fields.r:
        alpha = alpha * rank / fields.r
    return Adapter(root, base, rank, alpha, ",".join(sorted(targets)), ranks, fields)


def missing_base(path: str | Path) -> str | None:
    """The base model that an adapter's directory names, if it is not a directory here; None for everything else."""
    root = local_copy(path, "load_parameters_path")
    if not is_there(root / CONFIG):
        return None
    name = read_object(root / CONFIG).get("base_model_name_or_path")
    return None if _base_directory(root, name) else str(name or "")


def _checked(root: Path, stated: JsonObject) -> LoraFields:
    """The fields of an adapter_config.json.

    Raises:
      UserError: a field is wrong, or cannot be expressed.
    """
    problems: dict[str, str] = {}
    try:
        fields = LoraFields.model_validate(stated)
        for name, value in (fields.model_extra or {}).items():
            if name not in _WITHOUT_EFFECT and not is_off(value) and value not in ("", "none"):
                problems[name] = f"cannot be expressed. {_MERGE}"
    except ValidationError as error:
        fields = None
        problems = {str(detail["loc"][0]): f"is not read: {detail['msg']}." for detail in error.errors()}
    if fields is None or problems:
        where = root / CONFIG
        raise UserError([f"{where}: {name}={value_text(stated.get(name))} {why}" for name, why in problems.items()])
    return fields


def _rank_of(module: str, fields: LoraFields, side_by_side: list[str]) -> ModuleRank:
    rank = _matched(module, fields.rank_pattern, fields.r)
    alpha = _matched(module, fields.alpha_pattern, fields.lora_alpha)
    factor = fields.scale(rank, alpha) / fields.scale(fields.r, fields.lora_alpha)
    targets = _targets(module)
    own = tuple(target for target in targets if target in side_by_side)
    if own and rank % len(own) == 0:
        return ModuleRank(own, rank, rank // len(own), factor)
    return ModuleRank(targets, rank, rank, factor)


def _matched(module: str, patterns: Mapping[str, Any], usual: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name."""
    return next((value for end, value in patterns.items() if re.match(rf"(.*\.)?({end})$", module)), usual)


def _base(root: Path, stated: JsonObject) -> Path:
    name = stated.get("base_model_name_or_path")
    where = f"{root / CONFIG}: base_model_name_or_path={value_text(name)}"
    directory = _base_directory(root, name)
    if directory is None:
        hint = hub_hint(str(name or ""))
        raise UserError(f"{where} is not a directory here. Set it to the model that the adapter belongs to.{hint}")
    if is_there(directory / CONFIG):
        raise UserError(f"{where} is an adapter itself. Merge that one.")
    return directory


def _base_directory(root: Path, name: object) -> Path | None:
    if not name or not isinstance(name, str):
        return None
    return next((directory for directory in (user_path(name), root / name) if is_directory(directory)), None)


def _modules(file: Path) -> tuple[list[str], list[str]]:
    """The modules that a file has matrices for, sorted, and the weights that its metadata names."""
    check_file(file)
    names, metadata = check_format(file)
    if compiled := [name for name in names if _COMPILED in name]:
        raise UserError(
            f"{file} has {value_text(compiled[0])}, a name in a model that torch.compile wraps. Nearest that works: "
            f"save_pretrained of its _orig_mod, or the names without {_COMPILED}"
        )
    odd = [name for name in names if not (name.startswith(_PREFIX) and name.endswith(_SUFFIXES))]
    if odd or not names:
        what = value_text(any_of(odd[:3]) or "no tensors")
        raise UserError(f"{file} has {what}, where lora_A and lora_B are read. {_MERGE}")
    modules = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in names}
    targets = metadata.get(SIDE_BY_SIDE)
    return sorted(modules), targets.split(",") if targets else []


def _targets(module: str) -> tuple[str, ...]:
    """Our names of a module's weights; () if it is no matrix of a layer."""
    return _MODULES.get(re.sub(r"^.*?\.\d+\.", "", module), ())
