"""Chat templates are rendered as transformers renders them, in a sandbox."""

import datetime
import json

import pytest
import tokenizers

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.tokenizer_files import HuggingFaceTokenizer
from maxtext_lite.hf.chat import (
    DATE_OF_TRAINING_DATA,
    ChatTemplate,
    chat_template,
    check_contents,
)

transformers = pytest.importorskip("transformers")

TURNS = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hé?\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And now?"},
]
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}\n    {% if message.role == 'user' %}\n"
    "[INST] {{ message.content | trim }} [/INST]{% elif message.role == 'assistant' %} {{ message.content }}"
    "{{ eos_token }}{% else %}<<SYS>>{{ message | tojson }}<</SYS>>\n    {%- endif %}\n{% endfor %}"
)
LOOPS = (
    "{%- set ns = namespace(count=0) -%}{% for message in messages %}{% if message.role == 'system' %}{% continue %}"
    "{% endif %}{% set ns.count = ns.count + 1 %}{% generation %}{{ ns.count }}:{{ message['content'] }}\n"
    "{% endgeneration %}{% if ns.count > 1 %}{% break %}{% endif %}{% endfor %}{{ {'b': [1, 'é<'], 'a': none} | "
    "tojson(indent=2) }}{% if tools is not none %}tools{% endif %}{{ strftime_now('%Y') }}"
)
PRINTS = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
)
BEGIN = {"__type": "AddedToken", "content": "<s>", "special": True}
NO_BEGIN = {"bos_token": None}


def directory(path, template, **more):
    stated = {"chat_template": template, "bos_token": BEGIN, "eos_token": "</s>"}
    stated |= {"tokenizer_class": "PreTrainedTokenizerFast", **more}
    (path / "tokenizer_config.json").write_text(json.dumps(stated))
    return path


@pytest.mark.parametrize(
    ("template", "config", "mapped"),
    [
        (LLAMA2, {}, {}),
        (LOOPS, {}, {}),
        # A file of special tokens goes before, unless tokens are stated beside their ids.
        (
            PRINTS,
            {"bos_token": "a", "eos_token": None},
            {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
        ),
        (PRINTS, {"bos_token": "a", "added_tokens_decoder": {}}, {"bos_token": "<s>"}),
        (PRINTS, NO_BEGIN, {}),
        (
            "{{ image_token }}" + PRINTS,
            NO_BEGIN | {"extra_special_tokens": {"image_token": "<s>"}},
            {},
        ),
    ],
)
def test_a_template_is_rendered_with_the_special_tokens_that_transformers_reads(
    template, config, mapped, tmp_path
):
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a")
    )
    words.save(str(tmp_path / "tokenizer.json"))
    if mapped:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        directory(tmp_path, template, **config)
    )
    expected = tokenizer.apply_chat_template(
        TURNS, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(tmp_path).render(TURNS) == expected
    assert "Yes." in expected
    assert (
        HuggingFaceTokenizer(tmp_path / "tokenizer.json").end_of_text_id
        == tokenizer.eos_token_id
        == 2
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% if bos_token is defined %}{{ bos_token }}{% endif %}a",
        "{{ other }}{{ messages[0].some_token }}a",
        "{% macro f(a_token) %}{{ a_token }}{% endmacro %}{{ f() }}a",
    ],
)
def test_a_special_token_that_no_file_states_may_be_asked_about(template, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(template)
    assert ChatTemplate(tmp_path).render(TURNS) == "a"


PARTS = (
    "{% for m in messages %}{{ m.role }}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
FIRST_PART = "{% for m in messages %}{{ m.role + m.content[0].text }}{% endfor %}"


@pytest.mark.parametrize("template", [PARTS, FIRST_PART])
def test_a_template_that_reads_parts_of_contents_gets_them(template, tmp_path):
    path = directory(tmp_path, template)
    texts = [turn["role"] + turn["content"] for turn in TURNS]
    assert ChatTemplate(path).render(TURNS) == "".join(texts)
    check_contents(TURNS, "".join(texts))
    with pytest.raises(UserError):
        check_contents(TURNS, "".join(texts[1:]))


@pytest.mark.fast
def test_a_template_is_found_in_any_of_its_places(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "three"}))
    assert ChatTemplate(tmp_path).render([]) == "three"
    directory(
        tmp_path,
        [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "two"},
        ],
    )
    assert ChatTemplate(tmp_path).render([]) == "two"
    (tmp_path / "chat_template.jinja").write_text("one")
    assert ChatTemplate(tmp_path).render([]) == "one"


def test_training_data_are_the_same_on_every_day(tmp_path):
    path = directory(tmp_path, "{{ strftime_now('%Y') }}")
    assert (
        abs(
            int(ChatTemplate(path).render([]))
            - datetime.datetime.now(datetime.UTC).year
        )
        <= 1
    )
    assert ChatTemplate(path, today=DATE_OF_TRAINING_DATA).render([]) == "2024"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('Roles must alternate') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ missing.name }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10**9) }}",
        "{{ pad_token }}",  # which no file states
    ],
)
def test_whatever_a_template_raises_is_one_line_that_names_its_file(template, tmp_path):
    with pytest.raises(UserError, match=r"tokenizer_config\.json") as refused:
        ChatTemplate(directory(tmp_path, template)).render(TURNS)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% if %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
def test_an_invalid_template_is_named_with_its_file(template, tmp_path):
    with pytest.raises(UserError, match=r"tokenizer_config\.json|chat template"):
        ChatTemplate(directory(tmp_path, template))


def test_a_template_file_takes_precedence_over_the_directory(tmp_path):
    directory(tmp_path, "of the directory")
    file = tmp_path / "own.jinja"
    file.write_text("{{ eos_token }}{% if add_generation_prompt %}go{% endif %}")
    assert ChatTemplate(tmp_path, file=file).render(TURNS) == "</s>go"
    assert (
        ChatTemplate(tmp_path, file=file).render(TURNS, answer_follows=False) == "</s>"
    )
    assert (
        chat_template(
            load_config(None, [f"chat_template={file}", "dataset_type=sft"])
        ).render(TURNS)
        == "go"
    )
    with pytest.raises(UserError):
        chat_template(load_config(None, ["chat_template=", "dataset_type=sft"]))
