"""Sampling from a run: the cache, stop tokens, and independence of prompts from each other."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from maxtext_lite.config import load_config
from maxtext_lite.hf.model_directory import hf_config
from maxtext_lite.inference.decoding import Sampling
from maxtext_lite.inference.sampler import Sampler, load_on_mesh, mesh_problems
from maxtext_lite.inference.scoring import Scorer, Span
from tests.training.conftest import TINY, make_setup

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 6, 7, 8, 9], [40], [17, 3, 99]]


@pytest.fixture(scope="module")
def sampler(run):
    return Sampler(
        *load_on_mesh(
            run.run_directory, load_config(run.run_directory / "config.yml"), {}
        )
    )


def _texts(sampler, prompts, **how):
    texts = [[] for _ in prompts]
    for number, token, log_probability in sampler.stream(prompts, **how):
        texts[number].append((token, log_probability))
    return texts


def test_dynamic_rotation_goes_on_as_transformers_does_with_its_cache(tmp_path):
    """Prompts below, at and beyond 8 tokens, together: each as alone, token by token; and texts as a whole."""
    from tests.hf_models import save, torch, transformers

    save("llama-dynamic", tmp_path)
    decoder, params, mesh = load_on_mesh(tmp_path, hf_config(tmp_path), {})
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, length).tolist() for length in (5, 8, 15)]
    how = {"max_new_tokens": 9, "sampling": GREEDY}
    texts = _texts(Sampler(decoder, params, mesh), prompts, **how)
    scorer = Scorer(decoder, params, mesh, rows_at_once=2)
    for prompt, text in zip(prompts, texts, strict=True):
        # Loaded anew: what it has seen before changes its rotation.
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        found = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = found.sequences[0].tolist()
        assert [token for token, _ in text] == tokens[len(prompt) :]
        expected = [torch.log_softmax(x[0], -1).max() for x in found.logits]
        assert_allclose([p for _, p in text], expected, atol=1e-4)
        with torch.no_grad():
            whole = torch.log_softmax(theirs(found.sequences).logits[0, :-1], -1)
        likelihood = float(whole[range(len(tokens) - 1), tokens[1:]].sum())
        (score,) = scorer.score([Span(tokens, 1)])
        assert score.log_likelihood == pytest.approx(likelihood, abs=1e-3)


@pytest.mark.fast
def test_greedy_tokens_are_the_argmax_of_the_whole_sequence_and_end_at_a_stop_token(
    run, sampler
):
    texts = _texts(sampler, PROMPTS, max_new_tokens=6, sampling=GREEDY)
    decoder, params = make_setup().decoder, jax.device_get(run.state.params)
    wholes = [
        [*prompt, *(token for token, _ in text)]
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    most = max(map(len, wholes))
    rows = np.array([[*whole, *[0] * (most - len(whole))] for whole in wholes])
    position = np.tile(np.arange(most), (len(rows), 1))

    @jax.jit
    def of_every_next(params):
        x = decoder.hidden(params, rows, np.ones_like(rows), position)
        return jax.nn.log_softmax(decoder.logits(params, x))

    # A token does not see those after it: what is said of the whole text is what is said of each of its beginnings.
    for prompt, text, of_next in zip(
        PROMPTS, texts, np.asarray(of_every_next(params)), strict=True
    ):
        of_next = of_next[len(prompt) - 1 :][:6]
        assert [token for token, _ in text] == of_next.argmax(-1).tolist()
        probabilities = [p for _, p in text]
        assert_allclose(probabilities, of_next.max(-1), atol=1e-4)

    stop = texts[0][2][0]
    stopped = _texts(
        sampler, PROMPTS, max_new_tokens=6, sampling=GREEDY, stop_token_ids=[stop]
    )
    for whole, cut in zip(texts, stopped, strict=True):
        tokens = [token for token, _ in whole]
        expected = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert [token for token, _ in cut] == expected
    before = jax.sharding.get_abstract_mesh()
    next(sampler.stream(PROMPTS, max_new_tokens=5, sampling=GREEDY))
    assert jax.sharding.get_abstract_mesh() == before, (
        "whoever takes no more tokens is left with no mesh"
    )


def test_a_draw_depends_on_its_own_prompt_and_number_only_whatever_the_mesh_and_the_room(
    run, sampler, monkeypatch
):
    """However many tokens are asked for, the first one does not wait for room for all of them."""
    how = {"max_new_tokens": 70, "sampling": Sampling(1.0), "seed": 3}
    together = _texts(sampler, PROMPTS, **how)
    other_seed = _texts(sampler, PROMPTS, **how | {"seed": 4})
    assert [token for token, _ in together[0]] != [token for token, _ in other_seed[0]]
    monkeypatch.setattr("maxtext_lite.inference.sampler._FIRST_ROOM", 1)
    config = load_config(run.run_directory / "config.yml")
    split = Sampler(*load_on_mesh(run.run_directory, config, {"tensor": 2, "fsdp": 2}))
    grown = _texts(split, PROMPTS, **how)
    alone = _texts(sampler, PROMPTS[:1], **how)
    for one, other in [*zip(together, grown, strict=True), (together[0], alone[0])]:
        assert [token for token, _ in one] == [token for token, _ in other]
        assert_allclose([x for _, x in one], [x for _, x in other], atol=1e-5)
    next(split.stream(PROMPTS, **how | {"max_new_tokens": 2**31 - 1}))


def test_a_mesh_that_a_model_cannot_lie_on_is_named_by_each_of_its_keys():
    config = load_config(None, list(TINY))
    assert mesh_problems(config, 8, {"tensor": 2, "fsdp": 4}) == []
    tensor, fsdp = mesh_problems(config, 8, {"tensor": 4, "fsdp": 3})
    assert tensor.startswith("ici_tensor_parallelism=4 ")
    assert fsdp.startswith("ici_fsdp_parallelism=3 ")
    assert fsdp.endswith("Nearest that works: 2.")
