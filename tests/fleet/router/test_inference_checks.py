# SPDX-License-Identifier: Apache-2.0
"""Health checks by a real inference: a backend that says it is ready and cannot infer gets no requests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from routing import Routing, ScriptedBackend, ask, routing, scripted_backend

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.settings import BackendAddress, HealthSettings, RouterSettings, check_settings
from support.waiting import eventually

BODY = '{"model":"m","prompt":"a","max_tokens":1}'


class Engine:
    """Ready, whatever happens; an inference has the status that the test sets."""

    def __init__(self) -> None:
        self.status = b"200 OK"

    def __call__(self, sock: socket.socket, backend: ScriptedBackend) -> None:
        while request := backend.read_request(sock):
            status = self.status if request.startswith(b"POST") else b"200 OK"
            sock.sendall(b"HTTP/1.1 %b\r\ncontent-length: 2\r\n\r\nok" % status)


@pytest.fixture
def engine() -> Iterator[tuple[Engine, ScriptedBackend]]:
    engine = Engine()
    with scripted_backend(engine) as backend:
        yield engine, backend


def settings(**changes: Any) -> HealthSettings:
    # Whatever was proved before counts for no time: each check asks again.
    wanted = {
        "interval_seconds": 0.02,
        "timeout_seconds": 30.0,
        "rise": 1,
        "fall": 2,
        "inference_interval_seconds": 0.0,
    }
    return HealthSettings("/ready", inference_path="/v1/completions", inference_body=BODY, **wanted | changes)  # type: ignore[arg-type]


def state(router: Routing) -> str:
    return router.proxy.backends.all[0].state


def inferences(backend: ScriptedBackend) -> list[bytes]:
    return [request for request in backend.seen if request.startswith(b"POST /v1/completions")]


def test_a_backend_that_cannot_infer_gets_no_requests_until_it_can(engine: tuple[Engine, ScriptedBackend]) -> None:
    behaviour, backend = engine
    with routing(backend.port, health=settings()) as router:
        assert state(router) == "up"
        assert inferences(backend)[0].endswith(BODY.encode())
        behaviour.status = b"500 Out of memory"
        eventually(lambda: state(router) == "down")
        refused = ask(router.port, "GET", "/hello")
        assert refused.status == 503 and b"/v1/completions answered 500" in refused.body
        metrics = ask(router.port, "GET", "/router/metrics").body.decode()
        name = f"http://127.0.0.1:{backend.port}"
        failed = next(line for line in metrics.splitlines() if line.startswith("headrace_router_failed_checks_total{"))
        assert name in failed and float(failed.split()[-1]) >= 2
        assert f'headrace_router_ejections_total{{backend="{name}"}} 0' in metrics
        behaviour.status = b"200 OK"
        eventually(lambda: state(router) == "up")


def test_one_that_answers_clients_need_not_prove_that_it_can(engine: tuple[Engine, ScriptedBackend]) -> None:
    behaviour, backend = engine
    with routing(backend.port, health=settings(inference_interval_seconds=3600.0)) as router:
        assert len(inferences(backend)) == 1
        assert ask(router.port, "GET", "/hello").status == 200
        checks = router.proxy.backends.all[0].health.checks
        behaviour.status = b"500 Out of memory"
        eventually(lambda: router.proxy.backends.all[0].health.checks > checks + 3)
        assert len(inferences(backend)) == 1 and state(router) == "up"


def test_it_has_a_key_if_the_backend_wants_one(engine: tuple[Engine, ScriptedBackend], tmp_path: Path) -> None:
    _, backend = engine
    key = tmp_path / "key"
    key.write_text("hr_secret\n")
    with routing(backend.port, health=settings(inference_key_file=str(key))) as router:
        assert b"\r\nauthorization: Bearer hr_secret\r\n" in inferences(backend)[0]
        key.unlink()
        eventually(lambda: state(router) == "down")
        refused = ask(router.port, "GET", "/hello").body
        assert b"the key for its inference check cannot be read" in refused and b"hr_secret" not in refused


def test_settings_that_cannot_be() -> None:
    backends = (BackendAddress.parse("http://a:1"),)
    for health, complaint in (
        (HealthSettings(inference_path="v1"), "health.inference_path starts with /"),
        (HealthSettings(path="", inference_path="/v1"), "set health.path too"),
        (HealthSettings(path="a b"), "health.path starts with /"),
    ):
        with pytest.raises(InvalidArgument, match=complaint):
            check_settings(RouterSettings(backends, health=health))
