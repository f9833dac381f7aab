"""Chat templates: from the turns of a conversation to the text that the model was taught to answer."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from maxtext_lite.config import UserError
from maxtext_lite.config.hf_config import read_fields

Turn = dict[str, str]
"""{"role": "user", "content": ...}; roles are those that the template knows: system, user, assistant."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The chat template of a Hugging Face directory, rendered in a sandbox that can change and reach nothing.

    It is taken from chat_template.jinja, tokenizer_config.json or chat_template.json, whichever is there first.

    Raises:
      UserError: there is none, or it is not a template.
    """

    def __init__(self, directory: Path) -> None:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._directory = directory
        config = _fields(directory / "tokenizer_config.json")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_block(), "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
        try:
            self._template = environment.from_string(_source(directory, config))
        except jinja2.TemplateError as error:
            raise UserError(f"{directory}: its chat template is not one ({error}).") from None
        self._special = {name: text for name in _SPECIAL if (text := _content(config.get(name))) is not None}

    def render(self, turns: Sequence[Turn]) -> str:
        """The text of these turns up to where the answer begins.

        Raises:
          UserError: the template refuses the turns, or cannot be rendered.
        """
        import jinja2

        try:
            return self._template.render(
                messages=list(turns), tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(f"{self._directory}: its chat template refuses these turns: {error}.") from None


def _source(directory: Path, config: dict[str, Any]) -> str:
    if (directory / "chat_template.jinja").is_file():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    stated = config.get("chat_template") or _fields(directory / "chat_template.json").get("chat_template")
    if isinstance(stated, list):  # several, by name
        stated = {each["name"]: each["template"] for each in stated}.get("default")
    if not isinstance(stated, str):
        raise UserError(f"{directory} has no chat template. Leave chat out, and give the whole text as the prompt.")
    return stated


def _fields(path: Path) -> dict[str, Any]:
    return read_fields(path) if path.is_file() else {}


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    """JSON as it is: jinja's own would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _generation_block() -> Any:
    """`{% generation %}`, by which templates mark the answers that are learned: its content, as it stands."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
