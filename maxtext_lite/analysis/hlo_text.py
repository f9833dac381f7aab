"""A parser of compiled HLO text: computations, instructions, and how often one run of the module executes each."""

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
      dtype: HLO's name: f32, bf16, s8, f8e4m3fn.
      space: its memory: 0 the device's, 5 the host's; on a TPU 1 is VMEM.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, packed."""
        return -(-self.elements * bits(self.dtype) // 8)


def bits(dtype: str) -> int:
    """Bits per element of an HLO dtype; 0 for tokens and opaque types."""
    found = re.search(r"\d+", dtype)
    return _BITS.get(dtype, int(found[0]) if found else 0)


def arrays_of(text: str) -> tuple[Array, ...]:
    """Every array in the text of a type, tuples flattened."""
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
      opcode: such as all-gather-start or fusion.
      operands: names of its operands; for a constant or a parameter, the text in parentheses.
      attributes: the rest of the line.
      line: the whole line.
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
        """Its outputs, tuples flattened."""
        return arrays_of(self.result)

    @property
    def called(self) -> Iterator[tuple[str, str]]:
        """(keyword, name) of each computation it calls."""
        for keyword, names in _CALLED.findall(self.attributes):
            for name in re.findall(r"[\w.\-]+", names):
                yield keyword, name

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern's first match in its attributes; None without a match."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: instructions by name, in the order of the text."""

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction | None:
        """The instruction whose value it returns."""
        return next((instruction for instruction in self.instructions.values() if instruction.is_root), None)

    def parameter(self, number: int) -> Instruction | None:
        """Its parameter of that number."""
        return self._parameters.get(str(number))

    @functools.cached_property
    def _parameters(self) -> dict[str, Instruction]:
        return {it.operands[0]: it for it in self.instructions.values() if it.opcode == "parameter" and it.operands}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that use each instruction's value."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found


@dataclasses.dataclass(frozen=True)
class Runs:
    """How often one run of a module executes a computation.

    Attributes:
      times: None if a loop around it has an unknown trip count. Every branch of a conditional counts as taken.
      in_loop: it is inside a loop.
      inside: it is part of an instruction, such as a fusion or a reduction: its own instructions are not scheduled.
    """

    times: int | None
    in_loop: bool
    inside: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled module.

    Attributes:
      entry: the name of the computation that a run executes.
      runs: by computation, for those that are called.
      num_partitions: devices that run it together; with several TPU slices, those of one slice.
    """

    computations: Mapping[str, Computation]
    entry: str
    runs: Mapping[str, Runs]
    num_partitions: int

    def scheduled(self) -> Iterator[tuple[Computation, Instruction, int | None]]:
        """Every scheduled instruction with its computation and how often it runs."""
        for name, runs in self.runs.items():
            if not runs.inside:
                computation = self.computations[name]
                for instruction in computation.instructions.values():
                    yield computation, instruction, runs.times


def parse(hlo: str, *, trips_where_unknown: int | None = None, not_run: str | None = None) -> Module:
    """Parses a module from its text (`compiled.as_text()`).

    Args:
      trips_where_unknown: the trip count of loops whose count XLA does not know, such as one with a traced bound.
      not_run: the name of a scope (`jax.named_scope`) whose loops of unknown trip count never run.
    Raises:
      ValueError: the text does not have exactly one entry computation.
    """
    matches = list(_COMPUTATION.finditer(hlo))
    entries = [match[2] for match in matches if match[1]]
    if len(entries) != 1:
        raise ValueError(f"the text has {len(entries)} entry computations, not one: it is no HLO module")
    computations = {match[2]: _computation(match[2], match[3]) for match in matches}
    header = re.search(r"\bnum_partitions=(\d+)", hlo)
    runs = _runs(computations, entries[0], trips_where_unknown, not_run)
    return Module(computations, entries[0], runs, int(header[1]) if header else 1)


def _computation(name: str, body: str) -> Computation:
    found = {}
    for line in body.splitlines():
        match = _INSTRUCTION.match(line)
        if match and (instruction := _instruction(match, line.strip())):
            found[instruction.name] = instruction
    return Computation(name, found)


def _instruction(match: re.Match[str], line: str) -> Instruction | None:
    """None for a line that only looks like an instruction: text of an attribute."""
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
    """Names, from `%a, f32[2,3]{1,0} %b`; without any %, the text between the commas."""
    if "%" in text:
        return tuple(re.findall(r"%([\w.\-]+)", text))
    return tuple(part.split(" ")[-1] for part in text.split(", ") if part)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
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
    """Trips of a loop: as XLA noted them, or from a condition and body that count up to a limit.

    The count starts at the constant that enters the loop, or at 0, as in scans, if no constant is found.
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
    """The instruction that produces a value, through copies and bitcasts."""
    it = computation.instructions.get(name)
    while it is not None and it.opcode in ("copy", "bitcast"):
        it = computation.instructions.get(it.operands[0])
    return it


def _constant(name: str, computation: Computation) -> int | None:
    it = _source(name, computation)
    if it is None or it.opcode != "constant" or not it.operands or not it.operands[0].isdigit():
        return None
    return int(it.operands[0])
