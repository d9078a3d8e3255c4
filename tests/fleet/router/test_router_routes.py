# SPDX-License-Identifier: Apache-2.0
"""The route for everything else, and what a request leaves behind."""

from __future__ import annotations

import gc

from routing import routing

from headrace.fleet.router.proxied_request import ProxiedRequest
from headrace.net.http.exchange import Exchange
from headrace.net.http.routes import Routes
from support.serving import echo_site, serving


def _handler(exchange: Exchange) -> None:
    raise NotImplementedError


def _other(exchange: Exchange) -> None:
    raise NotImplementedError


def test_the_fallback_takes_what_no_other_route_takes() -> None:
    routes = Routes()
    routes.fallback(_other, _other, whole_bytes=100)
    routes.add("GET", "/own", _handler)
    routes.add("GET", "/models/{name}", _handler)
    routes.mount("/mine", _handler)
    for method, path, handler in (
        (b"GET", b"/own", _handler),
        (b"HEAD", b"/own", _handler),
        (b"GET", b"/models/m", _handler),
        (b"PUT", b"/mine/x", _handler),
        (b"POST", b"/own", _other),
        (b"BREW", b"/", _other),
        (b"GET", b"/mines", _other),
    ):
        assert routes.find(method, path)[0].handler is handler, path
    route = routes.find(b"GET", b"/")[0]
    assert route.raw and not route.streams_body and route.whole_bytes == 100
    assert route.longer is not None and route.longer.streams_body
    assert routes.find(b"GET", b"*")[0].handler is not _other


def test_requests_leave_nothing_for_the_collector() -> None:
    """A request and its exchange refer to each other; the cycle is broken however the request ends."""
    with serving(echo_site()) as server, routing(server.port) as router:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                assert router.get("/hello").status == 200
                assert router.get("/echo", "POST", b"x").status == 200
                assert router.get("/upload", "POST", bytes(100_000)).status == 200
                assert router.get("/big/300000").status == 200
                assert router.get("/stream/3", "HEAD").status == 200
            left = router.server.call(
                lambda: sum(issubclass(type(get_manifest), ProxiedRequest) for get_manifest in gc.get_objects())
            )
        finally:
            gc.enable()
        assert left == 0
