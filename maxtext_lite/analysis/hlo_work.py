"""The work of one run of a compiled module, loops included: matmuls, kernels, memory traffic, cycles."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from maxtext_lite.analysis.hlo import KINDS
from maxtext_lite.analysis.hlo_text import Array, Computation, Instruction, Module
from maxtext_lite.config.kernels import KERNEL_SCOPE

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


@dataclasses.dataclass(frozen=True)
class KernelCalls:
    """Calls of a kernel: a custom call to code that XLA did not generate.

    Attributes:
      name: the kernel's own (Pallas on TPU); else that of the enclosing scope (`jax.named_scope`) which begins with
        `KERNEL_SCOPE`, without the prefix; else the call's target.
      times: how often it runs; None if a loop's trip count is unknown.
      flops: of all its runs, by the kernel's own cost estimate; None without one.
    """

    name: str
    times: int | None
    flops: float | None


@dataclasses.dataclass(frozen=True)
class LargeArray:
    """An array that a module allocates, possibly several times at once.

    Attributes:
      type: in HLO's notation, without layout: f32[8192,128256].
      made_by: the traced operation it comes from if the compiler recorded it, else the opcode.
    """

    type: str
    num_bytes: int
    made_by: str


@dataclasses.dataclass(frozen=True)
class ProgramWork:
    """The work of one device in one run of a module. None: unknown, for example because of a loop's trip count.

    Attributes:
      matmul_flops: two per multiply-add, by the operands' dtype (HLO's names, joined by x if they differ), without
        matmuls inside kernels.
      kernels: the most frequent first.
      memory_bytes: read from and written to the device's memory by instructions: each operand once, and of a sliced
        array only the slice. A kernel may read an operand more than once.
      cycles: the TPU compiler's estimate, without kernels and links; None if it makes none.
      largest_arrays: in the device's memory, the largest first, each type once.
    """

    matmul_flops: Mapping[str, float | None]
    kernels: tuple[KernelCalls, ...]
    memory_bytes: float | None
    cycles: float | None
    largest_arrays: tuple[LargeArray, ...]

    @property
    def kernel_flops(self) -> float:
        """FLOPs of the kernels that state them."""
        return sum(kernel.flops or 0.0 for kernel in self.kernels)

    @property
    def silent_kernels(self) -> tuple[str, ...]:
        """Names of the kernels that do not state their FLOPs."""
        return tuple(kernel.name for kernel in self.kernels if kernel.flops is None)


@dataclasses.dataclass(frozen=True)
class InstructionWork:
    """The work of one execution of a scheduled instruction, with what is fused into it.

    Attributes:
      matmul_flops: as in `ProgramWork`.
      kernels: (name, FLOPs by its own cost estimate) of each kernel; None without one.
      memory_bytes: as in `ProgramWork`.
    """

    matmul_flops: Mapping[str, float]
    kernels: Sequence[tuple[str, float | None]]
    memory_bytes: float


def instruction_work(
    it: Instruction, computation: Computation, module: Module, spaces: frozenset[int]
) -> InstructionWork:
    """The work of one execution of an instruction of a scheduled computation."""
    flops: dict[str, float] = {}
    kernels: list[tuple[str, float | None]] = []
    for around, part in _with_fused(it, computation, module):
        if part.opcode in ("dot", "convolution") or "__cublas$" in part.attributes:
            lhs, rhs = (_array(operand, around) for operand in part.operands[:2])
            if lhs is not None and rhs is not None:
                dtype = "x".join(sorted({lhs.dtype, rhs.dtype}))
                flops[dtype] = flops.get(dtype, 0) + _matmul_flops(part, lhs, rhs)
        elif part.opcode == "custom-call" and (name := _kernel_name(part)) is not None:
            stated = part.attribute(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
            kernels.append((name, float(stated) if stated else None))
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
    flops: dict[str, list[float | None]] = {}
    calls: dict[str, list[tuple[int | None, float | None]]] = {}
    moved: list[float | None] = []
    cycles: list[float | None] = []
    spaces = frozenset(memory_spaces)
    made: dict[str, LargeArray] = {}
    for computation, it, times in module.scheduled():
        done = instruction_work(it, computation, module, spaces)
        moved.append(_times(done.memory_bytes, times))
        for dtype, each in done.matmul_flops.items():
            flops.setdefault(dtype, []).append(_times(each, times))
        for kernel, each in done.kernels:
            calls.setdefault(kernel, []).append((times, each))
        if it.opcode not in _NOTHING_MOVES and not it.opcode.endswith("-done"):
            for array in it.arrays:
                if array.space in spaces:
                    type_ = f"{array.dtype}[{','.join(map(str, array.dims))}]"
                    source = it.attribute(r'op_name="([^"]*)"') or it.opcode
                    made.setdefault(type_, LargeArray(type_, array.num_bytes, source))
        if estimate := it.attribute(r'"estimated_cycles":"(\d+)"'):
            cycles.append(_times(int(estimate), times))
    return ProgramWork(
        matmul_flops={dtype: total_of(each) for dtype, each in sorted(flops.items())},
        kernels=tuple(sorted((_kernel(name, each) for name, each in calls.items()), key=_most_runs_first)),
        memory_bytes=total_of(moved),
        cycles=total_of(cycles) if cycles else None,
        largest_arrays=tuple(sorted(made.values(), key=lambda array: (-array.num_bytes, array.type))[:_LARGEST]),
    )


def _times(each: float | None, times: int | None) -> float | None:
    return 0.0 if each == 0 else None if each is None or times is None else each * times


def total_of(parts: Sequence[float | None]) -> float | None:
    """Their sum; None if any is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _kernel(name: str, calls: Sequence[tuple[int | None, float | None]]) -> KernelCalls:
    times = total_of([times for times, _ in calls])
    return KernelCalls(name, None if times is None else int(times), total_of([_times(f, t) for t, f in calls]))


def _most_runs_first(kernel: KernelCalls) -> tuple[int, str]:
    return -(kernel.times or 0), kernel.name


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
    products = 1
    for at, label in enumerate(spatial):
        low = int(window["pad"].split("x")[at].split("_")[0]) if "pad" in window else 0
        sizes = {key: int(window[key].split("x")[at]) if key in window else 1 for key in _WINDOW}
        products *= _valid_products(
            lhs.dims[of_lhs.index(label)], it.arrays[0].dims[of_out.index(label)], low=low, **sizes
        )
    out = it.arrays[0].dims
    return 2 * rhs.dims[of_rhs.index("i")] * out[of_out.index("f")] * out[of_out.index("b")] * products


_WINDOW = ("size", "stride", "lhs_dilate", "rhs_dilate")


def _valid_products(
    lhs_size: int, out_size: int, *, size: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Pairs (output position o, kernel position k) of one dim that multiply an element of the input, not padding.

    That is where o stride + k rhs_dilate - low is a multiple of lhs_dilate within the dilated input.
    """
    last = (lhs_size - 1) * lhs_dilate
    common = math.gcd(stride, lhs_dilate)
    period = lhs_dilate // common
    count = 0
    for k in range(size):
        offset = k * rhs_dilate - low
        if offset % common:
            continue
        first, end = max(0, -(offset // stride)), min(out_size - 1, (last - offset) // stride)
        phase = -(offset // common) * pow(stride // common, -1, period) % period if period > 1 else 0
        start = first + (phase - first) % period
        count += max(0, (end - start) // period + 1)
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
    taken = {name: _size(computation.instructions[name].arrays, spaces) for name in it.operands
             if name in computation.instructions}  # fmt: skip
    given = _size(it.arrays, spaces)
    if opcode in ("fusion", "fusion-start"):
        fused = module.computations.get(dict(it.called).get("calls", ""))
        if fused is None:
            return sum(taken.values()) + given
        read = sum(
            min(taken[name], _read_of_parameter(fused, number, module))
            for number, name in enumerate(it.operands)
            if name in taken
        )
        # The result of a start repeats its inputs before its outputs.
        first = 0 if opcode == "fusion" else sum(len(computation.instructions[name].arrays) for name in taken)
        return read + _written(it.arrays[first:], fused, spaces)
    if opcode.removesuffix("-start") in _TAKE_A_PART:
        part = given if not opcode.endswith("-start") else max(0, given - sum(taken.values()))
        return min(part, sum(taken.values())) + part
    if opcode in ("dynamic-update-slice", "scatter"):  # in place
        parts = [taken.get(name, 0) for name in it.operands[1:]]
        return 2 * sum(parts)
    if opcode.endswith("-start") and opcode != "all-reduce-start":  # its result repeats its inputs
        return sum(taken.values()) + max(0, given - sum(taken.values()))
    return sum(taken.values()) + given


def _read_of_parameter(fused: Computation, number: int, module: Module) -> int:
    """Bytes of a parameter that a fusion reads at most; only the slices of a parameter that it only slices."""
    parameter = fused.parameter(number)
    return 0 if parameter is None else _read_of(fused, parameter, module)


def _read_of(fused: Computation, value: Instruction, module: Module) -> int:
    whole = sum(array.num_bytes for array in value.arrays)
    read = whole if value.is_root else 0
    for user in fused.users.get(value.name, []):
        is_first = user.operands[0] == value.name and value.name not in user.operands[1:]
        if user.opcode in KINDS or (user.is_root and user.opcode == "tuple"):
            continue  # the buffers of a collective that runs beside a fusion pass through it
        if user.opcode in _TAKE_A_PART and is_first:
            read += sum(array.num_bytes for array in user.arrays)
        elif user.opcode == "dynamic-update-slice" and is_first:
            continue  # overwritten in place
        elif user.opcode == "bitcast":
            read += _read_of(fused, user, module)
        elif user.opcode == "fusion" and (inner := module.computations.get(dict(user.called).get("calls", ""))):
            read += sum(
                _read_of_parameter(inner, at, module) for at, name in enumerate(user.operands) if name == value.name
            )
        else:
            return whole
    return min(whole, read)


def _written(arrays: Sequence[Array], fused: Computation, spaces: frozenset[int]) -> int:
    """Bytes that a fusion writes; of an array that it updates in place, only the update."""
    root = fused.root
    parts = root.operands if root is not None and root.opcode == "tuple" else () if root is None else (root.name,)
    if len(parts) > len(arrays):
        return _size(arrays, spaces)
    return sum(
        _updated(fused, part, out.num_bytes) for part, out in zip(parts, arrays, strict=False) if out.space in spaces
    )


def _updated(fused: Computation, name: str, whole: int) -> int:
    it = fused.instructions.get(name)
    if it is not None and it.opcode in ("parameter", *KINDS):
        return 0
    if it is not None and it.opcode == "bitcast":
        return _updated(fused, it.operands[0], whole)
    if it is not None and it.opcode == "dynamic-update-slice" and (update := _array(it.operands[1], fused)):
        return update.num_bytes
    return whole
