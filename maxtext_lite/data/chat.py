"""Chat templates: from the turns of a conversation to the text that the model was taught to answer."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from maxtext_lite.config import DataConfig, UserError
from maxtext_lite.config.hf_config import read_fields

Turn = dict[str, str]
"""{"role": "user", "content": ...}; roles are those that the template knows: system, user, assistant."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


DATE_OF_TRAINING_DATA = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)
"""Today, to templates that write the date, where a text is to be the same on every day; Llama's own default."""


class ChatTemplate:
    """The chat template of a Hugging Face directory, rendered in a sandbox that can change and reach nothing.

    It is taken from chat_template.jinja, tokenizer_config.json or chat_template.json, whichever is there first.

    Args:
      directory: where the tokenizer is, which knows how special tokens are spelled; None where it has no directory.
      file: a file that holds a template, which is then taken.
      today: what templates take for today; None: the date on which they are rendered.
    Raises:
      UserError: there is none, or it is not a template.
    """

    def __init__(
        self, directory: Path | None, *, file: Path | None = None, today: datetime.datetime | None = None
    ) -> None:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._name = str(directory if file is None else file)
        config = {} if directory is None else _fields(directory / "tokenizer_config.json")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_block(), "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: (today or datetime.datetime.now().astimezone()).strftime(
            form
        )
        try:
            self._template = environment.from_string(_source(directory, config) if file is None else _read(file))
        except jinja2.TemplateError as error:
            raise UserError(f"{self._name}: its chat template is not one ({error}).") from None
        self._special = {name: text for name in _SPECIAL if (text := _content(config.get(name))) is not None}

    def render(self, turns: Sequence[Turn], *, answer_follows: bool = True) -> str:
        """The text of these turns, and where an answer follows, what stands before it.

        Raises:
          UserError: the template refuses the turns, or cannot be rendered.
        """
        import jinja2

        try:
            return self._template.render(
                messages=list(turns), tools=None, documents=None, add_generation_prompt=answer_follows, **self._special
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(f"{self._name}: its chat template refuses these turns: {error}.") from None


def chat_template(config: DataConfig, *, today: datetime.datetime | None = None) -> ChatTemplate:
    """The template that `chat_template` names, or else that of the tokenizer's directory.

    Raises:
      UserError: there is none, or it is not a template.
    """
    path = Path(config.tokenizer_path).expanduser() if config.tokenizer_path else None
    directory = path.parent if path and path.is_file() else path
    file = Path(config.chat_template).expanduser() if config.chat_template else None
    return ChatTemplate(directory, file=file, today=today)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template={str(file)!r} cannot be read ({error}).") from None


def _source(directory: Path | None, config: dict[str, Any]) -> str:
    if directory is None:
        raise UserError(
            "turns of a conversation need a chat template, and tokenizer_type=byte has none. Set chat_template to a "
            "file that holds one, or give texts."
        )
    if (directory / "chat_template.jinja").is_file():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    stated = config.get("chat_template") or _fields(directory / "chat_template.json").get("chat_template")
    if isinstance(stated, list):  # several, by name
        stated = {each["name"]: each["template"] for each in stated}.get("default")
    if not isinstance(stated, str):
        raise UserError(
            f"{directory} has no chat template. Give whole texts instead of turns, or a file that holds a template."
        )
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
