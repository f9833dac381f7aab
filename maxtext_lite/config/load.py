"""From files and `key=value` to a Config: base.yml, the model's file, the user's files, the command line."""

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from maxtext_lite.config.errors import Refusal, UserError, value_text
from maxtext_lite.config.field_types import path_problem, wrong_value
from maxtext_lite.config.files import (
    RL_FILE,
    ROOT_FILE,
    Layer,
    Origin,
    file_layers,
    find_model,
    first_of,
    may_list_sources,
    packaged_directory,
    plain_value,
    read_layer,
    shipped_configs,
    takes_text,
)
from maxtext_lite.config.hf.directory import (
    directory_origin,
    directory_values,
    in_its_fields,
    missing_base_refusals,
    tokenizer_values,
)
from maxtext_lite.config.hints import key_hint, missing_model, missing_parameters, words_meant
from maxtext_lite.config.json_file import is_there, user_path
from maxtext_lite.config.schema import RL_KEYS, Config, RLRunConfig, keys_of
from maxtext_lite.config.sections import ModelConfig
from maxtext_lite.config.source_list import is_source_list
from maxtext_lite.config.suggest import ConfigRequest, suggest
from maxtext_lite.config.yaml_text import YamlValue, is_one_scalar, parse_value

_PER_DEVICE, _ACCUMULATION = "per_device_batch_size", "gradient_accumulation_steps"
_MOST_HINTS = 20
_ITS_BATCH = "where batch_size, num_generations and micro_batch_size determine the batch"
UNUSED_IN_RL = {
    "per_device_batch_size": _ITS_BATCH,
    "gradient_accumulation_steps": _ITS_BATCH,
    "global_batch_size": _ITS_BATCH,
    "enable_rampup_batch_size": _ITS_BATCH,
    "expansion_factor_real_data": _ITS_BATCH,
    "enable_diloco": _ITS_BATCH,
    "num_epochs": "where steps is the length of the run",
    "eval_per_device_batch_size": "where rollout_slots is the number of responses sampled at once",
    "grain_worker_count": "where the training process reads the prompts",
}
"""Keys that must have their values of base.yml in reinforcement learning, each with the reason."""


class ConfigError(UserError):
    """A config is wrong."""


def _refuse(problems: list[Refusal], message: str) -> None:
    problems.append(Refusal("", message))


@dataclass(frozen=True)
class Reading:
    """A config from its files and overrides, before any rule between keys is checked.

    Attributes:
      config: with the defaults in place of wrong values.
      refusals: of files, unknown keys and misplaced ones.
      wrong: the wrong values.
    """

    config: Config
    refusals: tuple[Refusal, ...]
    wrong: tuple[Refusal, ...]

    def refused(self, refusals: Iterable[Refusal]) -> list[Refusal]:
        """All refusals; where a config.json decided a key, in terms of its fields."""
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
    """The first half of `load_config`: the values and what is wrong with each by itself.

    Raises:
      ConfigError: configs/base.yml or configs/post_train/rl.yml, which ship with maxtext_lite, are damaged.
    """
    problems: list[Refusal] = []
    files = file_layers(None if path is None else str(path), problems)
    kind = RLRunConfig if any(layer.shipped == RL_FILE for layer in files) else Config
    stated, unreadable = _override_layer(overrides, problems, kind)
    layers = [*files, stated]
    for layer in layers:
        _drop_unknown_keys(layer, problems, kind)
    if kind is RLRunConfig:
        _refuse_training_batch(layers, problems)
    _spell_out_auto(layers)
    if kind is Config:
        _end_as_stated_last(layers[1:])
    layers[1:1] = _model_layer(layers, problems, kind)
    layers[1:1] = _directory_layer(layers, problems)
    try:
        defaults = defaults_of(kind)
    except (KeyError, ValidationError) as error:
        broken = Refusal("", f"{ROOT_FILE} or {RL_FILE} of maxtext_lite is damaged: {value_text(str(error))}.")
        raise ConfigError(str(problem) for problem in problems or [broken]) from None
    config, wrong = _validate(kind, layers, defaults)
    wrong.extend(Refusal(key, message, (getattr(config, key),)) for key, message in unreadable.items())
    origins = {key: layer.origin for layer in layers for key in layer.values}
    config = config.with_origins({key: origins[key] for key in keys_of(kind)})
    return Reading(config, tuple(problems), tuple(wrong))


@functools.cache
def defaults_of(kind: type[Config]) -> Config:
    """The config of configs/base.yml, and for reinforcement learning of configs/post_train/rl.yml.

    Raises:
      KeyError: they lack a key.
      ValidationError: a value is not of its key's type.
    """
    files = (ROOT_FILE, RL_FILE) if issubclass(kind, RLRunConfig) else (ROOT_FILE,)
    layers = [read_layer(packaged_directory("configs") / file, file, []) for file in files]
    values = _merged(layers)
    return kind.model_validate({key: values[key] for key in keys_of(kind)})


def _merged(layers: Iterable[Layer]) -> dict[str, object]:
    return {key: value for layer in layers for key, value in layer.values.items()}


def _refuse_training_batch(layers: Sequence[Layer], problems: list[Refusal]) -> None:
    """Refuses values other than those of base.yml for keys that RL does not use."""
    root, *others = layers
    for layer in others:
        for key in UNUSED_IN_RL:
            if key in layer.values and key in root.values and layer.values[key] != root.values[key]:
                value = value_text(layer.values.pop(key))
                reason = f"has no effect in RL, {UNUSED_IN_RL[key]}. Remove it."
                _refuse(problems, f"{key}={value} ({layer.origin}) {reason}")


def _spell_out_auto(layers: Sequence[Layer]) -> None:
    """Replaces per_device_batch_size=auto by -1, and so gradient_accumulation_steps where it is not stated."""
    values = next((layer.values for layer in reversed(layers) if _PER_DEVICE in layer.values), None)
    if values is None or values[_PER_DEVICE] != "auto":
        return
    values[_PER_DEVICE] = -1
    if not any(_ACCUMULATION in layer.values for layer in layers[1:]):
        values[_ACCUMULATION] = -1


def _end_as_stated_last(layers: Sequence[Layer]) -> None:
    """Keeps the length of a run, in steps or in epochs, that the last layer states."""
    steps = [place for place, layer in enumerate(layers) if layer.values.get("steps", -1) != -1]
    epochs = [place for place, layer in enumerate(layers) if layer.values.get("num_epochs", 0) != 0]
    if not steps or not epochs:
        return
    for layer in layers[: epochs[-1]]:
        layer.values.pop("steps", None)
    for layer in layers[: steps[-1]]:
        layer.values.pop("num_epochs", None)
        layer.values.pop("last_batch", None)


def _override_layer(
    overrides: Iterable[str], problems: list[Refusal], kind: type[Config]
) -> tuple[Layer, dict[str, str]]:
    """The values of the command line, and a message for each key whose value is not YAML."""
    values: dict[str, object] = {}
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
        values.pop(key, None)
        unreadable.pop(key, None)
        try:
            values[key] = _override_value(key, text)
        except ValueError as error:
            if key in kind.model_fields:
                unreadable[key] = f"{key}={value_text(text)} {error}."
            else:
                values[key] = None  # the key itself is refused
    return Layer(Origin("command line"), values), unreadable


def _override_value(key: str, text: str) -> object:
    """The value of `key=text`: *.txt, [ab].txt and `x #1.txt` are text, of which YAML makes something else."""
    try:
        value = parse_value(text)
    except ValueError:
        if not takes_text(key) or (may_list_sources(key) and text.lstrip().startswith("[{")):
            raise
        return text
    if takes_text(key) and not is_one_scalar(text) and not (may_list_sources(key) and _lists_sources(text, value)):
        return text
    return plain_value(key, value)


def _lists_sources(text: str, value: YamlValue) -> bool:
    """Whether the text is meant as a list of sources; `x: y.txt` is a path, though YAML reads a mapping."""
    return is_source_list(value.value) and (isinstance(value.value, list) or text.lstrip().startswith("{"))


def _drop_unknown_keys(layer: Layer, problems: list[Refusal], kind: type[Config] = Config) -> None:
    """Removes the keys that a kind of config does not have, and refuses them."""
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
    """One message for all keys of reinforcement learning in a layer of another config."""
    is_one, more = len(keys) == 1, f" and {len(keys) - 2} more" if len(keys) > 2 else ""
    named = f"key '{keys[0]}'" if is_one else f"keys '{keys[0]}', '{keys[1]}'{more}"
    return (
        f"unknown {named} ({origin}). {'It is a key' if is_one else 'They are keys'} of configs/{RL_FILE}: give that "
        "file, or one whose base it is."
    )


def _model_layer(layers: Sequence[Layer], problems: list[Refusal], kind: type[Config]) -> list[Layer]:
    """The layer of configs/models/NAME.yml, for the model_name that wins.

    None for `default`, and none where a file with this model_name has every key, as the config.yml of a run does.
    """
    naming = [layer for layer in layers if "model_name" in layer.values]
    name = naming[-1].values["model_name"] if naming else None
    if not name or not isinstance(name, str) or name == "default" or path_problem(name):
        return []  # a wrong name is refused as a value
    if any(layer.values["model_name"] == name and layer.values.keys() >= {*keys_of(kind)} for layer in naming):
        return []
    shipped = [file.removeprefix("models/").removesuffix(".yml") for file in shipped_configs() if "models/" in file]
    path = None
    if re.fullmatch(r"[\w][\w.-]*", name):
        path = find_model(name)
    if path is None:
        _refuse(problems, missing_model(name, shipped))
        return []
    model = read_layer(path, f"configs/models/{name}.yml", problems)
    _drop_unknown_keys(model, problems)
    if model.values.pop("model_name", None) is not None:
        _refuse(problems, f"model_name is in {model.origin}, the file that it names. Remove the line.")
    _refuse_stale_architecture(naming, layers[0], model, problems)
    return [model]


def _refuse_stale_architecture(naming: Sequence[Layer], root: Layer, model: Layer, problems: list[Refusal]) -> None:
    """Refuses dimensions for another model_name in a lower file, which would silently override the new model's."""
    winner = naming[-1]
    name = winner.values["model_name"]
    for layer in naming[:-1]:
        other = layer.values["model_name"]
        if layer is root or other == name:
            continue
        for key in ModelConfig.model_fields:
            if key not in layer.values or key not in model.values or key in winner.values:
                continue
            stale, new = layer.values[key], model.values[key]
            if stale != new:
                _refuse(
                    problems,
                    f"{key}={value_text(stale)} in {layer.origin} belongs to model_name={value_text(other)} there, "
                    f"but model_name={value_text(name)} ({winner.origin}) has {value_text(new)}. Remove it there, or "
                    f"state {key}= ({winner.origin}).",
                )


def _directory_layer(layers: Sequence[Layer], problems: list[Refusal]) -> list[Layer]:
    """The layer of the directory named by load_parameters_path: its config.json, if any, and its tokenizer."""
    root, *stating = layers
    path = str(_merged(layers).get("load_parameters_path") or "")
    if path_problem(path, of_run=True):
        return []  # a wrong path is refused as a value
    stated = {key: (value, layer.origin) for layer in stating for key, value in layer.values.items()}
    origin = directory_origin(path)
    if origin is None:
        if refusals := missing_base_refusals(path):
            is_whole = any(layer.values.keys() >= {*ModelConfig.model_fields} for layer in stating)
            problems.extend([] if is_whole else refusals)  # the config.yml of a run says what the model is
            return []
        is_missing = path and not path_problem(path) and not is_there(user_path(path))
        if is_missing and not any(key in ModelConfig.model_fields for layer in stating for key in layer.values):
            problems.append(missing_parameters(path))
        tokenizer = tokenizer_values(path, stated) if path else {}
        return [Layer(Origin(f"{path}/hf"), dict(tokenizer))] if tokenizer else []
    values, refusals = directory_values(path, stated, root.values["max_target_length"])
    problems.extend(refusals)
    return [Layer(Origin(origin, is_architecture=True), dict(values))]


def _validate(kind: type[Config], layers: Sequence[Layer], defaults: Config) -> tuple[Config, list[Refusal]]:
    """The config of the layers, with the defaults in place of wrong values, and the wrong values."""
    values = _merged(layers)
    try:
        return kind.model_validate(values), []
    except ValidationError as error:
        details = {str(detail["loc"][0]): detail for detail in error.errors()}
    legal = {key: value for key, value in values.items() if key not in details}
    usual = {key: getattr(defaults, key) for key in details}
    wrong: list[Refusal] = []
    for key in keys_of(kind):
        if key in details:
            refusal = wrong_value(kind, details[key], key)
            right = [getattr(kind.model_validate({**legal, **usual, key: value}), key) for value in refusal.nearest]
            wrong.append(replace(refusal, nearest=tuple(right)))
    return kind.model_validate({**legal, **usual}), wrong
