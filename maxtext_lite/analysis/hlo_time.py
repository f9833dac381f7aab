"""The time of a scheduled module on a device that runs its instructions in order, with transfers beside them."""

from collections.abc import Callable, Iterable, Iterator

from maxtext_lite.analysis.hlo import KINDS, Collective, chain_of
from maxtext_lite.analysis.hlo_text import Computation, Instruction, Module


class Schedule:
    """The schedule of a module. What it starts asynchronously runs beside its instructions until it is awaited.

    Collectives run one after the other, and so do asynchronous copies. What is awaited outside of its computation, such
    as in the next trip of a loop, is taken to be awaited at once. A conditional takes its longest branch.

    Args:
      found: `collectives(module)`.
      busy: seconds that an instruction which is no collective occupies the device, or its copy engine.
      sent: seconds that a collective occupies the links.
    """

    def __init__(
        self,
        module: Module,
        found: Iterable[Collective],
        *,
        busy: Callable[[Computation, Instruction], float],
        sent: Callable[[Collective], float],
    ) -> None:
        self._module, self._busy, self._sent = module, busy, sent
        self._collectives = {each.line: each for each in found}

    def seconds(self, name: str | None = None) -> float:
        """The time of one run of a computation; None: of the module."""
        name = name or self._module.entry
        computation = self._module.computations[name]
        parts = {it.name: dict(self._parts(it)) for it in computation.instructions.values()}
        last = {key: at for at, keys in parts.items() for key in keys}
        now = links = copies = 0.0
        ends: dict[str, float] = {}
        for it in computation.instructions.values():
            for key, collective in parts[it.name].items():
                if collective is not None:
                    links = ends[key] = max(now, links) + self._sent(collective)
            spent = 0.0 if _kind(it) in KINDS else self._nested(it, name) or self._busy(computation, it)
            if _is_copy(it):
                copies = ends[it.name] = max(now, copies) + spent
            else:
                now += spent
            for key in parts[it.name]:
                if last[key] == it.name:
                    now = max(now, ends.get(key, now))
        return now

    def _nested(self, it: Instruction, around: str) -> float:
        """The time of the computations that an instruction schedules; 0 if there are none."""
        called, runs = list(it.called), self._module.runs
        if it.opcode == "while":
            body = dict(called)["body"]
            trips = (runs[body].times or 0) / (runs[around].times or 1)
            return trips * self.seconds(body) if trips else 0.0
        if it.opcode in ("conditional", "call"):
            return max(self.seconds(target) for _, target in called)
        return 0.0

    def _parts(self, it: Instruction) -> Iterator[tuple[str, Collective | None]]:
        """Keys of what an instruction starts, continues or awaits, with a collective that it starts."""
        if _kind(it) in KINDS and not it.opcode.endswith("-done"):
            yield chain_of(it) or it.name, self._collectives.get(it.line)
        elif it.opcode.endswith("-done"):
            yield it.operands[0], None
        elif _is_copy(it):
            yield it.name, None
        if it.opcode in ("fusion", "async-start"):
            for _, target in it.called:
                for inner in self._module.computations[target].instructions.values():
                    for key, collective in self._parts(inner):
                        yield (it.name if key == inner.name else key), collective


def _kind(it: Instruction) -> str:
    return it.opcode.removesuffix("-start").removesuffix("-done")


def _is_copy(it: Instruction) -> bool:
    """Whether it starts a copy that runs beside other instructions."""
    return it.opcode.endswith("-start") and _kind(it) not in KINDS and it.opcode != "async-start"
