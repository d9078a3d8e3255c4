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
Answer = Callable[[Document], None]
OPEN_SECONDS = 25.0
"""How long a question stays open: less than `client` waits for any answer."""


@dataclass(eq=False)
class _Question:
    service: Service
    component: str
    known: Document
    """What was told last: `wanted` and `ready`."""
    answer: Answer
    timer: asyncio.TimerHandle | None = None


class Questions:
    """See the module. Used from the loop's thread only."""

    def __init__(self, replicas: Callable[[Service, str], Document]) -> None:
        """replicas: how it stands; may raise NotFound."""
        self._replicas = replicas
        self._open: set[_Question] = set()

    def ask(self, service: Service, component: str, known: Document, answer: Answer) -> Callable[[], None]:
        """Answer when it is otherwise than what is known, at once if it is. Returns how to give up. Raises NotFound."""
        question = _Question(service, component, known, answer)
        if not self._answered(question):
            self._open.add(question)
            loop = asyncio.get_running_loop()
            question.timer = loop.call_later(OPEN_SECONDS, self._close, question)
        return lambda: self._forget(question)

    def look(self, service: Service) -> None:
        """Something of a service may have changed."""
        for question in [each for each in self._open if each.service == service]:
            if self._answered(question):
                self._forget(question)

    def close(self) -> None:
        """Nobody waits any longer: all are told how it stands."""
        for question in list(self._open):
            self._close(question)

    def _answered(self, question: _Question) -> bool:
        try:
            now = self._replicas(question.service, question.component)
        except NotFound:
            if question not in self._open:
                raise
            return False  # it may come back; if it does not, the question ends by itself
        if all(now.get(name) == question.known.get(name) for name in ("wanted", "ready")):
            return False
        question.answer(now)
        return True

    def _close(self, question: _Question) -> None:
        self._forget(question)
        question.answer({**question.known})

    def _forget(self, question: _Question) -> None:
        self._open.discard(question)
        if question.timer is not None:
            question.timer.cancel()
