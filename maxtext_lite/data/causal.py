"""Whether a chat template writes each turn by what came before it alone, as its program shows.

Such a template writes the turns in one loop over them, and looks at none that is still to come. What it has written
when a turn's place in the loop begins is then what it writes of the turns before, whether more of them follow or not:
one rendering has the places of all turns, where a template of which nothing is known must be rendered up to each of
them, which takes work in proportion to the square of the turns. Nothing is proven of a template that asks for the
number of turns, for the last of them, or for one by its number: what those write depends on what follows.
"""

from __future__ import annotations

from jinja2 import nodes

_TURNS = "messages"
_OF_THE_LOOP = {"index", "index0", "first", "depth", "depth0", "previtem", "cycle"}
_AFTER_THE_LOOP = {
    "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token", "raise_exception", "strftime_now",
}  # fmt: skip
"""What may stand after the loop: it is the same after any number of turns."""


def loop_over_turns(template: nodes.Template) -> nodes.For | None:
    """The loop that writes the turns, of a template that writes each by those before it; None where it may not."""
    loops = [node for node in template.body if isinstance(node, nodes.For)]
    if not loops or any(template.find_all((nodes.Block, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends))):
        return None
    loop = loops[-1]
    turns = _names_of_turns(template)
    plain = not (loop.test or loop.else_ or loop.recursive or any(template.find_all((nodes.Break, nodes.CallBlock))))
    if not (plain and isinstance(loop.iter, nodes.Name) and loop.iter.name in turns):
        return None
    if any(node.name == "random" for node in template.find_all(nodes.Filter)):
        return None
    after = template.body[template.body.index(loop) + 1 :]
    before = template.body[: template.body.index(loop)]
    names = {name.name for node in after for name in _names(node)}
    asks = any(name.name == "add_generation_prompt" for node in [*before, loop] for name in _names(node))
    if asks or not names <= _AFTER_THE_LOOP or not _looks_back(template, loop, turns):
        return None
    return loop


def _names(node: nodes.Node) -> list[nodes.Name]:
    return [*([node] if isinstance(node, nodes.Name) else []), *node.find_all(nodes.Name)]


def _names_of_turns(template: nodes.Template) -> set[str]:
    """`messages`, and the names that are set to it or to its turns from one on."""
    names = {_TURNS}
    while True:
        more = {
            node.target.name
            for node in template.find_all(nodes.Assign)
            if isinstance(node.target, nodes.Name) and _is_turns(node.node, names)
        }
        if more <= names:
            return names
        names |= more


def _is_turns(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is the turns, or all of them from one on."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        start, others = node.arg.start, (node.arg.stop, node.arg.step)
        from_one_on = isinstance(start, nodes.Const) and isinstance(start.value, int) and start.value >= 0
        return from_one_on and others == (None, None) and _is_turns(node.node, names)
    return False


def _looks_back(template: nodes.Template, loop: nodes.For, turns: set[str]) -> bool:
    """Whether every use of the turns, and of `loop`, is one that the turns to come have no part in."""
    known: set[int] = {id(loop.iter)}
    for assign in template.find_all(nodes.Assign):
        if _is_turns(assign.node, turns):
            known |= {id(assign.target), *(id(name) for name in _names(assign.node))}
    for item in template.find_all(nodes.Getitem):  # the first turn is there whenever an answer follows
        if isinstance(item.arg, nodes.Const) and item.arg.value == 0 and isinstance(item.node, nodes.Name):
            known.add(id(item.node))
    for attribute in template.find_all(nodes.Getattr):
        if attribute.attr in _OF_THE_LOOP and isinstance(attribute.node, nodes.Name) and attribute.node.name == "loop":
            known.add(id(attribute.node))
    return all(id(name) in known for name in template.find_all(nodes.Name) if name.name in {"loop", *turns})
