# SPDX-License-Identifier: Apache-2.0
"""`GET /console`, its files, `GET /console/api/live`, and the timelines of requests at `/console/api/requests`.

Made by a composition root. The page itself is for everybody who can connect: it has no numbers in it, and has to ask for a
key before it can get some. What it asks for is guarded like any other route.
"""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from headrace.core.telemetry.registry import Registry
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.programs.console.live import Live, Machine, Numbers, Others, Tasks
from headrace.programs.console.pages import SERVER, Pages
from headrace.programs.console.requests import Watching, wish_of

LIVE = "/console/api/live"
REQUESTS = "/console/api/requests"
_LIVE_HEAD = ResponseHead(
    200, [(CONTENT_TYPE, JSON), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
)


def _nobody() -> Iterable[Numbers]:
    return ()


class Console:
    """Handlers over one data plane.

    `others`: the numbers of other workers, if there are any, and `others_requests` their timelines. `control`: whether
    models are loaded and unloaded on demand. `tasks`: what is brought from elsewhere.
    """

    def __init__(
        self,
        plane: DataPlane,
        registry: Registry,
        machine: Machine = tuple,
        others: Others = _nobody,
        *,
        control: bool = False,
        tasks: Tasks = tuple,
        watching: Watching | None = None,
        others_requests: Others = _nobody,
    ) -> None:
        self._live = Live(plane, registry, machine, others, tasks, control)
        self._pages = Pages(SERVER)
        self._watching = watching or Watching(plane)
        self._others_requests = others_requests

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        self._pages.add_to(routes)
        routes.add("GET", LIVE, self.live)
        routes.add("GET", REQUESTS, self.requests)
        routes.add("POST", REQUESTS, self.watch)

    def numbers(self) -> Numbers:
        """This process's share, for other workers."""
        return self._live.numbers()

    def timelines(self) -> Numbers:
        """The same of timelines."""
        return self._watching.document()

    def requests(self, exchange: Exchange) -> None:
        """What is watched, and what was seen: the newest first."""
        exchange.respond(_LIVE_HEAD, orjson.dumps(self._requests()))

    def watch(self, exchange: Exchange) -> None:
        """Begin or end to watch a model."""
        self._watching.begin(wish_of(bytes(exchange.body)))
        exchange.respond(_LIVE_HEAD, orjson.dumps(self._requests()))

    def _requests(self) -> Numbers:
        own = self.timelines()
        seen = dict(own["requests"])
        for each in self._others_requests():
            seen.update(each["requests"])
        ordered = sorted(seen.items(), key=lambda item: -item[1]["began"])
        return {"watching": own["watching"], "requests": [{"key": key, **each} for key, each in ordered]}

    def live(self, exchange: Exchange) -> None:
        """What the server does right now."""
        exchange.respond(_LIVE_HEAD, orjson.dumps(self._live.document()))
