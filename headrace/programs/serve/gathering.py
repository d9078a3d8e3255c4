# SPDX-License-Identifier: Apache-2.0
"""The numbers of all workers for who asks one of them: statistics and status answer for the whole server.

A worker keeps in a file, in the workers' folder, the last numbers it has told anyone. So what was told once is never less
afterwards: a worker that is busy or dead is read from its file, and the one that takes a dead worker's place counts on from
there. What a worker counted after it was last asked dies with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import orjson

from headrace.engine.dataplane import DataPlane
from headrace.programs.serve.numbers import Numbers, ended, numbers_of, together
from headrace.programs.serve.siblings import Siblings, write_whole

log = logging.getLogger("headrace.apps")

_QUESTION = "numbers"
_PATIENCE_SECONDS = 1.0
"""For a worker that computes in its loop; after that its file has to do."""
_AT_ONCE = 64
"""Versions whose numbers are read before requests get a turn."""

Extra = Callable[[], Numbers]


class Gathering:
    """One worker's numbers for the others, and theirs for it. Everything here is in the loop's thread."""

    def __init__(self, siblings: Siblings, plane: DataPlane) -> None:
        self._siblings = siblings
        self._plane = plane
        self._extras: dict[str, Extra] = {}
        self._before: Numbers = {}
        """What those counted who had this worker's place before."""
        self._others: list[Numbers] = []
        self._of_versions: dict[str, list[Numbers]] = {}
        self._gathering = asyncio.Lock()
        self._telling = asyncio.Lock()
        self._begun = self._done = 0
        self.showing = False
        """Whether someone is being shown the numbers of all, right now."""

    def show(self, tell: Callable[[], None]) -> None:
        """Call who tells the numbers; what it looks up meanwhile has those of all workers."""
        self.showing = True
        try:
            tell()
        finally:
            self.showing = False

    def tell_also(self, what: str, extra: Extra) -> None:
        """Tell the others something more: plain numbers, in objects of any depth."""
        self._extras[what] = extra

    def start(self) -> None:
        """Take over from a predecessor, and answer the others."""
        self._before = _ended(self._read(self._siblings.index))
        self._siblings.answer(_QUESTION, self._answer)

    def others(self, what: str) -> list[Numbers]:
        """What the others said of something more, at the last gathering."""
        return [numbers[what] for numbers in (*self._others, self._before) if numbers.get(what)]

    def of_version(self, name: str, version: str) -> list[Numbers]:
        """What the others counted of a version, at the last gathering."""
        return self._of_versions.get(f"{name}/{version}", [])

    async def gather(self) -> None:
        """Ask all the others now. Several who want this at once share one that begins after they came.

        One that has begun before would not do: its numbers may be older than what another worker has told meanwhile.
        """
        wanted = self._begun + 1
        async with self._gathering:
            if self._done < wanted:
                self._begun = number = self._begun + 1
                await self._gather()
                self._done = number

    async def _gather(self) -> None:
        told = self._siblings.ask_all(_QUESTION, seconds=_PATIENCE_SECONDS)
        answers, _ = await asyncio.gather(told, self._answer(None))
        self._others = [
            self._read(index) if isinstance(answer, BaseException) else answer for index, answer in answers.items()
        ]
        by_version: dict[str, list[Numbers]] = {}
        for numbers in (*self._others, self._before):
            for version, counted in numbers.get("versions", {}).items():
                by_version.setdefault(version, []).append(counted)
        self._of_versions = by_version

    async def _answer(self, _arguments: Any) -> Numbers:
        """This worker's numbers, and those of its predecessors. Kept before they are told, the older ones first."""
        async with self._telling:
            versions: dict[str, Numbers] = {}
            for count, version in enumerate(self._plane.statistics(), 1):
                versions[f"{version.name}/{version.version_text}"] = numbers_of(version.statistics)
                if count % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            own: Numbers = {"versions": versions} | {what: extra() for what, extra in self._extras.items()}
            all_told: Numbers = together(own, self._before) if self._before else own
            self._write(all_told)
            return all_told

    async def keep(self) -> None:
        """Keep the last numbers: this worker ends."""
        await self._answer(None)

    def _write(self, numbers: Numbers) -> None:
        try:
            write_whole(self._siblings.folder / f"worker-{self._siblings.index}.json", orjson.dumps(numbers))
        except OSError as error:  # no space left: a worker's death would make counts smaller, nothing else
            log.warning("cannot keep this worker's numbers: %s", error.strerror)

    def _read(self, index: int) -> Numbers:
        try:
            numbers: Numbers = orjson.loads((self._siblings.folder / f"worker-{index}.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):  # it was never asked
            return {}
        return numbers


def _ended(numbers: Numbers) -> Numbers:
    versions = {version: ended(counted) for version, counted in numbers.get("versions", {}).items()}
    return numbers | {"versions": versions} if numbers else {}
