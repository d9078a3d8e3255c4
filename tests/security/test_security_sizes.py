# SPDX-License-Identifier: Apache-2.0
"""More than is allowed (test 4), on every route of the gateway, a microservice, the router and the webhooks with a body.

The inference server's routes are tried by `tests/api/test_bad_input_corpus.py`, frames and messages by `tests/net`. Nobody
sends what is announced: who waits for it before they refuse would never answer. What gateway and router pass on is not kept
by them but held back (`tests/fleet/router/test_router_forwarding.py`), and counted where it ends.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import routes_and_rights as rights
from job_api import StandInJobs, job_api
from raw_requests import Answer, ask, exchange
from routing import routing
from surfaces import fleet_servers, gateway_path, microservice_routes

from headrace.core.limits import Limits
from headrace.jobs.microservice.service import Microservice
from headrace.net.site import Site
from support.serving import serving

MOST = 1 << 20
REFUSED = (400, 413)
"""TAO's clients know 400 for what is wrong with a request, and nothing finer."""


class UploadRoutes(NamedTuple):
    """A program and its routes that take a body."""

    port: int
    paths: list[tuple[str, str]]
    fields: tuple[bytes, ...] = ()


def kept(table: rights.Rights) -> list[tuple[str, str]]:
    """The routes with a body that is not passed on."""
    results = []
    for method, path in (route.split(" ") for route in rights.by_route(table)):
        if method in ("POST", "PUT", "PATCH") and not path.endswith((":inference", "_microservice/inference")):
            results.append((method, gateway_path(path)))
    return results


@pytest.fixture(scope="module", params=["gateway", "a stranger's gateway", "microservice", "webhooks", "router"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UploadRoutes]:
    folder: Path = tmp_path_factory.mktemp("sizes")
    if "gateway" in request.param:
        with job_api(StandInJobs(), folder) as api:
            stranger = request.param != "gateway"
            fields = () if stranger else (f"authorization: Bearer {api.login('root')}".encode(),)
            yield UploadRoutes(api.port, kept(rights.GATEWAY), fields)
    elif request.param == "microservice":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Microservice, "not_ready_response", lambda self: None)
            with serving(lambda: Site(microservice_routes(folder), limits=Limits(body_bytes=MOST))) as running:
                yield UploadRoutes(running.port, kept(rights.MICROSERVICE))
    elif request.param == "webhooks":
        routes = fleet_servers(folder)["webhooks"].site.routes
        with serving(lambda: Site(routes, limits=Limits(body_bytes=MOST))) as running:
            yield UploadRoutes(running.port, kept(rights.WEBHOOKS))
    else:
        with routing("http://127.0.0.1:1", limits=Limits(body_bytes=MOST)) as router:
            yield UploadRoutes(router.port, kept(rights.ROUTER))


def assert_refused(answer: Answer, *where: object) -> None:
    assert answer.status in REFUSED, (where, answer)
    assert 0 < len(answer.body) < 4096 and b"Traceback" not in answer.body


def test_a_length_over_the_limit_is_refused_before_the_body(program: UploadRoutes) -> None:
    for method, path in program.paths:
        for length in (MOST + 1, 2**40, 2**63):
            assert_refused(ask(program.port, method, path, b"", program.fields, length=length), method, path, length)


def test_lengths_that_are_none(program: UploadRoutes) -> None:
    for method, path in program.paths:
        for length in (b"-1", b"1e3", b"0x10", b"1, 2", b"+5", b"99999999999999999999999"):
            head = (f"{method} {path} HTTP/1.1".encode(), b"host: a", b"content-length: " + length, *program.fields)
            assert_refused(exchange(program.port, b"\r\n".join([*head, b"", b""])), method, path, length)


def test_a_body_without_a_length_is_counted(program: UploadRoutes) -> None:
    piece = b"%x\r\n%b\r\n" % (1 << 18, bytes(1 << 18))
    body = piece * 5 + b"0\r\n\r\n"
    for method, path in program.paths:
        answer = ask(program.port, method, path, body, (*program.fields, b"transfer-encoding: chunked"))
        assert_refused(answer, method, path)


def test_fields_are_counted(program: UploadRoutes) -> None:
    many = tuple(b"x-%d: a" % number for number in range(300))
    for method, path in program.paths:
        for fields in (many, (b"x: " + b"a" * 100_000,)):
            assert ask(program.port, method, path, b"", (*program.fields, *fields)).status == 431, (method, path)


def test_a_bomb_is_counted_after_inflation(program: UploadRoutes) -> None:
    bomb = gzip.compress(bytes(16 * MOST), 1)
    assert len(bomb) < MOST
    for method, path in program.paths:
        assert_refused(
            ask(program.port, method, path, bomb, (*program.fields, b"content-encoding: gzip")), method, path
        )
