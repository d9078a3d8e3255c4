# SPDX-License-Identifier: Apache-2.0
"""What an accident tells (test 15): every route and call of every program, while everything behind it raises.

The exception's text has what must not get out: a path, an address in memory, the words of a library. The client gets one
fixed sentence and an id; the log has the rest under that id.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import routes_and_rights as rights
from job_api import job_api
from raw_requests import Answer, ask
from surfaces import Served, fleet_servers, gateway_path, inference_server, microservice_routes, write_echo

from headrace.core.errors import INTERNAL_TEXT
from headrace.engine.dataplane import DataPlane
from headrace.fleet.cluster.webhooks import server as webhooks
from headrace.fleet.local.api_server import ApiServer
from headrace.jobs.microservice.service import Microservice
from headrace.net.site import Site
from support.serving import serving

SECRET = "/srv/secret/w31ghts.bin at 0x7f3a12345678"
BODY = json.dumps(
    {
        "inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}],
        "model": "echo", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x",
        "features": [1, 2, 3, 4],
    }
).encode()  # fmt: skip


def explode(*_: Any, **__: Any) -> Any:
    raise RuntimeError(f"cannot open {SECRET}\nERROR forged line")


class ExplodingJobs:
    """Whatever the gateway asks of its jobs raises."""

    def __getattr__(self, name: str) -> Any:
        return explode


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("exploding")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in list(vars(DataPlane).items()):
            if not name.startswith("_") and callable(value):
                patch.setattr(DataPlane, name, explode)
        with inference_server(folder, keys=False, models=write_echo(folder / "models")) as served:
            yield served


def tells_nothing(answer: Answer) -> bool:
    """Whether it is an accident of ours; nothing of it may be in the answer, whatever it is."""
    text = repr(answer)
    for part in ("secret", "w31ghts", "0x7f", "RuntimeError", "Traceback", "forged", "headrace/", ".py"):
        assert part not in text, answer
    return answer.status == 500


def test_every_route_of_the_server(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    failed = 0
    for route in rights.by_route(rights.SERVER):
        method, path = route.split(" ")
        if path in ("/docs", "/console", "/console/assets/{}/{}"):
            continue  # pages that are made before anything can fail, and have words of their own
        answer = ask(
            server.port, method, path.replace("{}", "echo", 1).replace("{}", "1"), BODY if method != "GET" else b""
        )
        if tells_nothing(answer):
            failed += 1
            assert INTERNAL_TEXT in answer.body.decode() + answer.fields.get("nv-status", ""), (route, answer)
            assert "x-request-id" in answer.fields or "request_id" in answer.fields["nv-status"], (route, answer)
    assert failed > 20
    # The log has it, or nobody could mend anything.
    assert any(record.exc_info and SECRET in str(record.exc_info[1]) for record in caplog.records)


def test_an_accident_is_found_in_the_log_by_its_id(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = ask(server.port, "GET", "/v2/models/echo/config")
    assert answer.status == 500
    results = [
        record for record in caplog.records if getattr(record, "request_id", "") == answer.fields["x-request-id"]
    ]
    assert len(results) == 1


def test_every_call_over_grpc(server: Served) -> None:
    failed = 0
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for method in server.calls:
            if method.endswith("/Watch"):
                continue  # which goes on for as long as the server is there
            call = channel.stream_stream(method)(iter([b""]), timeout=30)
            with suppress(grpc.RpcError):
                for message in call:
                    assert b"secret" not in message
            reported = str(call.details())
            assert "secret" not in reported and "RuntimeError" not in reported, (method, reported)
            if call.code() is grpc.StatusCode.INTERNAL:
                failed += 1
                assert reported == INTERNAL_TEXT
    assert failed > 5


def test_every_route_of_the_gateway(tmp_path: Path) -> None:
    failed = 0
    with job_api(ExplodingJobs(), tmp_path) as api:
        token = api.login("root")
        for route in rights.by_route(rights.GATEWAY):
            method, path = route.split(" ")
            # An administrator reads the audit log, where kinds of accidents have a place; it is looked at below.
            if path in ("/docs", "/openapi.json", "/metrics", "/console") or path.endswith(("/logout", "/audit")):
                continue
            if path.startswith("/console/"):
                continue
            path = gateway_path(path)
            got = api.ask(method, path, BODY if method != "GET" else None, token)
            if tells_nothing(Answer(got.status, got.fields, got.body)):
                failed += 1
                assert (got.json["error_desc"], bool(got.fields["x-request-id"])) == (INTERNAL_TEXT, True), route
        audited = "".join(path.read_text() for path in tmp_path.rglob("*audit*") if path.is_file())
    assert failed > 30
    assert audited and "w31ghts" not in audited


def test_every_route_of_a_microservice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("liveness", "status", "models", "infer", "chat", "stream"):
        monkeypatch.setattr(Microservice, name, explode)
    monkeypatch.setattr(Microservice, "not_ready_response", lambda self: None)
    failed = 0
    with serving(lambda: Site(microservice_routes(tmp_path))) as running:
        for route in rights.by_route(rights.MICROSERVICE):
            method, path = route.split(" ")
            for body in (BODY, BODY[:-1] + b', "stream": true}') if method == "POST" else (b"",):
                answer = ask(running.port, method, path, body)
                if tells_nothing(answer):
                    failed += 1
                    assert INTERNAL_TEXT in answer.body.decode() and answer.fields["x-request-id"], route
    assert failed == 7


def test_every_route_of_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket and the page of a machine's, the webhooks, metrics of the operator and of the agent."""
    monkeypatch.setattr(ApiServer, "call", explode)
    monkeypatch.setattr(webhooks, "review", explode)
    tables = {
        "operator": rights.OPERATOR, "agent": rights.AGENT, "webhooks": rights.WEBHOOKS, "local fleet": rights.LOCAL_FLEET,
        "fleet console": rights.FLEET_CONSOLE,
    }  # fmt: skip
    failed = dict.fromkeys(tables, 0)
    for name, server in fleet_servers(tmp_path).items():
        routes = server.site.routes
        with serving(lambda routes=routes: Site(routes)) as running:
            for route in rights.by_route(tables[name]):
                method, path = route.split(" ")
                if path.startswith("/console") and "/api/" not in path:
                    continue  # pages that are made before anything can fail, and have words of their own
                sent = BODY if method == "POST" else b""
                answer = ask(running.port, method, path.replace("{}", "x"), sent, (b"authorization: Bearer key",))
                if tells_nothing(answer):
                    failed[name] += 1
                    assert INTERNAL_TEXT in answer.body.decode() and answer.fields["x-request-id"], route
    assert failed == {"operator": 0, "agent": 0, "webhooks": 9, "local fleet": 1, "fleet console": 7}
