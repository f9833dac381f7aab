"""A reward, in a file of its own: each run has a process that imports it, and conftest.py would bring jax along."""


def low_bytes(completions):
    """A reward that an untrained model can raise: the share of a response's characters below '@'.

    Some responses have none.
    """
    return [
        sum(character < "@" for character in text) / max(len(text), 1)
        if len(text) % 4
        else None
        for text in completions
    ]
