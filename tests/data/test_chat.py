"""Chat templates are rendered as transformers renders them, in a sandbox."""

import datetime
import json

import pytest
import tokenizers

from maxtext_lite.config import UserError, load_config
from maxtext_lite.data.chat import DATE_OF_TRAINING_DATA, ChatTemplate, chat_template

transformers = pytest.importorskip("transformers")

TURNS = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hé?\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And now?"},
]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
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


def directory(path, template, **more):
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": template,
                "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
                "eos_token": "</s>",
                "tokenizer_class": "PreTrainedTokenizerFast",
                **more,
            }
        )
    )
    return path


@pytest.mark.parametrize("template", [CHATML, LLAMA2, LOOPS], ids=["chatml", "llama2", "loops"])
def test_a_template_is_rendered_as_transformers_does(template, tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory(tmp_path, template))
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(tmp_path).render(TURNS) == expected
    assert "Yes." in expected


@pytest.mark.parametrize("template", [
    "{% if bos_token is defined %}{{ bos_token }}{% endif %}a", "{{ bos_token | default('') }}a",
    "{% if bos_token %}{{ bos_token + 'b' }}{% endif %}a", "{{ bos_token or '' }}a", "{{ (bos_token or '') + 'a' }}",
    "{{ other }}{{ messages[0].some_token }}a", "{{ bos_token if bos_token is defined }}a",
    "{% macro f(a_token) %}{{ a_token }}{% endmacro %}{{ f() }}a",
    "{% if not messages %}{% set my_token = 'b' %}{% endif %}{{ my_token }}a",
])  # fmt: skip
def test_a_special_token_that_no_file_states_may_be_asked_about_but_not_printed(template, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(template)
    assert ChatTemplate(tmp_path).render(TURNS) == "a"
    for prints in ("{{ bos_token }}a", "{{ 'a' ~ bos_token }}", "{% set b = bos_token %}{{ b | trim }}",
                   "{% macro f(a_token) %}{{ a_token }}{% endmacro %}{{ f(bos_token) }}"):  # fmt: skip
        (tmp_path / "chat_template.jinja").write_text(prints)
        with pytest.raises(
            UserError, match=r"chat_template\.jinja: .* it prints bos_token, which \S+ does not state \(null: none\)\."
        ):
            ChatTemplate(tmp_path).render(TURNS)


def test_a_template_is_found_in_any_of_its_places(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "three"}))
    assert ChatTemplate(tmp_path).render([]) == "three"
    directory(tmp_path, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}])
    assert ChatTemplate(tmp_path).render([]) == "two"
    (tmp_path / "chat_template.jinja").write_text("one")
    assert ChatTemplate(tmp_path).render([]) == "one"


def test_strftime_now_gives_the_current_year(tmp_path):
    year = ChatTemplate(directory(tmp_path, "{{ strftime_now('%Y') }}")).render([])
    assert abs(int(year) - datetime.datetime.now(datetime.UTC).year) <= 1


@pytest.mark.parametrize(("template", "message"), [
    (None, "has no chat template"),
    ("{% if %}", "its chat template is invalid"),
    ("{{ raise_exception('Roles must alternate') }}", "refuses these turns: Roles must alternate"),
    ("{{ messages.append(1) }}", "refuses these turns"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these turns"),
    ("{{ missing.name }}", "refuses these turns"),
])  # fmt: skip
def test_turns_that_cannot_be_rendered_are_refused(template, message, tmp_path):
    with pytest.raises(UserError, match=message):
        ChatTemplate(directory(tmp_path, template)).render(TURNS)


@pytest.mark.parametrize(("template", "reason"), [
    ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
    ("{{ '{5}'.format(1) }}", "IndexError: "),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
    ("{{ [1, 2]|slice(0)|list }}", "ZeroDivisionError: "),
    ("{{ range(10**9) }}", "OverflowError: Range too big"),
    ("{{ 'a' * 10**11 }}", "it does more work than any chat needs"),
    ("{{ 2.0**100000 }}", "OverflowError: "),
    ("{% include 'other' %}", "TypeError: no loader"),
    ("{{ strftime_now(3) }}", "TypeError: "),
])  # fmt: skip
def test_whatever_a_template_raises_is_one_line_that_names_its_file(template, reason, tmp_path):
    with pytest.raises(UserError) as refused:
        ChatTemplate(directory(tmp_path, template)).render(TURNS)
    file = tmp_path / "tokenizer_config.json"
    assert str(refused.value).startswith(f"{file}: its chat template refuses these turns: {reason}")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("template", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% for m in messages %}" * 60])
def test_an_invalid_template_is_named_with_its_file(template, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=r"chat_template\.jinja: its chat template is invalid"):
        ChatTemplate(tmp_path)


@pytest.mark.parametrize("value", [3, [3], [{"name": "default"}], [{"name": "other", "template": "x"}], {"a": "b"}])
def test_a_template_that_is_no_text_is_refused(value, tmp_path):
    with pytest.raises(UserError, match=r"(tokenizer_config\.json: chat_template=|has no chat template)"):
        ChatTemplate(directory(tmp_path, value))


def test_a_template_file_takes_precedence_over_the_directory(tmp_path):
    directory(tmp_path, "of the directory")
    file = tmp_path / "own.jinja"
    file.write_text("{{ eos_token }}{% if add_generation_prompt %}go{% endif %}")
    assert ChatTemplate(tmp_path, file=file).render(TURNS) == "</s>go"
    assert ChatTemplate(tmp_path, file=file).render(TURNS, answer_follows=False) == "</s>"
    assert ChatTemplate(None, file=file).render(TURNS) == "go"
    config = [f"chat_template={file}", "dataset_type=sft"]
    assert chat_template(load_config(None, config)).render(TURNS) == "go"
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        keys = ["tokenizer_type=huggingface", f"tokenizer_path={path}"]
        assert chat_template(load_config(None, keys)).render(TURNS) == "of the directory"
    with pytest.raises(UserError, match=r"chat_template='.*gone.jinja' cannot be read"):
        chat_template(load_config(None, [f"chat_template={tmp_path}/gone.jinja", "dataset_type=sft"]))
    with pytest.raises(UserError, match="need a chat template, and tokenizer_type=byte has none"):
        chat_template(load_config(None, ["dataset_type=sft"]))


def test_training_data_are_the_same_on_every_day(tmp_path):
    template = ChatTemplate(directory(tmp_path, "{{ strftime_now('%d %b %Y') }}"), today=DATE_OF_TRAINING_DATA)
    assert template.render([]) == "26 Jul 2024"
