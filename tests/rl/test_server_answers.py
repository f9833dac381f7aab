"""Arbitrary answers of servers, written as the servers would."""

import json
import math
import re

import pytest

from maxtext_lite.models import Sampling
from maxtext_lite.rl.server_answers import Asked, read_completion, read_generation, read_vllm_completion

PROMPT = [5, 40, 7]


def choice(*token_ids, **other):
    """A server's answer with these tokens, except for what is given."""
    made = {"index": 0, "text": "", "finish_reason": "length", "token_ids": list(token_ids)}
    return made | {"logprobs": {"token_logprobs": [-0.5] * len(token_ids)}} | other


def logprobs(*values):
    return {"token_logprobs": list(values)}


STOP = 3
ASKED = Asked(PROMPT, 4, Sampling(), seed=1, stop_token_ids=[STOP, 47], vocab_size=48, weights="b-2")


def read(answer, reader=read_completion):
    return reader(json.loads(json.dumps(answer)), ASKED)


@pytest.mark.parametrize(("said", "response"), [
    (choice(1, 0, 46, 5), ([1, 0, 46, 5], [-0.5] * 4, False)),
    (choice(1, STOP, finish_reason="stop"), ([1, STOP], [-0.5] * 2, True)),
    (choice(9, finish_reason="stop", stop_reason=9), ([9], [-0.5], True)),  # a token that the server itself knows
    (choice(1, STOP, finish_reason="stop", stop_reason=STOP), ([1, STOP], [-0.5] * 2, True)),
    (choice(1, 1, 1, 47), ([1, 1, 1, 47], [-0.5] * 4, True)),  # both, as an engine of ours says too
    (choice(1, 2, 4, 5, logprobs=logprobs(0, -3, 1e-7, -999.5)), ([1, 2, 4, 5], [0.0, -3.0, 1e-7, -999.5], False)),
    (choice(1, 2, 4, 5, prompt_token_ids=PROMPT, stop_reason=None), ([1, 2, 4, 5], [-0.5] * 4, False)),
])  # fmt: skip
def test_what_can_be_right_is_taken_as_it_is(said, response):
    for answer in ({"choices": [said]}, {"choices": [said], "prompt_token_ids": PROMPT, "usage": {}}):
        found = read(answer)
        assert found == response
        assert {type(value) for value in found.log_probabilities} == {float}


ONE = choice(1, 2, 4, 5)


@pytest.mark.parametrize(("answer", "wrong"), [
    ({}, "choices is missing"),
    ({"choices": None}, "choices=null is not a list"),
    ({"choices": {"0": ONE}}, 'choices={"0": {"index": 0'),
    ({"choices": []}, "choices=[] is not a list of the one choice"),
    ({"choices": [ONE, ONE]}, "is not a list of the one choice that was asked for"),
    ({"choices": ["text"]}, 'choices=["text"] is not a list of the one choice'),
    ({"choices": [choice(1, 2, 4, 5, index=1)]}, "choices[0].index=1, where the only choice has 0"),
    ({"choices": [choice(1, 2, 4, 5, index=False)]}, "choices[0].index=false"),
    ({"choices": [choice(1, 2, 4, 5, prompt_token_ids=[5, 40])]}, "prompt_token_ids=[5, 40] is not the prompt"),
    ({"choices": [choice(1, 2, 4, 5, prompt_token_ids=[5, 40, 7.0])]}, "prompt_token_ids=[5, 40, 7.0] is not"),
    ({"choices": [ONE], "prompt_token_ids": "5 40 7"}, 'prompt_token_ids="5 40 7" is not the prompt that was sent'),
    ({"choices": [ONE | {"token_ids": None}]}, "choices[0].token_ids=null is not a list"),
    ({"choices": [choice(finish_reason="stop")]}, "token_ids has 0 tokens, where 1 to 4 were asked for"),
    ({"choices": [choice(*[1] * 1000)]}, "token_ids has 1,000 tokens, where 1 to 4 were asked for"),
    *(({"choices": [choice(1, wrong, 4, 5)]}, f"token_ids[1]={json.dumps(wrong)[:80]}")
      for wrong in (-1, 48, -5, 10**30, 10**4000, "2", 2.0, True, None, [2], {})),
    *(({"choices": [choice(1, 2, logprobs=logprobs(-1, wrong))]}, f"token_logprobs[1]={json.dumps(wrong)}")
      for wrong in (math.nan, math.inf, -math.inf, 7, 7.0, 0.01, -9999.0, -1e300, "-1", True, None, [])),
    ({"choices": [choice(1, 2, logprobs=logprobs(-1))]}, "2 token_ids with 1 token_logprobs"),
    ({"choices": [choice(1, 2, logprobs=[-1, -1])]}, "choices[0].logprobs=[-1, -1] is not an object"),
    ({"choices": [choice(1, 2, logprobs=None)]}, "choices[0].logprobs=null is not an object"),
    ({"choices": [choice(1, 2, logprobs={})]}, "choices[0].logprobs.token_logprobs is missing"),
    *(({"choices": [choice(1, 2, finish_reason=wrong)]}, "is neither stop nor length")
      for wrong in (None, "abort", "", 1, ["stop"])),
    ({"choices": [choice(9, finish_reason="stop")]},
     "finish_reason=stop after 9, which is none of stop_token_ids=[3, 47], nor named by stop_reason: token_ids must"),
    ({"choices": [choice(1, 9, finish_reason="stop", stop_reason=STOP)]},
     "choices[0].stop_reason=3, where choices[0].token_ids ends in 9: the ids must include the token that ended"),
    ({"choices": [choice(1, 9, finish_reason="stop", stop_reason="###")]}, 'stop_reason="###", where choices[0].'),
    ({"choices": [choice(1, STOP, 4, 5)]}, "goes on after one of stop_token_ids=[3, 47]"),
    ({"choices": [choice(1, 2)]}, "finish_reason=length after 2 tokens, where max_tokens=4"),
])  # fmt: skip
def test_what_cannot_be_right_is_refused(answer, wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)) as refused:
        read(answer)
    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()


def completion(*token_ids, version="b-2", **other):
    """As vLLM answers."""
    said = {"token_logprobs": [-0.5] * len(token_ids), "tokens": [f"token_id:{token_id}" for token_id in token_ids]}
    spans = [{"version": version, "start": 0, "end": len(token_ids)}]
    made = choice(*token_ids, logprobs=said, prompt_token_ids=PROMPT, weight_versions=spans) | other
    return {"choices": [{name: value for name, value in made.items() if value != "left out"}]}


def generation(*token_ids, **other):
    """As SGLang answers; `other` are entries of meta_info."""
    scored = [[-0.5, token_id, None] for token_id in token_ids]
    about = {"finish_reason": {"type": "length", "length": len(token_ids)}, "output_token_logprobs": scored}
    about |= {"prompt_tokens": 3, "weight_version": "b-2", "completion_tokens": len(token_ids)}
    return {"text": "", "output_ids": list(token_ids), "prompt_token_ids": PROMPT, "meta_info": about | other}


def test_what_vllm_and_sglang_say_is_taken():
    for answer in (completion(1, 2, 4, 5), completion(1, 2, 4, 5, weight_versions="left out")):  # vLLM before 0.33
        assert read(answer, read_vllm_completion) == ([1, 2, 4, 5], [-0.5] * 4, False)
    matched = {"type": "stop", "matched": STOP}
    assert read(generation(1, 2, 4, 5), read_generation) == ([1, 2, 4, 5], [-0.5] * 4, False)
    assert read(generation(1, STOP, finish_reason=matched), read_generation) == ([1, STOP], [-0.5] * 2, True)
    assert read(completion(9, finish_reason="stop"), read_vllm_completion) == ([9], [-0.5], True)  # its end-of-text
    matched = {"type": "stop", "matched": [STOP]}
    assert read(generation(1, STOP, finish_reason=matched), read_generation) == ([1, STOP], [-0.5] * 2, True)
    spans = [{"version": "b-2", "start": 0, "end": 4}]
    assert read(generation(1, 2, 4, 5, weight_versions=spans), read_generation)[0] == [1, 2, 4, 5]


NAMES = [f"token_id:{token_id}" for token_id in (1, 2, 4, 6)]


@pytest.mark.parametrize(("answer", "reader", "wrong"), [
    (completion(1, 2, 4, 5, prompt_token_ids="left out"), read_vllm_completion, "prompt_token_ids is missing"),
    (completion(1, 2, 4, 5, logprobs=logprobs(-1, -1, -1, -1)), read_vllm_completion, "logprobs.tokens=null, where"),
    (completion(1, 2, 4, 5, logprobs=logprobs(-1, -1, -1, -1) | {"tokens": NAMES}), read_vllm_completion,
     'logprobs.tokens=["token_id:1", "token_id:2", "token_id:4", "token_id:6"], where token_ids are ["token_id:1"'),
    (completion(1, 2, 4, 5, version="b-1"), read_vllm_completion,
     'choices[0].weight_versions="b-1", where the last update was "b-2": it sampled from other parameters'),
    (completion(1, 2, 4, 5, weight_versions=[None]), read_vllm_completion, "weight_versions=null, where the last"),
    (completion(1, 2, 4, 5, weight_versions=7), read_vllm_completion, "weight_versions=7 is not a list"),
    (completion(1, 2, 4, 48), read_vllm_completion, "token_ids[3]=48 is not an id from 0 to 47"),
    ({}, read_generation, "output_ids is missing"),
    ({"output_ids": [1]}, read_generation, "meta_info is missing"),
    (generation(1, 2, 4, 5, output_token_logprobs=None), read_generation,
     "meta_info.output_token_logprobs=null is not a list"),
    (generation(1, 2, 4, 5, output_token_logprobs=[-0.5] * 4), read_generation, "is not a list of [log-probability"),
    (generation(1, 2, output_token_logprobs=[[-1, 1, None], [-1, 3, None]]), read_generation,
     "meta_info.output_token_logprobs=[[-1, 1, null], [-1, 3, null]] are not of output_ids=[1, 2]"),
    (generation(1, 2, 4, 5, output_token_logprobs=[[-1, x, None] for x in (1, 2, 4)]), read_generation, "are not of"),
    (generation(1, 2, 4, 5, output_token_logprobs=[[y, x, None] for x, y in ((1, -1), (2, 0.5), (4, -1), (5, -1))]),
     read_generation, "meta_info.output_token_logprobs[1]=0.5 is not the log-probability of a token that was drawn"),
    (generation(1, 2, 4, 5) | {"prompt_token_ids": [5]}, read_generation, "prompt_token_ids=[5] is not the prompt"),
    (generation(1, 2, 4, 5, prompt_tokens=4), read_generation, "meta_info.prompt_tokens=4, where the prompt has 3"),
    (generation(1, 2, 4, 5, finish_reason="length"), read_generation, 'finish_reason="length" is not an object'),
    (generation(1, 2, 4, 5, finish_reason={"type": "abort", "message": "x"}), read_generation,
     'meta_info.finish_reason.type="abort" is neither stop nor length'),
    (generation(1, 2, 4, 5, weight_version="default"), read_generation,
     'meta_info.weight_version="default", where the last update was "b-2"'),
    (generation(1, 2, 4, 5, weight_versions=[{"version": "b-1"}, {"version": "b-2"}]), read_generation,
     'meta_info.weight_versions="b-1", where'),
    (completion(1, 9, finish_reason="stop", stop_reason=STOP), read_vllm_completion, "stop_reason=3, where"),
    (generation(1, 9, finish_reason={"type": "stop", "matched": STOP}), read_generation,
     "meta_info.finish_reason.matched=3, where output_ids ends in 9"),
    (generation(1, 2), read_generation, "finish_reason.type=length after 2 tokens, where max_tokens=4"),
    (generation(1, 2, 4, 5, 6), read_generation, "output_ids has 5 tokens, where 1 to 4 were asked for"),
    (generation(1, 2, 4, True), read_generation, "output_ids[3]=true is not an id"),
])  # fmt: skip
def test_what_vllm_and_sglang_cannot_mean_is_refused(answer, reader, wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)) as refused:
        read(answer, reader)
    assert len(str(refused.value)) < 500
