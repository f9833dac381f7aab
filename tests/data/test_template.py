"""A count bounds the work of any template; real chats stay far below the bound."""

import time

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maxtext_lite.data.template import BoundedEnvironment, TooMuchWorkError

TURNS = [{"role": ("user", "assistant")[number % 2], "content": f"words of turn {number}"} for number in range(200)]


def render(source, turns=TURNS[:3], **more):
    environment = BoundedEnvironment()
    template = environment.compiled(source)
    environment.allow(sum(len(turn["content"]) for turn in turns))
    return template.render(messages=turns, **more)


@pytest.mark.parametrize("source", [
    "{{ 'a' * 10**11 }}", "{{ 10**11 * 'a' }}", "{{ [1] * 10**10 }}", "{{ messages[0].content * 10**10 }}",
    "{{ 9**(9**9) }}", "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x|replace('a', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | join('') %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    *[
        "{% set ns = namespace(x=(1,)) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ USE }}"
        .replace("USE", use)  # each makes Python hash or write all of it unseen by the sandbox
        for use in (
            "{ns.x: 1}|length", "{}[ns.x]", "{}.get(ns.x)", "ns.x in {}", "ns.x is in {}", "dict([(ns.x, 1)])",
            "[ns.x]|unique|list", "messages|attr(ns.x)", "messages|map(attribute=ns.x)|list", "raise_exception(ns.x)",
        )
    ],
    # Hashing it would end the process: Python's recursion in C is not counted.
    "{% set ns = namespace(x=(1,)) %}{% for i in range(999) %}{% set ns.x = (ns.x,) %}{% endfor %}"
    "{{ {ns.x: 1}|length }}",
    "{% set ns = namespace(x=1) %}{{ ns }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
    "{% for a in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}",
    "{% set x = range(99999)|list %}{% for a in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "{% set x = range(99999)|list %}{% for a in range(99999) %}{% if 'b' is in x %}{% endif %}{% endfor %}",
    "{% set x = range(99999)|list %}{% for a in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for x in [[[[]]]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "{{ 'a'|center(10**10) }}", "{{ 'a'.center(10**10) }}", "{{ 'a'.zfill(width) }}", "{{ 'a'|indent(10**10, true) }}",
    "{{ '%9999999999d' % 1 }}", "{{ '%*d' % (10**10, 1) }}", "{{ '%.9999999999f' % 1.5 }}",
    "{{ '{:>9999999999}'.format(1) }}", "{{ '{:>{w}}'.format(1, w=10**10) }}", "{{ '%9999999999d'|format(1) }}",
    "{{ '{:>9999999999}'.format_map({}) }}", "{{ (1).to_bytes(10**11, 'big') }}", "{{ 'a\tb'.expandtabs(10**10) }}",
    "{{ 'a'|tojson(indent=10**10) }}", "{{ 1.5|round(10**10) }}", "{{ [1]|batch(10**10, 0)|list }}",
    "{{ 'abc'.translate({97: 'x' * 9000000, 98: 'x' * 9000000}) }}", "{{ lipsum(10**9) }}",
])  # fmt: skip
def test_endless_templates_are_refused(source, monkeypatch):
    monkeypatch.setattr("maxtext_lite.data.template._WORK", 100_000)  # a fiftieth: the bound is found sooner
    begin = time.process_time()
    with pytest.raises((TooMuchWorkError, RecursionError, jinja2.UndefinedError)):
        render(source, width=10**10, raise_exception=str)
    assert time.process_time() - begin < 60  # hours, or all of the memory, without the bound


def test_a_template_that_is_too_long_is_not_compiled():
    with pytest.raises(TooMuchWorkError, match="more than 262,144"):
        BoundedEnvironment().compiled("x" * (2**18 + 1))


@pytest.mark.parametrize("source", [
    # Every turn looks for the last one of the user, as templates with reasoning do.
    "{% for m in messages %}{% set ns = namespace(last=0) %}{% for n in messages %}{% if n.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ m.content }}{{ ns.last }}{% endfor %}",
    "{% for m in messages %}{{ m | tojson(indent=4) | replace('a', 'bb') | indent(8) }}"
    "{{ messages|length }}{% endfor %}",
    "{% for m in messages[::-1] %}{{ '%-9s|%5.2f' % (m.role, loop.index / 3) }}"
    "{{ '{0:>12}'.format(m.role) }}{% endfor %}",
    "{{ messages | map(attribute='content') | map('upper') | join('\n') }}{{ messages|selectattr('role', 'equalto', "
    "'user')|list|length }}{{ [3, 1, 2]|sort }}{{ {'b': 2, 'a': [1, none]}|dictsort }}{{ 7 * 6 + 2**10 % 9 }}",
    "{% macro one(m) %}{{ m.role.title() ~ ': ' ~ m['content'].split('turn')[-1].strip() }}{% endmacro %}"
    "{% for m in messages %}{{ one(m) if 'words' in m.content and m.content is string }}{{ x is defined }}{% endfor %}",
], ids=["last", "filters", "formats", "maps", "macro"])  # fmt: skip
def test_two_hundred_turns_render_as_in_a_plain_sandbox(source):
    expected = ImmutableSandboxedEnvironment().from_string(source).render(messages=TURNS)
    assert render(source, TURNS) == expected
