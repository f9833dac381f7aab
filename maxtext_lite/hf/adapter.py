"""An adapter of the PEFT library: its adapter_config.json, read into the LoRA keys, and its base model.

Like a config.json it decides its keys. A field that cannot be expressed, or that is not known to leave the numbers
unchanged, is refused by name.
Source: https://huggingface.co/docs/peft/package_reference/lora
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from maxtext_lite.config.bucket import local_copy
from maxtext_lite.config.errors import UserError, any_of, value_text
from maxtext_lite.config.hints import hub_hint
from maxtext_lite.config.json_file import check_file, is_directory, is_there, read_object, user_path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The two files of an adapter."""
SIDE_BY_SIDE = "lora_targets"
"""The entry of the weights' metadata with which an export names the weights that have adapters of their own.

Those of one module then are side by side: the first columns of its B are for the first of them alone.
"""

_LARGEST_ALPHA = 1e30  # of the key lora_alpha
_PICKLED = "adapter_model.bin"
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
_PREFIX = "base_model.model."
_MERGE = "Nearest that works: merge_and_unload of peft, and save that."
_COMPILED = "_orig_mod."
_KNOWN = (
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
)  # fmt: skip
_KEEP_THE_MODEL = ("true", "false", "gaussian", "eva", "orthogonal")
# Initial values that leave the base model unchanged: for pissa, olora and others peft subtracts them from its weights.
_MODULES = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "qkv_proj": "query,key,value",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate,up",
    "q_a_proj": "query_down", "q_b_proj": "query_up", "kv_a_proj_with_mqa": "kv_down", "kv_b_proj": "key_up,value_up",
    "c_attn": "query,key,value", "attn.c_proj": "out", "c_fc": "up", "mlp.c_proj": "down", "fc1": "up", "fc2": "down",
    "query_key_value": "query,key,value", "self_attn.dense": "out", "attention.dense": "out", "dense_h_to_4h": "up",
    "dense_4h_to_h": "down",
}  # fmt: skip


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
      fields: its adapter_config.json, without nulls.
    """

    directory: Path
    base: Path
    rank: int
    alpha: float
    targets: str
    ranks: dict[str, ModuleRank]
    fields: dict[str, Any]

    @property
    def keys(self) -> dict[str, Any]:
        """The LoRA keys that it decides."""
        return {"lora_rank": self.rank, "lora_alpha": self.alpha, "lora_targets": self.targets}

    def as_stated(self, lora_rank: object) -> "Adapter":
        """The adapter with this rank, if its file may have those of the weights of each module side by side.

        Exports once did not say so in the metadata, and runs state the rank of one.
        """
        rank = self.fields.get("r", 8)
        if (
            lora_rank != rank
            or lora_rank == self.rank
            or any(
                each.own % rank or each.own // rank > len(each.targets) or each.factor != 1
                for each in self.ranks.values()
            )
        ):
            return self
        return self._replace(rank=rank, alpha=_alpha(self.fields))

    def adapts(self, module: str) -> bool:
        """Whether the file must have matrices for a module, by PEFT's rules."""
        return not _left_out(module, self.fields)


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
        pickled = f" {_PICKLED} is pickled: reading it can run whatever code its author put there." * (len(there) > 1)
        raise UserError(f"{root} is an adapter in PEFT's layout without {WEIGHTS}.{pickled}")
    fields = {name: value for name, value in read_object(root / CONFIG).items() if value is not None}
    problems = _problems(fields)
    base = _base(root, fields, problems)
    if problems:
        raise UserError([f"{root / CONFIG}: {problem}" for problem in problems])
    modules, stated_targets = _modules(root / WEIGHTS)
    unknown = [module for module in modules if not _targets(module)]
    if unknown:
        problems.append(
            f"target_modules has {value_text(unknown[0])}, which is no weight of layers that has adapters. {_MERGE}"
        )
    for module in () if unknown else modules:
        if field := _left_out(module, fields):
            how = "does not name" if field == "target_modules" else "leaves out"
            problems.append(
                f"{field}={value_text(fields.get(field))} {how} {value_text(module)}, which {WEIGHTS} has matrices for."
            )
            break
    if problems:
        raise UserError([f"{root / CONFIG}: {problem}" for problem in problems])
    ranks = {module: _rank_of(module, fields, stated_targets) for module in modules}
    names = {target for each in ranks.values() for target in each.targets}
    rank, stated = max(each.own for each in ranks.values()), int(fields.get("r", 8))
    scaled = _alpha(fields)
    alpha = scaled if rank == stated else scaled * rank / stated
    return Adapter(root, base, rank, alpha, ",".join(sorted(names)), ranks, fields)


def missing_base(path: str | Path) -> str | None:
    """The base model that an adapter's directory names, if it is not a directory here; None for everything else."""
    root = local_copy(path, "load_parameters_path")
    if not is_there(root / CONFIG):
        return None
    name = read_object(root / CONFIG).get("base_model_name_or_path")
    return None if _base_directory(root, name) else str(name or "")


def _alpha(fields: dict[str, Any]) -> float:
    """The lora_alpha of r, after `use_rslora` is taken into account."""
    return float(fields.get("lora_alpha", 8)) * (math.sqrt(int(fields.get("r", 8))) if fields.get("use_rslora") else 1)


def _rank_of(module: str, fields: dict[str, Any], side_by_side: Sequence[str]) -> ModuleRank:
    rank, alpha = int(fields.get("r", 8)), float(fields.get("lora_alpha", 8))
    whole = int(_matched(module, fields.get("rank_pattern", {}), rank))
    own_alpha = _matched(module, fields.get("alpha_pattern", {}), alpha)
    scale, usual = (
        a / (math.sqrt(r) if fields.get("use_rslora") else r) for a, r in ((own_alpha, whole), (alpha, rank))
    )
    targets = tuple(_targets(module).split(","))
    own = tuple(target for target in targets if target in side_by_side)
    if own and whole % len(own) == 0:
        return ModuleRank(own, whole, whole // len(own), scale / usual)
    return ModuleRank(targets, whole, whole, scale / usual)


def _matched(module: str, patterns: dict[str, Any], usual: float) -> float:
    """The value of the first pattern that matches the end of a module's name."""
    return next((value for end, value in patterns.items() if re.match(rf"(.*\.)?({end})$", module)), usual)


def _problems(fields: dict[str, Any]) -> list[str]:
    """The fields of an adapter_config.json that are wrong or cannot be expressed, each in a sentence."""
    problems: list[str] = []

    def refuse(name: str, why: str) -> None:
        problems.append(f"{name}={value_text(fields.get(name))} {why}")

    if fields.get("peft_type") != "LORA":
        refuse("peft_type", "is not read: it must be LORA.")
        return problems
    for name, value in fields.items():
        usual = value is False or value in ([], {}, "", "none")
        if name not in _KNOWN and not usual:
            refuse(name, f"cannot be expressed. {_MERGE}")
    rank = fields.get("r", 8)
    if type(rank) is not int or not 1 <= rank < 2**31:
        refuse("r", "is not an integer of at least 1.")
        return problems
    alpha = fields.get("lora_alpha", 8)
    if type(alpha) not in (int, float) or not 0 < alpha < _LARGEST_ALPHA:
        refuse("lora_alpha", "is not a number above 0.")
        return problems
    if not isinstance(fields.get("use_rslora", False), bool):
        refuse("use_rslora", "is not true or false.")
    if str(fields.get("init_lora_weights", True)).lower() not in _KEEP_THE_MODEL:
        refuse("init_lora_weights", f"changes the model: it must be {any_of(_KEEP_THE_MODEL)}. Convert it with peft.")
    for name, kinds, above in (("rank_pattern", (int,), 2**31), ("alpha_pattern", (int, float), _LARGEST_ALPHA)):
        patterns = fields.get(name, {})
        if not isinstance(patterns, dict) or not all(
            _is_pattern(end) and type(each) in kinds and 0 < each < above
            for end, each in cast("dict[str, Any]", patterns).items()
        ):
            what = "numbers above 0" if float in kinds else "integers of at least 1"
            refuse(name, f"is not an object of {what} by module.")
    for name in ("exclude_modules", "layers_pattern"):
        names = fields.get(name, [])
        if not (isinstance(names, str) and _is_pattern(names)) and not _all_are(names, str):
            refuse(name, "is not a list of names or a pattern.")
    if type(fields.get("layers_to_transform", 0)) is not int and not _all_are(fields["layers_to_transform"], int):
        refuse("layers_to_transform", "is not a list of layers' numbers.")
    return problems


def _all_are(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(type(each) is kind for each in cast("list[Any]", values))


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _base(root: Path, fields: dict[str, Any], problems: list[str]) -> Path:
    name = fields.get("base_model_name_or_path")
    if directory := _base_directory(root, name):
        if is_there(directory / CONFIG):
            problems.append(f"base_model_name_or_path={value_text(name)} is an adapter itself. Merge that one.")
        return directory
    problems.append(
        f"base_model_name_or_path={value_text(name)} is not a directory here. Set it in that file to the Hugging Face "
        f"directory of the model that the adapter belongs to.{hub_hint(str(name or ''))}"
    )
    return root


def _base_directory(root: Path, name: object) -> Path | None:
    if not name or not isinstance(name, str):
        return None
    return next((directory for directory in (user_path(name), root / name) if is_directory(directory)), None)


def _modules(file: Path) -> tuple[tuple[str, ...], list[str]]:
    """The modules that a file has matrices for, sorted, and the weights that its metadata names."""
    check_file(file)
    try:
        with file.open("rb") as opened:
            header = json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), 10**8)))
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not a safetensors file, or is damaged or cut off ({value_text(error)}).") from None
    names = dict(cast("dict[str, Any]", header))
    about = names.pop("__metadata__", {})
    targets = cast("dict[str, Any]", about).get(SIDE_BY_SIDE) if isinstance(about, dict) else None
    if compiled := [name for name in names if _COMPILED in name]:
        raise UserError(
            f"{file} has {value_text(compiled[0])}, a name in a model that torch.compile wraps. Nearest that works: "
            f"save_pretrained of its _orig_mod, or the names without {_COMPILED}"
        )
    odd = [name for name in names if not (name.startswith(_PREFIX) and name.endswith(_SUFFIXES))]
    if odd or not names:
        way_out = f" {_MERGE}" if odd else ""
        what = value_text(any_of(odd[:3]) or "no tensors")
        raise UserError(f"{file} has {what}, where lora_A and lora_B are read.{way_out}")
    modules = tuple(sorted({name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in names}))
    return modules, targets.split(",") if isinstance(targets, str) else []


def _targets(module: str) -> str:
    """Our names of a module's weights; "" if it is unknown."""
    parts = module.split(".")
    return _MODULES.get(parts[-1]) or _MODULES.get(".".join(parts[-2:]), "")


def _left_out(module: str, fields: dict[str, Any]) -> str:
    """The field by which PEFT gives a module no adapter; "" if it gives it one."""
    excluded = cast("str | list[Any]", fields.get("exclude_modules") or [])
    if re.fullmatch(excluded, module) if isinstance(excluded, str) else _ends(module, excluded):
        return "exclude_modules"
    targets = fields.get("target_modules")
    if isinstance(targets, str):
        is_named = targets == "all-linear" or (_is_pattern(targets) and re.fullmatch(targets, module))
        return "" if is_named else "target_modules"
    names = cast("list[Any]", targets) if isinstance(targets, list) else []
    if not _ends(module, names):
        return "target_modules"
    layers = fields.get("layers_to_transform", [])
    if layers == [] or module in names:
        return ""
    patterns = cast("str | list[str]", fields.get("layers_pattern") or [])
    for pattern in ([patterns] if isinstance(patterns, str) else patterns) or [r"[^.]*"]:
        if found := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
            numbers = [layers] if isinstance(layers, int) else layers
            return "" if int(found[1]) in numbers else "layers_to_transform"
    return "layers_to_transform"


def _ends(module: str, names: list[Any]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)
