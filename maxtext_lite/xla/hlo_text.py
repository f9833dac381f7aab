"""The text of a compiled module as computations and instructions, and how often one run of it runs each."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}(?:$|, execution_thread)", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = {"pred": 8, "c64": 64, "c128": 128, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Array:
    """An array as HLO writes it: f32[16,24]{1,0:T(8,128)S(1)}.

    Attributes:
      dtype: as HLO names it: f32, bf16, s8, f8e4m3fn.
      space: the memory that it is in: 0 the device's own, 5 the host's; on a TPU 1 is on the chip itself.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, packed."""
        return -(-self.elements * bits(self.dtype) // 8)


def bits(dtype: str) -> int:
    """Bits of an element of a dtype by HLO's name; 0 of what has no elements."""
    found = re.search(r"\d+", dtype)
    return _BITS.get(dtype, int(found[0]) if found else 0)


def arrays_of(text: str) -> tuple[Array, ...]:
    """Every array that a type names, those inside tuples too."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        space = _SPACE.search(layout)
        sizes = tuple(int(size.removeprefix("<=")) for size in dims.split(",") if size)
        found.append(Array(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      result: the text of its type.
      opcode: as all-gather-start or fusion.
      operands: the names of what it takes; of a constant or a parameter, the text in its parentheses.
      attributes: the rest of the line.
      line: the whole of it.
    """

    name: str
    result: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    line: str

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """What comes out; of a tuple every part."""
        return arrays_of(self.result)

    @property
    def called(self) -> Iterator[tuple[str, str]]:
        """(keyword, name) of each computation that it calls."""
        for keyword, names in _CALLED.findall(self.attributes):
            for name in re.findall(r"[\w.\-]+", names):
                yield keyword, name

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern among its attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name, in the order of the text."""

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction | None:
        """What it returns."""
        return next((instruction for instruction in self.instructions.values() if instruction.is_root), None)

    def parameter(self, number: int) -> Instruction | None:
        """Its parameter of a number."""
        return self._parameters.get(str(number))

    @functools.cached_property
    def _parameters(self) -> dict[str, Instruction]:
        return {it.operands[0]: it for it in self.instructions.values() if it.opcode == "parameter" and it.operands}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take each."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often one run of a module runs a computation.

    Attributes:
      times: None where a loop around it has an unknown number of trips. Every branch of a conditional counts as taken.
      in_loop: it stands inside a loop.
      inside: it is a part of an instruction (of a fusion, of a reduction): its own instructions are not scheduled.
    """

    times: int | None
    in_loop: bool
    inside: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled module.

    Attributes:
      runs: of each computation that is called.
      num_partitions: devices that run it together; with several TPU slices, those of one slice.
    """

    computations: Mapping[str, Computation]
    runs: Mapping[str, Runs]
    num_partitions: int

    def scheduled(self) -> Iterator[tuple[Computation, Instruction, int | None]]:
        """Every instruction that runs by itself, with how often."""
        for name, runs in self.runs.items():
            if not runs.inside:
                computation = self.computations[name]
                for instruction in computation.instructions.values():
                    yield computation, instruction, runs.times


def parse(hlo: str, *, trips_where_unknown: int | None = None, not_run: str | None = None) -> Module:
    """A module from its text (`compiled.as_text()`).

    Args:
      trips_where_unknown: trips of a loop whose number XLA does not know, such as one with a traced bound.
      not_run: the name of a scope (`jax.named_scope`) whose loops, if XLA does not know their trips, have none.
    Raises:
      ValueError: the text holds no computation.
    """
    matches = list(_COMPUTATION.finditer(hlo))
    entries = [match[2] for match in matches if match[1]]
    if len(entries) != 1:
        raise ValueError(f"the text has {len(entries)} entry computations, not one: it is no HLO module")
    computations = {match[2]: _computation(match[2], match[3]) for match in matches}
    header = re.search(r"\bnum_partitions=(\d+)", hlo)
    runs = _runs(computations, entries[0], trips_where_unknown, not_run)
    return Module(computations, runs, int(header[1]) if header else 1)


def _computation(name: str, body: str) -> Computation:
    found = {}
    for line in body.splitlines():
        match = _INSTRUCTION.match(line)
        if match and (instruction := _instruction(match, line.strip())):
            found[instruction.name] = instruction
    return Computation(name, found)


def _instruction(match: re.Match[str], line: str) -> Instruction | None:
    """None for a line of some attribute's text that only looks like one."""
    is_root, name, text = match.groups()
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    result, rest = text[:end], text[end:].lstrip()
    opcode = re.match(r"([\w\-]+)\(", rest)
    if not opcode or end <= 0:
        return None
    close = _closing(rest, opcode.end() - 1)
    inner = re.sub(r"/\*.*?\*/", "", rest[opcode.end() : close])
    return Instruction(name, result, opcode[1], _operands(inner), rest[close + 1 :], bool(is_root), line)


def _operands(text: str) -> tuple[str, ...]:
    """Names, from `%a, f32[2,3]{1,0} %b`; without any %, what stands between the commas."""
    if "%" in text:
        return tuple(re.findall(r"%([\w.\-]+)", text))
    return tuple(part.split(" ")[-1] for part in text.split(", ") if part)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    return len(text)


def _runs(
    computations: Mapping[str, Computation], entry: str, where_unknown: int | None, not_run: str | None
) -> dict[str, Runs]:
    callers: dict[str, list[tuple[str, int | None, bool, bool]]] = {}
    for name, computation in computations.items():
        for instruction in computation.instructions.values():
            for keyword, target in instruction.called:
                if target in computations:
                    looped = keyword in ("body", "condition")
                    is_left_out = not_run is not None and f"/{not_run}/" in instruction.line
                    unknown = 0 if is_left_out else where_unknown
                    trips = _trips(instruction, computation, computations, unknown) if looped else 1
                    opcode = instruction.opcode
                    inside = opcode in ("fusion", "fusion-start") or (keyword == "to_apply" and opcode != "call")
                    callers.setdefault(target, []).append((name, trips, looped, inside))
    found = {entry: Runs(1, in_loop=False, inside=False)}

    def runs(name: str) -> Runs:
        if name not in found:
            total: int | None = 0
            in_loop = inside = False
            for caller, trips, looped, is_part in callers.get(name, []):
                around = runs(caller)
                known = total is not None and around.times is not None and trips is not None
                total = (total or 0) + (around.times or 0) * (trips or 0) if known else None
                in_loop = in_loop or looped or around.in_loop
                inside = inside or is_part or around.inside
            found[name] = Runs(total, in_loop, inside)
        return found[name]

    return {name: runs(name) for name in computations if name == entry or name in callers}


def _trips(
    loop: Instruction, around: Computation, computations: Mapping[str, Computation], where_unknown: int | None
) -> int | None:
    """Trips of a loop: as XLA noted them, or as its condition and body say that count up to a limit.

    They count from the constant that goes in; from 0, as scans do, where that is written elsewhere.
    """
    known = loop.attribute(_TRIPS.pattern)
    if known:
        return int(known)
    parts = dict(loop.called)
    condition, body = computations.get(parts.get("condition", "")), computations.get(parts.get("body", ""))
    if condition is None or body is None or condition.root is None or body.root is None:
        return where_unknown
    test, following = condition.root, body.root
    if test.opcode != "compare" or "direction=LT" not in test.attributes or following.opcode != "tuple":
        return where_unknown
    counter, limit = test.operands
    tested = _source(counter, condition)
    number = None if tested is None else tested.attribute(r"index=(\d+)")
    if number is None:
        return where_unknown
    added = _source(following.operands[int(number)], body)
    if added is None or added.opcode != "add":
        return where_unknown
    steps = [_constant(name, body) for name in added.operands]
    upper, step = _constant(limit, condition), next((step for step in steps if step), None)
    if upper is None or step is None:
        return where_unknown
    state = _source(loop.operands[0], around)
    first = _constant(state.operands[int(number)], around) if state is not None and state.opcode == "tuple" else None
    return max(0, -(-(upper - (first or 0)) // step))


def _source(name: str, computation: Computation) -> Instruction | None:
    """The instruction that makes a value, before it is copied."""
    it = computation.instructions.get(name)
    while it is not None and it.opcode in ("copy", "bitcast"):
        it = computation.instructions.get(it.operands[0])
    return it


def _constant(name: str, computation: Computation) -> int | None:
    it = _source(name, computation)
    if it is None or it.opcode != "constant" or not it.operands or not it.operands[0].isdigit():
        return None
    return int(it.operands[0])
