import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext_lite.batching import make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.balance import Balance
from maxtext_lite.data.feed import (
    EvaluationReads,
    TrainingReads,
    evaluation_batches,
    training_batches,
)
from maxtext_lite.data.order import example_ids
from maxtext_lite.data.packing import Documents

T = 8
FIELDS = {"tokens", "targets", "segments", "positions", "weights"}


@dataclasses.dataclass
class NumberedSource:
    """Every array of example i is i + 1, so that no example looks like an empty slot; counts what is read."""

    num_examples: int
    seconds: float = 0.0
    fingerprint: str = "numbered"
    num_tokens: int = T
    fields: tuple[str, ...] = tuple(FIELDS)

    def __post_init__(self):
        self.read: list[int] = []

    @property
    def num_target_tokens(self):
        return self.num_examples * T

    def __len__(self):
        return self.num_examples

    def __getitem__(self, example_id):
        time.sleep(self.seconds)
        self.read.append(example_id)
        return {
            name: np.full(
                T, example_id + 1, np.float32 if name == "weights" else np.int32
            )
            for name in FIELDS
        }

    def documents(self, example_ids):
        """One document each, in the first the longest."""
        return Documents(10 - np.asarray(example_ids), np.arange(len(example_ids)))


class Damaged(NumberedSource):
    def __getitem__(self, example_id):
        if example_id == 7:
            raise UserError("record 7")
        return super().__getitem__(example_id)


def plan_for(num_devices: int, keys: str = "", **options):
    config = load_config(None, [f"max_target_length={T}", *keys.split()])
    return make_plan(config, num_devices=num_devices, **options)


def row_sharding(
    num_devices: int, *, spec: tuple = (None, "fsdp", None), tensor: int = 1
) -> NamedSharding:
    devices = np.array(jax.devices()[:num_devices]).reshape(
        num_devices // tensor, tensor
    )
    return NamedSharding(Mesh(devices, ("fsdp", "tensor")), PartitionSpec(*spec))


def feed(source, plan, num_devices=1, sharding=None, **keys):
    defaults = {"examples_seen": 0, "num_steps": 3, "seed": 0, "worker_count": 0}
    return training_batches(
        source, plan, sharding=sharding or row_sharding(num_devices), **defaults | keys
    )


def batches(source, plan, num_devices=1, **keys):
    with feed(source, plan, num_devices, **keys) as iterator:
        return list(iterator)


def evaluated(source, plan, num_devices, eval_steps=-1):
    sharding = row_sharding(num_devices, spec=("fsdp", None))
    with evaluation_batches(
        source, plan, sharding=sharding, eval_steps=eval_steps
    ) as iterator:
        return list(iterator)


def slot_numbers(array: jax.Array) -> np.ndarray:
    """The example id in each slot, -1 for an empty one, from an array all of whose rows are constant."""
    values = np.asarray(array)
    assert (values == values[..., :1]).all()
    return values[..., 0].astype(int) - 1


def assert_same_batches(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one.example_ids, other.example_ids)
        for name in FIELDS:
            np.testing.assert_array_equal(
                np.asarray(one.arrays[name]), np.asarray(other.arrays[name])
            )


@pytest.mark.fast
@pytest.mark.parametrize(
    ("per_device", "slots"),
    [
        (1, "0 2 4 6 8 10 12 14/1 3 5 7 9 11 13 15"),
        (0.5, "0 2 4 6 -1 -1 -1 -1/1 3 5 7 -1 -1 -1 -1"),
    ],
)
def test_example_j_is_in_micro_batch_j_mod_A_and_slot_j_div_A(per_device, slots):
    plan = plan_for(
        8, f"per_device_batch_size={per_device} gradient_accumulation_steps=2"
    )
    size = int(16 * per_device)
    first, second = batches(NumberedSource(100), plan, 8, num_steps=2, seed=-1)
    assert first.num_examples == size
    assert first.example_ids.tolist() == list(range(size))
    assert second.example_ids.tolist() == list(range(size, 2 * size))
    assert set(first.arrays) == FIELDS
    for name, array in first.arrays.items():
        assert array.shape == (2, 8, T)
        assert array.dtype == (np.float32 if name == "weights" else np.int32)
        assert slot_numbers(array).tolist() == [
            [int(i) for i in row.split()] for row in slots.split("/")
        ]


SPLITS_OF_16 = [
    (1, 16, 1),
    (1, 1, 16),
    (2, 4, 2),
    (8, 2, 1),
    (8, 1, 2),
    (8, 0.5, 4),
    (8, 0.125, 16),
]


@pytest.mark.parametrize(("num_devices", "per_device", "accumulation"), SPLITS_OF_16)
def test_every_split_of_a_global_batch_has_the_same_examples(
    num_devices, per_device, accumulation
):
    plan = plan_for(
        num_devices,
        f"per_device_batch_size={per_device} gradient_accumulation_steps={accumulation}",
    )
    found = batches(NumberedSource(50), plan, num_devices, num_steps=7)
    assert len(found) == 7
    for step, batch in enumerate(found):
        expected = example_ids(16 * step, 16, num_examples=50, seed=0)
        np.testing.assert_array_equal(batch.example_ids, expected)
        slots = slot_numbers(batch.arrays["tokens"])
        assert sorted(slots[slots >= 0]) == sorted(expected)


@pytest.mark.parametrize(
    ("spec", "tensor"),
    [((None, "fsdp", None), 2), ((None, "fsdp", "tensor"), 2), ((), 1)],
)
def test_each_device_gets_its_part_of_the_global_array_and_each_row_is_read_once(
    spec, tensor
):
    keys = f"per_device_batch_size=1 gradient_accumulation_steps=2 ici_tensor_parallelism={tensor}"
    source, sharding = NumberedSource(100), row_sharding(8, spec=spec, tensor=tensor)
    (batch,) = batches(source, plan_for(8, keys), sharding=sharding, num_steps=1)
    ids = batch.example_ids
    assert sorted(source.read) == sorted(ids)
    num_slots = batch.arrays["tokens"].shape[1]
    whole = np.array(
        [
            [[ids[2 * slot + micro] + 1] * T for slot in range(num_slots)]
            for micro in range(2)
        ]
    )
    for array in batch.arrays.values():
        assert array.sharding == sharding
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])


@pytest.mark.parametrize("keys", ["expansion_factor_real_data=0.5", ""])
def test_an_excluded_row_leaves_its_slot_empty_from_its_position_on(keys):
    """Four epochs of 6 examples in batches of 8; 2 is left out from the second epoch on, 5 always, 4 never."""
    plan = plan_for(4, f"per_device_batch_size=1 gradient_accumulation_steps=2 {keys}")
    order = [*example_ids(0, 24, num_examples=6, seed=9)]
    for step, batch in enumerate(
        batches(NumberedSource(6), plan, 4, seed=9, excluded={2: 6, 5: 0, 4: 24})
    ):
        here = order[8 * step : 8 * step + 8]
        assert batch.example_ids.tolist() == here  # and their hash
        assert batch.num_examples == 8
        for place, example in enumerate(here):
            is_out = example == 5 or (example == 2 and 8 * step + place >= 6)
            for values in batch.arrays.values():
                assert (
                    np.asarray(values)[place % 2, place // 2]
                    == (0 if is_out else example + 1)
                ).all()


def reads_of(source, host_slots, **changes):
    """Steps of 39 examples in 3 micro-batches: 13 of 16 slots."""
    keys = {
        "first_example": 30,
        "num_steps": 2,
        "step_examples": 39,
        "micro_batches": 3,
        "loads_per_step": 1,
    }
    return TrainingReads(
        source, host_slots=np.asarray(host_slots), **{"seed": 4} | keys | changes
    )


@pytest.mark.parametrize("is_balanced", [False, True])
@pytest.mark.parametrize("size", [2, 8])
def test_a_row_twice_in_a_step_is_left_out_only_from_its_position_on(size, is_balanced):
    """5 examples in order, 8 positions, two hosts: 1 is at positions 1 and 6, and left out from 3 on."""
    source = NumberedSource(5)
    balance = Balance(True, np.square, 2, 1, 1, size) if is_balanced else None
    keys = {
        "first_example": 0,
        "num_steps": 8 // size,
        "step_examples": size,
        "micro_batches": 1,
        "seed": -1,
    }
    for host_slots in np.split(np.arange(size), 2):
        steps = reads_of(source, host_slots, **keys, balance=balance, excluded={1: 3})
        for step in range(len(steps)):
            steps[step]
    assert sorted(source.read) == [0, 0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("host_slots", [[], [3, 4, 5], [12, 13, 14, 15], range(16)])
def test_a_host_reads_the_rows_of_its_slots_and_no_others(host_slots):
    source = NumberedSource(100)
    part = reads_of(source, host_slots)[1]
    expected = example_ids(69, 39, num_examples=100, seed=4)
    np.testing.assert_array_equal(part.example_ids, expected)
    own = [
        (j % 3, host_slots.index(j // 3), expected[j])
        for j in range(39)
        if j // 3 in host_slots
    ]
    assert source.read == [example for _, _, example in own]
    assert part.cells.T.tolist() == [[micro, place] for micro, place, _ in own]
    assert slot_numbers(part.rows["tokens"]).tolist() == source.read


@pytest.mark.parametrize("loads", [2, 3])
def test_the_loads_of_a_step_divide_each_hosts_examples_in_order(loads):
    """A host with 11 slots x 3 micro-batches reads 33 examples: in 2 loads 17 and 16. None changes its place."""
    whole = reads_of(NumberedSource(100), range(2, 14))[1]
    split = reads_of(NumberedSource(100), range(2, 14), loads_per_step=loads)
    assert len(split) == 2 * loads
    parts = [split[loads + load] for load in range(loads)]
    np.testing.assert_array_equal(
        np.concatenate([part.cells for part in parts], axis=1), whole.cells
    )
    np.testing.assert_array_equal(
        np.concatenate([part.rows["tokens"] for part in parts]), whole.rows["tokens"]
    )
    sizes = [len(part.rows["tokens"]) for part in parts]
    assert sum(sizes) == 33
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("factor", ["0.5", "1/3"])
def test_several_loads_give_the_batches_of_one(factor):
    keys = "per_device_batch_size=1.5 gradient_accumulation_steps=3"
    several = plan_for(8, f"{keys} expansion_factor_real_data={factor}")
    assert_same_batches(
        *(batches(NumberedSource(50), plan, 8) for plan in (plan_for(8, keys), several))
    )


def test_worker_processes_give_the_batches_that_threads_give():
    plan, source = (
        plan_for(8, "per_device_batch_size=1 gradient_accumulation_steps=2"),
        NumberedSource(50),
    )
    keys = {"examples_seen": 7, "num_steps": 9, "seed": 3}
    threads = batches(source, plan, 8, **keys)
    read = list(source.read)
    assert_same_batches(threads, batches(source, plan, 8, **keys, worker_count=2))
    assert source.read == read  # this process read nothing


def test_a_short_last_batch_has_only_the_remaining_examples():
    """23 examples twice in batches of 2 x 2 x 2 = 8: five whole ones and one of 6, in the same slots."""
    keys = "per_device_batch_size=2 gradient_accumulation_steps=2 num_epochs=2 last_batch=train warmup_steps=0"
    plan = plan_for(2, keys, num_examples=23)
    found = batches(NumberedSource(23), plan, 2, num_steps=plan.length.steps_left(0, 0))
    assert [batch.num_examples for batch in found] == [8] * 5 + [6]
    ids = [example for batch in found for example in batch.example_ids.tolist()]
    assert ids == example_ids(0, 46, num_examples=23, seed=0).tolist()
    last = slot_numbers(found[-1].arrays["tokens"])
    assert last.tolist() == [
        [*found[-1].example_ids[0::2], -1],
        [*found[-1].example_ids[1::2], -1],
    ]
    resumed = batches(NumberedSource(23), plan, 2, examples_seen=35, num_steps=2)
    assert [batch.num_examples for batch in resumed] == [8, 3]


@pytest.mark.parametrize("examples_seen", [0, 1, 36, 37, 75])
@pytest.mark.parametrize("size", [3, 5])
def test_a_run_resumes_at_any_number_of_examples_with_any_batch(examples_seen, size):
    plan = plan_for(1, f"per_device_batch_size={size}")
    found = batches(NumberedSource(37), plan, examples_seen=examples_seen, num_steps=10)
    ids = [i for batch in found for i in batch.example_ids.tolist()]
    assert (
        ids
        == example_ids(0, 150, num_examples=37, seed=0)[
            examples_seen : examples_seen + 10 * size
        ].tolist()
    )


RAMP = "per_device_batch_size=4 gradient_accumulation_steps=4 enable_rampup_batch_size=true"
RAMP += " per_device_batch_size_start=2 per_device_batch_size_increment=1 global_rampup_samples=100"


@pytest.mark.parametrize(
    "mode", ["per_device_batch_size", "gradient_accumulation_steps"]
)
def test_a_ramp_changes_the_batch_and_not_the_order(mode):
    plan = plan_for(2, f"{RAMP} rampup_mode={mode}")
    # Shares of 50 examples: 16 a step for 4 steps (64), 24 for 3 steps (72), then 32.
    sizes = [16] * 4 + [24] * 3 + [32] * 3
    for first_step in (0, 4, 6):
        start = sum(sizes[:first_step])
        found = batches(
            NumberedSource(90), plan, 2, examples_seen=start, num_steps=10 - first_step
        )
        assert [batch.num_examples for batch in found] == sizes[first_step:]
        for batch in found:
            size = batch.num_examples
            expected = example_ids(start, size, num_examples=90, seed=0)
            start += size
            np.testing.assert_array_equal(batch.example_ids, expected)
            slots = slot_numbers(batch.arrays["tokens"])
            assert sorted(slots[slots >= 0]) == sorted(expected)
            a, b = (4, size // 4) if mode == "per_device_batch_size" else (size // 8, 8)
            assert batch.num_micro_batches == a
            assert batch.arrays["tokens"].shape == (
                4,
                b,
                T,
            )  # one shape, whatever the accumulation
            assert (slots[a:] == -1).all()
    # From within a stage, after another batch size: the stage lasts until its end is reached.
    found = batches(NumberedSource(90), plan, 2, examples_seen=60, num_steps=5)
    assert [batch.num_examples for batch in found] == [16, 24, 24, 24, 32]


@pytest.mark.parametrize("num_steps", [10**12, 2**63 - 1])
@pytest.mark.parametrize("examples_seen", [0, 10**9])
@pytest.mark.parametrize(
    "keys", ["expansion_factor_real_data=0.5 per_device_batch_size=2", RAMP]
)
def test_a_run_of_any_length_begins_at_once_wherever_it_resumes(
    keys, examples_seen, num_steps
):
    """A list of the run's steps, or a walk to the next step, would not end."""
    plan = plan_for(1, keys.replace("samples=100", "samples=2147483647"))
    with feed(
        NumberedSource(50), plan, examples_seen=examples_seen, num_steps=num_steps
    ) as iterator:
        for _ in range(2):
            ids = next(iterator).example_ids
            np.testing.assert_array_equal(
                ids, example_ids(examples_seen, len(ids), num_examples=50, seed=0)
            )
            examples_seen += len(ids)


@pytest.mark.parametrize(
    ("num_devices", "per_device"), [(1, 7), (1, 64), (8, 0.5), (4, 3)]
)
def test_an_evaluation_sees_every_example_once(num_devices, per_device):
    plan = plan_for(num_devices, f"eval_per_device_batch_size={per_device}")
    found = evaluated(NumberedSource(29), plan, num_devices)
    size = int(per_device * num_devices)
    assert [batch.num_examples for batch in found] == [size] * (29 // size) + [
        29 % size
    ] * (29 % size > 0)
    seen = [slot_numbers(batch.arrays["weights"]) for batch in found]
    assert all(
        len(slots) == len(seen[0]) for slots in seen
    )  # one shape, so one compilation
    assert [i for slots in seen for i in slots if i >= 0] == list(range(29))
    assert [i for batch in found for i in batch.example_ids] == list(range(29))
    for slots, batch in zip(seen, found, strict=True):
        assert (slots[batch.num_examples :] == -1).all()


@pytest.mark.parametrize(("eval_steps", "expected"), [(1, 4), (3, 12), (100, 29)])
def test_an_evaluation_stops_after_eval_steps(eval_steps, expected):
    found = evaluated(
        NumberedSource(29), plan_for(1, "eval_per_device_batch_size=4"), 1, eval_steps
    )
    assert sum(batch.num_examples for batch in found) == expected


def test_hosts_share_an_evaluation():
    for host_slots, own in ((np.arange(4), [16, 17, 18, 19]), (np.arange(4, 8), [20])):
        part = EvaluationReads(
            NumberedSource(21), host_slots=host_slots, batch_examples=8, max_batches=-1
        )[2]
        assert slot_numbers(part.rows["tokens"]).tolist() == own
        assert part.cells.tolist() == [[0] * len(own), list(range(len(own)))]
        assert part.example_ids.tolist() == [16, 17, 18, 19, 20]


TWO_A_STEP = "per_device_batch_size=2"


def test_reading_runs_ahead_and_ends_with_the_iterator():
    before, source = set(threading.enumerate()), NumberedSource(100)
    iterator = feed(source, plan_for(1, TWO_A_STEP), num_steps=100)

    def wait_until(condition):
        deadline = time.monotonic() + 20
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert condition()

    wait_until(lambda: len(source.read) >= 4)  # two steps before any was requested
    next(iterator)
    iterator.close()
    iterator.close()
    with pytest.raises(StopIteration):
        next(iterator)
    wait_until(lambda: not set(threading.enumerate()) - before)
    assert batches(source, plan_for(1, TWO_A_STEP), num_steps=0) == []


def test_the_wait_is_measured_where_it_happens():
    (batch,) = batches(
        NumberedSource(100, seconds=0.1), plan_for(1, TWO_A_STEP), num_steps=1
    )
    assert 0.05 < batch.data_seconds < 20


def test_an_unreadable_row_is_known_two_batches_ahead_and_raised_once():
    plan = plan_for(1, TWO_A_STEP)
    with feed(
        Damaged(100), plan, seed=-1, num_steps=100
    ) as iterator:  # the fourth step holds example 7
        assert iterator.first_problem() is None
        assert [next(iterator).problem for _ in range(3)] == [
            None,
            "record 7",
            "record 7",
        ]
        with pytest.raises(UserError, match="record 7"):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
    assert [batch.problem for batch in batches(Damaged(100), plan, seed=-1)] == [
        None
    ] * 3


def test_an_evaluation_continues_without_unreadable_rows():
    found = evaluated(Damaged(20), plan_for(1, "eval_per_device_batch_size=4"), 1)
    assert found[-1].problem == "record 7"
    seen = [slot_numbers(batch.arrays["weights"]) for batch in found]
    assert [i for slots in seen for i in slots if i >= 0] == [
        i for i in range(20) if not 4 <= i < 8
    ]


PROGRAM = """
import multiprocessing, signal
import jax
from maxtext_lite.batching import make_plan
from maxtext_lite.config import load_config
from maxtext_lite.data import open_sources
from maxtext_lite.data.feed import training_batches

def main():
    config = load_config(None, ["dataset_type=synthetic", "max_target_length=8", "per_device_batch_size=2"])
    source, _ = open_sources(config, vocab_size=config.vocab_size)
    sharding = jax.sharding.NamedSharding(
        jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1]), jax.sharding.PartitionSpec(None, "fsdp", None))
    iterator = training_batches(source, make_plan(config, num_devices=1), sharding=sharding, examples_seen=0,
                                num_steps=1_000_000, seed=0, worker_count=1)
    next(iterator)
    came = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: came.append(number))
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        while number not in came:
            next(iterator)
        for _ in range(20):  # more than was read ahead
            next(iterator)
        print("read on", flush=True)
    # Not closed, and the end of the data is far: the interpreter must still end.

if __name__ == "__main__":
    main()
"""


def wait_until_gone(process_id):
    deadline = time.monotonic() + 30
    status = pathlib.Path(f"/proc/{process_id}/status")
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(
    not pathlib.Path("/proc").is_dir(), reason="looks for processes in /proc"
)
def test_worker_processes_outlive_a_signal_to_all_but_never_their_parent(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
        "JAX_PLATFORMS": "cpu",
    }
    # Two at a time, because most of their time is start-up.
    with (
        ended_in_the_end(program, environment) as stopped,
        ended_in_the_end(program, environment) as killed,
    ):
        worker_of_stopped, worker_of_killed = (
            int(process.stdout.readline()) for process in (stopped, killed)
        )
        killed.kill()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.killpg(
                stopped.pid, number
            )  # to the whole group, as a terminal and some schedulers do
            assert stopped.stdout.readline() == "read on\n"
        assert stopped.communicate(timeout=60) == ("", "")
        assert stopped.returncode == 0
        wait_until_gone(worker_of_stopped)
        wait_until_gone(worker_of_killed)


@contextlib.contextmanager
def ended_in_the_end(program, environment):
    pipe = subprocess.PIPE
    keys = {
        "env": environment,
        "stdout": pipe,
        "stderr": pipe,
        "text": True,
        "start_new_session": True,
    }
    with subprocess.Popen([sys.executable, str(program)], **keys) as process:
        killer = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
        killer.start()
        try:
            yield process
        finally:
            killer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
