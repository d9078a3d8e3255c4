# SPDX-License-Identifier: Apache-2.0
"""`GET /metrics`: one scrape after the other, on as many ports as it is added to.

Made by a composition root, before the models are loaded. Scrapes that come while another of the same format is under way
get its answer. With several processes, `workers` has the numbers of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.api.metrics.collector import Collector, written
from headrace.api.metrics.sampler import Sampler
from headrace.api.metrics.settings import MetricsSettings
from headrace.api.metrics.workers import WorkersMetrics
from headrace.core.clock import Clock, SystemClock
from headrace.core.telemetry.exposition import Format, negotiate
from headrace.core.telemetry.merging import pack
from headrace.core.telemetry.registry import Registry
from headrace.core.telemetry.samples import Samples
from headrace.engine.dataplane import DataPlane
from headrace.net.http.coding import choose_coding, deflate
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, ResponseHead
from headrace.net.http.routes import Routes

_HEADS = {one: ResponseHead(200, [(CONTENT_TYPE, one.value)]) for one in Format}
_WORTH_COMPRESSING = 1024


class Metrics:
    """The scrapes of one process."""

    def __init__(
        self,
        plane: DataPlane,
        registry: Registry,
        settings: MetricsSettings | None = None,
        *,
        clock: Clock | None = None,
        workers: WorkersMetrics | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        settings = settings or MetricsSettings()
        self._sampler = sampler or Sampler(settings)
        self._collector = Collector(plane, registry, settings, clock or SystemClock(), self._sampler)
        self._workers = workers
        self._scrapes: dict[Format, asyncio.Task[list[bytes]]] = {}
        self._answers: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to look at GPUs and CPUs, in a thread; not before the process is forked."""
        self._sampler.start()

    def close(self) -> None:
        """End the thread. Waits for a look that is under way."""
        self._sampler.close()

    def seen(self) -> Sequence[Samples]:
        """What was last seen of GPUs and CPUs; for the console."""
        return self._sampler.seen

    def add_to(self, routes: Routes) -> None:
        """Serve the path."""
        routes.add("GET", "/metrics", self.scrape)

    def scrape(self, exchange: Exchange) -> None:
        """Answer one scrape."""
        task = asyncio.get_running_loop().create_task(self._answer(exchange))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def text(self, format: Format = Format.TEXT) -> bytes:
        """What a scrape is told."""
        return b"".join(await self._text(format))

    async def packed(self) -> bytes:
        """This process's metrics, for another one: see `workers.merged_text`."""
        return await asyncio.to_thread(pack, await self._collector.collect())

    async def answer(self, _arguments: object = None) -> str:
        """What another worker of this server is told when it asks."""
        packed = await self.packed()
        return (packed if self._workers is None else await self._workers.told(packed)).decode()

    async def _answer(self, exchange: Exchange) -> None:
        try:
            wanted = negotiate(exchange.head.get(b"accept"))
            text = await self._text(wanted)
            coding = choose_coding(exchange.head.get(b"accept-encoding") or b"")
            if coding is None or sum(map(len, text)) < _WORTH_COMPRESSING:
                exchange.respond(_HEADS[wanted], text)
                return
            # Here and not by the wire, which would do so in the loop's thread.
            body = await asyncio.to_thread(deflate, coding, text)
            exchange.respond(_HEADS[wanted], body, ((b"content-encoding", coding), (b"vary", b"accept-encoding")))
        except Exception as error:
            exchange.fail(error)

    async def _text(self, format: Format) -> list[bytes]:
        scrape = self._scrapes.get(format)
        if scrape is None:
            scrape = self._scrapes[format] = asyncio.get_running_loop().create_task(self._make_text(format))
            scrape.add_done_callback(lambda _: self._scrapes.pop(format))
        return await asyncio.shield(scrape)

    async def _make_text(self, format: Format) -> list[bytes]:
        if self._workers is None:
            return await written(await self._collector.collect(), format)
        return [await self._workers.text(await self.packed(), format)]
