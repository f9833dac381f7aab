"""From files and `key=value` to a Config: base.yml, the model's file, the user's files, the command line."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from maxtext_lite.config.errors import Refusal, UserError, WrongKind, did_you_mean, value_text
from maxtext_lite.config.hf_layer import directory_origin, directory_values
from maxtext_lite.config.lora import unused_problem
from maxtext_lite.config.rl_rules import unused_arithmetic
from maxtext_lite.config.rules import length_problem, rule_problems, warmup_problem
from maxtext_lite.config.schema import RL_KEYS, Config, ModelConfig, RLRunConfig, keys_of
from maxtext_lite.config.yaml_text import YamlValue, parse_mapping, parse_value

_PACKAGE = Path(__file__).resolve().parent.parent
_COMMAND_LINE = "command line"
_ROOT_FILE = "base.yml"
_RL_FILE = "post_train/rl.yml"
_ITS_BATCH = "where batch_size, num_generations and micro_batch_size say what a step trains on"
_OF_NO_USE_IN_RL = {
    "per_device_batch_size": _ITS_BATCH,
    "gradient_accumulation_steps": _ITS_BATCH,
    "global_batch_size": _ITS_BATCH,
    "enable_rampup_batch_size": _ITS_BATCH,
    "expansion_factor_real_data": _ITS_BATCH,
    "enable_diloco": _ITS_BATCH,
    "num_epochs": _ITS_BATCH,
    "eval_per_device_batch_size": "where rollout_slots says how many responses are under way",
    "grain_worker_count": "whose prompts are read by the process that trains",
}


@dataclass(frozen=True)
class _Layer:
    """Some values that come from one place; later layers win."""

    origin: str
    values: dict[str, YamlValue]


class ConfigError(UserError):
    """A config is wrong.

    Attributes:
      refusals: what is wrong with it.
      mended: a config with legal values in place of the wrong ones, whose other problems can then be found;
        None where files are missing or unreadable.
    """

    def __init__(self, refusals: Sequence[Refusal], mended: Config | None) -> None:
        self.refusals = tuple(refusals)
        self.mended = mended
        super().__init__(str(refusal) for refusal in refusals)


def _refuse(problems: list[Refusal], message: str) -> None:
    problems.append(Refusal("", message))


def packaged_directory(kind: Literal["configs", "assets"]) -> Path:
    """The directory of the files that ship with maxtext_lite: inside the package, or beside it in a checkout."""
    inside = _PACKAGE / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind


def packaged_file(kind: Literal["configs", "assets"], name: str) -> Path | None:
    """The shipped file `name` (with or without `configs/` in front), or None where there is no such file."""
    directory = packaged_directory(kind)
    for relative in (name, name.removeprefix(f"{kind}/")):
        path = directory / relative
        if path.is_file() and path.resolve().is_relative_to(directory.resolve()):
            return path
    return None


def load_config(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """The resolved config of a file and `key=value` overrides.

    A value comes from the first of these that has the key: the overrides (the last one of duplicates), the file, the
    files of its `base:` chain, the file of `model_name` in configs/models/, the config.json that comes with
    `load_parameters_path`, configs/base.yml.

    Args:
      path: a YAML file in the working directory or among the packaged configs; None is configs/base.yml.
      overrides: `key=value`, the value in YAML 1.2.
    Raises:
      ConfigError: (a UserError) with every problem of the config.
    """
    problems: list[Refusal] = []
    files = _file_layers(str(path) if path is not None else _ROOT_FILE, problems)
    layers = [*files, _override_layer(overrides, problems)]
    kind = RLRunConfig if any(layer.origin == _RL_FILE for layer in files) else Config
    for layer in layers:
        _drop_unknown_keys(layer, problems, kind)
    if kind is RLRunConfig:
        _refuse_training_batch(layers, problems)
    layers[1:1] = _model_layer(layers, problems)
    layers[1:1] = _directory_layer(layers, problems)
    keys = keys_of(kind)
    root = _root_of(layers)
    if any(key not in root.values for key in keys):  # base.yml itself could not be read
        raise ConfigError(problems or [Refusal("", f"{layers[0].origin} lacks a key.")], None)
    config = _validate(kind, root, layers, problems)
    if problems:
        raise ConfigError(problems, config)
    origins = {key: layer.origin for layer in layers for key in layer.values}
    return config.with_origins({key: origins[key] for key in keys})


def _root_of(layers: Sequence[_Layer]) -> _Layer:
    """The defaults: those of base.yml, and of post_train/rl.yml where that is among the files."""
    values = {key: value for layer in layers if layer.origin == _RL_FILE for key, value in layer.values.items()}
    return replace(layers[0], values=layers[0].values | values)


def _refuse_training_batch(layers: Sequence[_Layer], problems: list[Refusal]) -> None:
    """Refuses what base.yml's files do not say already, of keys that RL makes no use of."""
    root, *others = layers
    for layer in others:
        for key, reason in _OF_NO_USE_IN_RL.items():
            if key not in layer.values or key not in root.values or layer.values[key].value == root.values[key].value:
                continue
            value = value_text(layer.values.pop(key).value)
            _refuse(problems, f"{key}={value} ({layer.origin}) has no use in RL, {reason}. Remove it.")


def _read(path: Path, origin: str, problems: list[Refusal]) -> dict[str, YamlValue]:
    try:
        entries = parse_mapping(path.read_text(encoding="utf-8"))
    except OSError as error:
        _refuse(problems, f"{origin}: {error.strerror}.")
        return {}
    except UnicodeDecodeError:
        _refuse(problems, f"{origin} is not UTF-8 text.")
        return {}
    except ValueError as error:
        _refuse(problems, f"{origin} {error}.")
        return {}
    values: dict[str, YamlValue] = {}
    for key, value in entries:
        if key in values:
            _refuse(problems, f"key '{key}' stands twice in {origin}. Keep one of them.")
        values[key] = value
    return values


def _origin(path: Path, named: str) -> str:
    """A shipped file's path below configs/; otherwise the file as the user named it."""
    directory = packaged_directory("configs").resolve()
    resolved = path.resolve()
    return resolved.relative_to(directory).as_posix() if resolved.is_relative_to(directory) else named


def _find(name: str, beside: Path | None) -> Path | None:
    """A config file: in the working directory (or `beside` the file that names it), then among the shipped ones."""
    candidate = Path(name) if beside is None else beside / name
    return candidate if candidate.is_file() else packaged_file("configs", name)


def _shipped_configs() -> list[str]:
    directory = packaged_directory("configs")
    return sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*.yml"))


def _file_layers(name: str, problems: list[Refusal]) -> list[_Layer]:
    """The layers of a file and its bases, lowest first; configs/base.yml is always the lowest."""
    layers: list[_Layer] = []
    seen: dict[Path, str] = {}
    beside: Path | None = None
    root = packaged_directory("configs") / _ROOT_FILE
    namer = ""
    while True:
        path = _find(name, beside)
        if path is None:
            named_by = f" (base of {namer})" if namer else ""
            _refuse(problems, f"no config file '{name}'{named_by}.{did_you_mean(name, _shipped_configs())}")
            break
        origin = _origin(path, name if beside is None else str(beside / name))
        if path.resolve() in seen:
            _refuse(
                problems,
                f"base: {name} in {namer} leads back to {seen[path.resolve()]}: files may not be each other's base.",
            )
            break
        seen[path.resolve()] = origin
        values = _read(path, origin, problems)
        base = values.pop("base", None)
        layers.insert(0, _Layer(origin, values))
        if base is None:
            break
        if not isinstance(base.value, str):
            _refuse(problems, f"base: {value_text(base.value)} in {origin} is not the name of a file.")
            break
        name, beside, namer = base.value, path.parent, origin
    if root.resolve() not in seen:
        layers.insert(0, _Layer(_ROOT_FILE, _read(root, _ROOT_FILE, problems)))
    return layers


def _override_layer(overrides: Iterable[str], problems: list[Refusal]) -> _Layer:
    values: dict[str, YamlValue] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            _refuse(problems, f"'{override}' (command line) is not of the form key=value.")
            continue
        if key == "base":
            _refuse(problems, "base is a line of a config file, not a key of the command line. Name the file first.")
            continue
        if value := _override_value(key, text, problems):
            values[key] = value
    return _Layer(_COMMAND_LINE, values)


def _override_value(key: str, text: str, problems: list[Refusal]) -> YamlValue | None:
    try:
        value = parse_value(text)
    except ValueError as error:
        if not _holds_text(key):
            _refuse(problems, f"{key}={text} {error}.")
            return None
        value = YamlValue(None, None)
    # A path such as *.txt or [ab].txt is text for a key that holds text, though YAML reads an alias or a list.
    if _holds_text(key) and (value.text is None or (value.text == "" and value.value is None)):
        return YamlValue(text, text)
    return value


def _drop_unknown_keys(layer: _Layer, problems: list[Refusal], kind: type[Config] = Config) -> None:
    known = kind.model_fields
    for key in [key for key in layer.values if key not in known]:
        hint = f" It is a key of configs/{_RL_FILE}." if key in RL_KEYS else did_you_mean(key, known)
        _refuse(problems, f"unknown key '{key}' ({layer.origin}).{hint}")
        del layer.values[key]


def _model_layer(layers: Sequence[_Layer], problems: list[Refusal]) -> list[_Layer]:
    """The layer of configs/models/NAME.yml, for the model_name that wins; none for `default`."""
    naming = [layer for layer in layers if "model_name" in layer.values]
    name = naming[-1].values["model_name"].text if naming else None
    if not name or name == "default":
        return []
    shipped = [file.removeprefix("models/").removesuffix(".yml") for file in _shipped_configs() if "models/" in file]
    path = None
    if re.fullmatch(r"[\w][\w.-]*", name):
        path = _find(f"configs/models/{name}.yml", None)
    if path is None:
        choices = ", ".join(["default", *shipped])
        _refuse(
            problems,
            f"model_name={name} has no file in configs/models/. There are: {choices}.{did_you_mean(name, shipped)}",
        )
        return []
    origin = _origin(path, f"configs/models/{name}.yml")
    model = _Layer(origin, _read(path, origin, problems))
    _drop_unknown_keys(model, problems)
    if model.values.pop("model_name", None) is not None:
        _refuse(problems, f"model_name stands in {origin}, which is named by it. Remove the line.")
    _refuse_stale_architecture(naming, layers[0], model, problems)
    return [model]


def _refuse_stale_architecture(naming: Sequence[_Layer], root: _Layer, model: _Layer, problems: list[Refusal]) -> None:
    """Refuses a lower file's dimensions of another model_name, which would silently win over the new one's."""
    winner = naming[-1]
    name = winner.values["model_name"].text
    for layer in naming[:-1]:
        other = layer.values["model_name"].text
        if layer is root or other == name:
            continue
        for key in ModelConfig.model_fields:
            if key not in layer.values or key not in model.values or key in winner.values:
                continue
            stale, new = layer.values[key].value, model.values[key].value
            if stale != new:
                _refuse(
                    problems,
                    f"{key}={value_text(stale)} in {layer.origin} belongs to model_name={other} there, "
                    f"but model_name={name} ({winner.origin}) has {value_text(new)}. Remove it there, or "
                    f"say {key}= ({winner.origin}) which is meant.",
                )


def _directory_layer(layers: Sequence[_Layer], problems: list[Refusal]) -> list[_Layer]:
    """The layer of the directory that load_parameters_path names, where that brings a config.json along."""
    root, *stating = layers
    key = "load_parameters_path"
    path = next((layer.values[key].text for layer in reversed(layers) if key in layer.values), None) or ""
    origin = directory_origin(path)
    if origin is None:
        return []
    stated = {key: (_plain(key, value), layer.origin) for layer in stating for key, value in layer.values.items()}
    values, refusals = directory_values(path, stated, root.values["max_target_length"].value)
    problems.extend(refusals)
    return [_Layer(origin, {key: YamlValue(value, value_text(value)) for key, value in values.items()})]


def _holds_text(key: str) -> bool:
    field = RLRunConfig.model_fields.get(key)
    return field is not None and (field.annotation is str or get_origin(field.annotation) is Literal)


def _plain(key: str, value: YamlValue) -> object:
    """The value for the schema: a key that holds text takes a scalar as written, so run_name=007 stays 007."""
    if _holds_text(key) and value.text is not None and not (value.value is None and value.text):
        return value.text
    return value.value


def _validate(kind: type[Config], root: _Layer, layers: Sequence[_Layer], problems: list[Refusal]) -> Config:
    """The config of the layers. What is wrong is added to `problems`, and a legal value stands in for it."""
    values = {key: _plain(key, value) for layer in layers for key, value in layer.values.items()}
    refused: dict[str, Refusal] = {}
    try:
        config = kind.model_validate(values)
    except ValidationError as error:
        for detail in error.errors():
            key = str(detail["loc"][0])
            refused[key] = _kind_refusal(key, detail, default=_plain(key, root.values[key]))
        for key, refusal in refused.items():
            values[key] = refusal.nearest[0]
        known = set(kind.model_fields) - set(refused)
        for key in refused:
            known.add(key)
            refused[key] = _suiting(kind, refused[key], values, known, root)
            values[key] = refused[key].nearest[0]
        config = kind.model_validate(values)
    problems.extend(refused[key] for key in keys_of(kind) if key in refused)
    # With legal values in place of those of the wrong kind: what those then contradict is wrong as well.
    broken = _broken_rules(config, keys_of(kind), root)
    problems.extend(broken)
    legal = {
        refusal.key: refusal.nearest[0]
        for refusal in broken
        if refusal.nearest and not isinstance(refusal.nearest[0], str)
    }
    return config.model_copy(update=legal)


def _broken_rules(config: Config, known: Collection[str], root: _Layer) -> list[Refusal]:
    """The refusals of all rules whose keys are in `known`, those that ask for the defaults included."""
    broken = rule_problems(config, known)
    if {"warmup_steps", "steps", "num_epochs"} <= set(known):
        warmup = warmup_problem(config, root.values["warmup_steps"].value)
        length = length_problem(config, root.values["steps"].value)
        broken.extend(refusal for refusal in (warmup, length) if refusal)
    if {"lora_rank", "lora_alpha", "lora_targets"} <= set(known):
        alpha, targets = (root.values[key] for key in ("lora_alpha", "lora_targets"))
        assert isinstance(alpha.value, float)
        unused = unused_problem(config, default_alpha=alpha.value, default_targets=str(targets.value))
        broken.extend([unused] if unused else [])
    if isinstance(config, RLRunConfig) and {"dataset_type", "arithmetic_operations", "arithmetic_largest"} <= set(
        known
    ):
        operations, largest = (root.values[key] for key in ("arithmetic_operations", "arithmetic_largest"))
        assert isinstance(largest.value, int)
        unused = unused_arithmetic(config, default_operations=str(operations.value), default_largest=largest.value)
        broken.extend([unused] if unused else [])
    return broken


def _suiting(
    kind: type[Config], refusal: Refusal, values: dict[str, object], known: Collection[str], root: _Layer
) -> Refusal:
    """The refusal with those of its values that break no rule about its key, or else with the default."""
    key = refusal.key

    def suits(value: object) -> bool:
        config = kind.model_validate(values | {key: value})
        others = _broken_rules(config, set(known) - {key}, root)
        return len(_broken_rules(config, known, root)) == len(others)

    near = tuple(value for value in refusal.nearest if suits(value))
    return replace(refusal, nearest=near or (_plain(key, root.values[key]),))


def _kind_refusal(key: str, detail: ErrorDetails, *, default: object) -> Refusal:
    value = value_text(detail.get("input"))
    if detail["type"] == "literal_error":
        choices = [str(choice) for choice in get_args(RLRunConfig.model_fields[key].annotation)]
        near = max(choices, key=lambda choice: _likeness(value, choice))
        return Refusal(key, f"{key}={value} is not one of {', '.join(choices)}.", (near,))
    cause = detail.get("ctx", {}).get("error")
    nearest = cause.nearest if isinstance(cause, WrongKind) else ()
    nearest = nearest or (default,)
    return Refusal(key, f"{key}={value} {detail['msg'].removeprefix('Value error, ')}", nearest)


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other).ratio()
