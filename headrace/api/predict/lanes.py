# SPDX-License-Identifier: Apache-2.0
"""Answers in the order of their questions, on a connection that carries many of both.

Used by the WebSocket and by `PredictStream`. Questions are computed at the same time; an answer waits for those before it.
Who asks faster than we compute, or does not read, is held back. Knows nothing of what is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

MOST_QUESTIONS = 64
MOST_QUESTION_BYTES = 16 * 1024 * 1024
"""Questions of one lane without an answer, and their bytes, before the client is held back."""
MOST_UNREAD_BYTES = 16 * 1024 * 1024
"""Answers that wait to be sent: a model with many of them cannot be held back."""


class Slot:
    """One question's place in the order."""

    __slots__ = ("_kept", "_lane", "cancel", "over", "size")

    def __init__(self, lane: Lane, size: int) -> None:
        self._lane = lane
        self._kept: deque[tuple[Any, int]] = deque()
        self.size = size
        self.cancel: Callable[[], object] | None = None
        """Called if nobody waits for the answer any more."""
        self.over = False

    def put(self, message: Any, size: int = 0, *, last: bool = True) -> None:
        """One of its answers."""
        if not self.over:
            self._kept.append((message, size))
            self.over = last
            self._lane.answered(size)

    def end(self) -> None:
        """There is no more answer."""
        if not self.over:
            self.over = True
            self._lane.answered(0)

    def take(self) -> tuple[Any, int] | None:
        """The next answer that may be sent. For the lane."""
        return self._kept.popleft() if self._kept else None


class Lane:
    """See the module. `begin` is called with each question and its slot; it may answer at once, and must not raise."""

    def __init__(
        self,
        begin: Callable[[Slot, Any], None],
        send: Callable[[Any], bool],
        hold: Callable[[], None],
        release: Callable[[], None],
        overflow: Callable[[], None],
    ) -> None:
        self._begin = begin
        self._send = send
        self._hold = hold
        self._release = release
        self._overflow = overflow
        self.on_empty: Callable[[], None] | None = None
        """Called whenever everything is answered and sent."""
        self._slots: deque[Slot] = deque()
        self._backlog: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._unsent = 0
        self._writable = True
        self._held = False
        self._busy = False
        self._closed = False

    @property
    def empty(self) -> bool:
        """Whether nothing waits for an answer."""
        return not self._slots and not self._backlog

    def ask(self, question: Any, size: int) -> None:
        """A question has come."""
        if self._closed:
            return
        # What had been received before the client was held back comes all the same.
        if self._backlog or self._full:
            self._backlog.append((question, size))
        else:
            self._open(question, size)
        if self._full and not self._held and not self._closed:
            self._held = True
            self._hold()

    def writable(self) -> None:
        """The client reads again."""
        self._writable = True
        self._flush()

    def answered(self, size: int) -> None:
        """A slot has an answer. For slots."""
        self._unsent += size
        self._flush()
        if self._unsent > MOST_UNREAD_BYTES and not self._closed:
            self._overflow()

    def close(self) -> None:
        """Nobody waits any more: give up what is computed."""
        self._closed = True
        slots, self._slots = self._slots, deque()
        self._backlog.clear()
        for slot in slots:
            slot.over = True
            if slot.cancel is not None:
                slot.cancel()

    @property
    def _full(self) -> bool:
        return not self._writable or len(self._slots) >= MOST_QUESTIONS or self._bytes >= MOST_QUESTION_BYTES

    def _open(self, question: Any, size: int) -> None:
        slot = Slot(self, size)
        self._slots.append(slot)
        self._bytes += size
        self._begin(slot, question)

    def _flush(self) -> None:
        """Send what has its turn, then take what waited. Never runs inside itself."""
        if self._busy or self._closed:
            return
        self._busy = True
        try:
            self._write()
            while self._backlog and not self._full and not self._closed:
                self._open(*self._backlog.popleft())
                self._write()
        finally:
            self._busy = False
        self._settle()

    def _settle(self) -> None:
        """Let the client go on if it was held back and there is room; tell if there is nothing left."""
        if self._closed:
            return
        if self._held and not self._backlog and not self._full:
            self._held = False
            self._release()
        if self.empty and self.on_empty is not None and not self._closed:
            self.on_empty()

    def _write(self) -> None:
        while self._slots and self._writable and not self._closed:
            slot = self._slots[0]
            kept = slot.take()
            if kept is not None:
                self._unsent -= kept[1]
                self._writable = self._send(kept[0])
            elif slot.over:
                self._slots.popleft()
                self._bytes -= slot.size
            else:
                return
