"""The command on a Hugging Face directory, against transformers; questions, and what is refused."""

import itertools
import json
import math
import string

import numpy as np
import pytest

from maxtext_lite.config import UserError
from maxtext_lite.evaluate import main, parse_evaluate_config
from tests import hf_models

torch = pytest.importorskip("torch")

TEXT = "To be, or not to be, that is the question.\n" * 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny random model whose tokenizer has a token for each letter."""
    import tokenizers

    path = hf_models.save("llama", tmp_path_factory.mktemp("model"))
    letters = sorted({*TEXT, *"abcdefghijklmnopqrstuvwxyz?"})
    vocabulary = {"<eos>": 2, "<bos>": 1, "<pad>": 0} | {letter: 3 + number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path, lambda text: [vocabulary[letter] for letter in text]


def _log_probabilities(tokens):
    """The log-probability of each token but the first, by transformers."""
    with torch.no_grad():
        logits = hf_models.model("llama")(torch.tensor([tokens])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()


def _run(capsys, directory, *overrides):
    main([str(directory), "dtype=float32", "--json", *overrides])
    return json.loads(capsys.readouterr().out)


def test_perplexity_is_that_of_transformers_window_by_window(directory, tmp_path, capsys):
    path, encode = directory
    (tmp_path / "text.txt").write_text(TEXT)
    tokens = encode(TEXT)
    found = _run(capsys, path, f"text={tmp_path / 'text.txt'}", "max_length=32", "stride=16", "ici_fsdp_parallelism=2")
    nll = -_log_probabilities(tokens[:32]).sum()
    for scored in range(32, len(tokens), 16):
        part = _log_probabilities(tokens[scored - 16 : scored + 16])
        nll -= part[15:].sum()
    assert found["tokens"] == len(tokens) - 1
    assert found["perplexity"] == pytest.approx(math.exp(nll / (len(tokens) - 1)), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nll / math.log(2) / len(TEXT), rel=1e-4)


def test_choices_are_those_of_transformers(directory, tmp_path, capsys):
    path, encode = directory
    rng = np.random.default_rng(0)
    words = ["to", "be", "question", "that", "is"]
    questions, right, right_by_byte = [], 0, 0
    for _ in range(5):
        context, *choices = rng.choice(words, 4, replace=False)
        whole = [_log_probabilities(encode(f"{context} {choice}")) for choice in choices]
        likelihoods = [of_tokens[len(context) - 1 :].sum() for of_tokens in whole]
        answer = int(rng.integers(3))
        right += int(np.argmax(likelihoods)) == answer
        right_by_byte += int(np.argmax([x / len(c) for x, c in zip(likelihoods, choices, strict=True)])) == answer
        questions.append({"context": context, "choices": choices, "answer": answer})
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)) + "\n\n")
    found = _run(capsys, path, f"choices={tmp_path / 'questions.jsonl'}")
    assert found["questions"] == 5
    assert (found["accuracy"], found["accuracy_per_byte"]) == (right / 5, right_by_byte / 5)


def test_a_cloze_is_right_where_it_is_what_the_model_would_write(directory, tmp_path, capsys):
    """A blank and a letter, each of which must be the likeliest: after a context that the model continues this way."""
    path, encode = directory
    letters = {encode(letter)[0]: letter for letter in {*TEXT, *string.ascii_lowercase}}

    def next_letters(contexts):
        with torch.no_grad():
            likeliest = hf_models.model("llama")(torch.tensor([encode(text) for text in contexts])).logits[:, -1]
        return [letters.get(token, "") for token in likeliest.argmax(-1).tolist()]

    contexts = ["".join(three) for three in itertools.product(string.ascii_lowercase, repeat=3)]
    before_blanks = [c + blank for c, blank in zip(contexts, next_letters(contexts), strict=True) if blank.isspace()]
    found = zip(before_blanks, next_letters(before_blanks), strict=True)
    context, letter = next((context, letter) for context, letter in found if letter.strip())
    lines = [
        {"context": context[:3], "target": context[3:] + target} for target in (letter, "a" if letter != "a" else "b")
    ]
    (tmp_path / "cloze.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert _run(capsys, path, f"cloze={tmp_path / 'cloze.jsonl'}")["accuracy"] == 0.5


@pytest.mark.parametrize(("overrides", "message"), [
    ([], "there is nothing to evaluate: give one of text, choices and cloze."),
    (["text=a", "cloze=b"], "text and cloze contradict each other"),
    (["text=a", "max_length=8", "stride=8"], "Nearest that works: 7."),
    (["cloze=a", "stride=8"], "stride=8 has no effect without text. Nearest that works: 0."),
    (["txt=a"], "unknown key 'txt' (command line). Did you mean 'text'?"),
    (["text"], "'text' is not of the form key=value."),
    (["text=a", "max_length=1"], "max_length=1 must be at least 2. Nearest that works: 2."),
    (["text=a", "rows_at_once=10000000000"], "rows_at_once=10000000000 must be at most 2147483647. Nearest"),
])  # fmt: skip
def test_wrong_arguments_are_refused(overrides, message):
    with pytest.raises(UserError) as refusal:
        parse_evaluate_config(overrides)
    assert message in str(refusal.value)


@pytest.mark.parametrize(("overrides", "message"), [
    (["ici_tensor_parallelism=3"], "ici_tensor_parallelism=3 does not divide the model's heads, mlp"),
    (["ici_fsdp_parallelism=16"], "ici_fsdp_parallelism=16 does not divide the model's embedding over 8"),
])  # fmt: skip
def test_a_mesh_that_the_machine_does_not_have_is_refused(overrides, message, directory, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(UserError) as refusal:
        main([str(directory[0]), f"text={tmp_path / 'text.txt'}", *overrides])
    assert message in str(refusal.value)
