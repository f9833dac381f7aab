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
from numpy.testing import assert_array_equal

from maxtext_lite.batching import make_plan
from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.feed import (
    UnreadError,
    evaluation_batches,
    training_batches,
)
from maxtext_lite.data.order import example_ids
from maxtext_lite.data.source import ExampleSource

T = 8
FIELDS = {"tokens", "targets", "segments", "positions", "weights"}


@dataclasses.dataclass
class NumberedSource(ExampleSource):
    """Every array of example i is i + 1, so that no example looks like an empty slot; counts what is read."""

    num_examples: int
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
        self.read.append(example_id)
        return {
            name: np.full(
                T, example_id + 1, np.float32 if name == "weights" else np.int32
            )
            for name in FIELDS
        }


class Damaged(NumberedSource):
    def __getitem__(self, example_id):
        if example_id == 7:
            raise UserError("record 7")
        return super().__getitem__(example_id)


def plan_for(num_devices: int, keys: str = "", **options):
    config = load_config(None, [f"max_target_length={T}", *keys.split()])
    return make_plan(config, num_devices=num_devices, **options)


def row_sharding(num_devices: int, *spec: str | None) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("fsdp",))
    return NamedSharding(mesh, PartitionSpec(*spec, "fsdp", None))


def feed(source, plan, num_devices=1, **keys):
    defaults = {"examples_seen": 0, "num_steps": 3, "seed": 0, "worker_count": 0}
    sharding = row_sharding(num_devices, None)
    return training_batches(source, plan, sharding=sharding, **defaults | keys)


def batches(source, plan, num_devices=1, **keys):
    with feed(source, plan, num_devices, **keys) as iterator:
        return list(iterator)


def evaluated(source, plan, num_devices):
    sharding = row_sharding(num_devices)
    with evaluation_batches(source, plan, sharding=sharding, eval_steps=-1) as iterator:
        return list(iterator)


def slot_numbers(array: jax.Array) -> np.ndarray:
    """The example id in each slot, -1 for an empty one, from an array all of whose rows are constant."""
    values = np.asarray(array)
    assert (values == values[..., :1]).all()
    return values[..., 0].astype(int) - 1


def assert_same_batches(some, others):
    for one, other in zip(some, others, strict=True):
        assert_array_equal(one.example_ids, other.example_ids)
        for name in FIELDS:
            assert_array_equal(
                np.asarray(one.arrays[name]), np.asarray(other.arrays[name])
            )


@pytest.mark.fast
def test_example_j_is_in_micro_batch_j_mod_A_and_slot_j_div_A():
    plan = plan_for(8, "per_device_batch_size=0.5 gradient_accumulation_steps=2")
    first, second = batches(NumberedSource(100), plan, 8, num_steps=2, seed=-1)
    assert first.num_examples == 8
    assert first.example_ids.tolist() == list(range(8))
    assert second.example_ids.tolist() == list(range(8, 16))
    assert set(first.arrays) == FIELDS
    for name, array in first.arrays.items():
        assert array.shape == (2, 8, T)
        assert array.dtype == (np.float32 if name == "weights" else np.int32)
        assert slot_numbers(array).tolist() == [
            [*range(first, 8, 2), *[-1] * 4] for first in (0, 1)
        ]


def test_an_excluded_row_leaves_its_slot_empty_from_its_position_on():
    """Four epochs of 6 examples in batches of 8; 2 is left out from the second epoch on, 5 always, 4 never."""
    plan = plan_for(
        4,
        "per_device_batch_size=1 gradient_accumulation_steps=2 expansion_factor_real_data=0.5",
    )
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


def test_several_loads_give_the_batches_of_one():
    keys = "per_device_batch_size=1.5 gradient_accumulation_steps=3"
    several = plan_for(8, f"{keys} expansion_factor_real_data=1/3")
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


RAMP = "per_device_batch_size=4 gradient_accumulation_steps=4 enable_rampup_batch_size=true"
RAMP += " per_device_batch_size_start=2 per_device_batch_size_increment=1 global_rampup_samples=2147483647"


def test_a_run_of_any_length_begins_at_once_wherever_it_resumes():
    """A list of the run's steps, or a walk to the next step, would not end."""
    plan, examples_seen = plan_for(1, RAMP), 10**9
    with feed(
        NumberedSource(50), plan, examples_seen=examples_seen, num_steps=2**60
    ) as iterator:
        for _ in range(2):
            ids = next(iterator).example_ids
            assert_array_equal(
                ids, example_ids(examples_seen, len(ids), num_examples=50, seed=0)
            )
            examples_seen += len(ids)


@pytest.mark.parametrize(("num_devices", "per_device"), [(1, 64), (8, 0.5), (4, 3)])
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


def test_a_batch_that_cannot_be_read_is_an_error_when_it_is_taken():
    iterator = feed(Damaged(20), plan_for(1, TWO_A_STEP), num_steps=10, seed=-1)
    with iterator:
        assert [next(iterator).num_examples for _ in range(3)] == [2, 2, 2]
        with pytest.raises(UnreadError, match="record 7"):
            next(iterator)
    with pytest.raises(UnreadError, match="record 7"):
        evaluated(Damaged(20), plan_for(1, "eval_per_device_batch_size=4"), 1)


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
