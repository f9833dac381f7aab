"""How responses are generated: the mesh, the slots and the memory by hand, and what is refused."""

import pytest

from maxtext_lite.batching import load_plan
from maxtext_lite.batching.rl import rl_batch
from maxtext_lite.batching.topology import Topology
from maxtext_lite.config import UserError, load_config

FILE = "configs/post_train/rl.yml"


def mesh(devices, *overrides):
    return rl_batch(load_config(FILE, overrides), Topology(devices)).rollout.mesh


def test_generating_devices_have_their_own_mesh():
    assert mesh(8) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert mesh(8, "rollout_tensor_parallelism=2") == {"data": 4, "fsdp": 1, "tensor": 2}
    both = ("rollout_tensor_parallelism=2", "rollout_fsdp_parallelism=2")
    assert mesh(8, *both) == {"data": 2, "fsdp": 2, "tensor": 2}
    apart = ("trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5")
    assert mesh(8, *both, *apart) == {"data": 1, "fsdp": 2, "tensor": 2}


def test_slots_are_a_micro_batch_rounded_up_to_whole_shards():
    def slots(devices, *overrides):
        return rl_batch(
            load_config(FILE, ["batch_size=3", "num_generations=4", *overrides]), Topology(devices)
        ).rollout.slots

    assert slots(1) == 12
    assert slots(8) == 16
    assert slots(8, "rollout_tensor_parallelism=2") == 12
    assert slots(8, "micro_batch_size=4") == 8
    assert slots(8, "rollout_slots=24") == 24


def test_memory_by_hand():
    """Llama 3 8B in bfloat16, 8 devices of which two share a copy of the parameters: 32 layers, 8 kv heads of 128."""
    words = ["model_name=llama3-8b", "dtype=bfloat16", "rollout_tensor_parallelism=2", "max_target_length=1024",
             "batch_size=16", "num_generations=8", "tokenizer_type=huggingface", "tokenizer_path=x"]  # fmt: skip
    rollout = rl_batch(load_config(FILE, words), Topology(8)).rollout
    assert rollout.slots == 128
    assert rollout.params == 8_030_261_248 // 2 * 2
    assert rollout.cache == (128 // 4) * 1024 * 32 * 8 * (128 + 128) // 2 * 2
    assert str(rollout).startswith("128 slots on data 4 x tensor 2; ")
    server = ["rollout_engine=http", "rollout_url=http://here:8000/v1"]
    assert rl_batch(load_config(FILE, [*words[:2], *words[3:], *server]), Topology(8)).rollout is None


@pytest.mark.parametrize(("devices", "overrides", "messages"), [
    (8, ["rollout_slots=9"],
     ["rollout_slots=9 is not a multiple of the 8 parts into which the generating devices split them. Nearest that "
      "work: 8 or 16."]),
    (8, ["rollout_slots=3"],
     ["rollout_slots=3 is not a multiple of the 8 parts into which the generating devices split them. Nearest that "
      "works: 8."]),
    (8, ["rollout_tensor_parallelism=3"],
     ["rollout_tensor_parallelism=3 does not divide both the model's heads, mlp and vocabulary and the 8 generating "
      "devices. Nearest that work: 2 or 4."]),
    (8, ["rollout_tensor_parallelism=8"],  # 4 kv heads
     ["rollout_tensor_parallelism=8 does not divide both the model's heads, mlp and vocabulary and the 8 generating "
      "devices. Nearest that works: 4."]),
    (6, ["rollout_fsdp_parallelism=3", "ici_fsdp_parallelism=2", "ici_data_parallelism=-1"],  # base_emb_dim=128
     ["rollout_fsdp_parallelism=3 does not divide both the model's embedding and the 6 generating devices. Nearest "
      "that works: 2."]),
    (8, ["rollout_fsdp_parallelism=16", "rollout_tensor_parallelism=4"],
     ["rollout_fsdp_parallelism=16 does not divide both the model's embedding and the 8 generating devices. Nearest "
      "that works: 2."]),
    (8, ["rollout_tensor_parallelism=4", "rollout_fsdp_parallelism=4"],
     ["rollout_tensor_parallelism=4 x rollout_fsdp_parallelism=4 does not divide the 8 generating devices. Nearest "
      "that works: rollout_tensor_parallelism=2."]),
    (8, ["rollout_tensor_parallelism=3", "rollout_fsdp_parallelism=5"],
     ["rollout_tensor_parallelism=3 does not divide both the model's heads, mlp and vocabulary and the 8 generating "
      "devices. Nearest that works: 2.",
      "rollout_fsdp_parallelism=5 does not divide both the model's embedding and the 8 generating devices. Nearest "
      "that works: 4."]),
])  # fmt: skip
def test_a_mesh_that_does_not_divide_model_or_devices_is_refused(devices, overrides, messages):
    with pytest.raises(UserError) as refusal:
        load_plan(FILE, overrides, num_devices=devices)
    assert list(refusal.value.problems) == messages
    mended = []
    for message in messages:
        works = message.partition("Nearest that work")[2].partition(": ")[2].removesuffix(".").split(" or ")[0]
        mended.append(works if "=" in works else f"{message.partition('=')[0]}={works}")
    load_plan(FILE, [*overrides, *mended], num_devices=devices)


def test_a_server_has_its_own_devices():
    wide = "base_num_kv_heads=1"
    with pytest.raises(UserError, match="rollout_tensor_parallelism=2 does not divide"):
        load_plan(FILE, ["rollout_tensor_parallelism=2", wide], num_devices=4)
    _, plan = load_plan(FILE, ["rollout_engine=http", "rollout_url=http://x/v1", wide], num_devices=4)
    assert plan.rl.rollout is None
