"""Templates run as in a plain sandbox, with bounds on sizes."""

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maxtext_lite.hf.chat import ChatEnvironment

TURNS = [
    {"role": ("user", "assistant")[number % 2], "content": f"words of turn {number}"}
    for number in range(200)
]


def render(source, turns=TURNS[:3]):
    return ChatEnvironment().from_string(source).render(messages=turns)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**11 }}",
        "{{ [1] * 10**10 }}",
        "{{ 10**10 * [1] }}",
        "{{ 9**(9**9) }}",
        "{{ range(10**6) }}",
    ],
)
def test_absurd_sizes_are_refused_before_anything_of_that_size_is_made(source):
    with pytest.raises((SecurityError, OverflowError)):
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
