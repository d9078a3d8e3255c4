# SPDX-License-Identifier: Apache-2.0
"""gRPC calls are chosen and queued like all others: by what their heads say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from routing import NO_CHECKS

from headrace.fleet.router.backends import LimitedBackends
from headrace.fleet.router.grpc.proxy import GrpcProxy
from headrace.fleet.router.proxy import RouterProxy
from headrace.fleet.router.settings import BackendAddress, FairnessSettings, RouterSettings, SessionAffinitySettings
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.router import RouterAppSettings, build_router_site
from support.serving import EchoCalls, Serving, echo_site, serving
from support.waiting import eventually


@contextmanager
def _routing(*ports: int, **changes: Any) -> Iterator[tuple[int, RouterProxy, Serving]]:
    backends = tuple(BackendAddress.parse(f"http://127.0.0.1:{port}") for port in ports)
    settings = RouterAppSettings(RouterSettings(backends, health=NO_CHECKS, **changes), Address.parse("127.0.0.1:0"))
    created: list[Any] = []

    async def build() -> Site:
        proxy = RouterProxy(settings.router)
        calls = GrpcProxy(proxy.backends, settings.router, budget=proxy.budget)
        calls.queue = proxy.queue
        calls.fairness = proxy.fairness
        await proxy.start()
        calls.start()
        created.extend((proxy, calls))
        return build_router_site(proxy, calls, settings)

    with serving(build) as server:  # type: ignore[arg-type]
        try:
            yield server.port, created[0], server
        finally:
            server.call(created[1].close)
            server.call(created[0].close)


def test_a_session_is_known_by_its_metadata() -> None:
    with serving(echo_site()) as one, serving(echo_site()) as two:
        sticky = SessionAffinitySettings(header="x-session")
        with _routing(one.port, two.port, policy="round-robin", sticky=sticky) as (port, proxy, _):
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                echo = channel.unary_unary("/test.Echo/Unary")
                for key in "abcdefgh":
                    before = [backend.stats.requests for backend in proxy.backends.all]
                    for _ in range(3):
                        assert echo(b"x", metadata=(("x-session", key),), timeout=30) == b"x"
                    after = [backend.stats.requests for backend in proxy.backends.all]
                    assert sorted(now - then for now, then in zip(after, before, strict=True)) == [0, 3]


def test_calls_wait_when_every_backend_is_full() -> None:
    calls = EchoCalls()
    with serving(echo_site(calls=calls)) as one:
        with _routing(one.port, max_outstanding=1) as (port, proxy, _):
            assert isinstance(proxy.backends, LimitedBackends)
            queue = proxy.backends.queue
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                held = channel.unary_unary("/test.Echo/Hold").future(b"first", timeout=30)
                eventually(lambda: proxy.backends.all[0].outstanding == 1)
                second = channel.unary_unary("/test.Echo/Unary").future(b"second", timeout=30)
                eventually(lambda: queue.length == 1)
                held.cancel()
                assert second.result() == b"second"
                eventually(lambda: proxy.backends.all[0].outstanding == 0)


def test_calls_are_counted_for_their_tenant() -> None:
    calls = EchoCalls()
    settings = FairnessSettings(tenant_header="x-tenant", prompt_tokens_per_minute=100)
    with serving(echo_site(calls=calls)) as one:
        with _routing(one.port, max_outstanding=1, fairness=settings) as (port, proxy, _):
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                echo = channel.unary_unary("/test.Echo/Unary")
                metadata = (("x-tenant", "one"),)
                held = channel.unary_unary("/test.Echo/Hold").future(b"first", timeout=30)
                eventually(lambda: proxy.backends.all[0].outstanding == 1)
                waiting = echo.future(b"x" * 399, metadata=metadata, timeout=30)
                eventually(lambda: proxy.backends.queued == 1)
                held.cancel()
                assert len(waiting.result()) == 399
                assert proxy.fairness is not None
                tenant = proxy.fairness.tenants["one"]
                assert (tenant.requests, tenant.prompt_tokens, tenant.output_tokens) == (1, 101, 101)
                with pytest.raises(grpc.RpcError) as refused:
                    echo(b"x", metadata=metadata, timeout=30)
                assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "100 prompt tokens per minute" in refused.value.details()
                assert echo(b"x", metadata=(("x-tenant", "other"),), timeout=30) == b"x"
