"""The collectives of compiled HLO: the mesh axes they cross, how often a step runs them, and their bytes."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from maxtext_lite.analysis.hlo_text import Array, Instruction, Module, parse

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
"""HLO's names of the collectives."""

_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(mesh\[.*?\{[^}]*\}|\{\{.*?\}\}|\{\}|\[\S+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
_MEGASCALE = re.compile(r"_xla_megascale_transfer_type=\"(\w+)\"")
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
      times: executions in one run of the program; None if a loop around it has an unknown trip count.
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
    times: int | None
    payload: Mapping[str, int]
    line: str

    @property
    def payload_bytes(self) -> int:
        """Bytes per execution, over all dtypes."""
        return sum(self.payload.values())

    @property
    def sent_bytes(self) -> float | None:
        """Bytes that one device sends per execution, in a ring over its group; None between slices.

        In a ring of n devices each sends (n - 1) / n of the payload, and twice that in an all-reduce.
        """
        if self.across_slices:
            return None
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
    found = []
    parts: set[tuple[str | None, str]] = set()
    for name, runs in module.runs.items():
        for it in module.computations[name].instructions.values():
            kind = it.opcode.removesuffix("-start")
            is_fused = kind in KINDS and chain_of(it) is not None
            if is_fused:
                part = (chain_of(it), kind)
                if part in parts:
                    continue
                parts.add(part)
            if kind in KINDS:
                groups = device_groups(it.attribute(_GROUPS.pattern) or "{}")
                if groups and all(len(set(group)) == 1 for group in groups):
                    continue  # every device is alone in its group
                is_async = is_fused or (it.opcode != kind and '"is_sync":true' not in it.attributes)
                is_async = is_async or (runs.inside and "async_collective" in name)
                payload = _payload(it, groups)
                root = module.computations[name].root
                if kind == "all-reduce" and runs.inside and root and root.opcode == "dynamic-slice":
                    kind = "reduce-scatter"  # on a TPU, a fusion of an all-reduce and a slice of its result
            elif it.opcode == "send" and (kind := it.attribute(_MEGASCALE.pattern) or ""):
                kind = _MEGASCALE_KINDS.get(kind, kind.lower().replace("_", "-"))
                groups, is_async, payload = (), True, _bytes_by_dtype(it.arrays[:1])
            else:
                continue
            across = it.opcode == "send"
            found.append(
                Collective(
                    kind, groups, module.num_partitions, across, runs.in_loop, is_async, runs.times, payload, it.line
                )
            )
    return found


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
    """Replica groups, which HLO writes as {{0,1},{2,3}}, as [2,4]<=[4,2]T(1,0), or by the axes of a mesh.

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
    axes, chosen = text[: text.index("]")], text[text.rindex("{") + 1 : -1]
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
