"""Contradictions in a config of reinforcement learning, and that the suggestions work."""

import pytest

from maxtext_lite.config import RLRunConfig, UserError, load_config
from maxtext_lite.config.rl_rules import RL_RULES, reward_names, reward_weights
from maxtext_lite.config.rules import RULES, RULES_OF_DEFAULTS

FILE = "configs/post_train/rl.yml"
SHIPPED = "exact_answer, numeric_answer, format, math_verify"

REFUSED = {
    "micro_batch_size=6": "micro_batch_size=6 is not a multiple of num_generations=8: a group of responses is judged "
                          "together. Nearest that works: 8.",
    "max_prefill_predict_length=32": "max_prefill_predict_length=32 leaves no token of max_target_length=24 for a "
                                     "response. Nearest that work: max_prefill_predict_length=23 or "
                                     "max_target_length=33.",
    "max_target_length=1": "max_prefill_predict_length=16 leaves no token of max_target_length=1 for a response. "
                           "Nearest that works: max_target_length=17.",
    "num_iterations=7": "steps=120 ends in the middle of the num_iterations=7 steps on a batch. "
                        "Nearest that work: 119 or 126.",
    "trainer_devices_fraction=0.5": "trainer_devices_fraction=0.5 and sampler_devices_fraction=1 are more than all "
                                    "devices, and not both 1. Nearest that works: sampler_devices_fraction=0.5.",
    "dataset_type=sft": "dataset_type=sft has no prompts for RL. Nearest that work: prompts or arithmetic.",
    "dataset_type=prompt": "dataset_type=prompt is not one of text, array_record, megatron, synthetic, sft, dpo, "
                           "prompts, arithmetic. Nearest that works: prompts.",
    "dataset_path=": "dataset_path is empty, but dataset_type=prompts reads a file, directory or "
                     "glob: name it. Nearest that works: dataset_type=arithmetic.",
    "objective=sft": "objective=sft contradicts dataset_type=prompts, whose data are for grpo. Nearest that works: "
                     "grpo.",
    "long_examples=truncate": "long_examples=truncate has no effect in RL: a question that is cut short has another "
                              "answer. Nearest that work: drop or refuse.",
    "packing=true": "packing=true has no effect in RL: each prompt with its response is one row. Nearest that works: "
                    "false.",
    "z_loss_multiplier=0.001": "z_loss_multiplier=0.001 has no effect in RL, whose loss is of ratios, not of logits. "
                               "Nearest that works: 0.",
    "schedule_unit=tokens": "schedule_unit=tokens is impossible in RL: the number of tokens in the responses is not "
                            "known in advance. Nearest that work: steps or examples.",
    "prompt_template=Answer: ": "prompt_template=Answer:  has {prompt} nowhere: it must have it once. "
                                "Nearest that works: Answer: {prompt}.",
    "prompt_template={prompt}, {prompt}!": "prompt_template={prompt}, {prompt}! has {prompt} 2 times: it must have "
                                           "it once. Nearest that works: \"{prompt}, !\".",
    "arithmetic_operations=+": "arithmetic_operations=+ has no effect with dataset_type=prompts, which reads files. "
                               "Nearest that work: arithmetic_operations=+- or dataset_type=arithmetic.",
    "arithmetic_largest=12": "arithmetic_largest=12 has no effect with dataset_type=prompts, which reads files. "
                             "Nearest that work: arithmetic_largest=99 or dataset_type=arithmetic.",
    "reward_functions=,": "reward_functions=, names no function. Nearest that works: exact_answer.",
    "reward_functions=exact_answer,numeric": "reward_functions=exact_answer,numeric names 'numeric', which is none of "
                                             f"{SHIPPED}, nor of the form module:function. Nearest that works: "
                                             "exact_answer,numeric_answer.",
    "reward_functions=m:f, m:f": "reward_functions=m:f, m:f names m:f twice. Nearest that works: m:f.",
    "reward_weights=1,2": "reward_weights=1,2 has 2 for the 1 of reward_functions=exact_answer. Nearest that work: 1 "
                          "or reward_weights=.",
    "reward_weights=much": "reward_weights=much has something that is not a finite number. Nearest that works: 1.",
    "reward_weights=1_0": "reward_weights=1_0 has something that is not a finite number. Nearest that works: 1.",
    "reward_weights=-1e308": "reward_weights=-1e308 has a weight beyond 1000000, the largest in size. Nearest that "
                             "works: -1000000.",
    "reward_weights=inf": "reward_weights=inf has something that is not a finite number. Nearest that works: 1.",
    "reward_functions=format": "reward_format is empty, but reward_functions names format, which compares responses "
                               "with it. Nearest that works: reward_format=.*.",
    "reward_format=[0-9]+": "reward_format=[0-9]+ has no effect with reward_functions=exact_answer. Nearest that work: "
                            "reward_format= or reward_functions=exact_answer,format.",
    "decode_sampling_temperature=0": "decode_sampling_temperature=0 always samples the likeliest token: the "
                                     "num_generations=8 responses to a prompt would all be the same. Nearest that "
                                     "works: 1.",
    "decode_sampling_top_k=1": "decode_sampling_top_k=1 always samples the likeliest token: the num_generations=8 "
                               "responses to a prompt would all be the same. Nearest that work: 0 or 2.",
    "decode_sampling_nucleus_p=0.003": "decode_sampling_nucleus_p=0.003 always samples the likeliest token: the "
                                       "num_generations=8 responses to a prompt would all be the same. Nearest that "
                                       "works: 1.",
    "decode_sampling_top_k=321": "decode_sampling_top_k=321 is more than vocab_size=320. Nearest that work: 320 or 0.",
    "eval_num_generations=2": "eval_num_generations=2 with eval_sampling_temperature=0: all responses to a prompt "
                              "would be the same. Nearest that work: eval_num_generations=1 or "
                              "eval_sampling_temperature=1.",
    "rollout_engine=http": "rollout_url is empty, but rollout_engine=http asks a server. Nearest that work: "
                           "rollout_url=http://127.0.0.1:8000 or rollout_engine=local.",
    "rollout_engine=vllm": "rollout_url is empty, but rollout_engine=vllm asks a server. Nearest that work: "
                           "rollout_url=http://127.0.0.1:8000 or rollout_engine=local.",
    "rollout_correction_cap=3": "rollout_correction_cap=3 has no effect with rollout_correction=none. Nearest that "
                                "work: rollout_correction_cap=2 or rollout_correction=truncated.",
    "rollout_url=http://x": "rollout_url=http://x has no effect with rollout_engine=local, which samples in this "
                            "process. Nearest that works: rollout_url=.",
}  # fmt: skip


@pytest.mark.parametrize("override", REFUSED)
def test_a_contradiction_is_refused_and_what_is_named_works(override):
    message = REFUSED[override]
    with pytest.raises(UserError) as refused:
        load_config(FILE, [override])
    assert refused.value.problems == (message,)
    clause = message.partition("Nearest that work")[2].partition(": ")[2].removesuffix(".")
    for works in clause.split(" or ") if clause else ():
        load_config(FILE, [override, works if "=" in works else f"{message.partition('=')[0]}={works}"])


@pytest.mark.parametrize(("overrides", "message"), [
    (["dataset_type=arithmetic", "arithmetic_largest=2147483647", "eval_steps=4"],
     "arithmetic_largest=2147483647 gives more than 2**62 problems, which is more than can be numbered. Nearest "
     "that works: 1518500248."),
    (["dataset_type=arithmetic", "arithmetic_operations=+/"],
     "arithmetic_operations=+/ has '/', which is none of +, - and *. Nearest that works: +."),
    (["dataset_type=arithmetic", "arithmetic_operations=-+-"],
     "arithmetic_operations=-+- has an operation twice. Nearest that works: -+."),
    (["reward_functions=exact_answer,format", "reward_format=(", "reward_weights=2, 0.5"],
     "reward_format=( is not a regular expression (missing ), unterminated subpattern at position 0). Nearest that "
     r"works: \(."),
    (["reward_functions=exact_answer,m:f", "reward_weights=0.5"],
     "reward_weights=0.5 has 1 for the 2 of reward_functions=exact_answer,m:f. Nearest that work: 0.5,1 or "
     "reward_weights=."),
    (["rollout_engine=http", "rollout_url=127.0.0.1:8000"],
     "rollout_url=127.0.0.1:8000 is not http:// or https:// and a host, perhaps with a port and a path. Nearest that "
     "works: http://127.0.0.1:8000."),
    (["rollout_engine=http", "rollout_url=http://x/v1?a=1"],
     "rollout_url=http://x/v1?a=1 is not http:// or https:// and a host, perhaps with a port and a path. Nearest that "
     "works: http://127.0.0.1:8000."),
    (["rollout_engine=http", "rollout_url=https://x/v1", "rollout_fsdp_parallelism=2"],
     "rollout_fsdp_parallelism=2 has no effect with rollout_engine=http, whose server has its own devices. Nearest "
     "that works: 1."),
    (["rollout_engine=vllm", "rollout_url=http://x", "rollout_slots=64"],
     "rollout_slots=64 has no effect with rollout_engine=vllm, whose server has its own devices. Nearest that works: "
     "-1."),
    (["rollout_engine=vllm", "rollout_url=http://x", "sampler_devices_fraction=0.5"],
     "sampler_devices_fraction=0.5 leaves devices without work: with rollout_engine=vllm a server samples. Nearest "
     "that works: 1."),
    (["rollout_engine=sglang", "rollout_url=http://x", "rollout_tensor_parallelism=2"],
     "rollout_tensor_parallelism=2 has no effect with rollout_engine=sglang, whose server has its own devices. Nearest "
     "that works: 1."),
    (["rollout_engine=vllm", "rollout_url=http://x", "decode_sampling_temperature=0.7", "decode_sampling_top_k=40"],
     "decode_sampling_temperature=0.7 with decode_sampling_top_k=40 and decode_sampling_nucleus_p=1: "
     "rollout_engine=vllm does not report log-probabilities of softmax(logits / temperature) over the whole vocabulary "
     "then. Nearest that work: decode_sampling_temperature=1 or decode_sampling_top_k=0 decode_sampling_nucleus_p=1."),
    (["rollout_correction=truncated", "rollout_correction_cap=0.5"],
     "rollout_correction_cap=0.5 must be at least 1. Nearest that works: 1."),
    *((
        [f"decode_sampling_top_k={top_k}", f"decode_sampling_nucleus_p={p}"],
        f"decode_sampling_nucleus_p={p} always samples the likeliest token: the num_generations=8 responses to a "
        "prompt would all be the same. Nearest that works: 1.",
     ) for top_k, p in ((2, 0.5), (10, 0.1))),
    (['prompt_template="Q:\\nA:"'],
     r"prompt_template=Q:\nA: has {prompt} nowhere: it must have it once. Nearest that works: "
     r'"Q:\nA:{prompt}".'),
])  # fmt: skip
def test_keys_that_do_not_go_together_are_refused(overrides, message):
    with pytest.raises(UserError) as refused:
        load_config(FILE, overrides)
    assert refused.value.problems == (message,)
    works = message.partition("Nearest that work")[2].partition(": ")[2].removesuffix(".").split(" or ")[0]
    load_config(FILE, [*overrides, works if "_" in works.partition("=")[0] else f"{message.partition('=')[0]}={works}"])


def test_prompts_are_for_rl_alone():
    for overrides, near in (
        (["dataset_type=prompts"], "sft"),
        (["dataset_type=arithmetic", "objective=grpo"], "dataset_type=sft objective=auto"),
    ):
        with pytest.raises(UserError) as refused:
            load_config(None, overrides)
        kind = overrides[0].partition("=")[2]
        assert refused.value.problems == (
            f"dataset_type={kind} is for RL, and post_train/rl.yml is not among the files of this config: give that "
            f"file, or one whose base it is. Nearest that works: {near}.",
        )
    with pytest.raises(UserError, match=r"objective=grpo contradicts dataset_type=text.*: pretrain\.$"):
        load_config(None, ["objective=grpo"])
    load_config(None, ["dataset_type=sft", "objective=auto"])


def test_generated_problems_need_no_files_and_say_what_they_are():
    config = load_config(FILE, ["dataset_type=arithmetic", "dataset_path=", "arithmetic_operations=*",
                                "eval_steps=4", "arithmetic_largest=1000000", "objective=grpo"])  # fmt: skip
    assert (config.arithmetic_operations, config.arithmetic_largest) == ("*", 10**6)


def test_a_template_may_have_lines(tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text('base: configs/post_train/rl.yml\nprompt_template: "Question: {prompt}\\nAnswer:\\t"\n')
    assert load_config(file).prompt_template == "Question: {prompt}\nAnswer:\t"
    with pytest.raises(UserError) as refused:
        load_config(FILE, ["prompt_template={prompt}\n\x07"])
    assert refused.value.problems == (
        r"prompt_template={prompt}\n\x07 has a character that cannot be printed. Nearest that works: {prompt}.",
    )


@pytest.mark.parametrize(("names", "weights", "expected"), [
    ("exact_answer", "", {"exact_answer": 1.0}),
    ("exact_answer , m:f,", " ", {"exact_answer": 1.0, "m:f": 1.0}),
    ("m:f,exact_answer", "-0.5, 2e-1", {"m:f": -0.5, "exact_answer": 0.2}),
])  # fmt: skip
def test_each_function_has_its_weight(names, weights, expected):
    config = load_config(FILE, [f"reward_functions={names}", f"reward_weights={weights}"])
    assert isinstance(config, RLRunConfig)
    assert dict(zip(reward_names(config), reward_weights(config), strict=True)) == expected


def test_with_a_server_all_devices_train():
    both = ["trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5"]
    with pytest.raises(UserError) as refused:
        load_config(FILE, ["rollout_engine=vllm", "rollout_url=http://x", *both])
    assert refused.value.problems == (
        "trainer_devices_fraction=0.5 leaves devices without work: with rollout_engine=vllm a server samples. Nearest "
        "that works: trainer_devices_fraction=1 sampler_devices_fraction=1.",
    )


def test_no_rule_is_asked_twice():
    assert len({*RL_RULES, *RULES, *RULES_OF_DEFAULTS}) == len(RL_RULES) + len(RULES) + len(RULES_OF_DEFAULTS)


@pytest.mark.parametrize(("override", "reason"), [
    ("eval_per_device_batch_size=2", "where rollout_slots is the number of responses sampled at once"),
    ("grain_worker_count=2", "where the training process reads the prompts"),
])  # fmt: skip
def test_a_key_that_rl_does_not_read_is_refused(override, reason):
    with pytest.raises(UserError) as refused:
        load_config(FILE, [override])
    assert refused.value.problems == (f"{override} (command line) has no effect in RL, {reason}. Remove it.",)
