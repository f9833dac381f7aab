"""Parts of the library that a config asks for. An absent part is an error only if its key is not at its default."""

from typing import Any

from maxtext_lite.config.errors import setting_text
from maxtext_lite.config.keys import Config
from maxtext_lite.config.load import defaults_of
from maxtext_lite.config.registry import NotInstalled, load


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
