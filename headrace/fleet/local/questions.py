# SPDX-License-Identifier: Apache-2.0
"""Routers that wait for another number of replicas: each is told when there is one. Between `controller` and `control`.

A router that wakes what sleeps has to hear at once, and one whose service sleeps asks nothing for minutes: so its question
stays open until the answer is another one, or a while is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.errors import NotFound
from headrace.fleet.words import Document

Service = tuple[str, str]
OPEN_SECONDS = 25.0
"""How long a question stays open: less than `client` waits for any answer."""


@dataclass(eq=False)
class _Question:
    service: Service
    component: str
    known: Document
    """What was told last: `wanted` and `ready`."""
    answer: asyncio.Future[Document]


class Questions:
    """See the module. Used from the loop's thread only."""

    def __init__(self, replicas: Callable[[Service, str], Document]) -> None:
        """replicas: how it stands; may raise NotFound."""
        self._replicas = replicas
        self._open: set[_Question] = set()

    async def ask(self, service: Service, component: str, known: Document) -> Document:
        """How it stands: when it is otherwise than what is known, at once if it is. Raises NotFound."""
        now = self._replicas(service, component)
        if not _same(now, known):
            return now
        question = _Question(service, component, known, asyncio.get_running_loop().create_future())
        self._open.add(question)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await question.answer
        except TimeoutError:
            return known
        finally:
            self._open.discard(question)

    def look(self, service: Service) -> None:
        """Something of a service may have changed."""
        for question in [each for each in self._open if each.service == service and not each.answer.done()]:
            try:
                now = self._replicas(service, question.component)
            except NotFound:
                continue  # it may come back; if it does not, the question ends by itself
            if not _same(now, question.known):
                question.answer.set_result(now)

    def close(self) -> None:
        """Nobody waits any longer."""
        for question in self._open:
            if not question.answer.done():
                question.answer.set_result(question.known)


def _same(one: Document, other: Document) -> bool:
    return all(one.get(name) == other.get(name) for name in ("wanted", "ready"))
