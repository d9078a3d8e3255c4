# SPDX-License-Identifier: Apache-2.0
"""`GET /console`, its files, and `GET /console/api/live`.

Made by a composition root. The page itself is for everybody who can connect: it has no numbers in it, and has to ask for a
key before it can get some. What it asks for is guarded like any other route.
"""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from headrace.console.live import Live, Machine, Numbers, Others
from headrace.console.pages import SERVER, Pages
from headrace.engine.dataplane import DataPlane
from headrace.telemetry.registry import Registry
from headrace.wire.http.exchange import Exchange
from headrace.wire.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.wire.http.routes import Routes

LIVE = "/console/api/live"
_LIVE_HEAD = ResponseHead(
    200, [(CONTENT_TYPE, JSON), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
)


def _nobody() -> Iterable[Numbers]:
    return ()


class Console:
    """Handlers over one data plane.

    `others`: the numbers of other workers, if there are any. `control`: whether models are loaded and unloaded on demand.
    """

    def __init__(
        self,
        plane: DataPlane,
        registry: Registry,
        machine: Machine = tuple,
        others: Others = _nobody,
        *,
        control: bool = False,
    ) -> None:
        self._live = Live(plane, registry, machine, others, control)
        self._pages = Pages(SERVER)

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        self._pages.add_to(routes)
        routes.add("GET", LIVE, self.live)

    def numbers(self) -> Numbers:
        """This process's share, for other workers."""
        return self._live.numbers()

    def live(self, exchange: Exchange) -> None:
        """What the server does right now."""
        exchange.respond(_LIVE_HEAD, orjson.dumps(self._live.document()))
