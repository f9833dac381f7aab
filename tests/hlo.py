"""Reading compiled HLO: which collectives there are, over which devices, and whether a loop repeats them."""

import dataclasses
import re

import numpy as np

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(.*?"
    r"(?:replica_groups|source_target_pairs)=(?P<groups>mesh\[.*?\{[^}]*\}|\{\{.*?\}\}|\[\S+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: its kind, its groups of device numbers, and whether it stands inside a loop."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    in_loop: bool
    line: str

    def crosses(self, mesh, axis: str) -> bool:
        """Whether some group holds devices that differ along a mesh axis."""
        ids = np.vectorize(lambda device: device.id)(mesh.devices)
        coordinate = {int(ids[at]): at[mesh.axis_names.index(axis)] for at in np.ndindex(ids.shape)}
        return any(len({coordinate[device] for device in group}) > 1 for group in self.groups)


def device_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """The groups that HLO writes as {{0,1},{2,3}}, as [2,4]<=[4,2]T(1,0), or by the axes of a mesh."""
    if text.startswith("mesh["):
        axes, chosen = text[: text.index("]")], text[text.rindex("{") :]
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
        device_ids = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", text)
        ids = np.arange(np.prod([*sizes.values()]))
        if device_ids:
            ids = ids.reshape(_numbers(device_ids[1]))
            ids = ids.transpose(_numbers(device_ids[2])) if device_ids[2] else ids
        assert re.fullmatch(r"\{'\w+'(, ?'\w+')*\}", chosen), f"cannot read {text}"
        names = re.findall(r"'(\w+)'", chosen)
        dims = [list(sizes).index(name) for name in names]
        moved = np.moveaxis(ids.reshape([*sizes.values()]), dims, range(-len(dims), 0))
        return tuple(map(tuple, moved.reshape(-1, np.prod([sizes[name] for name in names], dtype=int)).tolist()))
    iota = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        ids = np.arange(np.prod(_numbers(iota[2]))).reshape(_numbers(iota[2]))
        ids = ids.transpose(_numbers(iota[3])) if iota[3] else ids
        return tuple(map(tuple, ids.reshape(_numbers(iota[1])).tolist()))
    return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", text))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def collectives(hlo: str) -> list[Collective]:
    """Every collective of a compiled module."""
    bodies = {
        match[1]: match[2] for match in re.finditer(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", hlo, re.M | re.S)
    }
    assert bodies, "no computations found"
    looped = set(re.findall(r"(?:body|condition)=%([\w.\-]+)", hlo))
    while True:  # what a loop calls is in the loop
        called = {name for body in looped for name in re.findall(r"%([\w.\-]+)", bodies[body]) if name in bodies}
        if called <= looped:
            break
        looped |= called
    found = []
    for name, body in bodies.items():
        for line in body.splitlines():
            match = _COLLECTIVE.search(line)
            if match:
                found.append(Collective(match[1], device_groups(match["groups"]), name in looped, line.strip()))
    return found
