"""Which tokens of a conversation are answers: by hand, over chat templates that render turns differently."""

import json

import numpy as np
import pytest
import tokenizers

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.tokenizer import load_tokenizer
from maxtext_lite.post_training.conversations import Renderer

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (  # begins with a special token, and strips the content of turns
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ "
    "message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
INSTRUCT = (  # no marker precedes an answer; a space begins it
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}{% else %}{{ '<<SYS>>' + "
    "message.content }}{% endif %}{% endfor %}"
)
FORGETFUL = (  # renders earlier answers differently from the last
    "{% for message in messages %}{{ message.role }}:{{ message.content }}{% if loop.last %}!{% endif %};{% endfor %}"
)
NEXT_ROLE = (  # the token of the next turn closes an answer, as in GLM's
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAST_END = (  # the last answer closes differently, as in gpt-oss
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{{ '</s>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WHOLE_END = (  # end-of-text after the whole conversation, as in Phi-3's
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '</s>' }}{% endif %}"
)
EARLIER_STRIPPED = (  # earlier answers lose their thinking, as in Qwen3's
    "{% for m in messages %}{% set c = m.content if loop.last else m.content.split('</think>')[-1].lstrip() %}"
    "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALL_STRIPPED = (  # every answer does, and the prompt opens the thinking, as in DeepSeek-R1's
    "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content.split('</think>')[-1].lstrip() + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<think>\n' }}{% endif %}"
)
PARTS = (  # contents are lists, as in templates for images
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for p in m.content %}{% if p.type == 'text' %}"
    "{{ p.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content.split('</think>')[-1] + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if not add_generation_prompt %}{{ '</s>' }}{% endif %}"
)
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hé 東?\n"},
    {"role": "assistant", "content": " Yes, 東. "},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "No."},
]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """A byte-level tokenizer with merges over spaces and line breaks, and special tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    keys = {
        "special_tokens": SPECIAL,
        "initial_alphabet": byte_level.alphabet(),
        "show_progress": False,
    }
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, **keys)
    tokenizer.train_from_iterator(
        ["user\n\n\n Yes, sure. No. assistant\n\n"] * 20, trainer
    )
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    return directory


def renderer(path, template=None, tmp_path=None, *words):
    overrides = ["dataset_type=sft", *words]
    if path is not None:
        overrides += [f"tokenizer_path={path}", "tokenizer_type=huggingface"]
    if template is not None:
        (tmp_path / "t.jinja").write_text(template)
        overrides.append(f"chat_template={tmp_path / 't.jinja'}")
    config = load_config(None, overrides)
    return Renderer(config, load_tokenizer(config))


def learned(it, rendered, tokenizer):
    """The text of each stretch of learned tokens, special tokens spelled out."""
    (tokenized,) = it.tokens([rendered])
    edges = np.flatnonzero(
        np.diff(np.concatenate([[0], tokenized.is_answer.astype(int), [0]]))
    )
    pieces = zip(edges[::2], edges[1::2], strict=True)
    texts = [
        tokenizer.decode(tokenized.token_ids[a:b].tolist(), skip_special_tokens=False)
        for a, b in pieces
    ]
    return (
        texts,
        tokenizer.decode(tokenized.token_ids.tolist(), skip_special_tokens=False),
        tokenized,
    )


@pytest.fixture(scope="module")
def plain(tokenizer_path):
    """The tokenizer as its own library loads it."""
    it = tokenizers.Tokenizer.from_file(str(tokenizer_path / "tokenizer.json"))
    it.decoder = tokenizers.decoders.ByteLevel()
    return it


# By hand, from the templates: the assistant's words up to and including end-of-turn.
@pytest.mark.fast
@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CHATML, [" Yes, 東. <|im_end|>", "No.<|im_end|>"]),
        (LLAMA3, ["Yes, 東.<|eot_id|>", "No.<|eot_id|>"]),
        (INSTRUCT, ["  Yes, 東. </s>", " No.</s>"]),
    ],
    ids=["chatml", "llama3", "instruct"],
)
def test_answers_are_the_assistants_turns(
    template, answers, tokenizer_path, plain, tmp_path
):
    it = renderer(tokenizer_path, template, tmp_path)
    (rendered,) = it.sft_texts("d:1", {"messages": TURNS, "other": 1})
    texts, whole, tokenized = learned(it, rendered, plain)
    assert texts == answers
    assert whole == rendered.text
    assert tokenized.num_cut == 0
    # In lists under prompt and completion, only the turns of the completion are learned.
    (rendered,) = it.sft_texts("d:1", {"prompt": TURNS[:4], "completion": TURNS[4:]})
    assert learned(it, rendered, plain)[:2] == (answers[1:], whole)
    # Of pairs, the answers after what both begin with.
    other = [*TURNS[:4], {"role": "assistant", "content": "Yes."}]
    for value in (
        {"chosen": TURNS, "rejected": other},
        {"prompt": "Sure?", "chosen": TURNS, "rejected": other},
        {"prompt": TURNS[:4], "chosen": TURNS[4:], "rejected": other[4:]},
    ):
        chosen, rejected = it.dpo_texts("d:1", value)
        assert learned(it, chosen, plain)[:2] == (answers[1:], whole)
        assert learned(it, rejected, plain)[0] == [answers[1].replace("No.", "Yes.")]


ASKED = "<|im_start|>user\n{}<|im_end|><|im_start|>assistant\n"
THOUGHT = [
    {"role": "user", "content": "end"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nim"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "No."},
]


# By hand, from the templates: each text, its learned part in [].
@pytest.mark.parametrize(
    ("template", "texts"),
    [
        (
            NEXT_ROLE,
            "<|im_start|>user\nend<|im_start|>assistant\n[<think>\nHm.\n</think>\n\nim<|im_start|>]user\nSure?"
            "<|im_start|>assistant\n[No.<|im_start|>]",
        ),
        (
            WHOLE_END,
            f"{ASKED.format('end')}[<think>\nHm.\n</think>\n\nim<|im_end|>]{ASKED.format('Sure?')}[No.<|im_end|>]</s>",
        ),
        (
            PARTS,
            f"{ASKED.format('end')}[<think>\nHm.\n</think>\n\nim<|im_end|>]{ASKED.format('Sure?')}[No.<|im_end|>]",
        ),
        (
            LAST_END,
            f"{ASKED.format('end')}[<think>\nHm.\n</think>\n\nim</s>] {ASKED.format('end')}<think>\nHm.\n</think>\n\n"
            f"im<|im_end|>{ASKED.format('Sure?')}[No.</s>]",
        ),
        (
            EARLIER_STRIPPED,
            f"{ASKED.format('end')}[<think>\nHm.\n</think>\n\nim<|im_end|>] {ASKED.format('end')}im<|im_end|>"
            f"{ASKED.format('Sure?')}[No.<|im_end|>]",
        ),
        (
            ALL_STRIPPED,
            "<|im_start|>userend<|im_end|><|im_start|>assistant<think>\n[Hm.\n</think>\n\nim<|im_end|>] "
            "<|im_start|>userend<|im_end|><|im_start|>assistantim<|im_end|><|im_start|>userSure?<|im_end|>"
            "<|im_start|>assistant<think>\n[\n</think>\n\nNo.<|im_end|>]",
        ),
        (
            MARKED,
            "<|im_start|>userend<|im_start|>assistant[\n\nim<|im_end|>\n]<|im_start|>userSure?"
            "<|im_start|>assistant[No.<|im_end|>\n]</s>",
        ),
    ],
    ids=[
        "next role",
        "whole end",
        "parts",
        "last end",
        "earlier stripped",
        "all stripped",
        "marked",
    ],
)
def test_answers_are_what_generation_at_their_turn_would_write(
    template, texts, tokenizer_path, plain, tmp_path
):
    it = renderer(tokenizer_path, template, tmp_path)
    rows = [*it.tokens(it.sft_texts("d:1", {"messages": THOUGHT}))]
    assert " ".join(bracketed(row, plain) for row in rows) == texts
    for row in rows:  # what precedes an answer has the tokens of the prompt
        (first, *_) = np.flatnonzero(row.is_answer)
        before = plain.decode(row.token_ids[:first].tolist(), skip_special_tokens=False)
        assert (
            row.token_ids[:first].tolist()
            == plain.encode(before, add_special_tokens=False).ids
        )


def test_a_system_turn_in_the_users_last_one_is_where_generation_sees_it(
    tokenizer_path, plain, tmp_path
):
    """As in Mistral's templates: a rendering that ends with an answer has no system turn."""
    system_last = (
        "{% set system = messages[0].content %}{% for m in messages[1:] %}{% if m.role == 'user' %}[INST]"
        "{{ system + ' ' if loop.last }}{{ m.content }}[/INST]{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
    )
    it = renderer(tokenizer_path, system_last, tmp_path)
    turns = [{"role": "system", "content": "Be brief."}, *THOUGHT[2:], *THOUGHT[2:]]
    rows = it.tokens(it.sft_texts("d:1", {"messages": turns}))
    assert [bracketed(row, plain) for row in rows] == [
        "[INST]Be brief. Sure?[/INST][No.</s>]",
        "[INST]Sure?[/INST]No.</s>[INST]Be brief. Sure?[/INST][No.</s>]",
    ]


def test_a_prompt_that_ends_with_a_space_takes_no_word_of_the_answer(
    tokenizer_path, plain, tmp_path
):
    """Yes with the space before it is one token, which generation after that space cannot write."""
    spaced = CHATML.replace("'assistant\n'", "'assistant: '").replace(
        "'\n' +", "': ' +"
    )
    spaced = spaced.replace("assistant\n", "assistant: ")
    it = renderer(tokenizer_path, spaced, tmp_path)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    (row,) = it.tokens(it.sft_texts("d:1", {"messages": turns}))
    assert bracketed(row, plain).endswith("assistant: [Yes<|im_end|>]\n")
    prompt = it.prompt_text("d:1", "messages", turns[:1])
    (asked,) = it.prompt_tokens([prompt])
    assert row.token_ids[: len(asked)].tolist() == asked.tolist()


def test_an_end_of_turn_that_takes_the_line_break_after_it_is_learned(
    tokenizer_path, plain, tmp_path
):
    """As Phi-3's tokens do, where a template writes that line break only between turns."""
    content = json.loads((tokenizer_path / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["rstrip"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    between = (
        "{% for m in messages %}{{ m.role + m.content + '<|im_end|>' + ('' if loop.last and m.role == 'assistant' "
        "else '\n') }}{% endfor %}"
    )
    it = renderer(tmp_path, between, tmp_path)
    (row,) = it.tokens(it.sft_texts("d:1", {"messages": [*THOUGHT[2:], *THOUGHT[2:]]}))
    learned = "userSure?<|im_end|>[assistantNo.<|im_end|>]"
    assert bracketed(row, plain) == learned + learned


def bracketed(tokenized, plain):
    """The text of a row, with its learned parts in []."""
    edges = np.flatnonzero(
        np.diff(tokenized.is_answer, prepend=False, append=False)
    ).tolist()
    parts = np.split(tokenized.token_ids, edges)
    texts = [plain.decode(part.tolist(), skip_special_tokens=False) for part in parts]
    return "".join(
        f"[{text}]" if number % 2 else text for number, text in enumerate(texts)
    )


@pytest.mark.parametrize(
    "turns", [THOUGHT, THOUGHT[:2], [*TURNS[:2], TURNS[4], *TURNS[3:], TURNS[1]]]
)
def test_marked_answers_are_those_of_transformers(turns, tokenizer_path, tmp_path):
    transformers = pytest.importorskip("transformers")
    it = renderer(tokenizer_path, MARKED, tmp_path)
    (tokenized,) = it.tokens(it.sft_texts("d:1", {"messages": turns}))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_path / "tokenizer.json")
    )
    expected = tokenizer.apply_chat_template(
        turns, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
    )
    assert tokenized.token_ids.tolist() == expected["input_ids"]
    assert tokenized.is_answer.astype(int).tolist() == expected["assistant_masks"]
    at = 2 + (turns[0]["role"] == "system")
    if len(turns) > at + 1:
        later = it.sft_texts("d:1", {"prompt": turns[:at], "completion": turns[at:]})
        (whole,) = it.sft_texts("d:1", {"messages": turns})
        assert later == (whole._replace(answers=whole.answers[1:]),)


def test_a_token_that_contains_the_beginning_of_an_answer_is_not_learned(
    tokenizer_path, plain, tmp_path
):
    """ChatML's line break before the answer and the first in it are one token; the second is one by itself."""
    it = renderer(tokenizer_path, CHATML, tmp_path)
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "\n\nNo."},
    ]
    texts, _, tokenized = learned(
        it, it.sft_texts("d:1", {"messages": turns})[0], plain
    )
    assert texts == ["\nNo.<|im_end|>"]
    assert tokenized.num_cut == 1
    # Trimmed offsets hide that the space of the prompt is the answer's token's.
    texts, _, tokenized = learned(
        it, it.sft_texts("d:1", {"prompt": "Q: ", "completion": "Yes, sure"})[0], plain
    )
    assert "Yes" not in texts[0]
    assert tokenized.num_cut == 1


@pytest.fixture
def beginning_with_s(tokenizer_path, tmp_path):
    """The directory of a tokenizer whose texts begin with <s> and end with </s>."""
    path = tmp_path / "special"
    path.mkdir()
    source = tokenizers.Tokenizer.from_file(str(tokenizer_path / "tokenizer.json"))
    source.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 5)]
    )
    source.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return path


@pytest.mark.parametrize("add_bos", ["auto", "false"])
def test_plain_text_ends_with_end_of_text(add_bos, beginning_with_s, plain):
    it = renderer(beginning_with_s, None, None, f"add_bos={add_bos}")
    begin = "<s>" if add_bos == "auto" else ""
    texts, whole, _ = learned(
        it, it.sft_texts("d:1", {"prompt": "user", "completion": " No."})[0], plain
    )
    assert (texts, whole) == ([" No.</s>"], f"{begin}user No.</s>")
    # Without a prompt, the answer's first token comes after the end of another text, or where all texts begin.
    texts, whole, tokenized = learned(
        it, it.sft_texts("d:1", {"prompt": "", "completion": "No."})[0], plain
    )
    assert (texts, whole) == (["No.</s>"], f"{begin or '</s>'}No.</s>")
    assert not tokenized.is_answer[0]


USER, ASSISTANT = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
)


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "x", "completion": ""},
        {"messages": [USER, ASSISTANT | {"tool_calls": [1]}]},  # would not be learned
        {"messages": [USER, ASSISTANT | {"weight": 0}]},
        {"messages": [USER, ASSISTANT], "tools": [{}]},  # would not be rendered
        {"messages": [USER]},
    ],
)
def test_an_invalid_sft_line_is_refused_with_its_place(value, tokenizer_path, tmp_path):
    with pytest.raises(UserError, match=r"d\.jsonl:7: "):
        renderer(tokenizer_path, CHATML, tmp_path).sft_texts("d.jsonl:7", value)


NO_CONTENT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_end|>' }}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
NO_END = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
END_MARKED = "{% for m in messages %}{{ m.content }}{% generation %}</s>{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    "template", [FORGETFUL, NO_CONTENT, NO_SYSTEM, NO_END, END_MARKED, None]
)
def test_templates_in_which_answers_cannot_be_found_are_refused(
    template, tokenizer_path, tmp_path
):
    it = renderer(tokenizer_path, template, tmp_path)
    with pytest.raises(UserError, match="d:1: "):
        it.sft_texts("d:1", {"messages": TURNS})


@pytest.mark.parametrize("template", [CHATML, INSTRUCT], ids=["chatml", "instruct"])
def test_a_prompt_is_what_comes_before_its_answer(
    template, tokenizer_path, plain, tmp_path
):
    it = renderer(tokenizer_path, template, tmp_path)
    prompt = it.prompt_text("d:1", "messages", TURNS[:2])
    (rendered,) = it.sft_texts(
        "d:1", {"messages": [*TURNS[:2], {"role": "assistant", "content": "No."}]}
    )
    (asked,), (tokenized,) = it.prompt_tokens([prompt]), it.tokens([rendered])
    assert prompt.text == rendered.text[: rendered.answers[0][0]]
    assert plain.decode(asked.tolist(), skip_special_tokens=False) == prompt.text
    first = np.flatnonzero(tokenized.is_answer)[0]
    assert asked.tolist() == tokenized.token_ids[:first].tolist()


@pytest.mark.parametrize("add_bos", ["auto", "false"])
def test_a_plain_prompt_begins_as_a_text_does(add_bos, beginning_with_s, plain):
    it = renderer(beginning_with_s, None, None, f"add_bos={add_bos}")
    some, none = it.prompt_tokens(
        [it.prompt_text("d:1", "prompt", text) for text in ("user", "")]
    )
    rendered = [
        plain.decode(tokens.tolist(), skip_special_tokens=False)
        for tokens in (some, none)
    ]
    assert rendered == (["<s>user", "<s>"] if add_bos == "auto" else ["user", "</s>"])
    assert some.dtype == none.dtype == np.int32
