# SPDX-License-Identifier: Apache-2.0
"""What the tests of gRPC through the router share: a router in front of real servers, and calls of `test.Echo` by grpcio.

with serving(echo_site()) as one, serving(echo_site()) as two, routing(one.port, two.port) as router:
    with channel_to(router) as channel: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from headrace.core.limits import Limits
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.grpc.proxy import GrpcProxy
from headrace.fleet.router.settings import BackendAddress, GrpcProxySettings, RouterSettings
from headrace.net.site import Site
from headrace.net.tls import TlsFiles
from support.serving import Serving, serving

SECONDS = 30
"""How long anything may take before a test gives up. Nothing is decided by how much of it was used."""

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]


class Routing:
    """A running router. `proxy` belongs to its loop: look at it through `call`."""

    def __init__(self, server: Serving, proxy: GrpcProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.port = server.port
        self.call = server.call

    def backend(self, number: int) -> Any:
        return self.proxy.backends.all[number]

    def connections(self) -> list[Any]:
        """Connections to backends."""
        return list(self.call(lambda: list(self.proxy.site.connections)))


@contextmanager
def routing(
    *backends: int | str,
    grpc_settings: GrpcProxySettings | None = None,
    limits: Limits | None = None,
    tls: TlsFiles | None = None,
    **settings: Any,
) -> Iterator[Routing]:
    urls = tuple(backend if isinstance(backend, str) else f"http://127.0.0.1:{backend}" for backend in backends)
    wanted = RouterSettings(tuple(map(BackendAddress.parse, urls)), **{"policy": "round-robin", **settings})
    created: list[GrpcProxy] = []

    async def site() -> Site:
        proxy = GrpcProxy(Backends(wanted), wanted, grpc_settings)
        proxy.start()
        created.append(proxy)
        return Site(services=proxy.services, limits=limits)

    with serving(site, tls=tls) as server:
        try:
            yield Routing(server, created[0])
        finally:
            server.call(created[0].close)


@contextmanager
def channel_to(server: Any, *more: tuple[str, Any]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", [*_OPTIONS, *more]) as channel:
        yield channel


def aio_channel(server: Any) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", _OPTIONS)


def unary(channel: Any, method: str = "Unary") -> Any:
    return channel.unary_unary(f"/test.Echo/{method}")


def raised(call: Callable[[], Any]) -> Any:
    """The error a call ends with."""
    try:
        result = call()
        if not isinstance(result, bytes):
            list(result)
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call succeeded")
