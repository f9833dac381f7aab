"""From files and `key=value` to a Config: base.yml, the model's file, the user's files, the command line."""

import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError

from maxtext_lite.config.bucket import is_bucket
from maxtext_lite.config.errors import (
    Refusal,
    UserError,
    did_you_mean,
    full_text,
    setting_text,
    value_text,
    without_secrets,
)
from maxtext_lite.config.json_file import is_there, user_path
from maxtext_lite.config.keys import (
    Config,
    MixtureList,
    ModelConfig,
    SourceList,
    field_of,
    keys_of,
    known_keys,
)
from maxtext_lite.config.registry import NotInstalled, installed_names, load, load_installed, names
from maxtext_lite.config.rules import rule_violations
from maxtext_lite.config.types import path_problem, wrong_value
from maxtext_lite.config.whole_file import write_whole
from maxtext_lite.config.yaml import YamlValue, parse_mapping, parse_value

ROOT_FILE = "base.yml"
"""The base of every config."""
RUN_FILE = "config.yml"
"""The name of the config of a run directory, which has every key."""
WORKING_DIRECTORY = "working_directory"
"""The entry of a run's environment.json for the directory that its relative paths are in."""
LARGEST_FILE = 2**22
"""The most bytes of a config. PyYAML reads them in 20 s; 1000 sources with paths of 600 characters take half."""

_PACKAGE = Path(__file__).resolve().parent.parent
_MOST_NAMED = 20
_MODELS = "models/"


class ConfigError(UserError):
    """A config is wrong."""


# ---- Files ----------------------------------------------------------------------------------------------------------


class Origin(str):
    """Where a value comes from, as messages call it."""

    is_default = False
    """Whether it is configs/base.yml or a file of configs/models/, as shipped: the user left the key open."""


@dataclass(frozen=True)
class Layer:
    """The values from one source; later layers win.

    Attributes:
      origin: the name of the source in messages.
      values: by key; a key that takes text has the text of a scalar as it is written, so run_name=007 stays 007.
      shipped: the path below configs/ of a shipped file; "" for other sources.
    """

    origin: Origin
    values: dict[str, object]
    shipped: str = ""


def packaged_directory(kind: Literal["configs", "assets"]) -> Path:
    """The directory of the shipped files: inside the package, or beside it in a checkout."""
    inside = _PACKAGE / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind


def packaged_file(kind: Literal["configs", "assets"], name: str) -> Path | None:
    """The shipped file `name`, with or without `configs/` in front; None where there is no such file."""
    directory = packaged_directory(kind)
    for relative in (name, name.removeprefix(f"{kind}/")):
        path = directory / relative
        if _is_file(path) and path.resolve().is_relative_to(directory.resolve()):
            return path
    return None


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 which raises for a name that no file system accepts


def _find_config(name: str, namer: Path | None) -> Path | None:
    """A config file: beside the file that names it or in the working directory, otherwise among the shipped ones."""
    path = user_path(name) if namer is None else namer.parent / user_path(name)
    names_itself = namer is not None and path.resolve() == namer.resolve()
    return path if _is_file(path) and not names_itself else packaged_file("configs", name)


def _shipped_configs() -> list[str]:
    """The paths below configs/ of all shipped files."""
    directory = packaged_directory("configs")
    return sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*.yml"))


def _read_layer(path: Path, named: str, problems: list[Refusal]) -> Layer:
    """The values of a file.

    Args:
      named: the file as the user named it.
      problems: gains what is wrong with the file.
    """
    directory, resolved = packaged_directory("configs").resolve(), path.resolve()
    shipped = resolved.relative_to(directory).as_posix() if resolved.is_relative_to(directory) else ""
    origin = Origin(shipped or value_text(named))
    origin.is_default = shipped == ROOT_FILE or shipped.startswith(_MODELS)
    try:
        entries = _read_shipped(resolved) if shipped else _read(path)
    except OSError as error:
        problems.append(Refusal("", f"{origin}: {error.strerror}."))
        return Layer(origin, {})
    except ValueError as error:
        problems.append(Refusal("", f"{origin} {error}."))
        return Layer(origin, {})
    problems += [Refusal("", message) for message in keys_twice(entries, origin)]
    return Layer(origin, {key: _plain_value(key, value) for key, value in entries}, shipped)


def _read(path: Path) -> list[tuple[str, YamlValue]]:
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise ValueError(f"has {size:,} bytes; a config has at most {LARGEST_FILE:,}")
    entries = parse_mapping(path.read_text(encoding="utf-8"))
    if path.name == RUN_FILE and not entries:
        raise ValueError("has no keys, as if it had been cut short")
    return entries


_read_shipped = functools.lru_cache(maxsize=8)(_read)


def keys_twice(entries: Sequence[tuple[str, YamlValue]], origin: str) -> list[str]:
    """The problems with the keys that occur several times in a file."""
    counts = Counter(key for key, _ in entries)
    twice = [key for key, count in counts.items() if count > 1]
    return [f"key '{value_text(key)}' occurs twice in {origin}. Keep one of them." for key in twice[:_MOST_NAMED]]


def _takes_text(key: str) -> bool:
    """Whether the value of a key is text."""
    field = field_of(key)
    is_text = field is not None and (field.annotation is str or get_origin(field.annotation) is Literal)
    return is_text or _may_list_sources(key)


def _may_list_sources(key: str) -> bool:
    """Whether the value of a key may be a list of sources."""
    field = field_of(key)
    return field is not None and not {SourceList, MixtureList}.isdisjoint(get_args(field.annotation))


def _plain_value(key: str, value: YamlValue) -> object:
    """The value of a key in a Layer."""
    is_null = value.value is None and value.text != ""  # as written: null or ~
    return value.value if is_null or value.text is None or not _takes_text(key) else value.text


def _file_layers(name: str | None, problems: list[Refusal]) -> list[Layer]:
    """The layers of a file and its bases, the lowest first, which is always the shipped configs/base.yml."""
    layers: list[Layer] = []
    seen: dict[Path, str] = {}
    namer, by = None, ""
    while name is not None:
        path = _find_config(name, namer)
        if path is None:
            from maxtext_lite.config.hints import missing_file

            directory = Path() if namer is None else namer.parent
            problems.append(Refusal("", missing_file(name, by, _shipped_configs(), directory)))
            break
        if path.resolve() in seen:
            message = f"base: {value_text(name)} in {by} leads back to {seen[path.resolve()]}, which is based on it."
            problems.append(Refusal("", message))
            break
        layer = _read_layer(path, name if namer is None else str(namer.parent / user_path(name)), problems)
        layers.insert(0, layer)
        seen[path.resolve()] = layer.origin
        namer, by = path, layer.origin
        base = layer.values.pop("base", None)
        if base is not None and not isinstance(base, str):
            problems.append(Refusal("", f"base: {value_text(base)} in {by} is not the name of a file."))
            break
        name = base
    if not layers or layers[0].shipped != ROOT_FILE:
        layers.insert(0, _read_layer(packaged_directory("configs") / ROOT_FILE, ROOT_FILE, problems))
    return layers


# ---- The values that win --------------------------------------------------------------------------------------------


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
      refusals: of files, unknown and misplaced keys, and wrong values.
      provided: what load_parameters_path decided.
    """

    config: Config
    refusals: tuple[Refusal, ...]
    provided: Provided

    def problems(self, refusals: Iterable[Refusal]) -> list[str]:
        """All refusals as text; where load_parameters_path decided a key, in terms of its files."""
        theirs = self.provided.field_names
        words = re.compile(rf"\b({'|'.join(theirs)})\b")
        found: list[str] = []
        for refusal in (*self.refusals, *refusals):
            text, origin = str(refusal), self.config.origins.get(refusal.key)
            if theirs and origin == self.provided.origin:
                text = f"{origin}: {words.sub(lambda name: theirs[name[0]], text)}"
            found.append(text)
        return found


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
    config = reading.config
    if problems := reading.problems(rule_violations(config, defaults_of(type(config)))):
        raise ConfigError(problems)
    return config


def read_config(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Reading:
    """The first half of `load_config`: the values and what is wrong with each by itself.

    Raises:
      NotInstalled: the kind of run that the files select is absent.
    """
    problems: list[Refusal] = []
    files = _file_layers(None if path is None else str(path), problems)
    kind = _kind_of(files)
    defaults = defaults_of(kind)
    layers = [*files, _override_layer(overrides, problems, defaults)]
    for layer in layers:
        _drop_unknown_keys(layer, problems, kind)
    _refuse_unused_keys(layers, problems, kind)
    _spell_out_auto(layers)
    _end_as_stated_last(layers[1:])
    layers[1:1] = _model_layers(layers, problems, kind)
    provided = _provided(layers, problems)
    layers.insert(1, Layer(Origin(provided.origin), dict(provided.values)))
    config = _validate(kind, layers, problems, defaults)
    origins = {key: layer.origin for layer in layers for key in layer.values}
    return Reading(config.with_origins({key: origins[key] for key in keys_of(kind)}), tuple(problems), provided)


def _kind_of(files: Iterable[Layer]) -> type[Config]:
    """The kind of run that one of the files selects."""
    for layer in files:
        if layer.shipped in names("run"):
            return load("run", layer.shipped)
    return Config


@functools.cache
def defaults_of(kind: type[Config]) -> Config:
    """The config of the `base_files` of a kind of run."""
    values = _merged(_read_layer(packaged_directory("configs") / file, file, []) for file in kind.base_files)
    return kind.model_validate({key: values[key] for key in keys_of(kind)})


def _merged(layers: Iterable[Layer]) -> dict[str, object]:
    return {key: value for layer in layers for key, value in layer.values.items()}


def _override_layer(overrides: Iterable[str], problems: list[Refusal], defaults: Config) -> Layer:
    """The values of the command line."""
    values: dict[str, object] = {}
    unreadable: dict[str, Refusal] = {}
    words = list(overrides)
    is_refused = False
    for place, word in enumerate(words):
        key, equals, text = word.partition("=")
        was_refused, is_refused = is_refused, not (key and equals)
        if was_refused and is_refused:
            continue  # the value of the word before it, as in `steps 5`
        if is_refused:
            from maxtext_lite.config.hints import override_hint

            hint = override_hint(words[place:], known_keys())
            message = f"'{value_text(word)}' (command line) is not of the form key=value.{hint}"
            problems.append(Refusal("", message))
            continue
        values.pop(key, None)
        unreadable.pop(key, None)
        try:
            values[key] = _override_value(key, text)
        except ValueError as error:
            if key in type(defaults).model_fields:
                unreadable[key] = Refusal(key, f"{key}={value_text(text)} {error}.", (getattr(defaults, key),))
            else:
                values[key] = None  # the key itself is refused
    problems += unreadable.values()
    return Layer(Origin("command line"), values)


def _override_value(key: str, text: str) -> object:
    """The value of `key=text`; for a text key the text itself, unless it is quoted, null or a list."""
    is_text = _takes_text(key) and not text.startswith(("'", '"')) and text not in ("~", "null")
    if is_text and not (_may_list_sources(key) and text.lstrip("[ ").startswith("{")):
        return text
    return _plain_value(key, parse_value(text))


def _drop_unknown_keys(layer: Layer, problems: list[Refusal], kind: type[Config] = Config) -> None:
    """Removes the keys that a kind of config does not have, and refuses them."""
    known = kind.model_fields
    unknown = [key for key in layer.values if key not in known]
    for key in unknown:
        del layer.values[key]
    if not unknown:
        return
    from maxtext_lite.config.hints import key_hint

    for other in load_installed("run"):
        theirs = [key for key in unknown if key in other.model_fields]
        if theirs:
            unknown = [key for key in unknown if key not in theirs]
            named, file = ", ".join(theirs[:_MOST_NAMED]), f"configs/{other.base_files[-1]}"
            message = f"unknown here: {named} ({layer.origin}). Give {file}, which has it, or a file whose base it is."
            problems.append(Refusal("", message))
    for key in unknown[:_MOST_NAMED]:
        problems.append(Refusal("", f"unknown key '{value_text(key)}' ({layer.origin}).{key_hint(key, known)}"))
    if len(unknown) > _MOST_NAMED:
        problems.append(Refusal("", f"{layer.origin} has {len(unknown) - _MOST_NAMED:,} more unknown keys."))


def _refuse_unused_keys(layers: Sequence[Layer], problems: list[Refusal], kind: type[Config]) -> None:
    """Refuses values other than base.yml's for keys that this kind of run does not use."""
    root, *others = layers
    for layer in others:
        for key, why in kind.unused_keys.items():
            if layer.values.get(key, root.values.get(key)) != root.values.get(key):
                value = value_text(layer.values.pop(key))
                reason = f"has no effect in {kind.run_kind.upper()}, {why}. Remove it."
                problems.append(Refusal("", f"{key}={value} ({layer.origin}) {reason}"))


def _spell_out_auto(layers: Sequence[Layer]) -> None:
    """Replaces per_device_batch_size=auto by -1, and so gradient_accumulation_steps where it is not stated."""
    stating = [layer.values for layer in layers if "per_device_batch_size" in layer.values]
    if not stating or stating[-1]["per_device_batch_size"] != "auto":
        return
    stating[-1]["per_device_batch_size"] = -1
    if not any("gradient_accumulation_steps" in layer.values for layer in layers[1:]):
        stating[-1]["gradient_accumulation_steps"] = -1


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


def _model_layers(layers: Sequence[Layer], problems: list[Refusal], kind: type[Config]) -> list[Layer]:
    """The layer of configs/models/NAME.yml, for the model_name that wins.

    None for `default`, and none where a file with this model_name has every key, as the config.yml of a run does.
    """
    naming = [layer for layer in layers if "model_name" in layer.values]
    name = naming[-1].values["model_name"] if naming else None
    if not name or not isinstance(name, str) or name == "default" or path_problem(name):
        return []  # a wrong name is refused as a value
    if any(layer.values["model_name"] == name and layer.values.keys() >= {*keys_of(kind)} for layer in naming):
        return []
    file = f"configs/{_MODELS}{name}.yml"
    path = (packaged_file("configs", file) or _find_config(file, None)) if "/" not in name else None
    if path is None:
        shipped = [Path(each).stem for each in _shipped_configs() if each.startswith(_MODELS)]
        hint = did_you_mean(name, [*shipped, "default"])
        message = f"model_name={value_text(name)} has no file in configs/models/; model_name=default needs none.{hint}"
        problems.append(Refusal("", message))
        return []
    model = _read_layer(path, file, problems)
    _drop_unknown_keys(model, problems)
    if model.values.pop("model_name", None) is not None:
        message = f"model_name is in {model.origin}, the file that it names. Remove the line."
        problems.append(Refusal("", message))
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
        stated = layer.values.keys() & model.values.keys() & ModelConfig.model_fields.keys()
        for key in sorted(stated - winner.values.keys()):
            stale, new = layer.values[key], model.values[key]
            if stale != new:
                message = (
                    f"{key}={value_text(stale)} in {layer.origin} belongs to model_name={value_text(other)} there, but "
                    f"model_name={value_text(name)} has {value_text(new)}. Remove it, or state {key}= "
                    f"({winner.origin})."
                )
                problems.append(Refusal("", message))


_ARCHITECTURE = ModelConfig.model_fields.keys() - {"lora_rank", "lora_alpha", "lora_targets"}


def _provided(layers: Sequence[Layer], problems: list[Refusal]) -> Provided:
    """What the directory of load_parameters_path says about the config, if any."""
    root, *stating = layers
    nothing = Provided("", {})
    path = str(_merged(layers).get("load_parameters_path") or "")
    if not path or path_problem(path, of_run=True):
        return nothing  # a wrong path is refused as a value
    stated = {key: (value, layer.origin) for layer in stating for key, value in layer.values.items()}
    for provide in load_installed("config_provider"):
        provided = provide(path, stated, root.values["max_target_length"])
        if provided is not None:
            problems += provided.refusals
            return provided
    place = user_path(path)
    if is_bucket(path) or is_there(place / RUN_FILE) or is_there(place / "checkpoints"):
        return nothing
    if is_there(place):
        if installed_names("config_provider") != names("config_provider"):
            raise NotInstalled(f"load_parameters_path={path}: what reads it is not installed (maxtext_lite.hf).")
    elif not _ARCHITECTURE & stated.keys():  # a run's config.yml has them; its first parameters may be gone
        from maxtext_lite.config.hints import no_directory

        problems.append(Refusal("load_parameters_path", no_directory(path, "load_parameters_path")))
    return nothing


def _validate(kind: type[Config], layers: Sequence[Layer], problems: list[Refusal], defaults: Config) -> Config:
    """The config of the layers, with the defaults in place of wrong values, which it refuses."""
    values = _merged(layers)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        details = {str(detail["loc"][0]): detail for detail in error.errors()}
    usual = {key: getattr(defaults, key) for key in details}
    config = kind.model_validate({**values, **usual})
    for key in keys_of(kind):
        if key in details:
            refusal = wrong_value(kind, details[key], key)
            near = refusal.nearest or (usual[key],)
            problems.append(replace(refusal, nearest=_legal_values(config, defaults, key, near)))
    return config


def _legal_values(config: Config, defaults: Config, key: str, values: Iterable[object]) -> tuple[object, ...]:
    """The values of a key, each replaced by those that the rules between keys name where they refuse it."""
    legal: list[object] = []
    for value in values:
        tried = config.model_copy(update={key: value})
        refused = [each for each in rule_violations(tried, defaults) if each.key == key]
        instead = [each for each in refused[0].nearest if not isinstance(each, Mapping)] if refused else []
        legal += instead or [value]
    return tuple(legal)


# ---- A config as text -----------------------------------------------------------------------------------------------


_ALWAYS_SHOWN = (
    "run_name", "steps", "per_device_batch_size", "gradient_accumulation_steps", "max_target_length", "model_name",
    "base_emb_dim", "base_num_decoder_layers", "vocab_size", "dtype", "learning_rate", "ici_data_parallelism",
    "ici_fsdp_parallelism", "ici_tensor_parallelism",
)  # fmt: skip
_ADDRESSES = ("rollout_url",)  # the only ones with a name and a password: a path with them is refused


def write_resolved(config: Config, path: str | Path) -> None:
    """Writes every value, with its origin as a comment; `load_config(path)` gives an equal config.

    Passwords and signatures in the address of a server are written as ***.
    """
    lines = ["# Every key of this run and where its value came from. `load_config` of this file gives the same config."]
    if len(config.base_files) > 1:
        lines.append(f"base: {config.base_files[-1]}")
    for heading, section in config.sections:
        lines += ["", f"# ---- {heading} ----"]
        for key in section.model_fields:
            value = getattr(config, key)
            entry = f"{key}: {_yaml_text(without_secrets(value) if key in _ADDRESSES else value)}"
            origin = " ".join(config.origins.get(key, "not loaded from a file").split())
            lines.append(f"{entry:<55} # {origin}")
    write_whole(Path(path), "\n".join(lines) + "\n")


def describe(config: Config) -> str:
    """A table of the most important keys and of those that differ from configs/base.yml, with their origins."""
    base = defaults_of(type(config))
    shown = {*_ALWAYS_SHOWN, *config.shown_keys} - config.unused_keys.keys()
    keys = [key for key in keys_of(type(config)) if key in shown or getattr(config, key) != getattr(base, key)]
    values = [value_text(getattr(config, key)) for key in keys]
    key_width = max(len(key) for key in keys)
    value_width = min(max(len(value) for value in values), 40)
    return "\n".join(
        f"{key:<{key_width}}  {value:<{value_width}}  {config.origins.get(key, '')}".rstrip()
        for key, value in zip(keys, values, strict=True)
    )


def _yaml_text(value: object) -> str:
    """The value as a scalar that YAML 1.2 reads back unchanged."""
    if isinstance(value, SourceList):
        return str(value)
    if not isinstance(value, str):
        return full_text(value)
    if re.fullmatch(r"[A-Za-z_/][\w./-]*", value, flags=re.ASCII) and parse_value(value).value == value:
        return value
    return yaml.dump(value, default_style='"', allow_unicode=True, width=10**9).strip()


def load_asked(config: Config, kind: str, name: str, *keys: str) -> Any | None:
    """The object of a name that these keys request; None if it is absent and they have their defaults.

    Raises:
      NotInstalled: it is absent, and a key is not at its default.
    """
    try:
        return load(kind, name)
    except NotInstalled as error:
        defaults = defaults_of(type(config))
        for key in keys:
            value = getattr(config, key)
            if value != getattr(defaults, key):
                raise NotInstalled(f"{key}={setting_text(value)}: {error}") from None
        return None
