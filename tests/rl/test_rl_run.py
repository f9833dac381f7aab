"""The parts of a run of reinforcement learning: devices, slots, stop tokens, policy, refusals."""

import contextlib

import jax
import pytest
import tokenizers

from maxtext_lite.batching.topology import Topology
from maxtext_lite.config import UserError
from maxtext_lite.post_training.batch import rl_batch
from maxtext_lite.post_training.pairs import Sampled
from maxtext_lite.post_training.prompts import Prompt
from maxtext_lite.post_training.rollout import Response
from maxtext_lite.post_training.rollout_steps import open_rl_run, policy_of


def test_devices_are_shared_out_and_slots_fit_those_that_sample(tmp_path, config_of):
    words = "trainer_devices_fraction=0.25 sampler_devices_fraction=0.75 rollout_fsdp_parallelism=2"
    with contextlib.closing(open_rl_run(config_of(tmp_path, *words.split()))) as rl:
        assert list(rl.run.mesh.devices.flat) == jax.devices()[:2]
        assert list(rl.engine._mesh.devices.flat) == jax.devices()[2:]
        # A chunk has 8 pairs, and there are 6 shards.
        assert rl.engine._slots_per_replica * rl.engine._num_replicas == 12
        assert rl.run.plan.num_devices == 2
        assert rl.eval_sampling.temperature == 0


def said(rl, token_ids, ended):
    response = Response(token_ids, [0] * len(token_ids), ended)
    prompt = Prompt(0, "1=", (49, 61), {}, is_plain=True)
    return rl.text_of(prompt, response, skip_special_tokens=True)


def test_a_response_ends_at_end_of_text_and_where_its_models_files_say(
    tmp_path, config_of
):
    """A resumed run needs no load_parameters_path, from which these files were copied. No stop token is text."""
    (tmp_path / "run/hf").mkdir(parents=True)
    (tmp_path / "run/hf/config.json").write_text('{"eos_token_id": [2, 3]}')
    (tmp_path / "run/checkpoints/5").mkdir(parents=True)
    for name, stop in (("run", (2, 3, 256)), ("new", (256,))):
        with contextlib.closing(
            open_rl_run(config_of(tmp_path, f"run_name={name}"))
        ) as rl:
            assert rl.stop_token_ids == stop
            assert said(rl, [49, 50, 256], True) == said(rl, [49, 50], False) == "12"


@pytest.mark.parametrize("skips", ["true", "false"])
def test_rewards_see_special_tokens_by_a_key_and_format_always(
    skips, tmp_path, config_of
):
    vocabulary = {"5": 0, "x": 1, "<think>": 2, "<end>": 3}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token="x")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<think>", "<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    words = ["reward_functions=format,exact_answer", "reward_format=<think>x5"]
    words += [f"reward_skip_special_tokens={skips}", "tokenizer_type=huggingface"]
    words += [f"tokenizer_path={tmp_path}/tokenizer.json"]
    with contextlib.closing(open_rl_run(config_of(tmp_path, *words))) as rl:
        response = Response([2, 1, 0, 3], [0.0] * 4, True)
        prompt = Prompt(0, "5", (0,), {"answer": "x5"})
        text = rl.text_of(prompt, response, skip_special_tokens=skips == "true")
        assert text == ("x5" if skips == "true" else "<think>x5")
        found = rl.judge(Sampled([prompt], [response], [text]), 1).by_name
        assert found["format"].tolist() == [1]
        assert found["exact_answer"].tolist() == [skips == "true"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("words", "compares", "cap"),
    [
        (["rollout_correction=truncated"], True, 2.0),
        (["num_experts=4", "capacity_factor=1.5"], True, None),
        (["num_experts=4"], False, None),
        (["rollout_engine=sglang", "rollout_url=http://x"], True, None),
    ],
)
def test_what_sampled_is_compared_where_it_may_differ(
    words, compares, cap, config_of, tmp_path
):
    config = config_of(tmp_path, *words)
    policy = policy_of(config, rl_batch(config, Topology(8, 1)))
    assert (policy.compares, policy.correction_cap) == (compares, cap)


def test_what_a_step_minimises_follows_from_the_keys(tmp_path, config_of):
    words = "grpo_epsilon=0.1 loss_algo=gspo num_iterations=2 decode_sampling_temperature=0.7 "
    words += "rollout_correction=truncated rollout_correction_cap=5"
    config = config_of(tmp_path, *words.split())
    policy = policy_of(config, rl_batch(config, Topology(8, 1)))
    assert (policy.algo, policy.on_policy) == ("gspo", False)
    assert (policy.epsilon_low, policy.epsilon_high) == (0.1, 0.1)
    assert (policy.temperature, policy.max_response_tokens) == (0.7, 10)
    assert policy.correction_cap == 5


def test_what_cannot_be_leaves_no_directory(tmp_path, config_of):
    endless = ["arithmetic_largest=1000", "max_prefill_predict_length=10"]
    for words, named in (
        (["reward_functions=tests.rl.conftest:nothing"], "nothing"),
        (["load_parameters_path=nowhere"], "load_parameters_path=nowhere"),
        (endless, r"^eval_steps=-1 .*Nearest that works: 250\."),
    ):
        with pytest.raises(UserError, match=named):
            open_rl_run(config_of(tmp_path, *words))
    assert not list(tmp_path.iterdir())
