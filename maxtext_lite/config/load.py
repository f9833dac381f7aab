"""From files and `key=value` to a Config: base.yml, the model's file, the user's files, the command line."""

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from maxtext_lite.config.errors import Refusal, UserError, WrongType, full_text, value_text
from maxtext_lite.config.field_types import path_problem
from maxtext_lite.config.files import (
    RL_FILE,
    ROOT_FILE,
    Layer,
    file_layers,
    find_config,
    first_of,
    packaged_directory,
    read_layer,
    shipped_configs,
)
from maxtext_lite.config.hf.layer import directory_origin, directory_values, in_its_fields
from maxtext_lite.config.hints import key_hint, missing_model, words_meant
from maxtext_lite.config.schema import RL_KEYS, Config, RLRunConfig, keys_of
from maxtext_lite.config.sections import ModelConfig
from maxtext_lite.config.source_list import SourceList, is_source_list
from maxtext_lite.config.suggest import ConfigRequest, WrongValue, suggest
from maxtext_lite.config.yaml_text import YamlValue, parse_value

_COMMAND_LINE = "command line"
_PER_DEVICE, _ACCUMULATION = "per_device_batch_size", "gradient_accumulation_steps"
_MOST_HINTS = 20
_ITS_BATCH = "where batch_size, num_generations and micro_batch_size say what a step trains on"
OF_NO_USE_IN_RL = {
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
"""Keys that a config of reinforcement learning may not state otherwise than base.yml, with why."""


class ConfigError(UserError):
    """A config is wrong."""


def _refuse(problems: list[Refusal], message: str) -> None:
    problems.append(Refusal("", message))


@dataclass(frozen=True)
class Reading:
    """A config as its files and overrides have it, before any rule is asked.

    Attributes:
      config: with the defaults in place of wrong values.
      refusals: of files, and of what stands where it should not.
      wrong: the wrong values.
    """

    config: Config
    refusals: tuple[Refusal, ...]
    wrong: tuple[WrongValue, ...]

    def refused(self, refusals: Iterable[Refusal]) -> list[Refusal]:
        """All refusals, with those of what a config.json decides in the words of its fields."""
        return in_its_fields(self.config.load_parameters_path, [*self.refusals, *refusals], self.config.origins)


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
    reading = read_config(path, overrides)
    refusals = suggest(ConfigRequest(reading.config, defaults_of(type(reading.config))), reading.wrong)
    if refused := reading.refused(refusals):
        raise ConfigError(str(refusal) for refusal in refused)
    return reading.config


def read_config(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Reading:
    """What `load_config` reads, with what is wrong in itself, but no rule between keys asked.

    Raises:
      ConfigError: configs/base.yml or configs/post_train/rl.yml, which ship with maxtext_lite, are wrong.
    """
    problems: list[Refusal] = []
    files = file_layers(str(path) if path is not None else ROOT_FILE, problems)
    stated, unreadable = _override_layer(overrides, problems)
    layers = [*files, stated]
    kind = RLRunConfig if any(layer.shipped == RL_FILE for layer in files) else Config
    for layer in layers:
        _drop_unknown_keys(layer, problems, kind)
    if kind is RLRunConfig:
        _refuse_training_batch(layers, problems)
    _spell_out_auto(layers)
    layers[1:1] = _model_layer(layers, problems)
    layers[1:1] = _directory_layer(layers, problems)
    try:
        defaults = defaults_of(kind)
    except (KeyError, ValidationError) as error:
        broken = Refusal("", f"{ROOT_FILE} or {RL_FILE} of maxtext_lite is damaged: {value_text(str(error))}.")
        raise ConfigError(str(problem) for problem in problems or [broken]) from None
    config, wrong = _validate(kind, layers, defaults)
    wrong.extend(
        WrongValue(key, message, (getattr(config, key),))
        for key, message in unreadable.items()
        if key in kind.model_fields
    )
    origins = {key: layer.origin for layer in layers for key in layer.values}
    config = config.with_origins({key: origins[key] for key in keys_of(kind)})
    return Reading(config, tuple(problems), tuple(wrong))


@functools.cache
def defaults_of(kind: type[Config]) -> Config:
    """What configs/base.yml has, and for reinforcement learning configs/post_train/rl.yml.

    Raises:
      KeyError: they lack a key.
      ValidationError: a value is not of its key's kind.
    """
    files = (ROOT_FILE, RL_FILE) if issubclass(kind, RLRunConfig) else (ROOT_FILE,)
    layers = [read_layer(packaged_directory("configs") / file, file, []) for file in files]
    values = {key: _plain(key, value) for layer in layers for key, value in layer.values.items()}
    return kind.model_validate({key: values[key] for key in keys_of(kind)})


def _refuse_training_batch(layers: Sequence[Layer], problems: list[Refusal]) -> None:
    """Refuses what base.yml's files do not say already, of keys that RL makes no use of."""
    root, *others = layers
    for layer in others:
        for key, reason in OF_NO_USE_IN_RL.items():
            if key not in layer.values or key not in root.values or layer.values[key].value == root.values[key].value:
                continue
            value = value_text(layer.values.pop(key).value)
            _refuse(problems, f"{key}={value} ({layer.origin}) has no effect in RL, {reason}. Remove it.")


def _spell_out_auto(layers: Sequence[Layer]) -> None:
    """Writes -1 for per_device_batch_size=auto, and for gradient_accumulation_steps where nobody states it."""
    stating = [layer.values for layer in layers if _PER_DEVICE in layer.values]
    if not stating or stating[-1][_PER_DEVICE].value != "auto":
        return
    stating[-1][_PER_DEVICE] = found = YamlValue(-1, "-1")
    if not any(_ACCUMULATION in layer.values for layer in layers[1:]):
        stating[-1][_ACCUMULATION] = found


def _override_layer(overrides: Iterable[str], problems: list[Refusal]) -> tuple[Layer, dict[str, str]]:
    """The values of the command line, and by key what is said of those that are not YAML."""
    values: dict[str, YamlValue] = {}
    unreadable: dict[str, str] = {}
    waiting = list(overrides)
    while waiting:
        override = waiting[0]
        key, equals, text = override.partition("=")
        if not equals:
            meant = words_meant(waiting, RLRunConfig.model_fields)
            hint = f" Did you mean '{value_text(meant[0])}'?" if meant else ""
            _refuse(problems, f"'{value_text(override)}' (command line) is not of the form key=value.{hint}")
            del waiting[: meant[1] if meant else 1]
            continue
        del waiting[0]
        if key == "base":
            _refuse(problems, "base is a line of a config file, not a key of the command line. Name the file first.")
            continue
        unreadable.pop(key, None)
        try:
            values[key] = _override_value(key, text)
        except ValueError as error:
            values.pop(key, None)
            unreadable[key] = f"{key}={value_text(text)} {error}."
    unknown = {key: YamlValue(None, "") for key in unreadable if key not in RLRunConfig.model_fields}
    return Layer(_COMMAND_LINE, values | unknown), unreadable


def _override_value(key: str, text: str) -> YamlValue:
    is_text = _holds_text(key)
    try:
        value = parse_value(text)
    except ValueError:
        if not is_text or (_may_list_sources(key) and text.lstrip().startswith("[{")):
            raise
        return YamlValue(text, text)
    if _may_list_sources(key) and is_source_list(value.value):
        return value
    # A path such as *.txt or [ab].txt is text for a key that holds text, though YAML reads an alias or a list.
    if is_text and (value.text is None or (value.text == "" and value.value is None)):
        return YamlValue(text, text)
    return value


def _drop_unknown_keys(layer: Layer, problems: list[Refusal], kind: type[Config] = Config) -> None:
    known = kind.model_fields
    unknown = [key for key in layer.values if key not in known]
    for key in unknown:
        del layer.values[key]
    of_rl = [key for key in unknown if key in RL_KEYS]
    if of_rl:
        _refuse(problems, _rl_keys_unknown(of_rl, layer.origin))
    unknown = [key for key in unknown if key not in RL_KEYS]
    hints = {key: key_hint(key, known) for key in unknown[:_MOST_HINTS]}
    messages = [f"unknown key '{value_text(key)}' ({layer.origin}).{hints.get(key, '')}" for key in unknown]
    problems.extend(Refusal("", message) for message in first_of(messages, layer.origin))


def _rl_keys_unknown(keys: Sequence[str], origin: str) -> str:
    """One sentence on all of a layer's keys of reinforcement learning, which the config is none of."""
    is_one, more = len(keys) == 1, f" and {len(keys) - 2} more" if len(keys) > 2 else ""
    named = f"key '{keys[0]}'" if is_one else f"keys '{keys[0]}', '{keys[1]}'{more}"
    return (
        f"unknown {named} ({origin}). {'It is a key' if is_one else 'They are keys'} of configs/{RL_FILE}: give that "
        "file, or one whose base it is."
    )


def _model_layer(layers: Sequence[Layer], problems: list[Refusal]) -> list[Layer]:
    """The layer of configs/models/NAME.yml, for the model_name that wins; none for `default`."""
    naming = [layer for layer in layers if "model_name" in layer.values]
    name = naming[-1].values["model_name"].text if naming else None
    if not name or name == "default" or path_problem(name):  # a wrong name is refused as a value
        return []
    shipped = [file.removeprefix("models/").removesuffix(".yml") for file in shipped_configs() if "models/" in file]
    path = None
    if re.fullmatch(r"[\w][\w.-]*", name):
        path = find_config(f"configs/models/{name}.yml")
    if path is None:
        _refuse(problems, missing_model(name, shipped))
        return []
    model = read_layer(path, f"configs/models/{name}.yml", problems)
    _drop_unknown_keys(model, problems)
    if model.values.pop("model_name", None) is not None:
        _refuse(problems, f"model_name stands in {model.origin}, which is named by it. Remove the line.")
    _refuse_stale_architecture(naming, layers[0], model, problems)
    return [model]


def _refuse_stale_architecture(naming: Sequence[Layer], root: Layer, model: Layer, problems: list[Refusal]) -> None:
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


def _directory_layer(layers: Sequence[Layer], problems: list[Refusal]) -> list[Layer]:
    """The layer of the directory that load_parameters_path names, where that brings a config.json along."""
    root, *stating = layers
    key = "load_parameters_path"
    path = next((layer.values[key].text for layer in reversed(layers) if key in layer.values), None) or ""
    origin = None if path_problem(path, of_run=True) else directory_origin(path)  # a wrong path is refused as a value
    if origin is None:
        return []
    stated = {key: (_plain(key, value), layer.origin) for layer in stating for key, value in layer.values.items()}
    values, refusals = directory_values(path, stated, root.values["max_target_length"].value)
    problems.extend(refusals)
    return [Layer(origin, {key: YamlValue(value, full_text(value)) for key, value in values.items()})]


def _holds_text(key: str) -> bool:
    field = RLRunConfig.model_fields.get(key)
    is_text = field is not None and (field.annotation is str or get_origin(field.annotation) is Literal)
    return is_text or _may_list_sources(key)


def _may_list_sources(key: str) -> bool:
    field = RLRunConfig.model_fields.get(key)
    return field is not None and SourceList in get_args(field.annotation)


def _plain(key: str, value: YamlValue) -> object:
    """The value for the schema: a key that holds text takes a scalar as written, so run_name=007 stays 007."""
    if _holds_text(key) and value.text is not None and not (value.value is None and value.text):
        return value.text
    return value.value


def _validate(kind: type[Config], layers: Sequence[Layer], defaults: Config) -> tuple[Config, list[WrongValue]]:
    """The config of the layers, with the defaults in place of wrong values, and these."""
    values = {key: _plain(key, value) for layer in layers for key, value in layer.values.items()}
    try:
        return kind.model_validate(values), []
    except ValidationError as error:
        details = {str(detail["loc"][0]): detail for detail in error.errors()}
    legal = {key: value for key, value in values.items() if key not in details}
    usual = {key: getattr(defaults, key) for key in details}
    wrong: list[WrongValue] = []
    for key in keys_of(kind):
        if key in details:
            message, near = _wrong_kind(key, details[key])
            right = [getattr(kind.model_validate({**legal, **usual, key: value}), key) for value in near]
            wrong.append(WrongValue(key, message, tuple(right)))
    return kind.model_validate({**legal, **usual}), wrong


def _wrong_kind(key: str, detail: ErrorDetails) -> tuple[str, Sequence[object]]:
    """What is said of a value that is not of its key's kind, and values that are."""
    value = value_text(detail.get("input"))
    if detail["type"] == "literal_error":
        choices = [str(choice) for choice in get_args(RLRunConfig.model_fields[key].annotation)]
        near = max(choices, key=lambda choice: _likeness(value, choice))
        return f"{key}={value} is not one of {', '.join(choices)}.", (near,)
    cause = detail.get("ctx", {}).get("error")
    nearest = cause.nearest if isinstance(cause, WrongType) else ()
    return f"{key}={value} {detail['msg'].removeprefix('Value error, ')}", nearest


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other).ratio()
