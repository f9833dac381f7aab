"""Templates run as in a plain sandbox, with bounds on sizes; which render turns in order is known without rendering."""

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maxtext_lite.hf.causal import loop_over_turns
from maxtext_lite.hf.template import ChatEnvironment, TooLargeError
from tests.data.test_conversations import CHATML, FORGETFUL, INSTRUCT, LLAMA3

TURNS = [
    {"role": ("user", "assistant")[number % 2], "content": f"words of turn {number}"}
    for number in range(200)
]


def render(source, turns=TURNS[:3]):
    return ChatEnvironment().compiled(source).render(messages=turns)


WIDE = [
    "{{ 'a'.center(10**10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ lipsum(10**9) }}",
]
WIDE += [
    "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "{{ 'a'|tojson(indent=10**10) }}",
    "{{ [1]|batch(10**10, 0)|list }}",
]
WIDE += [
    "{{ (1).to_bytes(10**11, 'big') }}",
    "{{ 'a\tb'.expandtabs(10**10) }}",
    "{{ 1.5|round(10**10) }}",
]


WIDE += [
    "{{ ['a']|map('center', 10**9)|list }}",
    "{{ 'a'|wordwrap(10**9) }}",
    "{{ '{:>{w}}'.format(1, w='9999999999') }}",
    "{{ '{x:>{w}}'.format_map({'x': 1, 'w': 10**10}) }}",
    "{% set f = '{:9999999999}'.format %}{{ f(1) }}",
    "{{ 'a'|attr('ljust')(10**10) }}",
]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**11 }}",
        "{{ [1] * 10**10 }}",
        "{{ 10**10 * [1] }}",
        "{{ 9**(9**9) }}",
        "{{ range(10**6) }}",
        *WIDE,
    ],
)
def test_absurd_sizes_are_refused_before_anything_of_that_size_is_made(source):
    with pytest.raises((TooLargeError, OverflowError, jinja2.UndefinedError)):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        # Every turn looks for the last one of the user, as templates with reasoning do.
        "{% for m in messages %}{% set ns = namespace(last=0) %}{% for n in messages %}{% if n.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ m.content }}{{ ns.last }}{% endfor %}",
        "{% for m in messages %}{{ m | tojson(indent=4) | replace('a', 'bb') | indent(8) }}"
        "{{ messages|length }}{% endfor %}",
        "{% for m in messages[::-1] %}{{ '%-9s|%5.2f' % (m.role, loop.index / 3) }}"
        "{{ '{0:>12}'.format(m.role) }}{% endfor %}",
        "{{ messages | map(attribute='content') | map('upper') | join('\n') }}"
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
        "{{ [3, 1, 2]|sort }}{{ {'b': 2, 'a': [1, none]}|dictsort }}{{ 7 * 6 + 2**10 % 9 }}",
        "{% for m in messages %}{% set ns = namespace(any=false) %}{{ m.get('content').strip() }}{% endfor %}",
        "{{ '20240101 %s %5d' % (20250101, 3) }}{{ '{} 20240101 {{20240101}} {:>5}'.format(20250101, 3) }}",
        "{% macro center(n) %}{{ n }}{% endmacro %}{{ center(10**9) }}{{ 'a' * 3 }}{{ 7 ** 9 }}"
        "{{ 1234567|round }}{{ 10**6|default(1) }}",
        "{% macro one(m) %}{{ m.role.title() ~ ': ' ~ m['content'].split('turn')[-1].strip() }}{% endmacro %}"
        "{% for m in messages %}{{ one(m) if 'words' in m.content and m.content is string }}"
        "{{ x is defined }}{% endfor %}",
    ],
    ids=[
        "last",
        "filters",
        "formats",
        "maps",
        "namespace",
        "numbers",
        "names",
        "macro",
    ],
)
def test_two_hundred_turns_render_as_in_a_plain_sandbox(source):
    expected = (
        ImmutableSandboxedEnvironment().from_string(source).render(messages=TURNS)
    )
    assert render(source, TURNS) == expected


# ---- Whether what is rendered of a turn depends on later ones ----

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


@pytest.mark.fast
@pytest.mark.parametrize("source", [CHATML, LLAMA3, INSTRUCT, GEMMA, NAMESPACE])
def test_loops_that_only_look_back_are_causal(source):
    assert loop_over_turns(jinja2.Environment().parse(source)) is not None


@pytest.mark.parametrize(
    "source",
    [
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
    ],
)
def test_other_templates_are_not_causal(source):
    assert loop_over_turns(jinja2.Environment().parse(source)) is None
