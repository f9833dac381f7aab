"""Reading compiled HLO: its collectives, the mesh axes they cross, how often a step runs them, and their bytes."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np
from jax.sharding import Mesh

_COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<result>.*?) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)"
    r"(?P<start>-start)?\(.*?"
    r"(?:replica_groups|source_target_pairs)="
    r"(?P<groups>mesh\[.*?\{[^}]*\}|\{\{.*?\}\}|\{\}|\[\S+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}(?:$|, execution_thread)", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_MEGASCALE = re.compile(r"= \((?P<result>\w+\[[\d,]*\]).*? send\(.*?_xla_megascale_transfer_type=\"(?P<kind>\w+)\"")
_MEGASCALE_KINDS = {"ONE_TO_ONE": "collective-permute"}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_BITS = {"pred": 8, "c64": 64, "c128": 128}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all, ragged-all-to-all or collective-permute.
      groups: the partitions of the program that talk to each other, in the order of `mesh.devices.flat`; of a
        collective-permute, the pairs (from, to); empty: all in one group.
      num_partitions: partitions of the program; with several TPU slices, those of one slice.
      across_slices: TPU slices exchange it over the network between them (Megascale); it has no groups then.
      in_loop: it stands inside a loop.
      times: how often one run of the program runs it; None where a loop around it has an unknown number of trips.
      payload_bytes: bytes of the whole array on one device, each time: what comes out, or of a reduce-scatter what
        goes in.
      line: the line of HLO.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    num_partitions: int
    across_slices: bool
    in_loop: bool
    times: int | None
    payload_bytes: int
    line: str

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The mesh axes that it crosses: those along which the members of some group differ."""
        slice_of = np.array([getattr(device, "slice_index", None) or 0 for device in mesh.devices.flat])
        if self.across_slices:
            grid = slice_of.reshape(mesh.devices.shape)
            return tuple(a for dim, a in enumerate(mesh.axis_names) if np.any(grid != np.take(grid, [0], axis=dim)))
        # Every slice runs the same program, so that one stands for all.
        here = np.flatnonzero(slice_of == slice_of[0]) if self.num_partitions < mesh.size else np.arange(mesh.size)
        groups = [here[list(group)] for group in self.groups or (range(self.num_partitions),)]
        crossed = set()
        for group in groups:
            coordinates = np.stack(np.unravel_index(np.asarray(group), mesh.devices.shape))
            crossed.update(np.flatnonzero(np.any(coordinates != coordinates[:, :1], axis=1)).tolist())
        return tuple(axis for dim, axis in enumerate(mesh.axis_names) if dim in crossed)

    def crosses(self, mesh: Mesh, axis: str) -> bool:
        """Whether it crosses a mesh axis."""
        return axis in self.axes(mesh)


def collectives(hlo: str, *, trips_where_unknown: int | None = None) -> list[Collective]:
    """Every collective of a compiled module that moves something, in the order of its text.

    Args:
      hlo: the text of the module (`compiled.as_text()`).
      trips_where_unknown: trips of a loop whose number XLA does not know, such as one with a traced bound.
    Raises:
      ValueError: the text holds no computation, or groups in a notation that is not known.
    """
    bodies = {match[2]: match[3] for match in _COMPUTATION.finditer(hlo)}
    entries = [match[2] for match in _COMPUTATION.finditer(hlo) if match[1]]
    if len(entries) != 1:
        raise ValueError(f"the text has {len(entries)} entry computations, not one: it is no HLO module")
    header = re.search(r"\bnum_partitions=(\d+)", hlo)
    partitions = int(header[1]) if header else 1
    times = _runs(bodies, entries[0], trips_where_unknown)
    found = []
    parts: set[str] = set()
    for name, body in bodies.items():
        if name not in times:
            continue  # never called
        count, in_loop = times[name]
        for line in body.splitlines():
            match = _COLLECTIVE.match(line)
            if match:
                # A TPU writes a collective that runs beside other work into every part of that work.
                if "async_collective_fusion_config" in line:
                    channel = re.search(r"\bchannel_id=\d+", line)
                    part = (channel and channel[0], match["kind"], match["groups"], _ARRAY.findall(match["result"]))
                    if str(part) in parts:
                        continue
                    parts.add(str(part))
                groups = device_groups(match["groups"])
                if groups and all(len(set(group)) == 1 for group in groups):
                    continue  # each with itself
                payload = _payload_bytes(match["kind"], bool(match["start"]), match["result"], groups)
                found.append(
                    Collective(match["kind"], groups, partitions, False, in_loop, count, payload, line.strip())
                )
            elif match := _MEGASCALE.search(line):
                kind = _MEGASCALE_KINDS.get(match["kind"], match["kind"].lower().replace("_", "-"))
                payload = _payload_bytes(kind, False, match["result"], ())
                found.append(Collective(kind, (), partitions, True, in_loop, count, payload, line.strip()))
    return found


def _runs(bodies: Mapping[str, str], entry: str, trips_where_unknown: int | None) -> dict[str, tuple[int | None, bool]]:
    """How often each computation runs in one run of the module (None: unknown), and whether in a loop.

    Every branch of a conditional counts as if it were taken.
    """
    callers: dict[str, list[tuple[str, int | None, bool]]] = {}
    for name, body in bodies.items():
        for line in body.splitlines():
            for keyword, called in _CALLED.findall(line):
                looped = keyword in ("body", "condition")
                trips = _trips(line, bodies, trips_where_unknown) if looped else 1
                for target in re.findall(r"[\w.\-]+", called):
                    if target in bodies:
                        callers.setdefault(target, []).append((name, trips, looped))
    found: dict[str, tuple[int | None, bool]] = {entry: (1, False)}

    def runs(name: str) -> tuple[int | None, bool]:
        if name not in found:
            total: int | None = 0
            in_loop = False
            for caller, trips, looped in callers.get(name, []):
                times, caller_in_loop = runs(caller)
                total = None if None in (total, times, trips) else (total or 0) + (times or 0) * (trips or 0)
                in_loop = in_loop or looped or caller_in_loop
            found[name] = total, in_loop
        return found[name]

    return {name: runs(name) for name in bodies if name == entry or name in callers}


def _trips(line: str, bodies: Mapping[str, str], where_unknown: int | None) -> int | None:
    """Trips of a loop: as XLA noted them, or as its condition and body say that count up to a limit, from 0."""
    known = _TRIPS.search(line)
    if known:
        return int(known[1])
    condition, body = (bodies.get(name, "") for name in _loop_parts(line))
    limit = re.search(r"ROOT .* compare\(%?([\w.\-]+), %?([\w.\-]+)\), direction=LT", condition)
    counter = limit and re.search(r" get-tuple-element\(.*index=(\d+)", _definition(limit[1], condition))
    if not counter or not limit:
        return where_unknown
    root = re.search(r"ROOT .* tuple\((.*?)\)", body)
    following = re.sub(r"/\*.*?\*/", "", root[1]).split(",") if root else []
    added = (
        re.search(r" add\((.*?)\)", _definition(following[int(counter[1])].strip(" %"), body)) if following else None
    )
    steps = [_constant(name.strip(" %"), body) for name in added[1].split(",")] if added else []
    upper, step = _constant(limit[2], condition), next((step for step in steps if step), None)
    return where_unknown if upper is None or step is None else -(-upper // step)


def _loop_parts(line: str) -> tuple[str, str]:
    """The names of a loop's condition and body."""
    condition, body = (re.search(rf"{word}=%?([\w.\-]+)", line) for word in ("condition", "body"))
    return (condition[1] if condition else "", body[1] if body else "")


def _definition(name: str, computation: str) -> str:
    """The line of a computation that defines a name; "" where none does."""
    found = re.search(rf"^\s*(?:ROOT )?%?{re.escape(name)} = .*$", computation, re.MULTILINE)
    return found[0] if found else ""


def _constant(name: str, computation: str) -> int | None:
    found = re.search(r" constant\((\d+)\)", _definition(name, computation))
    return int(found[1]) if found else None


def _payload_bytes(kind: str, is_start: bool, result: str, groups: tuple[tuple[int, ...], ...]) -> int:
    sizes = [array_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(result)]
    if is_start and kind == "all-gather":  # (what goes in, what comes out)
        sizes = sizes[len(sizes) // 2 :]
    elif is_start and kind == "collective-permute":  # (what goes in, what comes out, contexts)
        sizes = sizes[1:2]
    elif is_start and kind in ("all-to-all", "reduce-scatter", "ragged-all-to-all"):
        sizes = sizes[len(sizes) // 2 :]
    whole = sum(sizes)
    return whole * len(groups[0]) if kind == "reduce-scatter" and groups else whole


def array_bytes(dtype: str, dims: str) -> int:
    """Bytes of an array that HLO writes as dtype[dims], as in f32[16,24] or pred[]; elements are packed."""
    bits = _BITS.get(dtype) or int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
    elements = int(np.prod([int(size.removeprefix("<=")) for size in dims.split(",") if size], dtype=np.int64))
    return -(-elements * bits // 8)


def device_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """The groups that HLO writes as {{0,1},{2,3}}, as [2,4]<=[4,2]T(1,0), or by the axes of a mesh.

    Raises:
      ValueError: the notation is not known.
    """
    if text.startswith("mesh["):
        return _groups_of_mesh(text)
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        return _rows(_iota(iota[2], iota[3]).reshape(_numbers(iota[1])))
    return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", text))


def _groups_of_mesh(text: str) -> tuple[tuple[int, ...], ...]:
    """Groups along axes of a mesh; 'a':(2)4 is a part of an axis: 4, after the 2 outermost."""
    axes, chosen = text[: text.index("]")], text[text.rindex("{") + 1 : -1]
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    device_ids = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", text)
    ids = _iota(device_ids[1], device_ids[2]) if device_ids else np.arange(np.prod([*sizes.values()]))
    if not re.fullmatch(r"'\w+'(:\(\d+\)\d+)?(, ?'\w+'(:\(\d+\)\d+)?)*", chosen):
        raise ValueError(f"cannot read the groups {text}")
    parts = {name: (1, size) for name, size in sizes.items()}
    for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", chosen):
        if before:
            parts[name] = int(before), int(size)
    dims = []
    for name, size in sizes.items():  # each axis as [before, part, after]
        before, part = parts[name]
        dims += [before, part, size // (before * part)]
    at = [3 * list(sizes).index(name) + 1 for name, _, _ in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", chosen)]
    moved = np.moveaxis(ids.reshape(dims), at, range(-len(at), 0))
    return _rows(moved.reshape(-1, int(np.prod([dims[dim] for dim in at]))))


def _iota(shape: str, order: str | None) -> np.ndarray:
    ids = np.arange(np.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def _rows(groups: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, groups.tolist()))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
