# SPDX-License-Identifier: Apache-2.0
"""New activation settings while requests are held: nothing is lost, and nothing is started twice."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from activation_router import TARGET, ScriptedScaler, activation_router
from routing import ask, routing

from headrace.fleet.router.settings import ActivationSettings, ScaleTarget
from support.serving import echo_site, serving
from support.waiting import eventually


def renewed(router: Any, activation: ActivationSettings | None) -> list[str]:
    fixed: list[str] = router.server.call(
        router.proxy.update_settings, replace(router.proxy.settings, activation=activation)
    )
    return fixed


def test_numbers_change_while_a_request_waits() -> None:
    with serving(echo_site()) as server, activation_router(server.port) as router, ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, router.port, "GET", "/hello")
        router.held(1)
        assert renewed(router, ActivationSettings((TARGET,), idle_seconds=0.1, held_requests=1)) == []
        assert ask(router.port, "GET", "/hello").status == 503, "one may wait now"
        router.scaler.ready = 1
        assert waiting.result(30).body == b"hello"
        router.becomes("asleep")  # after a tenth of a second without any


def test_what_may_not_sleep_any_more_is_woken_for_who_waits_and_stays() -> None:
    with (
        serving(echo_site()) as server,
        activation_router(server.port, idle_seconds=0.1) as router,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(ask, router.port, "GET", "/hello")
        router.held(1)
        assert renewed(router, None) == []
        router.scaler.ready = 1
        assert waiting.result(30).body == b"hello"
        assert router.activator.settings.idle_seconds == float("inf") and router.state == "awake"
        assert renewed(router, ActivationSettings((TARGET,), idle_seconds=0.1)) == []
        router.becomes("asleep")


def test_another_target_is_waited_for_as_well() -> None:
    other = ScaleTarget("other")
    with serving(echo_site()) as server, activation_router(server.port) as router, ThreadPoolExecutor() as pool:
        assert renewed(router, ActivationSettings((TARGET, other))) == []
        eventually(lambda: router.activator.targets.counts(other))
        waiting = pool.submit(ask, router.port, "GET", "/hello")
        router.held(1)
        eventually(lambda: set(router.scaler.asked) == {("other", 1), (TARGET.name, 1)})
        router.scaler.ready = 1
        assert waiting.result(30).body == b"hello"


def test_what_never_slept_may_from_now_on() -> None:
    with serving(echo_site()) as server, routing(server.port) as router:
        scaler = ScriptedScaler(wanted=1, ready=1)
        router.proxy._make_scaler = lambda _: scaler
        assert ask(router.port, "GET", "/hello").body == b"hello"
        changed = replace(router.proxy.settings, activation=ActivationSettings((TARGET,), idle_seconds=0.1))
        assert router.server.call(router.proxy.update_settings, changed) == []
        eventually(lambda: (TARGET.name, 0) in scaler.asked)
        assert ask(router.port, "GET", "/hello").body == b"hello"
        assert json.loads(ask(router.port, "GET", "/router/status").body)["waking"]["wakes"] == 1
        assert "headrace_router_wakes_total 1" in ask(router.port, "GET", "/router/metrics").body.decode()
