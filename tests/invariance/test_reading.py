"""Who reads what, for hundreds of ways to run: every example of every step once, by hosts that are made up."""

import dataclasses
import functools
import itertools
import math
from fractions import Fraction

import jax
import pytest

from maxtext_lite.batching import make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.data import feed
from maxtext_lite.data.feed import row_layout
from maxtext_lite.data.order import example_ids, examples_hash
from maxtext_lite.data.source import ExampleSource
from maxtext_lite.parallel import make_mesh, sharding
from maxtext_lite.training.step import TRAIN_BATCH_AXES

NUM_EXAMPLES = 37
MACHINES = [(1, 1), (4, 2), (8, 4)]
PER_DEVICE = [Fraction(text) for text in ("0.25", "0.5", "1.5")]
FACTORS = [Fraction(text) for text in ("-1", "1", "2", "4", "0.5")]
MODES = ["per_device_batch_size", "gradient_accumulation_steps"]
DOWN_AND_UP = "half the batch, then the whole one again, by "
RAMPS = [None, *MODES, *(DOWN_AND_UP + mode for mode in MODES)]
RAMP_SAMPLES = 9
LENGTHS = [
    {"steps": 4},
    {"steps": -1, "num_epochs": Fraction(2), "last_batch": "train"},
    {"steps": -1, "num_epochs": Fraction(3), "last_batch": "drop"},
]
BASE = load_config(None, ["max_target_length=1", "warmup_steps=0"])
MESHES = [
    {"fsdp": -1},
    {"data": -1, "fsdp": 1},
    {"data": 2, "fsdp": -1},
    {"tensor": 2, "fsdp": -1},
    {"tensor": 4, "fsdp": -1},
]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run."""

    devices: int
    hosts: int
    per_device: Fraction
    accumulation: int
    factor: Fraction
    ramp: str | None
    mesh: dict[str, int]
    length: dict[str, object]

    @property
    def config(self):
        """Put together without the parser, which would take most of the time."""
        keys = {
            "per_device_batch_size": self.per_device,
            "gradient_accumulation_steps": self.accumulation,
        }
        keys |= {"expansion_factor_real_data": self.factor, **self.length}
        keys |= {f"ici_{axis}_parallelism": size for axis, size in self.mesh.items()}
        if self.goes_down:
            stages = (RAMP_SAMPLES, self.half), (2 * RAMP_SAMPLES, self.target)
            keys |= {
                "batch_schedule": ((0, self.target), *stages),
                "rampup_mode": self.ramp.removeprefix(DOWN_AND_UP),
                "gradient_accumulation_steps": -1,
            }
        elif self.ramp:
            keys |= {
                "enable_rampup_batch_size": True,
                "rampup_mode": self.ramp,
                "global_rampup_samples": RAMP_SAMPLES,
            }
            keys |= dict.fromkeys(
                ("per_device_batch_size_start", "per_device_batch_size_increment"),
                self.per_device / 2,
            )
        return BASE.model_copy(update=keys)

    @property
    def target(self):
        return int(self.per_device * self.devices * self.accumulation)

    @property
    def half(self):
        return max(self.target // 2, 1)

    @property
    def goes_down(self):
        return bool(self.ramp) and self.ramp.startswith(DOWN_AND_UP)

    @property
    def is_legal(self):
        """By the rules of the seeds, worked out here: whole batches, loading hosts and loads."""
        whole = [self.per_device * self.devices]
        if self.ramp == DOWN_AND_UP + MODES[0]:
            # A device takes fewer where its size is not whole.
            whole = [Fraction(1, 1 if whole[0] >= 1 else 2)]
        elif self.ramp == DOWN_AND_UP + MODES[1]:
            whole.append(self.half / whole[0])
        elif self.ramp == "per_device_batch_size":
            whole.append(self.per_device * self.devices / 2)
        elif self.ramp:
            whole.append(Fraction(self.accumulation, 2))
        if self.factor > 0:
            whole.append(
                self.hosts / self.factor if self.factor > 1 else 1 / self.factor
            )
        if self.length.get("last_batch") == "drop":  # a whole batch fits into the data
            first_batch = self.target / (2 if self.ramp and not self.goes_down else 1)
            whole.append(
                Fraction(
                    1,
                    1 if first_batch <= self.length["num_epochs"] * NUM_EXAMPLES else 2,
                )
            )
        return all(count.denominator == 1 for count in whole)

    def batches(self, seen, steps_done):
        """(examples, accumulation) of each step after the first `seen` examples, by replay."""
        target = self.target
        half = self.half
        ramp_end = -(-RAMP_SAMPLES // half) * half if self.ramp else 0
        total = (
            self.length["num_epochs"] * NUM_EXAMPLES
            if "num_epochs" in self.length
            else math.inf
        )
        found = []
        while seen < total and steps_done + len(found) != self.length["steps"]:
            size, accumulation = target, self.accumulation
            is_half = seen < ramp_end
            if self.goes_down:
                is_half = RAMP_SAMPLES <= seen < 2 * RAMP_SAMPLES
            if is_half:
                size, accumulation = (
                    half,
                    accumulation // (2 if self.ramp != "per_device_batch_size" else 1),
                )
            if self.goes_down:  # as few micro-batches as fit
                most = self.per_device * self.devices
                accumulation = next(
                    n for n in range(1, size + 1) if size % n == 0 and size <= n * most
                )
            if seen + size > total:
                if self.length["last_batch"] == "drop":
                    break
                size = int(total - seen)
            found.append((size, accumulation))
            seen += size
        return found


def every_way():
    """Machines, batches, factors, ramps and lengths; the meshes in turn."""
    turns = itertools.count()
    for (
        devices,
        hosts,
    ), per_device, accumulation, factor, ramp, length in itertools.product(
        MACHINES, PER_DEVICE, (1, 2, 3), FACTORS, RAMPS, LENGTHS
    ):
        fitting = [mesh for mesh in MESHES if devices % -math.prod(mesh.values()) == 0]
        yield Way(
            devices,
            hosts,
            per_device,
            accumulation,
            factor,
            ramp,
            fitting[next(turns) % len(fitting)],
            length,
        )


class Numbers(ExampleSource):
    """Example i is the number i."""

    num_tokens = 1
    fields = ("tokens",)

    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, example_id):
        return {"tokens": example_id}


@functools.cache
def layout_on_made_up_hosts(shape, where, hosts, filled_slots, loading_hosts):
    per_host = where.mesh.size // hosts
    return row_layout(
        shape,
        where,
        filled_slots=filled_slots,
        loading_hosts=loading_hosts,
        host_of=lambda device: device.id // per_host,
    )


@pytest.fixture
def segments_of(monkeypatch):
    """What `training_batches` would read for a plan, as (reads of each host, layout)."""
    monkeypatch.setattr(feed, "BatchIterator", lambda segments, worker_count: segments)

    def segments(plan, examples_seen, num_steps):
        def layout(shape, where, *, filled_slots, loading_hosts):
            return layout_on_made_up_hosts(
                shape, where, plan.num_hosts, filled_slots, loading_hosts
            )

        monkeypatch.setattr(feed, "row_layout", layout)
        mesh = make_mesh(
            plan.ici_mesh, plan.dcn_mesh, jax.devices()[: plan.num_devices]
        )
        return feed.training_batches(
            Numbers(),
            plan,
            sharding=sharding(mesh, TRAIN_BATCH_AXES),
            examples_seen=examples_seen,
            num_steps=num_steps,
            seed=5,
            worker_count=0,
        )

    return segments


def sizes_of(segments):
    """(examples, micro-batches) of each step."""
    return [
        (reads.step_examples, reads.micro_batches)
        for reads, _ in segments
        for _ in range(reads.num_steps)
    ]


def positions_of(segments):
    """(first, one beyond the last) position in the run of the examples of each step."""
    return [
        (
            reads.first_example + step * reads.step_examples,
            reads.first_example + (step + 1) * reads.step_examples,
        )
        for reads, _ in segments
        for step in range(reads.num_steps)
    ]


def check_step(plan, segment, step):
    """One step's reads over all hosts; returns the hash of what they read."""
    reads, layout = segment
    loads, micro_batches = reads.loads_per_step, reads.micro_batches
    first, count = reads.first_example + step * reads.step_examples, reads.step_examples
    want = example_ids(first, count, num_examples=NUM_EXAMPLES, seed=5)
    at_cell, parts = {}, []
    for host, slots in enumerate(layout.slots_of_host):
        of_host = dataclasses.replace(reads, host_slots=slots)
        for load in range(loads):
            found = of_host[step * loads + load]
            assert (found.example_ids == want).all()
            ids = found.rows["tokens"][:, 0]
            cells = [
                (int(micro_batch), int(slots[place]))
                for micro_batch, place in zip(
                    found.micro_batches, found.places, strict=True
                )
            ]
            assert (
                not set(cells) & at_cell.keys()
            )  # disjoint, also over loads and hosts
            at_cell |= dict(zip(cells, ids.tolist(), strict=True))
            parts.append(int(examples_hash(ids), 16))
            assert len(ids) <= plan.global_batch_to_load
            assert host in plan.loading_hosts or not len(ids)
    assert at_cell == {
        (j % micro_batches, j // micro_batches): example_id
        for j, example_id in enumerate(want)
    }
    if layout.load_positions is not None:
        shares = [len(layout.slots_of_host[host]) for host in plan.loading_hosts]
        assert max(shares) - min(shares) <= 1
        assert (
            len(set(layout.load_positions)) == sum(shares) == len(layout.load_positions)
        )
    return f"{sum(parts) % 2**64:016x}"


def test_every_example_of_every_step_is_read_once_by_a_host_that_loads(segments_of):
    hashes: dict[tuple[int, ...], list[str]] = {}
    legal = refused = 0
    for way in every_way():
        machine = {
            "num_devices": way.devices,
            "num_hosts": way.hosts,
            "num_examples": NUM_EXAMPLES,
        }
        if not way.is_legal:
            refused += 1
            if refused % 40 == 0:  # to name what would work takes long
                with pytest.raises(UserError):
                    make_plan(way.config, **machine)
            continue
        legal += 1
        plan = make_plan(way.config, **machine)
        num_loading = way.hosts // way.factor if way.factor > 1 else way.hosts
        assert plan.loading_hosts == tuple(range(num_loading))
        batches = way.batches(0, 0)
        segments = segments_of(plan, 0, plan.length.steps_left(0, 0))
        assert sizes_of(segments) == batches, way
        found = [
            check_step(plan, segment, step)
            for segment in segments
            for step in range(segment[0].num_steps)
        ]
        assert found == hashes.setdefault(
            tuple(examples for examples, _ in batches), found
        ), way
        # Resumed: after one of its own steps, or anywhere, as a run of other batches leaves it.
        seen = [0, *itertools.accumulate(examples for examples, _ in batches)]
        steps = positions_of(segments)
        assert [first for first, _ in steps] == seen[:-1]
        done = legal % len(batches)
        assert plan.length.steps_left(done, seen[done]) == len(batches) - done
        assert (
            positions_of(segments_of(plan, seen[done], len(batches) - done))
            == steps[done:]
        ), way
        anywhere = legal * 7 % seen[-1]
        if rest := way.batches(anywhere, 1):
            assert plan.length.steps_left(1, anywhere) == len(rest)
            resumed = segments_of(plan, anywhere, len(rest))
            assert sizes_of(resumed) == rest, (way, anywhere)
            read = positions_of(resumed)
            assert [first for first, _ in read] == [
                anywhere,
                *(stop for _, stop in read[:-1]),
            ]
    assert legal > 300
    assert len(hashes) < legal / 10  # so that most were compared with another way
