"""From files and `key=value` to a Config: base.yml, the model's file, the user's files, the command line."""

import functools
import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from maxtext_lite.config.bucket import absolute, is_bucket, original
from maxtext_lite.config.errors import Refusal, UserError, value_text
from maxtext_lite.config.field_types import path_problem, wrong_value
from maxtext_lite.config.files import (
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
from maxtext_lite.config.hints import key_hint, missing_model, missing_parameters, words_meant
from maxtext_lite.config.json_file import is_there, read_object, user_path
from maxtext_lite.config.registry import load, load_installed, names
from maxtext_lite.config.schema import Config, keys_of, known_keys
from maxtext_lite.config.sections import TOKENIZER_FILES, ModelConfig
from maxtext_lite.config.source_list import SourceList, is_source_list
from maxtext_lite.config.suggest import ConfigRequest, suggest
from maxtext_lite.config.yaml_text import YamlValue, is_one_scalar, parse_value

_PER_DEVICE, _ACCUMULATION = "per_device_batch_size", "gradient_accumulation_steps"
_MOST_HINTS = 20
WORKING_DIRECTORY = "working_directory"
"""The entry of a run's environment.json for the directory that its relative paths are in."""


class ConfigError(UserError):
    """A config is wrong."""


def _refuse(problems: list[Refusal], message: str) -> None:
    problems.append(Refusal("", message))


@dataclass(frozen=True)
class Provided:
    """What the directory of load_parameters_path says about a config.

    Attributes:
      origin: where it says so, as messages call it.
      values: of the keys that it decides, below those that the user states.
      refusals: of stated keys that contradict it, and of what is wrong with its files.
      field_names: what its own files call our keys, for messages about the architecture.
    """

    origin: str
    values: Mapping[str, object]
    refusals: Sequence[Refusal] = ()
    field_names: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Reading:
    """A config from its files and overrides, before any rule between keys is checked.

    Attributes:
      config: with the defaults in place of wrong values.
      refusals: of files, unknown keys and misplaced ones.
      wrong: the wrong values.
      field_names: of what load_parameters_path provided.
    """

    config: Config
    refusals: tuple[Refusal, ...]
    wrong: tuple[Refusal, ...]
    field_names: Mapping[str, str] = field(default_factory=dict[str, str])

    def refused(self, refusals: Iterable[Refusal]) -> list[Refusal]:
        """All refusals; where load_parameters_path decided a key, in terms of its files."""
        return [self._in_its_fields(refusal) for refusal in (*self.refusals, *refusals)]

    def _in_its_fields(self, refusal: Refusal) -> Refusal:
        origin = self.config.origins.get(refusal.key)
        if not self.field_names or not isinstance(origin, Origin) or not origin.is_architecture:
            return refusal
        words = re.compile(rf"\b({'|'.join(self.field_names)})\b")

        def worded(text: object) -> object:
            if not isinstance(text, str):
                return text
            return words.sub(lambda found: self.field_names[found[0]], text)

        return replace(
            refusal, message=f"{origin}: {worded(refusal.message)}", nearest=tuple(map(worded, refusal.nearest))
        )


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
      ConfigError: configs/base.yml, or another file of `base_files`, which ship with maxtext_lite, is damaged.
      NotInstalled: the kind of run that the files select is absent.
    """
    problems: list[Refusal] = []
    files = file_layers(None if path is None else str(path), problems)
    kind = _kind_of(files)
    stated, unreadable = _override_layer(overrides, problems, kind)
    layers = [*files, stated]
    for layer in layers:
        _drop_unknown_keys(layer, problems, kind)
    _refuse_unused_keys(layers, problems, kind)
    _spell_out_auto(layers)
    if "num_epochs" not in kind.unused_keys:
        _end_as_stated_last(layers[1:])
    layers[1:1] = _model_layer(layers, problems, kind)
    provided = _provided(layers, problems)
    if provided:
        origin = Origin(provided.origin, is_architecture=bool(provided.field_names))
        layers.insert(1, Layer(origin, dict(provided.values)))
    try:
        defaults = defaults_of(kind)
    except (KeyError, ValidationError) as error:
        files_of_kind = " or ".join(kind.base_files)
        broken = Refusal("", f"{files_of_kind} of maxtext_lite is damaged: {value_text(str(error))}.")
        raise ConfigError(str(problem) for problem in problems or [broken]) from None
    config, wrong = _validate(kind, layers, defaults)
    wrong.extend(Refusal(key, message, (getattr(config, key),)) for key, message in unreadable.items())
    origins = {key: layer.origin for layer in layers for key in layer.values}
    config = config.with_origins({key: origins[key] for key in keys_of(kind)})
    return Reading(config, tuple(problems), tuple(wrong), provided.field_names if provided else {})


def _kind_of(files: Iterable[Layer]) -> type[Config]:
    """The kind of run that one of the files selects.

    Raises:
      NotInstalled: it is absent.
    """
    for layer in files:
        if layer.shipped in names("run"):
            return load("run", layer.shipped)
    return Config


@functools.cache
def defaults_of(kind: type[Config]) -> Config:
    """The config of the `base_files` of a kind of run.

    Raises:
      KeyError: they lack a key.
      ValidationError: a value is not of its key's type.
    """
    layers = [read_layer(packaged_directory("configs") / file, file, []) for file in kind.base_files]
    values = _merged(layers)
    return kind.model_validate({key: values[key] for key in keys_of(kind)})


def _merged(layers: Iterable[Layer]) -> dict[str, object]:
    return {key: value for layer in layers for key, value in layer.values.items()}


def _refuse_unused_keys(layers: Sequence[Layer], problems: list[Refusal], kind: type[Config]) -> None:
    """Refuses values other than those of base.yml for keys that this kind of run does not use."""
    root, *others = layers
    for layer in others:
        for key, why in kind.unused_keys.items():
            if key in layer.values and key in root.values and layer.values[key] != root.values[key]:
                value = value_text(layer.values.pop(key))
                reason = f"has no effect in {kind.run_kind.upper()}, {why}. Remove it."
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
            meant = words_meant(waiting, known_keys())
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
    if not unknown:
        return
    for key in unknown:
        del layer.values[key]
    for other in load_installed("run"):
        theirs = [key for key in unknown if key in other.model_fields]
        if theirs:
            _refuse(problems, _keys_of_other_run(theirs, layer.origin, other.base_files[-1]))
            unknown = [key for key in unknown if key not in theirs]
    hints = {key: key_hint(key, known) for key in unknown[:_MOST_HINTS]}
    messages = [f"unknown key '{value_text(key)}' ({layer.origin}).{hints.get(key, '')}" for key in unknown]
    problems.extend(Refusal("", message) for message in first_of(messages, layer.origin))


def _keys_of_other_run(keys: Sequence[str], origin: str, file: str) -> str:
    """One message for all keys of another kind of run, whose file is named, in a layer."""
    is_one, more = len(keys) == 1, f" and {len(keys) - 2} more" if len(keys) > 2 else ""
    named = f"key '{keys[0]}'" if is_one else f"keys '{keys[0]}', '{keys[1]}'{more}"
    return (
        f"unknown {named} ({origin}). {'It is a key' if is_one else 'They are keys'} of configs/{file}: give that "
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


def _provided(layers: Sequence[Layer], problems: list[Refusal]) -> Provided | None:
    """What the directory of load_parameters_path says about the config, if any."""
    root, *stating = layers
    path = str(_merged(layers).get("load_parameters_path") or "")
    if not path or path_problem(path, of_run=True):
        return None  # a wrong path is refused as a value
    stated = {key: (value, layer.origin) for layer in stating for key, value in layer.values.items()}
    for provide in load_installed("config_provider"):
        provided = provide(path, stated, root.values["max_target_length"])
        if provided is not None:
            problems.extend(provided.refusals)
            return provided
    is_missing = not path_problem(path) and not is_there(user_path(path))
    if is_missing and not any(key in ModelConfig.model_fields for key in stated):
        problems.append(missing_parameters(path))
    return None


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


# ---- The config of a run that has begun -----------------------------------------------------------------------------


def config_of_run(directory: Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a run or an imported model, wherever its directory and the working directory are now.

    Its run directory is this one, and its tokenizer and chat template are those stored there. Other relative paths that
    are not here are taken from the working directory that the run recorded.

    Raises:
      UserError: the config is wrong.
    """
    config = load_config(directory / "config.yml", overrides)
    stated = {word.partition("=")[0] for word in overrides}
    record = directory / "environment.json"
    recorded = read_object(record).get(WORKING_DIRECTORY) if is_there(record) else None
    there = Path(recorded) if isinstance(recorded, str) else None
    found = _stored_tokens(config, directory / "hf", is_whole=there is not None)
    run = absolute(original(directory, "RUN_DIR"))
    found |= {"base_output_directory": str(run.parent), "run_name": run.name}
    if there is not None:
        for key in ("dataset_path", "eval_dataset_path", "excluded_rows", "load_parameters_path"):
            found[key] = _found(getattr(config, key), there)
    return config.model_copy(update={key: value for key, value in found.items() if key not in stated})


def _stored_tokens(config: Config, stored: Path, *, is_whole: bool) -> dict[str, object]:
    """The keys of the tokenizer and the template that a run has stored.

    Args:
      is_whole: what is in use is stored. Older runs stored only what came with their model, for use where the
        tokenizer's own file is gone.
    """
    found = dict[str, object]()
    name, template = TOKENIZER_FILES.get(config.tokenizer_type, ""), stored / "chat_template.jinja"
    if name and is_there(stored / name) and (is_whole or not user_path(config.tokenizer_path).exists()):
        found["tokenizer_path"] = str(stored / name)
    if is_whole and config.chat_template and is_there(template):
        found["chat_template"] = str(template)
    return found


def _found(path: str | SourceList, there: Path) -> str | SourceList:
    """The path of a key; a relative one that names nothing here, but something in the directory `there`, is from there.

    The same goes for each path of a list of sources.
    """
    if isinstance(path, SourceList):
        entries = tuple(each.model_copy(update={"path": _found(each.path, there)}) for each in path.entries)
        return replace(path, entries=entries)
    place = user_path(path)
    if not path or place.is_absolute() or is_bucket(path) or is_there(place) or _matches(path):
        return path
    if is_there(there / place):
        return str(there / place)
    pattern = f"{glob.escape(str(there))}/{path}"
    return pattern if _matches(pattern) else path


def _matches(pattern: str) -> bool:
    return bool(glob.glob(pattern, recursive=True))  # noqa: PTH207 as the reader of texts does
