"""What a compiled program does: its collectives, its matmuls and their times, read from HLO.

The text is parsed here: jaxlib's own binding has neither shapes nor attributes, and xprof (32 MB) reads traces.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from maxtext_lite.config.kernels import KERNEL_SCOPE

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}(?:$|, execution_thread)", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = r'"known_trip_count":\{"n":"(\d+)"\}'
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = {"pred": 8, "c64": 64, "c128": 128, "token": 0, "opaque": 0}


class Array(NamedTuple):
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
    def root(self) -> Instruction:
        """The instruction whose value it returns."""
        return next(instruction for instruction in self.instructions.values() if instruction.is_root)

    @functools.cached_property
    def parameters(self) -> dict[str, Instruction]:
        """Its parameters by number."""
        return {it.operands[0]: it for it in self.instructions.values() if it.opcode == "parameter" and it.operands}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that use each instruction's value."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found


class Runs(NamedTuple):
    """How often one run of a module executes a computation.

    Attributes:
      times: NaN if a loop around it has an unknown trip count. Every branch of a conditional counts as taken.
      in_loop: it is inside a loop.
      inside: it is part of an instruction, such as a fusion or a reduction: its own instructions are not scheduled.
    """

    times: float
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

    def fused(self, it: Instruction) -> Computation | None:
        """The computation of a fusion."""
        return self.computations.get(dict(it.called).get("calls", ""))

    def scheduled(self) -> Iterator[tuple[Computation, Instruction, float]]:
        """Every scheduled instruction with its computation and how often it runs."""
        for name, runs in self.runs.items():
            if not runs.inside:
                computation = self.computations[name]
                for instruction in computation.instructions.values():
                    yield computation, instruction, runs.times


def parse(hlo: str, *, trips_where_unknown: float = math.nan, not_run: str | None = None) -> Module:
    """Parses a module from its text (`compiled.as_text()`).

    Args:
      trips_where_unknown: NaN, or the trip count of loops whose count XLA does not know, such as a traced one.
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
        instruction = _instruction(match, line.strip()) if match else None
        if instruction:
            found[instruction.name] = instruction
    return Computation(name, found)


def _instruction(match: re.Match[str], line: str) -> Instruction | None:
    """None for a line that only looks like an instruction: text of an attribute."""
    is_root, name, text = match.groups()
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    result = text[:end]
    rest = text[end:].lstrip()
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
    computations: dict[str, Computation], entry: str, where_unknown: float, not_run: str | None
) -> dict[str, Runs]:
    """How often each computation runs. Callers follow what they call, so the text is read backwards."""
    runs = {entry: Runs(1, in_loop=False, inside=False)}
    for name, computation in reversed(computations.items()):
        if name not in runs:
            continue  # nothing calls it
        around = runs[name]
        for it in computation.instructions.values():
            for keyword, target in it.called:
                if target not in computations:
                    continue
                is_loop = keyword in ("body", "condition")
                trips: float = 1
                if is_loop:
                    never_runs = not_run is not None and f"/{not_run}/" in it.line
                    trips = _trips(it, computation, computations, 0 if never_runs else where_unknown)
                is_part = it.opcode in ("fusion", "fusion-start") or (keyword == "to_apply" and it.opcode != "call")
                others = runs.get(target, Runs(0, in_loop=False, inside=False))
                runs[target] = Runs(
                    others.times + around.times * trips,
                    in_loop=others.in_loop or around.in_loop or is_loop,
                    inside=others.inside or around.inside or is_part,
                )
    return {name: runs[name] for name in computations if name in runs}


def _trips(
    loop: Instruction, around: Computation, computations: Mapping[str, Computation], where_unknown: float
) -> float:
    """Trips of a loop: as XLA noted them, or from a condition and body that count up to a limit.

    The count starts at the constant that enters the loop, or at 0, as in scans, if no constant is found.
    """
    known = loop.attribute(_TRIPS)
    if known:
        return int(known)
    parts = dict(loop.called)
    condition = computations.get(parts.get("condition", ""))
    body = computations.get(parts.get("body", ""))
    if condition is None or body is None:
        return where_unknown
    test = condition.root
    following = body.root
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
    step = next((step for step in steps if step), None)
    upper = _constant(limit, condition)
    if upper is None or step is None:
        return where_unknown
    state = _source(loop.operands[0], around)
    first = None
    if state is not None and state.opcode == "tuple":
        first = _constant(state.operands[int(number)], around)
    return max(0, math.ceil((upper - (first or 0)) / step))


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


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
"""HLO's names of the collectives."""

_GROUPS = (
    r"(?:replica_groups|source_target_pairs)="
    r"(mesh\[.*?\{[^}]*\}|\{\{.*?\}\}|\{\}|\[\S+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
_MEGASCALE = r"_xla_megascale_transfer_type=\"(\w+)\""
_MEGASCALE_KINDS = {"ONE_TO_ONE": "collective-permute"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: one of `KINDS`.
      groups: partitions of the program that communicate, in the order of `mesh.devices.flat`; for a
        collective-permute, the pairs (from, to). Empty: one group of all partitions.
      num_partitions: partitions of the program; with several TPU slices, those of one slice.
      across_slices: it crosses TPU slices over the network (Megascale), and has no groups.
      in_loop: it is inside a loop.
      is_async: it can overlap with other work of the device.
      times: executions in one run of the program; NaN if a loop around it has an unknown trip count.
      payload: bytes per execution of the whole array on one device, by HLO dtype: the output, or for a reduce-scatter
        the input.
      line: the line of HLO.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    num_partitions: int
    across_slices: bool
    in_loop: bool
    is_async: bool
    times: float
    payload: Mapping[str, int]
    line: str

    @property
    def payload_bytes(self) -> int:
        """Bytes per execution, over all dtypes."""
        return sum(self.payload.values())

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends per execution, in a ring over its group; NaN between slices.

        In a ring of n devices each sends (n - 1) / n of the payload, and twice that in an all-reduce.
        """
        if self.across_slices:
            return math.nan
        if self.kind == "collective-permute":
            return self.payload_bytes
        size = len(self.groups[0]) if self.groups else self.num_partitions
        return (2 if self.kind == "all-reduce" else 1) * self.payload_bytes * (size - 1) / size

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The mesh axes it crosses: those along which members of a group differ."""
        slice_of = np.array([getattr(device, "slice_index", None) or 0 for device in mesh.devices.flat])
        if self.across_slices:
            grid = slice_of.reshape(mesh.devices.shape)
            return tuple(a for dim, a in enumerate(mesh.axis_names) if np.any(grid != np.take(grid, [0], axis=dim)))
        # Every slice runs the same program, so one of them is enough.
        here = np.flatnonzero(slice_of == slice_of[0]) if self.num_partitions < mesh.size else np.arange(mesh.size)
        groups = [here[list(group)] for group in self.groups or (range(self.num_partitions),)]
        crossed = set()
        for group in groups:
            coordinates = np.stack(np.unravel_index(np.asarray(group), mesh.devices.shape))
            crossed.update(np.flatnonzero(np.any(coordinates != coordinates[:, :1], axis=1)).tolist())
        return tuple(axis for dim, axis in enumerate(mesh.axis_names) if dim in crossed)


def collectives(hlo: str | Module) -> list[Collective]:
    """Every collective of a compiled module that moves data between devices, in the order of its text.

    Args:
      hlo: the text of the module (`compiled.as_text()`), or the parsed module.
    Raises:
      ValueError: the text has no entry computation, or replica groups in an unknown notation.
    """
    module = parse(hlo) if isinstance(hlo, str) else hlo
    found: list[Collective] = []
    chains = set[tuple[str, str]]()
    for name, runs in module.runs.items():
        computation = module.computations[name]
        for it in computation.instructions.values():
            kind = it.opcode.removesuffix("-start")
            chain = chain_of(it)
            if kind in KINDS and chain is not None:
                if (chain, kind) in chains:
                    continue  # another part of the same collective
                chains.add((chain, kind))
            collective = _collective(it, kind, computation, runs, module.num_partitions)
            if collective is not None:
                found.append(collective)
    return found


def _collective(
    it: Instruction, kind: str, computation: Computation, runs: Runs, num_partitions: int
) -> Collective | None:
    """A collective within a slice, or over the network of TPU slices.

    None for other instructions, and where every device is alone in its group.
    """
    transfer = it.attribute(_MEGASCALE) if it.opcode == "send" else None
    groups = device_groups(it.attribute(_GROUPS) or "{}") if kind in KINDS else ()
    is_alone = groups and all(len(set(group)) == 1 for group in groups)
    if is_alone or not (transfer or kind in KINDS):
        return None
    starts_only = it.opcode != kind and '"is_sync":true' not in it.attributes
    in_async_fusion = runs.inside and "async_collective" in computation.name
    if transfer:
        kind = _MEGASCALE_KINDS.get(transfer, transfer.lower().replace("_", "-"))
    elif kind == "all-reduce" and runs.inside and computation.root.opcode == "dynamic-slice":
        kind = "reduce-scatter"  # on a TPU, a fusion of an all-reduce and a slice of its result
    return Collective(
        kind=kind,
        groups=groups,
        num_partitions=num_partitions,
        across_slices=transfer is not None,
        in_loop=runs.in_loop,
        is_async=bool(transfer) or chain_of(it) is not None or starts_only or in_async_fusion,
        times=runs.times,
        payload=_bytes_by_dtype(it.arrays[:1]) if transfer else _payload(it, groups),
        line=it.line,
    )


def chain_of(it: Instruction) -> str | None:
    """What the parts of a TPU's overlapped collective share: it appears in each part of the work that it overlaps."""
    if "async_collective_fusion_config" not in it.attributes:
        return None
    return it.attribute(r'\bchain_id="(\d+)"') or it.attribute(r"\bchannel_id=(\d+)")


def _payload(it: Instruction, groups: tuple[tuple[int, ...], ...]) -> dict[str, int]:
    arrays = it.arrays
    if it.opcode == "collective-permute-start":  # (inputs, outputs, contexts)
        arrays = arrays[1:2]
    elif it.opcode.endswith("-start") and it.opcode != "all-reduce-start":  # (inputs, outputs)
        arrays = arrays[len(arrays) // 2 :]
    whole = len(groups[0]) if it.opcode.startswith("reduce-scatter") and groups else 1
    return {dtype: size * whole for dtype, size in _bytes_by_dtype(arrays).items()}


def _bytes_by_dtype(arrays: Sequence[Array]) -> dict[str, int]:
    found = Counter[str]()
    for array in arrays:
        found[array.dtype] += array.num_bytes
    return dict(found)


def device_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Replica groups. HLO writes {{0,1},{2,3}}, [2,4]<=[4,2]T(1,0), or the axes of a mesh.

    Raises:
      ValueError: the notation is unknown.
    """
    if text.startswith("mesh["):
        return _groups_of_mesh(text)
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        return _rows(_iota(iota[2], iota[3]).reshape(_numbers(iota[1])))
    return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", text))


def _groups_of_mesh(text: str) -> tuple[tuple[int, ...], ...]:
    """Groups along mesh axes; 'a':(2)4 is the part of size 4 of axis a, inside an outer part of size 2."""
    axes = text[: text.index("]")]
    chosen = text[text.rindex("{") + 1 : -1]
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    device_ids = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", text)
    ids = _iota(device_ids[1], device_ids[2]) if device_ids else np.arange(np.prod([*sizes.values()]))
    if not re.fullmatch(r"'\w+'(:\(\d+\)\d+)?(, ?'\w+'(:\(\d+\)\d+)?)*", chosen):
        raise ValueError(f"cannot read the groups {text}")
    parts = {name: (1, size) for name, size in sizes.items()}
    taken = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", chosen)
    parts |= {name: (int(before), int(size)) for name, before, size in taken if before}
    dims = []
    for name, size in sizes.items():  # each axis as [before, part, after]
        before, part = parts[name]
        dims += [before, part, size // (before * part)]
    at = [3 * list(sizes).index(name) + 1 for name, _, _ in taken]
    moved = np.moveaxis(ids.reshape(dims), at, range(-len(at), 0))
    return _rows(moved.reshape(-1, int(np.prod([dims[dim] for dim in at]))))


def _iota(shape: str, order: str | None) -> np.ndarray:
    ids = np.arange(np.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def _rows(groups: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, groups.tolist()))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


_NO_KERNELS = frozenset({
    "AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart", "ConcatBitcast",
    "GatherScatterIndicesBitpacked", "MoveToDevice", "MoveToHost", "PinToDevice", "Sharding", "SPMDFullToShardShape",
    "SPMDShardToFullShape", "annotate_device_placement",
})  # fmt: skip
_NOTHING_MOVES = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "opt-barrier", "optimization-barrier", "partition-id", "replica-id", "domain", "async-start", "async-update",
})  # fmt: skip
_SCHEDULED_CALLS = frozenset({"while", "conditional", "call"})
"""Instructions whose computations are scheduled instruction by instruction."""
_TAKE_A_PART = frozenset({"slice", "dynamic-slice", "gather"})
MEMORY_SPACES: Mapping[str, tuple[int, ...]] = {"cpu": (0,), "gpu": (0, 1), "tpu": (0,)}
"""HLO's numbers of the memory of a device of each platform."""
_LARGEST = 5
"""Number of arrays in `ProgramWork.largest_arrays`."""


class KernelCalls(NamedTuple):
    """Calls of a kernel: a custom call to code that XLA did not generate.

    Attributes:
      name: the kernel's own (Pallas on TPU); else that of the enclosing scope (`jax.named_scope`) which begins with
        `KERNEL_SCOPE`, without the prefix; else the call's target.
      times: how often it runs; NaN if a loop's trip count is unknown.
      flops: of all its runs, by the kernel's own cost estimate; NaN without one.
    """

    name: str
    times: float
    flops: float


class LargeArray(NamedTuple):
    """An array that a module allocates, possibly several times at once.

    Attributes:
      type: in HLO's notation, without layout: f32[8192,128256].
      made_by: the traced operation it comes from if the compiler recorded it, else the opcode.
    """

    type: str
    num_bytes: int
    made_by: str


class ProgramWork(NamedTuple):
    """One device's work in one run of a module. NaN: unknown, for example because of a loop's trip count.

    Attributes:
      matmul_flops: two per multiply-add, by the operands' dtype (HLO's names, joined by x if they differ), without
        matmuls inside kernels.
      kernels: the most frequent first.
      memory_bytes: read from and written to the device's memory by instructions: each operand once, and of a sliced
        array only the slice. A kernel may read an operand more than once.
      cycles: the TPU compiler's estimate, without kernels and links; NaN if it makes none.
      largest_arrays: in the device's memory, the largest first, each type once.
    """

    matmul_flops: Mapping[str, float]
    kernels: tuple[KernelCalls, ...]
    memory_bytes: float
    cycles: float
    largest_arrays: tuple[LargeArray, ...]

    @property
    def kernel_flops(self) -> float:
        """FLOPs of the kernels that state them."""
        return sum(known_or_0(kernel.flops) for kernel in self.kernels)

    @property
    def silent_kernels(self) -> tuple[str, ...]:
        """Names of the kernels that do not state their FLOPs."""
        return tuple(kernel.name for kernel in self.kernels if math.isnan(kernel.flops))


class InstructionWork(NamedTuple):
    """The work of one execution of a scheduled instruction, with what is fused into it.

    Attributes:
      matmul_flops: as in `ProgramWork`.
      kernels: (name, FLOPs by its own cost estimate) of each kernel; NaN without one.
      memory_bytes: as in `ProgramWork`.
    """

    matmul_flops: Mapping[str, float]
    kernels: Sequence[tuple[str, float]]
    memory_bytes: float


def instruction_work(
    it: Instruction, computation: Computation, module: Module, spaces: frozenset[int]
) -> InstructionWork:
    """The work of one execution of an instruction of a scheduled computation."""
    flops: dict[str, float] = {}
    kernels: list[tuple[str, float]] = []
    for around, part in _with_fused(it, computation, module):
        if part.opcode in ("dot", "convolution") or "__cublas$" in part.attributes:
            lhs, rhs = (_array(operand, around) for operand in part.operands[:2])
            if lhs is not None and rhs is not None:
                dtype = "x".join(sorted({lhs.dtype, rhs.dtype}))
                flops[dtype] = flops.get(dtype, 0) + _matmul_flops(part, lhs, rhs)
        elif part.opcode == "custom-call":
            name = _kernel_name(part)
            if name is not None:
                stated = part.attribute(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
                kernels.append((name, float(stated or math.nan)))
    return InstructionWork(flops, kernels, _moved_bytes(it, computation, module, spaces))


def _with_fused(it: Instruction, computation: Computation, module: Module) -> Iterator[tuple[Computation, Instruction]]:
    """An instruction and all those that it runs without scheduling them, each with its computation."""
    yield computation, it
    if it.opcode not in _SCHEDULED_CALLS:
        for _, target in it.called:
            for inner in module.computations[target].instructions.values() if target in module.computations else ():
                yield from _with_fused(inner, module.computations[target], module)


def work(module: Module, *, memory_spaces: Sequence[int] = (0,)) -> ProgramWork:
    """Counts the work of a module.

    Args:
      memory_spaces: those of the device's memory, as in MEMORY_SPACES.
    """
    spaces = frozenset(memory_spaces)
    flops = dict[str, float]()
    kernels = dict[str, KernelCalls]()
    moved: float = 0
    cycles = list[float]()
    largest: dict[str, LargeArray] = {}
    for computation, it, times in module.scheduled():
        done = instruction_work(it, computation, module, spaces)
        moved += _times(done.memory_bytes, times)
        for dtype, each in done.matmul_flops.items():
            flops[dtype] = flops.get(dtype, 0) + _times(each, times)
        for kernel, each in done.kernels:
            before = kernels.get(kernel, KernelCalls(kernel, 0, 0))
            kernels[kernel] = KernelCalls(kernel, before.times + times, before.flops + _times(each, times))
        estimate = it.attribute(r'"estimated_cycles":"(\d+)"')
        if estimate:
            cycles.append(_times(int(estimate), times))
        if it.opcode in _NOTHING_MOVES or it.opcode.endswith("-done"):
            continue
        for array in it.arrays:
            if array.space in spaces:
                type_ = f"{array.dtype}[{','.join(map(str, array.dims))}]"
                source = it.attribute(r'op_name="([^"]*)"') or it.opcode
                largest.setdefault(type_, LargeArray(type_, array.num_bytes, source))
    return ProgramWork(
        matmul_flops=dict(sorted(flops.items())),
        kernels=tuple(sorted(kernels.values(), key=lambda kernel: (-known_or_0(kernel.times), kernel.name))),
        memory_bytes=moved,
        cycles=sum(cycles) if cycles else math.nan,
        largest_arrays=tuple(sorted(largest.values(), key=lambda array: (-array.num_bytes, array.type))[:_LARGEST]),
    )


def _times(each: float, times: float) -> float:
    """Nothing stays nothing, however often it is."""
    return each * times if each else 0.0


def known_or_0(amount: float) -> float:
    """The amount, or 0 for NaN."""
    return 0.0 if math.isnan(amount) else amount


def _target(it: Instruction) -> str | None:
    """The target of a custom call."""
    return it.attribute(r'custom_call_target="([^"]*)"') if it.opcode == "custom-call" else None


def _kernel_name(call: Instruction) -> str | None:
    """None for calls that are not kernels: the compiler's annotations, and cuBLAS, which counts as matmuls."""
    target = _target(call) or "unnamed"
    if target in _NO_KERNELS or target.startswith("__cublas$"):
        return None
    if target == "tpu_custom_call":
        return re.sub(r"(\.(\d+|remat\d*|clone\d*))+$", "", call.name)
    return call.attribute(rf'op_name="[^"]*\b{KERNEL_SCOPE}(\w+)') or target


# ---- Matmuls -------------------------------------------------------------------------------------------------------


def _matmul_flops(it: Instruction, lhs: Array, rhs: Array) -> float:
    if it.opcode == "convolution":
        return _convolution_flops(it, lhs, rhs)
    if it.opcode == "dot":
        contracted = it.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    else:  # cuBLAS: {"lhs_contracting_dimensions":["1"], ..}
        contracted = (it.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]') or "").replace('"', "")
    return 2 * it.arrays[0].elements * math.prod(lhs.dims[int(dim)] for dim in contracted.split(",") if dim)


def _convolution_flops(it: Instruction, lhs: Array, rhs: Array) -> float:
    """TPU matmuls are convolutions with batch dims as spatial dims; products with padding are not counted."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", it.attributes)
    if labels is None:
        return 0
    of_lhs, of_rhs, of_out = labels.groups()
    window = dict(re.findall(r"(\w+)=([\w\-]+)", it.attribute(r"window=\{([^}]*)\}") or ""))
    spatial = sorted(label for label in of_rhs if label.isdigit())
    out = it.arrays[0].dims
    products = 1
    for at, label in enumerate(spatial):
        low = int(window["pad"].split("x")[at].split("_")[0]) if "pad" in window else 0
        sizes = {key: int(window[key].split("x")[at]) if key in window else 1 for key in _WINDOW}
        products *= _valid_products(lhs.dims[of_lhs.index(label)], out[of_out.index(label)], low=low, **sizes)
    return 2 * rhs.dims[of_rhs.index("i")] * out[of_out.index("f")] * out[of_out.index("b")] * products


_WINDOW = ("size", "stride", "lhs_dilate", "rhs_dilate")


def _valid_products(
    lhs_size: int, out_size: int, *, size: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Pairs (output position o, kernel position k) of one dim that multiply an element of the input, not padding.

    That is where o stride + k rhs_dilate - low is a multiple of lhs_dilate within the dilated input.
    """
    first = np.arange(out_size) * stride - low
    count = 0
    for k in range(size):
        position = first + k * rhs_dilate
        is_inside = (position >= 0) & (position <= (lhs_size - 1) * lhs_dilate)
        count += int(np.count_nonzero(is_inside & (position % lhs_dilate == 0)))
    return count


# ---- Memory --------------------------------------------------------------------------------------------------------


def _array(name: str, computation: Computation) -> Array | None:
    it = computation.instructions.get(name)
    return it.arrays[0] if it is not None and it.arrays else None


def _size(arrays: Sequence[Array], spaces: frozenset[int]) -> int:
    return sum(array.num_bytes for array in arrays if array.space in spaces)


def _moved_bytes(it: Instruction, computation: Computation, module: Module, spaces: frozenset[int]) -> float:
    """Bytes that one execution of a scheduled instruction reads and writes."""
    opcode = it.opcode
    if opcode in _NOTHING_MOVES or opcode.endswith("-done") or _target(it) == "AllocateBuffer":
        return 0
    operands = {name: computation.instructions[name] for name in it.operands if name in computation.instructions}
    taken = {name: _size(operand.arrays, spaces) for name, operand in operands.items()}
    all_taken = sum(taken.values())
    given = _size(it.arrays, spaces)
    # The result of a start repeats its inputs before its outputs.
    repeats = opcode.endswith("-start") and opcode != "all-reduce-start"
    if opcode in ("fusion", "fusion-start"):
        fused = module.fused(it)
        if fused is None:
            return all_taken + given
        read = 0
        for number, name in enumerate(it.operands):
            if name in taken:
                read += min(taken[name], _read_of(fused, fused.parameters.get(str(number)), module))
        first = sum(len(operand.arrays) for operand in operands.values()) if repeats else 0
        return read + _written(it.arrays[first:], fused, spaces)
    if opcode in ("dynamic-update-slice", "scatter"):  # in place
        return 2 * sum(taken.get(name, 0) for name in it.operands[1:])
    if repeats:
        given = max(0, given - all_taken)
    if opcode.removesuffix("-start") in _TAKE_A_PART:
        return min(given, all_taken) + given
    return all_taken + given


def _read_of(fused: Computation, value: Instruction | None, module: Module) -> int:
    """Bytes of a value that a fusion reads at most; only the slices of a value that it only slices."""
    if value is None:
        return 0
    whole = sum(array.num_bytes for array in value.arrays)
    read = whole if value.is_root else 0
    for user in fused.users.get(value.name, []):
        is_first = user.operands[0] == value.name and value.name not in user.operands[1:]
        inner = module.fused(user) if user.opcode == "fusion" else None
        if user.opcode in KINDS or (user.is_root and user.opcode == "tuple"):
            continue  # the buffers of a collective that runs beside a fusion pass through it
        if user.opcode in _TAKE_A_PART and is_first:
            read += sum(array.num_bytes for array in user.arrays)
        elif user.opcode == "dynamic-update-slice" and is_first:
            continue  # overwritten in place
        elif user.opcode == "bitcast":
            read += _read_of(fused, user, module)
        elif inner is not None:
            for number, name in enumerate(user.operands):
                if name == value.name:
                    read += _read_of(inner, inner.parameters.get(str(number)), module)
        else:
            return whole
    return min(whole, read)


def _written(arrays: Sequence[Array], fused: Computation, spaces: frozenset[int]) -> int:
    """Bytes that a fusion writes; an array that it updates in place counts only the update."""
    parts = fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)
    if len(parts) > len(arrays):
        return _size(arrays, spaces)
    written = 0
    for part, array in zip(parts, arrays, strict=False):
        if array.space in spaces:
            written += _updated(fused, part, array.num_bytes)
    return written


def _updated(fused: Computation, name: str, whole: int) -> int:
    it = fused.instructions.get(name)
    if it is None:
        return whole
    if it.opcode in ("parameter", *KINDS):
        return 0
    if it.opcode == "bitcast":
        return _updated(fused, it.operands[0], whole)
    update = _array(it.operands[1], fused) if it.opcode == "dynamic-update-slice" else None
    return whole if update is None else update.num_bytes


def scheduled_seconds(
    module: Module,
    found: Iterable[Collective],
    *,
    busy: Callable[[Computation, Instruction], float],
    sent: Callable[[Collective], float],
) -> float:
    """The time of one run of a module by its schedule. Asynchronous operations overlap instructions until they are
    awaited.

    Collectives run one after the other, and so do asynchronous copies. What is awaited outside of its computation, such
    as in the next trip of a loop, is taken to be awaited at once. A conditional takes its longest branch.

    Args:
      found: `collectives(module)`.
      busy: seconds that an instruction which is no collective occupies the device, or its copy engine.
      sent: seconds that a collective occupies the links.
    """
    by_line = {each.line: each for each in found}

    def parts_of(it: Instruction) -> Iterator[tuple[str, Collective | None]]:
        """Keys of what an instruction starts, continues or awaits, with a collective that it starts."""
        if _kind(it) in KINDS and not it.opcode.endswith("-done"):
            yield chain_of(it) or it.name, by_line.get(it.line)
        elif it.opcode.endswith("-done"):
            yield it.operands[0], None
        elif _is_copy(it):
            yield it.name, None
        if it.opcode in ("fusion", "async-start"):
            for _, target in it.called:
                for inner in module.computations[target].instructions.values():
                    for key, collective in parts_of(inner):
                        yield (it.name if key == inner.name else key), collective

    def nested(it: Instruction, around: str) -> float:
        """The time of the computations that an instruction schedules; 0 if there are none."""
        called = list(it.called)
        if it.opcode == "while":
            body = dict(called)["body"]
            trips = known_or_0(module.runs[body].times) / (known_or_0(module.runs[around].times) or 1)
            return trips * seconds(body) if trips else 0.0
        if it.opcode in ("conditional", "call"):
            return max(seconds(target) for _, target in called)
        return 0.0

    def seconds(name: str) -> float:
        """The time of one run of a computation."""
        computation = module.computations[name]
        parts = {it.name: dict(parts_of(it)) for it in computation.instructions.values()}
        last: dict[str, str] = {}
        for at, keys in parts.items():
            last |= dict.fromkeys(keys, at)
        now = links = copies = 0.0
        ends: dict[str, float] = {}
        for it in computation.instructions.values():
            for key, collective in parts[it.name].items():
                if collective is not None:
                    links = ends[key] = max(now, links) + sent(collective)
            spent = 0.0 if _kind(it) in KINDS else nested(it, name) or busy(computation, it)
            if _is_copy(it):
                copies = ends[it.name] = max(now, copies) + spent
            else:
                now += spent
            for key in parts[it.name]:
                if last[key] == it.name:
                    now = max(now, ends.get(key, now))
        return now

    return seconds(module.entry)


def _kind(it: Instruction) -> str:
    return it.opcode.removesuffix("-start").removesuffix("-done")


def _is_copy(it: Instruction) -> bool:
    """Whether it starts a copy that runs beside other instructions."""
    return it.opcode.endswith("-start") and _kind(it) not in KINDS and it.opcode != "async-start"
