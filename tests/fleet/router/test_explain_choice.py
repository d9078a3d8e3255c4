# SPDX-License-Identifier: Apache-2.0
"""Which backend a request would get, and why: asked without sending it, and counted when it is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from routing import Routing, ask, routing

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.explain import parse_explain_request
from headrace.fleet.router.settings import SessionAffinitySettings
from support.serving import echo_site, serving

_PROMPT = {"prompt": "how does a turbine work? " * 8}


def _explain(router: Routing, **asked: Any) -> Any:
    answer = ask(router.port, "POST", "/router/explain", json.dumps(asked).encode())
    assert answer.status == 200, answer
    return json.loads(answer.body)


@pytest.mark.parametrize("policy", ["round-robin", "least", "weighted"])
def test_explaining_does_not_advance_the_round_robin(policy: str) -> None:
    with serving(echo_site()) as one, serving(echo_site()) as two, serving(echo_site()) as three:
        with routing(one.port, two.port, three.port, policy=policy) as router:
            for _ in range(7):
                received = [_explain(router, method="GET", path="/hello") for _ in range(3)]
                assert len({item["backend"] for item in received}) == 1 and received[0]["why"] == "policy"
                before = {backend.name: backend.stats.requests for backend in router.proxy.backends.all}
                assert router.get("/hello").status == 200
                gained = [
                    backend.name
                    for backend in router.proxy.backends.all
                    if backend.stats.requests > before[backend.name]
                ]
                assert gained == [received[0]["backend"]]


def test_a_prompt_is_explained_by_the_backends_that_cached_it() -> None:
    with serving(echo_site()) as one, serving(echo_site()) as two:
        with routing(one.port, two.port, policy="cache_aware") as router:
            first = _explain(router, path="/v1/completions", body=_PROMPT)
            assert first["why"] == "miss" and set(first["details"]["matched_characters"].values()) == {0}
            assert router.get("/echo", "POST", json.dumps(_PROMPT).encode()).status == 200
            home = next(backend.name for backend in router.proxy.backends.all if backend.stats.requests)
            explanation = _explain(router, path="/v1/completions", body=_PROMPT)
            assert (explanation["backend"], explanation["why"]) == (home, "hit")
            assert explanation["details"]["matched_characters"][home] == len(_PROMPT["prompt"])
            # The same as bytes.
            assert _explain(router, path="/", body=json.dumps(_PROMPT)) == _explain(router, path="/", body=_PROMPT)
            text = ask(router.port, "GET", "/router/metrics").body.decode()
            line = f'headrace_router_decisions_total{{policy="cache_aware",backend="{home}",why="miss"}} 1'
            assert line in text and 'why="hit"' not in text


def test_a_session_is_explained_by_its_order() -> None:
    with serving(echo_site()) as one, serving(echo_site()) as two:
        with routing(one.port, two.port, sticky=SessionAffinitySettings(header="x-session")) as router:
            explanation = _explain(router, path="/hello", headers={"X-Session": "abc"})
            assert (
                explanation["why"] == "sticky" and explanation["details"]["session_order"][0] == explanation["backend"]
            )
            assert len(explanation["details"]["session_order"]) == 2
            for _ in range(3):
                router.get("/hello", x_session="abc")
            home = next(backend for backend in router.proxy.backends.all if backend.name == explanation["backend"])
            assert home.stats.requests == 3
            text = ask(router.port, "GET", "/router/metrics").body.decode()
            assert f'policy="p2c",backend="{home.name}",why="sticky"}} 3' in text


def test_without_backends_the_reason_is_stated() -> None:
    with serving(echo_site()) as one, routing(one.port) as router:
        assert _explain(router, path="/hello")["why"] == "only"
        backend = router.proxy.backends.all[0]

        def take_out() -> None:
            for _ in range(3):
                router.proxy.backends.checked(backend, False, 1.0, "it burns")

        router.server.call(take_out)
        explanation = _explain(router, path="/hello")
        assert (
            explanation["backend"] is None and explanation["why"] == "nobody" and "it burns" in explanation["because"]
        )
        assert explanation["backends"][0]["candidate"] is False


@pytest.mark.parametrize(
    "bad",
    [b"", b"[", b"[]", b'{"colour": 1}', b'{"path": 5}', b'{"headers": {"a": 1}}', b'{"body_base64": "%"}'],
)
def test_questions_that_are_none(bad: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse_explain_request(bad)


def test_bytes_are_passed_unchanged() -> None:
    assert bytes(parse_explain_request(b'{"body_base64": "AP8="}').body) == b"\x00\xff"
