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
from maxtext_lite.data.feed import EvaluationReads, TrainingReads, evaluation_batches, training_batches
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
        return {name: np.full(T, example_id + 1, np.float32 if name == "weights" else np.int32) for name in FIELDS}


def plan_for(num_devices: int, **keys: object):
    config = load_config(None, [f"max_target_length={T}", *(f"{key}={value}" for key, value in keys.items())])
    return make_plan(config, num_devices=num_devices)


def row_sharding(num_devices: int, *, spec: tuple = (None, "fsdp", None), tensor: int = 1) -> NamedSharding:
    devices = np.array(jax.devices()[:num_devices]).reshape(num_devices // tensor, tensor)
    return NamedSharding(Mesh(devices, ("fsdp", "tensor")), PartitionSpec(*spec))


def batches(source, plan, num_devices, *, examples_seen=0, num_steps=3, seed=0, worker_count=0, **sharding):
    with training_batches(
        source,
        plan,
        sharding=row_sharding(num_devices, **sharding),
        examples_seen=examples_seen,
        num_steps=num_steps,
        seed=seed,
        worker_count=worker_count,
    ) as iterator:
        return list(iterator)


def slot_numbers(array: jax.Array) -> np.ndarray:
    """The example id in each slot, -1 for an empty one, from an array all of whose rows are constant."""
    values = np.asarray(array)
    assert (values == values[..., :1]).all()
    return values[..., 0].astype(int) - 1


@pytest.mark.fast
def test_example_j_is_in_micro_batch_j_mod_A_and_slot_j_div_A():
    plan = plan_for(8, per_device_batch_size=1, gradient_accumulation_steps=2)
    first, second = batches(NumberedSource(100), plan, 8, num_steps=2, seed=-1)
    assert slot_numbers(first.arrays["tokens"]).tolist() == [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]]
    assert slot_numbers(second.arrays["tokens"])[0].tolist() == [16, 18, 20, 22, 24, 26, 28, 30]
    assert first.example_ids.tolist() == list(range(16))
    assert first.num_examples == 16
    assert set(first.arrays) == FIELDS
    for name, array in first.arrays.items():
        assert array.shape == (2, 8, T)
        assert array.dtype == (np.float32 if name == "weights" else np.int32)
        np.testing.assert_array_equal(slot_numbers(array), slot_numbers(first.arrays["tokens"]))


def test_slots_beyond_the_examples_are_empty():
    # 0.5 x 8 devices = 4 examples in 8 slots.
    plan = plan_for(8, per_device_batch_size=0.5, gradient_accumulation_steps=2)
    (batch,) = batches(NumberedSource(100), plan, 8, num_steps=1, seed=-1)
    for array in batch.arrays.values():
        values = np.asarray(array)
        assert values.shape == (2, 8, T)
        assert not values[:, 4:].any()
        assert values[:, :4].all()
    assert slot_numbers(batch.arrays["tokens"]).tolist() == [[0, 2, 4, 6, -1, -1, -1, -1], [1, 3, 5, 7, -1, -1, -1, -1]]
    assert batch.num_examples == 8


SPLITS_OF_16 = [(1, 16, 1), (1, 1, 16), (2, 4, 2), (8, 2, 1), (8, 1, 2), (8, 0.5, 4), (8, 0.125, 16)]


@pytest.mark.parametrize(("num_devices", "per_device", "accumulation"), SPLITS_OF_16)
def test_every_split_of_a_global_batch_has_the_same_examples(num_devices, per_device, accumulation):
    plan = plan_for(num_devices, per_device_batch_size=per_device, gradient_accumulation_steps=accumulation)
    found = batches(NumberedSource(50), plan, num_devices, num_steps=7)
    assert len(found) == 7
    for step, batch in enumerate(found):
        expected = example_ids(16 * step, 16, num_examples=50, seed=0)
        np.testing.assert_array_equal(batch.example_ids, expected)
        slots = slot_numbers(batch.arrays["tokens"])
        assert sorted(slots[slots >= 0]) == sorted(expected)


def test_a_device_has_the_same_examples_whatever_the_accumulation():
    on_device = []
    for per_device, accumulation in ((4, 1), (2, 2), (1, 4)):
        plan = plan_for(8, per_device_batch_size=per_device, gradient_accumulation_steps=accumulation)
        (batch,) = batches(NumberedSource(1000), plan, 8, num_steps=1)
        shards = batch.arrays["tokens"].addressable_shards
        on_device.append({shard.device.id: sorted(slot_numbers(shard.data).ravel()) for shard in shards})
    assert on_device[0] == on_device[1] == on_device[2]
    assert all(len(examples) == 4 for examples in on_device[0].values())


@pytest.mark.parametrize(("spec", "tensor"), [((None, "fsdp", None), 2), ((None, "fsdp", "tensor"), 2), ((), 1)])
def test_each_device_gets_its_part_of_the_global_array_and_each_row_is_read_once(spec, tensor):
    plan = plan_for(8, per_device_batch_size=1, gradient_accumulation_steps=2, ici_tensor_parallelism=tensor)
    source = NumberedSource(100)
    (batch,) = batches(source, plan, 8, num_steps=1, spec=spec, tensor=tensor)
    ids = batch.example_ids
    assert sorted(source.read) == sorted(ids)
    num_slots = batch.arrays["tokens"].shape[1]
    whole = np.array([[[ids[2 * slot + micro] + 1] * T for slot in range(num_slots)] for micro in range(2)])
    for array in batch.arrays.values():
        assert array.sharding == row_sharding(8, spec=spec, tensor=tensor)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])


def reads_of(source, host_slots, **changes):
    """Steps of 39 examples in 3 micro-batches: 13 of 16 slots."""
    keys = {"first_example": 30, "num_steps": 2, "step_examples": 39, "micro_batches": 3, "loads_per_step": 1}
    return TrainingReads(source, host_slots=np.asarray(host_slots), seed=4, **keys | changes)


@pytest.mark.parametrize("keys", [{"expansion_factor_real_data": 0.5}, {"grain_worker_count": 0}])
def test_an_excluded_row_leaves_its_slot_empty_from_its_position_on(keys):
    """Four epochs of 6 examples in batches of 8; 2 is left out from the second epoch on, 5 always, 4 never."""
    source, plan = NumberedSource(6), plan_for(4, per_device_batch_size=1, gradient_accumulation_steps=2, **keys)
    shared = {"sharding": row_sharding(4), "examples_seen": 0, "num_steps": 3, "seed": 9, "worker_count": 0}
    order = [*example_ids(0, 24, num_examples=6, seed=9)]
    with training_batches(source, plan, excluded={2: 6, 5: 0, 4: 24}, **shared) as iterator:
        for step, batch in enumerate(iterator):
            here = order[8 * step : 8 * step + 8]
            assert batch.example_ids.tolist() == here  # and their hash
            assert batch.num_examples == 8
            for place, example in enumerate(here):
                is_out = example == 5 or (example == 2 and 8 * step + place >= 6)
                for values in batch.arrays.values():
                    assert (np.asarray(values)[place % 2, place // 2] == (0 if is_out else example + 1)).all()


class Unequal(NumberedSource):
    """Rows of one document each, the first the costliest."""

    def documents(self, example_ids):
        return Documents(10 - np.asarray(example_ids), np.arange(len(example_ids)))


@pytest.mark.parametrize("is_balanced", [False, True])
@pytest.mark.parametrize("step_examples", [2, 8])
def test_a_row_twice_in_a_step_is_left_out_only_from_its_position_on(step_examples, is_balanced):
    """5 examples in order, 8 positions, two hosts: 1 is at positions 1 and 6, and left out from 3 on."""
    source = Unequal(5)
    for host_slots in np.split(np.arange(step_examples), 2):
        steps = TrainingReads(
            source,
            host_slots=host_slots,
            first_example=0,
            num_steps=8 // step_examples,
            step_examples=step_examples,
            loads_per_step=1,
            micro_batches=1,
            seed=-1,
            balance=Balance(True, np.square, 2, 1, 1, step_examples) if is_balanced else None,
            excluded={1: 3},
        )
        for step in range(len(steps)):
            steps[step]
    assert sorted(source.read) == [0, 0, 1, 2, 2, 3, 4]


def test_a_host_reads_the_rows_of_its_slots_and_no_others():
    for host_slots in ([], [3, 4, 5], [12, 13, 14, 15], range(16)):
        source = NumberedSource(100)
        part = reads_of(source, host_slots)[1]
        expected = example_ids(69, 39, num_examples=100, seed=4)
        np.testing.assert_array_equal(part.example_ids, expected)
        own = [(j % 3, host_slots.index(j // 3), expected[j]) for j in range(39) if j // 3 in host_slots]
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
    np.testing.assert_array_equal(np.concatenate([part.cells for part in parts], axis=1), whole.cells)
    np.testing.assert_array_equal(np.concatenate([part.rows["tokens"] for part in parts]), whole.rows["tokens"])
    sizes = [len(part.rows["tokens"]) for part in parts]
    assert sum(sizes) == 33
    assert max(sizes) - min(sizes) <= 1


def assert_same_batches(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one.example_ids, other.example_ids)
        for name in FIELDS:
            np.testing.assert_array_equal(np.asarray(one.arrays[name]), np.asarray(other.arrays[name]))


@pytest.mark.parametrize("factor", ["0.5", "1/3"])
def test_several_loads_give_the_batches_of_one(factor):
    keys = {"per_device_batch_size": 1.5, "gradient_accumulation_steps": 3}
    one = batches(NumberedSource(50), plan_for(8, **keys), 8)
    assert_same_batches(one, batches(NumberedSource(50), plan_for(8, **keys, expansion_factor_real_data=factor), 8))


def test_a_short_last_batch_has_only_the_remaining_examples():
    """23 examples twice in batches of 2 x 2 x 2 = 8: five whole ones and one of 6, in the same slots."""
    config = load_config(None, [f"max_target_length={T}", "per_device_batch_size=2", "gradient_accumulation_steps=2",
                                "num_epochs=2", "last_batch=train", "warmup_steps=0"])  # fmt: skip
    plan = make_plan(config, num_devices=2, num_examples=23)
    found = batches(NumberedSource(23), plan, 2, num_steps=plan.length.steps_left(0, 0))
    assert [batch.num_examples for batch in found] == [8] * 5 + [6]
    ids = [example for batch in found for example in batch.example_ids.tolist()]
    assert ids == example_ids(0, 46, num_examples=23, seed=0).tolist()
    last = slot_numbers(found[-1].arrays["tokens"])
    assert last.tolist() == [[*found[-1].example_ids[0::2], -1], [*found[-1].example_ids[1::2], -1]]
    resumed = batches(NumberedSource(23), plan, 2, examples_seen=35, num_steps=2)
    assert [batch.num_examples for batch in resumed] == [8, 3]


def test_a_run_resumes_at_any_number_of_examples_with_any_batch():
    expected = example_ids(0, 150, num_examples=37, seed=0).tolist()
    for examples_seen in (0, 1, 36, 37, 75):
        for size in (3, 5):
            plan = plan_for(1, per_device_batch_size=size)
            found = batches(NumberedSource(37), plan, 1, examples_seen=examples_seen, num_steps=10)
            ids = [i for batch in found for i in batch.example_ids.tolist()]
            assert ids == expected[examples_seen : examples_seen + 10 * size]


@pytest.mark.parametrize("mode", ["per_device_batch_size", "gradient_accumulation_steps"])
def test_a_ramp_changes_the_batch_and_not_the_order(mode):
    plan = plan_for(
        2,
        per_device_batch_size=4,
        gradient_accumulation_steps=4,
        enable_rampup_batch_size="true",
        rampup_mode=mode,
        per_device_batch_size_start=2,
        per_device_batch_size_increment=1,
        global_rampup_samples=100,
    )
    # Shares of 50 examples: 16 a step for 4 steps (64), 24 for 3 steps (72), then 32.
    sizes = [16] * 4 + [24] * 3 + [32] * 3
    starts = [sum(sizes[:step]) for step in range(10)]
    for first_step in (0, 4, 6):
        found = batches(NumberedSource(90), plan, 2, examples_seen=starts[first_step], num_steps=10 - first_step)
        assert [batch.num_examples for batch in found] == sizes[first_step:]
        for start, size, batch in zip(starts[first_step:], sizes[first_step:], found, strict=True):
            expected = example_ids(start, size, num_examples=90, seed=0)
            np.testing.assert_array_equal(batch.example_ids, expected)
            slots = slot_numbers(batch.arrays["tokens"])
            assert sorted(slots[slots >= 0]) == sorted(expected)
            a, b = (4, size // 4) if mode == "per_device_batch_size" else (size // 8, 8)
            assert batch.num_micro_batches == a
            assert batch.arrays["tokens"].shape == (4, b, T)  # one shape, whatever the accumulation
            assert (slot_numbers(batch.arrays["tokens"])[a:] == -1).all()
    # From within a stage, after another batch size: the stage lasts until its end is reached.
    found = batches(NumberedSource(90), plan, 2, examples_seen=60, num_steps=5)
    assert [batch.num_examples for batch in found] == [16, 24, 24, 24, 32]


def test_worker_processes_give_the_batches_that_threads_give():
    plan = plan_for(8, per_device_batch_size=1, gradient_accumulation_steps=2)
    source = NumberedSource(50)
    threads = batches(source, plan, 8, examples_seen=7, num_steps=9, seed=3)
    read = list(source.read)
    processes = batches(source, plan, 8, examples_seen=7, num_steps=9, seed=3, worker_count=2)
    assert source.read == read  # this process read nothing
    assert_same_batches(threads, processes)


@pytest.mark.parametrize(("num_devices", "per_device"), [(1, 7), (1, 64), (8, 0.5), (4, 3)])
def test_an_evaluation_sees_every_example_once(num_devices, per_device):
    plan = plan_for(num_devices, eval_per_device_batch_size=per_device)
    sharding = row_sharding(num_devices, spec=("fsdp", None))
    with evaluation_batches(NumberedSource(29), plan, sharding=sharding, eval_steps=-1) as iterator:
        found = list(iterator)
    size = int(per_device * num_devices)
    assert [batch.num_examples for batch in found] == [size] * (29 // size) + [29 % size] * (29 % size > 0)
    seen = [slot_numbers(batch.arrays["weights"]) for batch in found]
    assert all(len(slots) == len(seen[0]) for slots in seen)  # one shape, so one compilation
    assert [i for slots in seen for i in slots if i >= 0] == list(range(29))
    assert [i for batch in found for i in batch.example_ids] == list(range(29))
    for slots, batch in zip(seen, found, strict=True):
        assert (slots[batch.num_examples :] == -1).all()
        assert batch.arrays["tokens"].shape[1] == T


def test_an_evaluation_stops_after_eval_steps():
    plan = plan_for(1, eval_per_device_batch_size=4)
    for eval_steps, expected in ((1, 4), (3, 12), (100, 29)):
        with evaluation_batches(
            NumberedSource(29), plan, sharding=row_sharding(1, spec=("fsdp", None)), eval_steps=eval_steps
        ) as iterator:
            assert sum(batch.num_examples for batch in iterator) == expected


def test_hosts_share_an_evaluation():
    source = NumberedSource(21)
    halves = [
        EvaluationReads(source, host_slots=slots, batch_examples=8, max_batches=-1)[2]
        for slots in (np.arange(4), np.arange(4, 8))
    ]
    assert slot_numbers(halves[0].rows["tokens"]).tolist() == [16, 17, 18, 19]
    assert slot_numbers(halves[1].rows["tokens"]).tolist() == [20]
    assert halves[1].cells.tolist() == [[0], [0]]
    assert halves[0].example_ids.tolist() == halves[1].example_ids.tolist() == [16, 17, 18, 19, 20]


def open_iterator(source, num_steps=100):
    return training_batches(
        source,
        plan_for(1, per_device_batch_size=2),
        sharding=row_sharding(1),
        examples_seen=0,
        num_steps=num_steps,
        seed=-1,
        worker_count=0,
    )


def test_no_steps_are_no_batches():
    with open_iterator(NumberedSource(9), num_steps=0) as iterator:
        assert list(iterator) == []


def test_reading_starts_at_once_and_runs_ahead():
    source = NumberedSource(100)
    with open_iterator(source):
        deadline = time.monotonic() + 20
        while len(source.read) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(source.read) >= 4  # two steps before any was requested


def test_the_wait_is_measured_where_it_happens():
    with open_iterator(NumberedSource(100, seconds=0.1), num_steps=1) as iterator:
        assert 0.05 < next(iterator).data_seconds < 20
    with open_iterator(NumberedSource(100), num_steps=4) as iterator:
        waits = []
        for _ in range(4):
            time.sleep(0.5)  # the step before, in which the batch is read and transferred
            waits.append(next(iterator).data_seconds)
        assert min(waits) < 0.2  # the rest may be other programs' on the machine


def test_a_closed_iterator_ends_and_leaves_no_thread():
    before = set(threading.enumerate())
    iterator = open_iterator(NumberedSource(100))
    next(iterator)
    iterator.close()
    iterator.close()
    with pytest.raises(StopIteration):
        next(iterator)
    deadline = time.monotonic() + 20
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


@pytest.mark.parametrize("num_steps", [10**12, 2**63 - 1])
@pytest.mark.parametrize("examples_seen", [0, 10**9])
@pytest.mark.parametrize(
    "keys",
    [
        "per_device_batch_size=2 expansion_factor_real_data=0.5",
        "per_device_batch_size=4 per_device_batch_size_start=2 per_device_batch_size_increment=2 "
        "enable_rampup_batch_size=true global_rampup_samples=2147483647",
    ],
)
def test_a_run_of_any_length_begins_at_once_wherever_it_resumes(keys, examples_seen, num_steps):
    """A list of the run's steps, or a walk to the next step, would not end."""
    plan = plan_for(1, **dict(word.split("=") for word in keys.split()))
    layout = {"sharding": row_sharding(1), "seed": 0, "worker_count": 0}
    with training_batches(
        NumberedSource(50), plan, examples_seen=examples_seen, num_steps=num_steps, **layout
    ) as iterator:
        for first in (examples_seen, examples_seen + 2):
            expected = example_ids(first, 2, num_examples=50, seed=0)
            np.testing.assert_array_equal(next(iterator).example_ids, expected)


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


@pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_worker_processes_outlive_a_signal_to_all_but_never_their_parent(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    # Two at a time, because most of their time is start-up.
    with ended_in_the_end(program, environment) as stopped, ended_in_the_end(program, environment) as killed:
        worker_of_stopped, worker_of_killed = (int(process.stdout.readline()) for process in (stopped, killed))
        killed.kill()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.killpg(stopped.pid, number)  # to the whole group, as a terminal and some schedulers do
            assert stopped.stdout.readline() == "read on\n"
        assert stopped.communicate(timeout=60) == ("", "")
        assert stopped.returncode == 0
        wait_until_gone(worker_of_stopped)
        wait_until_gone(worker_of_killed)


@contextlib.contextmanager
def ended_in_the_end(program, environment):
    pipe = subprocess.PIPE
    keys = {"env": environment, "stdout": pipe, "stderr": pipe, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, str(program)], **keys) as process:
        killer = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
        killer.start()
        try:
            yield process
        finally:
            killer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


class Damaged(NumberedSource):
    def __getitem__(self, example_id):
        if example_id == 7:
            raise UserError("record 7")
        return super().__getitem__(example_id)


def test_an_unreadable_row_is_known_two_batches_ahead_and_raised_once():
    with open_iterator(Damaged(100)) as iterator:  # two examples a step: the fourth step holds example 7
        assert iterator.first_problem() is None
        assert [next(iterator).problem for _ in range(3)] == [None, "record 7", "record 7"]
        with pytest.raises(UserError, match="record 7"):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
    with open_iterator(Damaged(100), num_steps=3) as iterator:  # which end before it
        assert [batch.problem for batch in iterator] == [None] * 3
        assert iterator.first_problem() is None


def test_an_evaluation_continues_without_unreadable_rows():
    plan, sharding = plan_for(1, eval_per_device_batch_size=4), row_sharding(1, spec=("fsdp", None))
    with evaluation_batches(Damaged(20), plan, sharding=sharding, eval_steps=-1) as iterator:
        found = list(iterator)
    assert found[-1].problem == "record 7"
    seen = [slot_numbers(batch.arrays["weights"]) for batch in found]
    assert [i for slots in seen for i in slots if i >= 0] == [i for i in range(20) if not 4 <= i < 8]
