# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from llm_tokenizers import fast_tokenizer

from headrace.backends.llm.chat_template import ChatTemplate
from headrace.core.errors import HeadraceError, InvalidArgument, TooLarge

USER = {"role": "user", "content": "a" * 1000}


def _render(text: str, _messages: Sequence[Any] = (USER,), /, _seconds: float = 60.0, **arguments: Any) -> str:
    return ChatTemplate(text, special_tokens={"bos_token": "<s>"}, seconds=_seconds).render(_messages, (), arguments)


WAYS = {
    "loops": "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ loop.first }}{{ loop.last }} {% endfor %}",
    "namespaces": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
    "joining": "{% set t = '[' ~ messages[0].role ~ (']' ~ 1) %}{{ t ~ '!' if t ~ '' else t }}{{ ('a' ~ 'b') | upper }}",
    "breaks": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "filtered loops": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}",
    "macros": "{% macro f(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "dictionaries": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ dict(a=1)['a'] }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}{{ ' x ' | trim }}{{ 'a\nb' | indent(2) }}",
    "strings": "{{ messages[0].content.split(' ')[-1].strip() }}{{ '%s-%s' % ('a', 1) }}{{ '**{}**'.format(1) }}",
    "slices": "{% for m in messages[::-1] %}{{ m.role }}{% endfor %}{{ messages[1:] | length }}",
    "numbers": "{{ 7 % 2 }}{{ 3 * 4 }}{{ 2 ** 8 }}{{ 7 // 2 }}{{ 'ab' * 2 }}{{ [1] + [2] }}",
    "special": "{{ bos_token }}{{ eos_token is defined }}{{ add_generation_prompt }}",
    "formats": "{{ '%s and %d' | format('a', 5) }}{{ '%(a)s' | format(a=1) }}",
    "blocks": "{% set x %}<{{ messages[0].role }}>{% endset %}{{ x }}{% set y | upper %}a{% endset %}{{ y }}",
    "chosen items": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | map('trim')"
    " | join('|') }}",
    "cut lists": "{% set messages = messages[1:] %}{{ messages | length }}{{ custom is defined }}{{ tools is none }}",
    "thoughts": "{{ ('<think>x</think>\\n\\nyes').split('</think>')[-1].lstrip('\\n') }}",
    "backwards": "{% set n = namespace(last=-1) %}{% for m in messages[::-1] %}"
    "{% set i = (messages | length - 1) - loop.index0 %}"
    "{% if n.last < 0 and m.role == 'user' %}{% set n.last = i %}{% endif %}{% endfor %}{{ n.last }}",
    "nothing to loop over": "{% for x in nothing %}{{ x }}{% else %}none{% endfor %}{% for c in 'ab' %}{{ c }}{% endfor %}",
    "recursion": "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
}


@pytest.mark.parametrize("way", WAYS)
def test_templates_make_what_they_make_in_transformers(way: str) -> None:
    messages = [{"role": "system", "content": "be <kind>"}, {"role": "user", "content": "tell me: ünï"}]
    words = fast_tokenizer("bytes")
    expected = words.apply_chat_template(messages, chat_template=WAYS[way], tokenize=False, add_generation_prompt=True)
    special = {name: token for name, token in words.special_tokens_map.items() if isinstance(token, str)}
    assert ChatTemplate(WAYS[way], special_tokens=special).render(messages, (), {}) == expected


_GROWING = "{%% set n = namespace(a='x') %%}{%% for i in range(60) %%}%s{%% endfor %%}"

ENDLESS = {
    "nested loops": "{% set b = range(99999) | list %}{% for a in b %}{% for c in b %}{% endfor %}{% endfor %}",
    "nested ranges": "{% for a in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "doubling by ~": "{% set n = namespace(a='x') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "doubling by +": "{% set n = namespace(a='x') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "doubling lists": "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "times": "{{ messages[0].content * 10000000000 }}",
    "times a list": "{{ ([1] * 10000000000) | length }}",
    "times, turned": "{{ 10000000000 * messages[0].content }}",
    "powers": "{{ 9 ** 99999999 }}",
    "ljust": "{{ messages[0].content.ljust(10000000000) }}",
    "center": "{{ messages[0].content | center(10000000000) }}",
    "indent": "{{ 'a\n' | indent(10000000000) }}",
    "replace": "{% set x = messages[0].content %}{% set y = x.replace('a', x) %}{{ y.replace('a', y) }}",
    "replace filter": "{% set x = messages[0].content %}{% set y = x.replace('a', x) %}{{ y | replace('a', y) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "nested format": "{{ '{:>{}}'.format(1, 9999999999) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "doubling by join": _GROWING % "{% set n.a = [n.a, n.a] | join %}",
    "doubling by join()": _GROWING % "{% set n.a = ''.join([n.a, n.a]) %}",
    "doubling by blocks": _GROWING % "{% set n.a %}{{ n.a }}{{ n.a }}{% endset %}",
    "doubling by macros": "{% macro f(x, n) %}{% if n %}{{ f(x, n - 1) }}{{ f(x, n - 1) }}{% else %}{{ x }}{% endif %}"
    "{% endmacro %}{{ f('x' * 50000, 20) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "output": "{% for a in range(9999) %}{% for c in range(9999) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
    "json indent": "{{ messages | tojson(indent=999999999) }}",
}


@pytest.mark.parametrize("way", ENDLESS)
def test_a_template_without_an_end_is_stopped(way: str) -> None:
    with pytest.raises(TooLarge, match="messages: the prompt "):
        _render(ENDLESS[way], _seconds=0.3)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ self.__init__.__globals__ }}",
        "{{ ('{0.__class__.__mro__}').format(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ nothing.at.all }}",
        "{{ '%z' % 1 }}",
    ],
)
def test_a_template_reaches_nothing_and_its_failures_stay_here(text: str) -> None:
    with pytest.raises(InvalidArgument, match="chat template cannot render them") as error:
        _render(text)
    assert "Error" not in error.value.message


def test_the_refusal_of_a_template_is_reported_and_shortened() -> None:
    with pytest.raises(InvalidArgument) as error:
        _render("{{ raise_exception('only user and assistant roles' ~ 'x' * 1000) }}")
    assert error.value.message.startswith("messages: only user and assistant roles")
    assert len(error.value.message) == len("messages: ") + 300


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "chat_template",
        "tokenize",
        "bos_token",
        "raise_exception",
        "_x",
        "a b",
        "continue_final_message",
    ],
)
def test_a_client_cannot_take_the_servers_place(name: str) -> None:
    with pytest.raises(InvalidArgument, match="chat_template_kwargs"):
        _render("{{ messages }}", **{name: "x"})


def test_a_client_may_add_what_the_template_asks_for() -> None:
    assert _render("{{ enable_thinking }}{{ more.deep[0] }}", enable_thinking=False, more={"deep": [1]}) == "False1"
    with pytest.raises(InvalidArgument, match="at most 64"):
        _render("", **{f"a{number}": 1 for number in range(65)})
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidArgument, match="64 deep"):
        _render("", deep=deep)


def test_lists_of_text_become_text_where_the_template_does_not_support_lists() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert _render("{{ messages[0].content }}", [message]) == "a\nb"
    loop = "{% for i in messages[0]['content'] %}{{ i.text }};{% endfor %}"
    assert _render(loop, [message]) == "a;b;"
    renamed = "{% set blocks = messages[0].content %}{% for b in blocks %}{{ b['text'] }};{% endfor %}"
    assert _render(renamed, [message]) == "a;b;"
    with pytest.raises(InvalidArgument, match="takes text only"):
        _render("{{ messages[0].content }}", [{"role": "user", "content": [{"type": "image"}]}])


def test_arguments_of_tool_calls_are_an_object_and_the_callers_data_is_unchanged() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert _render("{{ messages[0].tool_calls[0].function.arguments.a }}", [message]) == "1"
    assert call["function"]["arguments"] == '{"a": 1}'
    call["function"]["arguments"] = "not json"
    assert _render("{{ messages[0].tool_calls[0].function.arguments }}", [message]) == "not json"


def test_a_template_for_tools_is_used_with_tools_only() -> None:
    both = ChatTemplate("plain", "tools: {{ tools[0].name }}", special_tokens={})
    assert both.render([USER], (), {}) == "plain"
    assert both.render([USER], ({"name": "f"},), {}) == "tools: f"


def test_objects_that_are_not_json_are_only_named() -> None:
    class Trap:
        def fire(self) -> None:
            raise AssertionError

    assert _render("{{ messages[0].content }}", [{"role": "user", "content": Trap()}]) == "<Trap>"


def test_a_message_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="each must be an object"):
        _render("{{ messages }}", ["hello"])


def test_threads_have_budgets_of_their_own() -> None:
    from concurrent.futures import ThreadPoolExecutor

    template = ChatTemplate(
        "{% if messages[0].role == 'bad' %}{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        special_tokens={},
        seconds=60.0,
        characters=1000,
    )

    def render(role: str) -> str:
        try:
            return template.render([{"role": role, "content": role}], (), {})
        except HeadraceError as error:
            return type(error).__name__

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(render, ["good", "bad"] * 4)) == ["good", "TooLarge"] * 4
