# SPDX-License-Identifier: Apache-2.0
"""One scrape for all worker processes of a server: any of them answers it, with the numbers of all.

Made by a composition root that has a way for workers to ask each other, and given to `http.Metrics`. A worker keeps in a
file what it last told anyone, so that what was told once is never less afterwards, which Prometheus would read as a
restart of the whole server: one that is dead or busy is read from its file, and the one that takes a dead worker's place
counts on from there. What a worker counted after it was last asked dies with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.core.telemetry.exposition import Format, pieces
from headrace.core.telemetry.merging import lasting, merge, pack, unpack
from headrace.core.telemetry.samples import Samples

log = logging.getLogger("headrace.api")

Ask = Callable[[], Awaitable[Mapping[int, Any]]]
"""Asks all other workers for `Metrics.answer`: what each said, by its number; an exception for one that said nothing."""


def merged_text(packs: Iterable[bytes], format: Format = Format.TEXT, ended: Iterable[bytes] = ()) -> bytes:
    """The metrics of several processes, as each packed its own (`Metrics.packed`), as one scrape.

    `ended` are the last packs of processes that are no more: what they counted still counts.
    """
    return b"".join(pieces(_merged(packs, ended), format))


def merged_pack(packs: Iterable[bytes], ended: Iterable[bytes] = ()) -> bytes:
    """The same, packed again."""
    return pack(_merged(packs, ended))


def _merged(packs: Iterable[bytes], ended: Iterable[bytes]) -> list[Samples]:
    return merge(map(unpack, packs), [lasting(unpack(packed)) for packed in ended])


class WorkersMetrics:
    """One worker's part in it. Everything but the files in the loop's thread."""

    def __init__(self, folder: Path, index: int, ask: Ask) -> None:
        self._folder = folder
        self._index = index
        self._ask = ask
        self._before = self._read(index)
        """What those told last who had this worker's place before."""
        self._keeping = asyncio.Lock()

    async def told(self, own: bytes) -> bytes:
        """What another worker is to know: these numbers, and those of the predecessors. Kept before they are told."""
        async with self._keeping:
            return await asyncio.to_thread(self._kept, own)

    async def text(self, own: bytes, format: Format) -> bytes:
        """The scrape for all workers, when this one has these numbers."""
        answers, whole = await asyncio.gather(self._ask(), self.told(own))
        return await asyncio.to_thread(self._text, whole, answers, format)

    def _text(self, whole: bytes, answers: Mapping[int, Any], format: Format) -> bytes:
        packs = [whole, *(answer.encode() for answer in answers.values() if isinstance(answer, str))]
        silent = [self._read(index) for index, answer in answers.items() if not isinstance(answer, str)]
        return merged_text(packs, format, filter(None, silent))

    def _kept(self, own: bytes) -> bytes:
        whole = kept = own
        if self._before:
            metrics, before = unpack(own), lasting(unpack(self._before))
            # Kept, but not told: what the predecessors counted of models that this worker does not have, or not yet.
            whole, kept = pack(merge([metrics], [before])), pack(merge([metrics, before]))
        path = self._path(self._index)
        beside = path.with_suffix(".new")
        try:
            beside.write_bytes(kept)
            os.replace(beside, path)
        except OSError as error:  # no space left: a worker's death would make counts smaller, nothing else
            log.warning("cannot keep this worker's metrics: %s", error.strerror)
        return whole

    def _read(self, index: int) -> bytes:
        try:
            return self._path(index).read_bytes()
        except OSError:  # it was never asked
            return b""

    def _path(self, index: int) -> Path:
        return self._folder / f"metrics-{index}.json"
