# SPDX-License-Identifier: Apache-2.0
"""`GET /metrics`: answer scrapes with the metrics of all worker processes.

Scrapes that arrive while another one of the same format runs share its response. With several workers, any worker
answers a scrape: it asks the others for their metrics and merges them. Each worker stores the metrics that it last
reported in a file, so that totals do not fall when a worker dies, which Prometheus would read as a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.api.metrics.collector import Collector, render
from headrace.api.metrics.hardware import Sampler
from headrace.api.metrics.settings import MetricsSettings
from headrace.core.clock import Clock, SystemClock
from headrace.core.files import write_atomically
from headrace.core.telemetry.exposition import Format, merge, negotiate, pack, pieces, retained, unpack
from headrace.core.telemetry.metrics import Registry, Samples
from headrace.engine.dataplane import DataPlane
from headrace.net.http.coding import choose_coding, deflate
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, ResponseHead
from headrace.net.http.routes import Routes

_HEADS = {form: ResponseHead(200, [(CONTENT_TYPE, form.value)]) for form in Format}
_COMPRESS_BYTES = 1024


log = logging.getLogger("headrace.api")
AskWorkers = Callable[[], Awaitable[Mapping[int, Any]]]
"""Asks all other workers for `Metrics.answer`; returns the answers by worker number, an exception for a silent worker."""


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
        """Start the sampler thread; call it after the process is forked."""
        self._sampler.start()

    def close(self) -> None:
        """Stop the sampler thread."""
        self._sampler.close()

    def hardware_samples(self) -> Sequence[Samples]:
        """Return the last samples of GPUs and CPUs; for the console."""
        return self._sampler.samples

    def add_to(self, routes: Routes) -> None:
        """Serve the path."""
        routes.add("GET", "/metrics", self.scrape, scope="read")

    def scrape(self, exchange: Exchange) -> None:
        """Answer one scrape."""
        task = asyncio.get_running_loop().create_task(self._answer(exchange))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def text(self, format: Format = Format.TEXT) -> bytes:
        """Return the text of a scrape."""
        return b"".join(await self._text(format))

    async def packed(self) -> bytes:
        """Return this process's metrics in the form that `merged_text` reads."""
        return await asyncio.to_thread(pack, await self._collector.collect())

    async def answer(self, _arguments: object = None) -> str:
        """Return this worker's metrics for another worker of the server."""
        packed = await self.packed()
        return (packed if self._workers is None else await self._workers.totals(packed)).decode()

    async def _answer(self, exchange: Exchange) -> None:
        try:
            wanted = negotiate(exchange.head.get(b"accept"))
            text = await self._text(wanted)
            coding = choose_coding(exchange.head.get(b"accept-encoding") or b"")
            if coding is None or sum(map(len, text)) < _COMPRESS_BYTES:
                exchange.respond(_HEADS[wanted], text)
                return
            # Here and not in `net.http`, which would compress in the event loop.
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
            return await render(await self._collector.collect(), format)
        return [await self._workers.text(await self.packed(), format)]


def merged_text(packs: Iterable[bytes], format: Format = Format.TEXT, ended: Iterable[bytes] = ()) -> bytes:
    """Merge the metrics of several processes (`Metrics.packed`) into the text of one scrape.

    `ended` are the last metrics of processes that have ended: their counts still count.
    """
    return b"".join(pieces(_merged(packs, ended), format))


def _merged(packs: Iterable[bytes], ended: Iterable[bytes]) -> list[Samples]:
    return merge(map(unpack, packs), [retained(unpack(packed)) for packed in ended])


class WorkersMetrics:
    """One worker's part in the scrapes of a server with several workers."""

    def __init__(self, folder: Path, index: int, ask: AskWorkers) -> None:
        self._folder = folder
        self._index = index
        self._ask = ask
        self._predecessors = self._read(index)
        """The last metrics of the earlier processes with this worker's number."""
        self._store_lock = asyncio.Lock()

    async def totals(self, own: bytes) -> bytes:
        """Return these metrics plus those of the predecessors, after storing them in the file."""
        async with self._store_lock:
            return await asyncio.to_thread(self._store, own)

    async def text(self, own: bytes, format: Format) -> bytes:
        """Return the text of a scrape for all workers; `own` are this worker's metrics."""
        answers, totals = await asyncio.gather(self._ask(), self.totals(own))
        return await asyncio.to_thread(self._text, totals, answers, format)

    def _text(self, totals: bytes, answers: Mapping[int, Any], format: Format) -> bytes:
        packs = [totals, *(answer.encode() for answer in answers.values() if isinstance(answer, str))]
        silent = [self._read(index) for index, answer in answers.items() if not isinstance(answer, str)]
        return merged_text(packs, format, filter(None, silent))

    def _store(self, own: bytes) -> bytes:
        totals = stored = own
        if self._predecessors:
            metrics, before = unpack(own), retained(unpack(self._predecessors))
            # Stored but not reported: the predecessors' counts of models that this worker does not have, or not yet.
            totals, stored = pack(merge([metrics], [before])), pack(merge([metrics, before]))
        try:
            write_atomically(self._path(self._index), stored, durable=False)
        except OSError as error:  # no space left: totals would fall if this worker died, nothing else
            log.warning("cannot store this worker's metrics: %s", error.strerror)
        return totals

    def _read(self, index: int) -> bytes:
        try:
            return self._path(index).read_bytes()
        except OSError:  # it never reported
            return b""

    def _path(self, index: int) -> Path:
        return self._folder / f"metrics-{index}.json"
