# SPDX-License-Identifier: Apache-2.0
"""What a page in somebody's browser can do to a server that this browser reaches (test 12): forged requests, DNS rebinding.

A browser sends what any page asks for, to loopback too, and tells the page's Origin. Without API keys nothing else stands
between a page and the routes that change something; with keys, the page has none.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import routes_and_rights as rights
from job_api import Api, StandInJobs, job_api
from raw_requests import Answer, exchange
from surfaces import Served, inference_server, microservice_routes, router_routes, write_echo

from headrace.api.access.settings import AccessSettings, RateLimit, RateLimits
from headrace.api.predict.settings import PredictSettings
from headrace.net.http.heads import RequestHead
from headrace.net.http.routes import Routes
from headrace.programs.serve.access_guard import may_change

CHANGES = [
    route.split(" ") for route, right in rights.by_route(rights.SERVER).items()
    if right == "admin" and not route.startswith("GET ")
]  # fmt: skip
WRITES = """
from pathlib import Path
class TritonPythonModel:
    def initialize(self, args):
        Path({canary!r}).mkdir()
    def execute(self, requests):
        return []
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """As a user starts it for themselves: on loopback, without keys, models loaded on request."""
    folder = tmp_path_factory.mktemp("browsed")
    write_echo(folder / "models")
    with inference_server(
        folder, keys=False, models=folder / "models", predict=PredictSettings(model="echo")
    ) as served:
        yield served


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with job_api(StandInJobs(), tmp_path_factory.mktemp("browsed_gateway")) as api:
        yield api


def send(port: int, method: str, path: str, *fields: str, host: str = "", body: bytes = b"{}") -> Answer:
    """What a browser sends: the body as text, which needs no leave of the server's."""
    head = [f"{method} {path.replace('{}', 'x')} HTTP/1.1", f"host: {host or f'127.0.0.1:{port}'}", "connection: close"]
    head += ["content-type: text/plain", f"content-length: {len(body)}", *fields]
    return exchange(port, "\r\n".join([*head, "", ""]).encode() + body)


def test_there_is_something_to_protect() -> None:
    assert len(CHANGES) > 15


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://evil.example", "null", "http://localhost:1", "file://", "http://127.0.0.1"],
)
def test_pages_of_others_change_nothing(server: Served, origin: str) -> None:
    for method, path in CHANGES:
        answer = send(server.port, method, path, f"origin: {origin}")
        assert answer.status == 403, (method, path, answer)
        assert "--api-keys-file" in answer.error


@pytest.mark.parametrize(
    "name", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "x.localhost.evil"]
)
def test_a_rebound_dns_name_changes_nothing(server: Served, name: str) -> None:
    """DNS rebinding: for the browser, page and server are one host."""
    host = f"{name}:{server.port}"
    for method, path in CHANGES:
        assert send(server.port, method, path, f"origin: http://{host}", host=host).status == 403, (method, path)


def test_the_servers_own_page_and_programs_are_not_restricted(server: Served) -> None:
    for host in (f"127.0.0.1:{server.port}", f"localhost:{server.port}", f"[::1]:{server.port}", "gpu-box:8000"):
        for method, path in CHANGES:
            assert send(server.port, method, path, f"origin: http://{host}", host=host).status != 403, (host, path)
    for method, path in CHANGES:
        assert send(server.port, method, path, host="models.example").status != 403, (method, path)


def test_no_page_has_this_server_run_its_code(server: Served, tmp_path: Path) -> None:
    """The worst of it: a load may bring a model.py along."""
    for name, fields in (("page", ["origin: http://evil.example"]), ("program", [])):
        canary = tmp_path / name
        code = base64.b64encode(WRITES.format(canary=str(canary)).encode()).decode()
        tensor = {"name": "T", "data_type": "TYPE_FP32", "dims": [1]}
        config = json.dumps({"backend": "python", "max_batch_size": 0, "input": [tensor], "output": [tensor]})
        body = json.dumps({"parameters": {"config": config, "file:1/model.py": code}}).encode()
        answer = send(server.port, "POST", f"/v2/repository/models/{name}/load", *fields, body=body)
        assert (answer.status == 403) is (name == "page"), answer
        # Whoever may load may run code, as SECURITY.md says: or the line above would show nothing.
        assert canary.exists() is (name == "program")


def test_over_http_2_too(server: Served) -> None:
    for origin, expected in (("http://evil.example", "403"), (f"http://127.0.0.1:{server.port}", "200")):
        arguments = ["curl", "-s", "--http2-prior-knowledge", "-o", "/dev/null", "-w", "%{http_version} %{http_code}"]
        url = f"http://127.0.0.1:{server.port}/v2/logging"
        result = subprocess.run(
            [*arguments, "-H", f"origin: {origin}", "-d", "{}", url], capture_output=True, text=True, check=True
        )
        assert result.stdout == f"2 {expected}"


def test_rate_limits_without_keys_leave_it_closed(tmp_path: Path) -> None:
    limits = AccessSettings(rates=RateLimits((RateLimit(1000, 1.0, "address"),)))
    with inference_server(tmp_path, keys=False, access=limits) as served:
        assert send(served.port, "POST", "/v2/logging", "origin: http://evil.example").status == 403
        assert send(served.port, "POST", "/v2/logging").status == 200


def test_a_key_is_enough_wherever_the_page_is_from(tmp_path: Path) -> None:
    """A page behind a proxy that changes the Host; a page of others has no key, and a browser sends none by itself."""
    with inference_server(tmp_path, keys=True) as served:
        key = f"authorization: Bearer {served.keys['admin']}"
        assert send(served.port, "POST", "/v2/logging", "origin: https://models.example").status == 401
        assert send(served.port, "POST", "/v2/logging", "origin: https://models.example", key).status == 200


def test_which_names_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Box.Example.ORG")

    def allowed(host: str, scheme: str = "http", origin: str = "") -> bool:
        fields = ((b"host", host.encode()), (b"origin", f"{scheme}://{origin or host}".encode()))
        return may_change(RequestHead(b"POST", b"/", fields, scheme=scheme.encode(), version="1.1"))

    assert allowed("box.example.org:8000")
    assert not allowed("other.example.org:8000")
    nowhere = RequestHead(b"POST", b"/", ((b"origin", b"null"),), version="1.0")
    assert not may_change(nowhere)
    # A browser that speaks TLS with us has seen a certificate of that name, which a page elsewhere does not have.
    assert allowed("other.example.org:8000", "https")
    assert not allowed("other.example.org:8000", "https", "evil.example")


def handshake(port: int, path: str, *fields: str) -> Answer:
    head = [f"GET {path.replace('{}', 'echo')} HTTP/1.1", f"host: 127.0.0.1:{port}", "connection: upgrade, close"]
    head += ["upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", *fields]
    return exchange(port, "\r\n".join([*head, "", ""]).encode())


def test_pages_of_others_open_no_websocket(server: Served) -> None:
    sockets = [path for method, path in server.routes if path.endswith("/stream")]
    assert sockets
    for path in sockets:
        for origin in ("http://evil.example", "null", f"http://localhost:{server.port}"):
            assert handshake(server.port, path, f"origin: {origin}").status == 403, (path, origin)
        own = f"origin: http://127.0.0.1:{server.port}"
        assert handshake(server.port, path, own, "sec-websocket-version: 12").status in (400, 426)


PREFLIGHT = ("origin: http://evil.example", "access-control-request-method: POST", "access-control-request-headers: x")


def _paths(routes: Routes) -> set[str]:
    return {path for _, path in routes.listed()}


def test_no_cors_permission_for_foreign_pages(server: Served, gateway: Api, tmp_path: Path) -> None:
    """No CORS, so a browser sends nothing that needs to be asked for, and keeps every answer from the page; no cookies."""
    request = 0
    for port, paths in (
        (server.port, _paths(server.protocols.site.routes)),
        (gateway.port, _paths(gateway.server.site.routes)),
    ):
        for path in paths:
            for method in ("OPTIONS", "GET", "POST"):
                answer = send(port, method, path, *PREFLIGHT)
                assert not [name for name in answer.fields if name.startswith("access-control-")], (method, path)
                assert "set-cookie" not in answer.fields, (method, path)
                assert method != "OPTIONS" or answer.status in (400, 401, 404, 405), (path, answer)
                request += 1
    assert request > 300
    for routes in (microservice_routes(tmp_path), router_routes()):
        assert not [route for route in routes.listed() if route[0] == "OPTIONS"]


def test_every_page_is_closed_to_the_scripts_and_frames_of_others(server: Served, gateway: Api) -> None:
    """Also what nobody has thought of: any answer that a browser would show as a page."""
    pages: list[Any] = []
    for port, paths in (
        (server.port, _paths(server.protocols.site.routes)),
        (gateway.port, _paths(gateway.server.site.routes)),
    ):
        for path in sorted(paths):
            answer = send(port, "GET", path, "accept: text/html")
            kind = answer.fields.get("content-type", "")
            assert not kind.startswith(("application/xhtml", "text/xml", "application/xml")), path
            if kind.startswith(("text/html", "image/svg")):
                pages.append(path)
                policy = answer.fields["content-security-policy"]
                assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy, path
                assert "unsafe" not in policy and "http:" not in policy and "*" not in policy, path
                assert answer.fields["x-content-type-options"] == "nosniff", path
                assert answer.fields["referrer-policy"] == "no-referrer", path
    assert pages == ["/console", "/docs", "/docs"]
