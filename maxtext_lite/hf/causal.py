"""Static proof that a chat template renders each turn from earlier turns alone.

Such a template renders the turns in one loop and never looks at later ones. Its output when the iteration of a turn
begins is then what it would render of the turns before, whether or not more follow. So one rendering yields the places
of all turns; an unknown template must be rendered up to each of them, which takes quadratic work. Nothing is proven
about a template that asks for the number of turns, for the last turn, or for a turn by its number, because its output
may depend on what follows.
"""

from __future__ import annotations

from jinja2 import nodes

_TURNS = "messages"
_OF_THE_LOOP = {"index", "index0", "first", "depth", "depth0", "previtem", "cycle"}
_AFTER_THE_LOOP = {
    "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token", "raise_exception", "strftime_now",
}  # fmt: skip
"""Names that may occur after the loop: their values do not depend on the number of turns."""


def loop_over_turns(template: nodes.Template) -> nodes.For | None:
    """The loop over the turns if it provably renders each from earlier ones alone; otherwise None."""
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
    """`messages`, and the names assigned to it or to a tail of it."""
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
    """Whether an expression is the list of turns, or a tail of it."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        start, others = node.arg.start, (node.arg.stop, node.arg.step)
        from_one_on = isinstance(start, nodes.Const) and isinstance(start.value, int) and start.value >= 0
        return from_one_on and others == (None, None) and _is_turns(node.node, names)
    return False


def _looks_back(template: nodes.Template, loop: nodes.For, turns: set[str]) -> bool:
    """Whether no use of the turns or of `loop` depends on later turns."""
    known: set[int] = {id(loop.iter)}
    for assign in template.find_all(nodes.Assign):
        if _is_turns(assign.node, turns):
            known |= {id(assign.target), *(id(name) for name in _names(assign.node))}
    for item in template.find_all(nodes.Getitem):  # the first turn exists whenever an answer follows
        if isinstance(item.arg, nodes.Const) and item.arg.value == 0 and isinstance(item.node, nodes.Name):
            known.add(id(item.node))
    for attribute in template.find_all(nodes.Getattr):
        if attribute.attr in _OF_THE_LOOP and isinstance(attribute.node, nodes.Name) and attribute.node.name == "loop":
            known.add(id(attribute.node))
    return all(id(name) in known for name in template.find_all(nodes.Name) if name.name in {"loop", *turns})
