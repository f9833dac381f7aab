"""What the messages of a refusal name, read as a user reads them."""

import re


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
