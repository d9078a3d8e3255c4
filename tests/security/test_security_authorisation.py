# SPDX-License-Identifier: Apache-2.0
"""Authorisation by enumeration (test 11 of the list): every route, gRPC call and WebSocket path of every program.

What there is comes from the real tables, whom it is for from `routes_and_rights`. So a new route fails here until somebody
has said whom it is for, and then is tried with every method, without a key, with a wrong one and with each right.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import MagicMock

import grpc
import pytest
import routes_and_rights as rights
from job_api import ORG, Api, StandInJobs, job_api
from raw_requests import METHODS, ask, exchange
from surfaces import SCOPES, Served, fleet_servers, gateway_path, inference_server, microservice_routes, router_routes

from headrace.core.clock import SystemClock
from headrace.net.http.routes import Routes
from headrace.programs.console.http import GATEWAY, Pages
from headrace.programs.gateway import GatewayMetrics
from headrace.programs.serve.node_server import health_routes

ROOT = Path(__file__).parents[2]
TABLES = {
    "fleet/cluster/webhooks/server.py", "fleet/local/api_server.py", "fleet/metrics.py", "jobs/api/routes.py", "net/site.py",
    "programs/console/fleet.py", "programs/gateway.py", "programs/microservice.py", "programs/router.py",
    "programs/serve/node_server.py", "programs/serve/protocols.py",
}  # fmt: skip
"""Where tables of routes are made: all of them are walked here."""
BODIES = ("POST", "PUT", "PATCH")
VARIANTS = {
    "two slashes": lambda path: "/" + path,
    "a slash at the end": lambda path: path + "/",
    "a dot at the end": lambda path: path + ".",
    "upper case": lambda path: path.upper(),
    "an encoded letter": lambda path: f"/%{ord(path[1]):02x}{path[2:]}",
    "an encoded slash": lambda path: "/" + path[1:].replace("/", "%2f"),
    "this folder": lambda path: "/." + path,
    "the folder above": lambda path: "/v2/health/.." + path,
    "a parameter": lambda path: path + ";x=y",
    "an open path in front": lambda path: "/console/assets/.." + path,
}


def listed(routes: Routes) -> dict[str, str]:
    return {f"{method} {path}": path for method, path in routes.listed()}


def names_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_no_table_of_routes_is_forgotten() -> None:
    """A new program that makes a table, or a new kind of table, has to be walked here, too."""
    results = set()
    for path in (ROOT / "headrace").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "Routes" in text else ():
            makes = isinstance(node, ast.Call) and names_of(node.func) == "Routes"
            derives = isinstance(node, ast.ClassDef) and any(names_of(base) == "Routes" for base in node.bases)
            if makes or derives:
                results.add(str(path.relative_to(ROOT / "headrace")))
    assert results == TABLES


def test_every_route_of_the_smaller_programs_has_a_rule(tmp_path: Path) -> None:
    """None of these changes anything but the fleet's: a socket of its owner's, and a page with a key."""
    assert listed(microservice_routes(tmp_path)).keys() == rights.by_route(rights.MICROSERVICE).keys()
    assert listed(router_routes()).keys() == rights.by_route(rights.ROUTER).keys()
    assert listed(health_routes(MagicMock())).keys() == rights.by_route(rights.NODE).keys()
    tables = {
        "operator": rights.OPERATOR, "agent": rights.AGENT, "webhooks": rights.WEBHOOKS, "local fleet": rights.LOCAL_FLEET,
        "fleet console": rights.FLEET_CONSOLE,
    }  # fmt: skip
    for name, server in fleet_servers(tmp_path).items():
        assert listed(server.site.routes).keys() == rights.by_route(tables[name]).keys(), name


# The inference server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with inference_server(tmp_path_factory.mktemp("authorised"), keys=True) as served:
        yield served


def status(server: Served, method: str, path: str, *fields: str) -> int:
    body = b"{}" if method in BODIES else b""
    return ask(server.port, method, path.replace("{}", "x"), body, tuple(field.encode() for field in fields)).status


def bearer(key: str) -> str:
    return f"authorization: Bearer {key}"


def test_every_route_of_the_server_has_a_rule(server: Served) -> None:
    assert listed(server.protocols.site.routes).keys() == rights.by_route(rights.SERVER).keys()
    assert server.protocols.metrics_site is not None
    assert listed(server.protocols.metrics_site.routes).keys() == rights.by_route(rights.METRICS_PORT).keys()
    assert set(server.calls) == rights.by_route(rights.SERVER_CALLS).keys()


@pytest.mark.parametrize("sent", ["", bearer("nvapi-" + "x" * 64), "x-api-key: ", "authorization: Basic eDp4"])
def test_nothing_without_a_good_key_whatever_the_method(server: Served, sent: str) -> None:
    rules = rights.by_route(rights.SERVER)
    fields = (sent,) if sent else ()
    for path in {path for _, path in server.routes}:
        for method in METHODS:
            right = rules.get(f"{'GET' if method == 'HEAD' else method} {path}")
            reported = status(server, method, path, *fields)
            if right is None:  # no such method; what mounts take is guarded like a route
                assert reported in (401, 405), (method, path, reported)
            elif right == "open":
                assert reported not in (401, 403), (method, path, reported)
            else:
                assert reported == 401, (method, path, reported)


@pytest.mark.parametrize("held", SCOPES)
def test_each_scope_opens_its_own_and_no_other(server: Served, held: str) -> None:
    for route, right in rights.by_route(rights.SERVER).items():
        method, path = route.split(" ")
        reported = status(server, method, path, bearer(server.keys[held]))
        if right in ("open", held) or held == "admin":
            assert reported not in (401, 403), (route, reported)
        else:
            assert reported == 403, (route, reported)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_another_spelling_of_a_path_does_not_bypass_the_check(server: Served, variant: object) -> None:
    assert callable(variant)
    for route, right in rights.by_route(rights.SERVER).items():
        method, path = route.split(" ")
        if right != "open":
            reported = status(server, method, variant(path.replace("{}", "x")))
            assert reported in (400, 401, 404, 405), (method, variant(path), reported)


def test_a_key_in_the_query_or_a_cookie_opens_nothing(server: Served) -> None:
    key = server.keys["admin"]
    for path in (f"/v2?api_key={key}", f"/v2?key={key}", f"/v2?authorization=Bearer%20{key}"):
        assert status(server, "GET", path) == 401
    assert status(server, "GET", "/v2", f"cookie: api_key={key}; x-api-key={key}") == 401


def test_websockets_need_a_key_before_the_handshake(server: Served) -> None:
    sockets = [path for method, path in server.routes if path.startswith("/predict") and path.endswith("/stream")]
    assert len(sockets) == 2
    head = (
        "host: test\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    for path in sockets:
        line = f"GET {path.replace('{}', 'x')} HTTP/1.1\r\n{head}"
        end = "connection: close\r\n\r\n"
        assert exchange(server.port, f"{line}{end}".encode()).status == 401
        assert exchange(server.port, f"{line}{bearer(server.keys['read'])}\r\n{end}".encode()).status == 403


def code(server: Served, method: str, *metadata: tuple[str, str]) -> str:
    """How a call with an empty message ends. One way to call does for all: those that stream take one message as well."""
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_stream(method)(iter([b""]), timeout=30, metadata=metadata)
        with suppress(grpc.RpcError):
            for _ in call:
                if method.endswith("/Watch"):
                    call.cancel()  # which would go on for as long as the server is there
        return str(call.code().name)


def test_every_grpc_call_needs_its_right(server: Served) -> None:
    for method, right in rights.by_route(rights.SERVER_CALLS).items():
        none = code(server, method)
        wrong = code(server, method, ("authorization", "Bearer nvapi-" + "x" * 64))
        assert (none == wrong == "UNAUTHENTICATED") is (right != "open"), (method, none, wrong)
        if right == "open":
            continue
        for held in SCOPES:
            reported = code(server, method, ("authorization", f"Bearer {server.keys[held]}"))
            assert (reported == "PERMISSION_DENIED") is (held not in (right, "admin")), (method, held, reported)
            assert reported != "UNAUTHENTICATED"


# The gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with job_api(StandInJobs(), tmp_path_factory.mktemp("gateway_rights")) as api:
        metrics = GatewayMetrics(SystemClock(), logs=False)
        api.server.call(metrics.add_to, api.server.site.routes)
        api.server.call(Pages(GATEWAY).add_to, api.server.site.routes)
        yield api


def path_of(route: str, org: str = ORG) -> str:
    return gateway_path(route.split(" ")[1], org)


def test_every_route_of_the_gateway_has_a_rule(gateway: Api) -> None:
    described = gateway.http._inference._routes
    assert described is not None
    result = listed(gateway.server.site.routes).keys() | listed(described).keys()
    assert result == rights.by_route(rights.GATEWAY).keys()


# A wrong key is soon told to wait, for its address: `tests/api/access/test_authenticator.py`.
@pytest.mark.parametrize("token", ["", "eyJhbGciOiJub25lIn0.eyJzdWIiOiJyb290In0."])
def test_nothing_of_the_gateway_without_a_good_token_whatever_the_method(gateway: Api, token: str) -> None:
    rules = rights.by_route(rights.GATEWAY)
    for path in {route.split(" ")[1] for route in rules}:
        for method in METHODS:
            right = rules.get(f"{'GET' if method == 'HEAD' else method} {path}", "none")
            reported = gateway.ask(method, path_of(f"- {path}"), b"{}" if method in BODIES else None, token).status
            # 400: a login without a key says what is missing. 200: the stand-in for the
            # jobs takes any key of a service; the real one compares it (`tests/jobs/test_jobs_services.py`).
            # 308 and 404: a slash too many, and a file of another version of the console.
            expected = {
                "open": {200, 308, 400, 401, 404},
                "token": {401},
                "none": {401, 404, 405},
                "service": {200, 401},
            }
            assert reported in expected.get(right, {401}), (method, path, reported)
            assert token or reported != 200 or right == "open", (method, path)


@pytest.mark.parametrize(("who", "role"), [("victor", "viewer"), ("alice", "operator")])
def test_each_role_is_refused_what_is_above_it(gateway: Api, who: str, role: str) -> None:
    order = ("viewer", "operator", "admin")
    token = gateway.login(who)
    refused = 0
    for route, right in rights.by_route(rights.GATEWAY).items():
        if right in order and order.index(right) > order.index(role):
            got = gateway.ask(route.split(" ")[0], path_of(route), b"{}", token)
            assert got.status == 403, (route, got.body)
            refused += 1
    assert refused > 10


def test_another_organisation_is_hidden_in_every_request(gateway: Api) -> None:
    """404 and not 403, and the same words as for an organisation that nobody has (test 25)."""
    token = gateway.login("bob", "other")
    for route, right in rights.by_route(rights.GATEWAY).items():
        if "/orgs/" in route and right != "service":
            method = route.split(" ")[0]
            body = b"{}" if method in BODIES else None
            real, none = (gateway.ask(method, path_of(route, org), body, token) for org in (ORG, "none"))
            assert (real.status, none.status) == (404, 404), (route, real.body)
            assert real.body.replace(ORG.encode(), b"?") == none.body.replace(b"none", b"?")


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_another_spelling_of_a_gateways_path_does_not_bypass_the_check(gateway: Api, variant: object) -> None:
    assert callable(variant)
    for route, right in rights.by_route(rights.GATEWAY).items():
        if right != "open":
            reported = gateway.ask(route.split(" ")[0], variant(path_of(route)), b"{}").status
            assert reported in (400, 401, 404, 405), (route, reported)
