"""Chat templates: from the turns of a conversation to the text that the model was trained on."""

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maxtext_lite.config import UserError
from maxtext_lite.config.errors import value_text
from maxtext_lite.config.json_file import is_directory, is_there, read_object, read_text, user_path
from maxtext_lite.data.tokenizer import TokenizerKeys
from maxtext_lite.data.tokenizer_files import CONFIG_FILE, special_tokens
from maxtext_lite.hf.turns import Turn

DATE_OF_TRAINING_DATA = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)
"""The date for templates that print today's, if a text must not depend on the day; Llama's own default."""

_THINKING = re.compile(
    r"<(\w*:?think\w*|thought|reasoning)>.*?</\1>|\[THINK\].*?\[/THINK\]|<\|channel>.*?<channel\|>|◁think▷.*?◁/think▷",
    re.DOTALL,
)
THINKING_DELIMITERS = re.compile(r"</?\w*:?think\w*>|\[/?THINK\]")
"""The texts around an answer's thinking, including special tokens."""
_UNOPENED = re.compile(r"^.*?(</\w*:?think\w*>|\[/THINK\])", re.DOTALL)


_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


MARKS = ("\ufdd0", "\ufdd1")
"""Written around what a template marks with `{% generation %}`. Unicode assigns them to no character."""
_MOST_BITS = 100_000  # of an integer
_MOST_REPEATED = 10_000_000  # characters or elements


class ChatTemplate:
    """The chat template of a Hugging Face directory, rendered in a sandbox that can change and reach nothing.

    It comes from chat_template.jinja, tokenizer_config.json or chat_template.json, whichever exists first.

    Args:
      directory: directory of the tokenizer, whose files spell the special tokens that the template prints; None if
        the tokenizer has none, and they print nothing.
      file: a file with a template, which takes precedence.
      today: the date that templates see; None: the date of rendering.
    Attributes:
      fingerprint: hash of the template's text, and of the special tokens that it names.
      has_marks: whether the template marks answers with `{% generation %}`.
    Raises:
      UserError: there is no template, or it is invalid.
    """

    def __init__(
        self, directory: Path | None, *, file: Path | None = None, today: datetime.datetime | None = None
    ) -> None:
        self._file, source = _source(directory) if file is None else (file, _read(file))
        self._today = today
        environment = ChatEnvironment()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = self._strftime_now
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # jinja's own, and what Python's compiler makes of a program like this
            raise UserError(f"{self._file}: its chat template is invalid ({_reason(error)}).") from error
        self.has_marks = environment.has_marks
        stated = {} if directory is None else special_tokens(directory)
        self._special: dict[str, Any] = {}
        if directory is not None:
            self._special = {name: UnstatedToken(name=name) for name in _SPECIAL_TOKENS}
        for name, token in stated.items():
            self._special[name] = token.text if isinstance(token.text, str) else jinja2.Undefined(name=name)
        named = {name: token.text for name, token in sorted(stated.items()) if name in source}
        known_by = f"{source}{json.dumps(named) if named else ''}"
        self.fingerprint = hashlib.sha256(known_by.encode("utf-8", "replace")).hexdigest()
        self._gives_parts = False
        if not self._renders_contents():  # contents may have to be lists of parts, as for images
            self._gives_parts = True
            self._gives_parts = self._renders_contents()

    def render(self, turns: Sequence[Turn], *, answer_follows: bool = True) -> str:
        """The text of these turns, followed by what precedes an answer if one follows.

        Raises:
          UserError: the template refuses the turns, fails on them, or asks for something of absurd size.
        """
        text = self._render(turns, answer_follows=answer_follows)
        return _without_marks(text)[0] if self.has_marks else text

    def render_marked(self, turns: Sequence[Turn]) -> tuple[str, list[tuple[int, int]]]:
        """The text of these turns, and the first character and the one after the last of each `{% generation %}`."""
        return _without_marks(self._render(turns, answer_follows=False))

    def _render(self, turns: Sequence[Turn], *, answer_follows: bool) -> str:
        messages: list[dict[str, Any]] = [dict(turn) for turn in turns]
        if self.has_marks and any(mark in turn["content"] for turn in turns for mark in MARKS):
            raise UserError(
                "a turn has U+FDD0 or U+FDD1, which mark what is learned and no text may have. Remove them."
            )
        if self._gives_parts:
            for message in messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": answer_follows}
        try:
            return self._template.render({**self._special, **given})
        except Exception as error:  # a template is a program, and may raise what any program may
            raise UserError(f"{self._file}: its chat template refuses these turns: {_reason(error)}.") from error

    def _renders_contents(self) -> bool:
        """Whether the contents of turns are in their rendering, without the names that parts have."""
        turns = [{"role": "user", "content": "Ask8t0"}, {"role": "assistant", "content": "Say8t0"}]
        try:
            text = self.render(turns, answer_follows=False)
        except UserError:
            return False
        return all(turn["content"] in text for turn in turns) and not re.search("""['"]type['"]""", text)

    def _strftime_now(self, form: str) -> str:
        today = self._today or datetime.datetime.now().astimezone()
        return today.strftime(form)


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks of `{% generation %}`, and what they enclosed."""
    begin, end = MARKS
    first, *others = text.split(begin)
    pieces = [first]
    spans: list[tuple[int, int]] = []
    written = len(first)
    for other in others:
        marked, _, rest = other.partition(end)
        spans.append((written, written + len(marked)))
        pieces += [marked, rest]
        written += len(marked) + len(rest)
    return "".join(pieces), spans


def check_contents(turns: Sequence[Turn], text: str) -> None:
    """Refuses a rendering without the content of a turn.

    Raises:
      UserError: a content, trimmed and without thinking, is not in the text.
    """
    for number, turn in enumerate(turns, start=1):
        if turn["content"].strip() not in text and not all(part in text for part in spoken_parts(turn["content"])):
            raise UserError(
                f"the chat template does not render the content of turn {number}, the {turn['role']}'s "
                f"('{value_text(turn['content'])}')."
            )


def spoken_parts(content: str) -> list[str]:
    """A content without its thinking, trimmed; none if it is all thinking."""
    rest = _UNOPENED.sub("\0", _THINKING.sub("\0", content))
    return [part.strip() for part in rest.split("\0") if part.strip()]


def _reason(error: Exception) -> str:
    """Why a template failed, in its own or jinja's words; for Python's errors with their type."""
    text = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    return value_text(text.rstrip("."))


class ChatKeys(TokenizerKeys, Protocol):
    """The keys of a config that name a chat template."""

    @property
    def chat_template(self) -> str:
        """A file with a template; "": the one of the tokenizer's directory."""
        ...


def chat_template(config: ChatKeys, *, today: datetime.datetime | None = None) -> ChatTemplate:
    """The template that `chat_template` names, or else the one of the tokenizer's directory.

    Raises:
      UserError: there is no template, or it is invalid.
    """
    path = user_path(config.tokenizer_path) if config.tokenizer_path else None
    directory = path.parent if path and not is_directory(path) else path
    file = user_path(config.chat_template) if config.chat_template else None
    return ChatTemplate(directory, file=file, today=today)


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except UserError as error:
        raise UserError(f"chat_template='{value_text(str(file))}' cannot be read: {error}") from None


def _source(directory: Path | None) -> tuple[Path, str]:
    """The file of a directory's chat template, and the template."""
    if directory is None:
        raise UserError(
            "turns need a chat template: set chat_template to a file with one, or give plain texts instead of turns."
        )
    if is_there(directory / "chat_template.jinja"):
        return directory / "chat_template.jinja", read_text(directory / "chat_template.jinja")
    for file in (directory / CONFIG_FILE, directory / "chat_template.json"):
        stated = read_object(file).get("chat_template") if is_there(file) else None
        if isinstance(stated, list):  # several, by name
            named = {each.get("name"): each.get("template") for each in stated if isinstance(each, dict)}
            stated = named.get("default")
        if isinstance(stated, str) and stated:
            return file, stated
        if stated:
            raise UserError(
                f"{file}: chat_template={value_text(stated)} is not text, or a list with one named default."
            )
    raise UserError(
        f"{directory} has no chat template: put a chat_template.jinja there, set the key chat_template to a file with "
        "one, or give plain texts instead of turns."
    )


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **how: Any) -> str:
    """Plain JSON; jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **how)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# ---- The sandbox: templates can reach and change nothing, and `*` and `**` make nothing of absurd size ---------------


class UnstatedToken(jinja2.Undefined):
    """A special token that no file states: it may be asked about, but not printed."""

    def __str__(self) -> str:
        name = self._undefined_name
        raise jinja2.UndefinedError(f"it prints {name}, which tokenizer_config.json does not state (null: none)")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for one template; jinja2 itself bounds `range`.

    Attributes:
      has_marks: whether the template marks answers with `{% generation %}`.
    """

    intercepted_binops = frozenset({"*", "**"})
    has_marks = False

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            is_absurd = bits > _MOST_BITS
        else:
            repeated, times = (right, left) if isinstance(left, int) else (left, right)
            is_sized = isinstance(repeated, str | list | tuple) and isinstance(times, int)
            is_absurd = is_sized and len(repeated) * times > _MOST_REPEATED
        if is_absurd:
            raise SecurityError(f"it asks for a text or a number of absurd size with {operator}")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}`, which marks the answers to learn in templates: writes MARKS around them."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> Any:
        """Parses the block as a call in its own scope, like transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_marks = True  # type: ignore[attr-defined]
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        return f"{MARKS[0]}{caller()}{MARKS[1]}"
