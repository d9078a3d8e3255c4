# SPDX-License-Identifier: Apache-2.0
"""Restrictions hold for every route and every method of v2, on every way in that speaks the transport; and for it alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
import pytest
from v2_servers import ask, functions_served

from headrace.api.v2.grpc_messages import SERVICE
from headrace.api.v2.settings import APIS, Restriction, V2Settings
from headrace.net.grpc.services import Services
from support.engines import config_of
from support.serving import Serving

ALL = (Restriction.parse(f"{','.join(APIS)}:x-key=secret"),)
RIGHT_CALL = (("triton-grpc-protocol-x-key", "secret"),)


@contextmanager
def _served(settings: V2Settings) -> Iterator[Serving]:
    with functions_served([(config_of("same"), lambda inputs: {"OUTPUT0": inputs["INPUT0"]})], settings) as running:
        yield running


@pytest.fixture(scope="module")
def closed() -> Iterator[Serving]:
    with _served(V2Settings(allow_client_shm=True, http_restrictions=ALL, grpc_restrictions=ALL)) as running:
        yield running


def _code(server: Serving, method: str, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.StatusCode:
    """How a call with an empty message ends. One way to call does for all: those that stream take one message as well."""
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_stream(method)(iter([b""]), timeout=30, metadata=metadata)
        with suppress(grpc.RpcError):
            for _ in call:
                pass
        return call.code()


def test_every_route_needs_the_header(closed: Serving) -> None:
    routes = closed.site.routes
    assert routes is not None
    listed = [(method, path.replace("{}", "same")) for method, path in routes.listed()]
    assert len(listed) > 30
    for method, path in listed:
        for one in (method, "HEAD") if method == "GET" else (method,):
            assert ask(closed, one, path, {})[0] == 403, (one, path)
            assert ask(closed, one, path, {}, {"X-Key": "secret"})[0] != 403, (one, path)


def test_http_2_is_http(closed: Serving) -> None:
    for path, body in (("/v2/models/same", []), ("/v2/repository/index", ["-d", "{}"])):
        for header, expected in (("x-other: secret", "403"), ("x-key: secret", "200")):
            result = subprocess.run(
                ["curl", "-s", "--http2-prior-knowledge", "-o", "/dev/null", "-w", "%{http_version} %{http_code}",
                 "-H", header, *body, f"http://127.0.0.1:{closed.port}{path}"],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            assert result.stdout == f"2 {expected}"


def test_every_method_needs_the_metadata(closed: Serving) -> None:
    services = closed.site.services
    assert isinstance(services, Services)
    methods = list(services.policies)
    assert len(methods) > 15
    for method in methods:
        assert _code(closed, method) is grpc.StatusCode.PERMISSION_DENIED, method
        assert _code(closed, method, RIGHT_CALL) is not grpc.StatusCode.PERMISSION_DENIED, method


@pytest.mark.parametrize("which", ["http", "grpc"])
def test_each_is_for_its_own_transport(which: str) -> None:
    settings = V2Settings(**{f"{which}_restrictions": ALL})
    with _served(settings) as running:
        code = _code(running, f"/{SERVICE}/ServerLive")
        if which == "http":
            assert (ask(running, "GET", "/v2/models/same")[0], code) == (403, grpc.StatusCode.OK)
        else:
            assert (ask(running, "GET", "/v2/models/same")[0], code) == (200, grpc.StatusCode.PERMISSION_DENIED)
