"""What the messages of a refusal name, read as a user reads them; and values that no key is made for."""

import re
from typing import get_args

from maxtext_lite.config import KEYS
from maxtext_lite.post_training.keys import RL_KEYS, RLRunConfig

RL_FILE = "configs/post_train/rl.yml"
EXTREME = (
    "0",
    "-1",
    "2",
    "7",
    "1e20",
    "-1e20",
    "1000000000000000000",
    "9223372036854775808",
    str(10**400),
    "1e308",
    "5e-324",
    "1e400",
    ".nan",
    "-.inf",
    "-0.0",
    "0.333333333333333333",
    "1e-300",
    "1/3",
    "1/0",
    "99999999999999999999/3",
    "0x" + "f" * 4000,
    "1" * 5000,
    "a" * 5000,
    "",
    "null",
    "[1, 2]",
    "{}",
    "{rope_type: linear, factor: 1e400}",
    "true",
    "\x1b[31mred",
    "a\0b",
    "\u202eabc",
    "\udc80",
    "naïve-ß-漢字",
    "*x",
    "&a [*a]",
    "!!python/object:os.system x",
    "[" * 60,
    "'unclosed",
    "a=b",
    "../..",
    "2147483647",
    "1000000007",
    "0.25",
)
"""Values of a command line: numbers beyond every bound, texts that are no text, YAML that is none."""


def changes(problem):
    """The changes that a message names: dicts of settings, as texts."""
    clause = re.search(r" Nearest that works?: (.*)\.$", problem)
    assert clause, f"no value that works in: {problem}"
    key = re.match(r"(\w+)=", problem)
    found = []
    for text in split(clause[1], (", ", " or ")):
        named = [setting.partition("=") for setting in split(text, (" ",))]
        stated = all(equals and re.fullmatch(r"\w+", name) for name, equals, _ in named)
        assert stated or key, problem
        found.append(
            {name: value for name, _, value in named}
            if stated or not key
            else {key[1]: text}
        )
    return found


def split(text, separators):
    """The parts of a text between separators that stand in no quotes and no brackets."""
    parts, depth, quoted, at = [""], 0, False, 0
    while at < len(text):
        between = next((one for one in separators if text.startswith(one, at)), None)
        if between and not quoted and not depth:
            parts.append("")
            at += len(between)
            continue
        if quoted and text[at] == "\\":
            parts[-1] += text[at]
            at += 1
        elif text[at] == '"':
            quoted = not quoted
        elif not quoted:
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(text[at], 0)
        parts[-1] += text[at]
        at += 1
    return parts


def random_words(rng, *, is_rl):
    """`key=value` of a few keys: half of the values are of the key's kind, the others extreme."""
    keys = (*KEYS, *RL_KEYS) if is_rl else KEYS
    chosen = rng.sample(keys, rng.choice([1, 1, 2, 3, 5, 9]))
    return [
        f"{key}={rng.choice(EXTREME) if rng.random() < 0.5 else _usual(rng, key)}"
        for key in chosen
    ]


def _usual(rng, key):
    kind = RLRunConfig.model_fields[key].annotation
    if kind is bool:
        return rng.choice(["true", "false"])
    if kind is str:
        return rng.choice(
            ["x", "a,b", "global", "local,global", "exact_answer", "{prompt}"]
        )
    choices = get_args(kind)
    if choices and all(isinstance(choice, str) for choice in choices):
        return rng.choice(choices)
    return rng.choice(
        ["1", "2", "3", "6", "8", "12", "64", "100", "1000", "-1", "0", "0.5"]
    )
