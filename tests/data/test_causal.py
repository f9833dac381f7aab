"""Static proof that a template renders turns in order: for plain loops, and for none that looks ahead."""

import jinja2
import pytest

from maxtext_lite.data.causal import loop_over_turns
from tests.data.test_conversations import CHATML, FORGETFUL, INSTRUCT, LLAMA3

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}"
    "{% endif %}"
    "{{ '<' + m.role + '>' + (first if loop.first else '') + m['content'] | trim + '</>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<model>' }}{% endif %}"
)
NAMESPACE = (
    "{% set ns = namespace(seen=0) %}{% for m in messages %}{% set ns.seen = ns.seen + 1 %}{{ ns.seen }}{{ m.content }}"
    "{% endfor %}"
)


@pytest.mark.parametrize("source", [CHATML, LLAMA3, INSTRUCT, GEMMA, NAMESPACE])
def test_loops_that_only_look_back_are_causal(source):
    assert loop_over_turns(jinja2.Environment().parse(source)) is not None


@pytest.mark.parametrize("source", [
    FORGETFUL,
    "no loop",
    NAMESPACE + "{{ ns.seen }}",  # what comes after depends on all turns
    "{{ messages|length }}" + INSTRUCT,
    "{% set n = messages|length %}" + INSTRUCT,
    "{% set last = messages[-1] %}" + INSTRUCT,
    "{% set second = messages[1] %}" + INSTRUCT,
    "{% set messages = messages[:2] %}" + INSTRUCT,
    "{% set messages = 'ab' %}" + INSTRUCT,
    "{% set rest = messages[::-1] %}{% for m in rest %}{{ m.content }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ loop.nextitem.role }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ loop.revindex }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ messages[loop.index].role }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% if add_generation_prompt %}!{% endif %}{% endfor %}",
    "{% set x = add_generation_prompt %}{% for m in messages %}{{ m.content }}{{ x }}{% endfor %}",
    "{% set say = joiner() %}{% for m in messages %}{{ say() }}{{ m.content }}{% endfor %}{{ say() }}",
    "{% macro all() %}{{ messages }}{% endmacro %}{% for m in messages %}{{ all() }}{% endfor %}",
    "{% for m in messages %}{{ [1, 2]|random }}{{ m.content }}{% endfor %}",
    "{% block a %}{% for m in messages %}{{ m.content }}{% endfor %}{% endblock %}",
])  # fmt: skip
def test_other_templates_are_not_causal(source):
    assert loop_over_turns(jinja2.Environment().parse(source)) is None
