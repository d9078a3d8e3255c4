# SPDX-License-Identifier: Apache-2.0
"""Sessions through a running router: a cookie that is given, a header, and what a full backend means for them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from routing import Routing, ask, routing

from headrace.fleet.router.settings import SessionAffinitySettings
from support.serving import echo_site, serving


def _given(router: Routing) -> list[int]:
    return [backend.stats.requests for backend in router.proxy.backends.all]


def test_a_client_without_a_cookie_is_given_one_and_stays() -> None:
    with serving(echo_site()) as one, serving(echo_site()) as two:
        with routing(one.port, two.port, policy="round-robin", sticky=SessionAffinitySettings(cookie="hr")) as router:
            homes: Counter[int] = Counter()
            for _ in range(12):
                first = router.get("/hello")
                name, _, rest = first.fields["set-cookie"].partition("=")
                key = rest.partition(";")[0]
                assert (first.status, first.body, name) == (200, b"hello", "hr")
                assert "HttpOnly" in rest and "Secure" not in rest
                before = _given(router)
                for _ in range(3):
                    again = router.get("/hello", cookie=f"a=b; hr={key}")
                    assert again.body == b"hello" and "set-cookie" not in again.fields
                after = _given(router)
                gained = [now - then for now, then in zip(after, before, strict=True)]
                assert sorted(gained) == [0, 3]
                homes[gained.index(3)] += 1
            assert len(homes) == 2


def test_a_session_moves_when_its_backend_dies_and_nothing_is_lost() -> None:
    with serving(echo_site()) as one, serving(echo_site()) as two:
        with routing(one.port, two.port, sticky=SessionAffinitySettings(header="x-session")) as router:
            keys = [str(number) for number in range(20)]
            for key in keys:
                assert router.get("/hello", x_session=key).body == b"hello"
            assert min(_given(router)) > 0
            one.call(lambda: [connection.abort() for connection in tuple(one.site.connections)])
            one.call(one.server.abort)
            for key in keys:
                answer = router.get("/hello", x_session=key)
                assert (answer.status, answer.body) == (200, b"hello")
            assert router.proxy.chooser is not None
            assert {why for _, why in router.proxy.chooser.counts} >= {"sticky"}


def test_a_long_body_is_routed_by_its_head() -> None:
    with serving(echo_site()) as one, serving(echo_site()) as two:
        changes: dict[str, Any] = {"whole_bytes": 1000, "sticky": SessionAffinitySettings(header="x-session")}
        with routing(one.port, two.port, **changes) as router:
            body = b"x" * 5000
            for _ in range(4):
                assert ask(router.port, "POST", "/echo", body, {"x-session": "a"}).body == body
            assert sorted(_given(router)) == [0, 4]
