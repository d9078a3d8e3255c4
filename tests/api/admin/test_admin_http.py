# SPDX-License-Identifier: Apache-2.0
"""`/admin/traffic` over a real server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from split_planes import SplitPlane, echo, open_split_plane

from headrace.api.admin import Admin, admin_table
from headrace.api.openapi.document import base_document, undescribed_routes
from headrace.api.v2.http import V2Http
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.serving import Serving, serving

REQUEST = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
Ask = Any


class AdminServer:
    """A server with one model of two versions."""

    split_plane: SplitPlane

    async def site(self) -> Site:
        self.split_plane = await open_split_plane(echo, echo)
        routes = Routes()
        Admin(self.split_plane.traffic).add_to(routes)
        V2Http(self.split_plane.plane).add_to(routes)
        return Site(routes)


@pytest.fixture
def ask() -> Iterator[Ask]:
    here = AdminServer()
    with serving(here.site) as server:

        def one(method: str, path: str, document: Any = None) -> tuple[int, Any]:
            body = document if isinstance(document, bytes) else json.dumps(document).encode() if document else None
            return answered(server, method, path, body)

        yield one
        server.call(here.split_plane.close)


def answered(server: Serving, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_a_split_is_set_shown_and_removed(ask: Ask) -> None:
    assert ask("GET", "/admin/traffic") == (200, {"splits": []})
    split = {"weights": {"1": 0.5, "2": 0.5}, "sticky": {"field": "user"}}
    status, state = ask("PUT", "/admin/traffic/m", split)
    assert status == 200 and state["split"] == split and state["baseline"] == "1"
    assert ask("GET", "/admin/traffic/m")[1] == ask("GET", "/admin/traffic")[1]["splits"][0]
    seen = {}
    for user in range(40):
        status, answer = ask("POST", "/v2/models/m/infer", {**REQUEST, "parameters": {"user": str(user)}})
        assert status == 200
        seen[user] = answer["model_version"]
    assert set(seen.values()) == {"1", "2"}
    for user, version in seen.items():
        assert (
            ask("POST", "/v2/models/m/infer", {**REQUEST, "parameters": {"user": str(user)}})[1]["model_version"]
            == version
        )
    status, report = ask("GET", "/admin/traffic/m/report")
    assert status == 200 and sum(version["requests"] for version in report["versions"]) == 80
    assert report["versions"][0]["latency_ms"]["p99"] > 0
    assert [comparison["version"] for comparison in report["comparisons"]] == ["2"]
    assert ask("POST", "/admin/traffic/m/rollback", {"version": "2", "reason": "why not"})[0] == 200
    assert ask("GET", "/admin/traffic/m")[1]["versions"][1]["reason"] == "why not"
    # By POST too, which lifts the rollback.
    assert ask("POST", "/admin/traffic/m", {"weights": {"1": 0, "2": 100}})[1]["versions"][1]["state"] == "serving"
    assert ask("DELETE", "/admin/traffic/m") == (200, {"model": "m", "removed": True})
    assert ask("DELETE", "/admin/traffic/m")[0] == ask("GET", "/admin/traffic/m/report")[0] == 404


@pytest.mark.parametrize(
    ("path", "document", "status", "says"),
    [
        ("m", b"{", 400, "not JSON (line 1, column"),
        ("m", b"[1]", 400, "must be a JSON object"),
        ("m", b"\xff", 400, "not JSON"),
        ("m", b" " * 300_000, 400, "far less than"),
        ("m", b"[" * 100_000, 400, "not JSON"),
        ("m", {"weights": {"1": 0.5, "2": 0.2}}, 400, "sum to 0.7"),
        ("m", {"weights": {"1": 0.5, "9": 0.5}}, 400, "no version '9'"),
        ("m", {"weight": {"1": 1}}, 400, "did you mean 'weights'"),
        ("nothing", {"weights": {"1": 1}}, 404, "is not loaded"),
        ("..%2Fx", {"weights": {"1": 1}}, 400, "is not allowed"),
        ("m/rollback", {"version": 2}, 400, "both are strings"),
        ("m/rollback", {"version": "2", "other": 1}, 400, "both are strings"),
        ("m/rollback", {"version": "2"}, 404, "has no split"),
    ],
)
def test_invalid_input_is_refused_with_a_reason(ask: Ask, path: str, document: Any, status: int, says: str) -> None:
    got, reply = ask("POST", f"/admin/traffic/{path}", document)
    assert (got, says in reply["error"]) == (status, True), reply
    assert ask("GET", "/admin/traffic") == (200, {"splits": []})


def test_every_route_is_described_and_every_description_is_of_a_route() -> None:
    table = admin_table()
    routes = Routes()
    Admin(cast("Any", None)).add_to(routes)
    assert not undescribed_routes(routes, [table])
    document = base_document(routes, [table])
    assert {(method.upper(), path) for path, found in document["paths"].items() for method in found} == set(table)
    for operation in table.values():
        for response in operation["responses"].values():
            if "$ref" in response:
                assert response["$ref"].rpartition("/")[2] in document["components"]["responses"]
