# SPDX-License-Identifier: Apache-2.0
"""A request that waits, of either proxy, as `holding` knows it.

A client that leaves is found by asking, so that no request has to look whether it is held when it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from headrace.core.errors import HeadraceError
    from headrace.fleet.router.flows import Flow
    from headrace.fleet.router.h2.call import ProxiedCall
    from headrace.net.http.exchange import Exchange


log = logging.getLogger("headrace.router")

Answered = Callable[["Held"], None]
TRACEPARENT = b"traceparent"


class Held(Protocol):
    """One that waits."""

    @property
    def since(self) -> float:
        """When it first began to wait; 0 before. It may have to wait twice."""

    @since.setter
    def since(self, now: float) -> None: ...

    def gone(self) -> bool:
        """Whether its client has left, or its time is over."""

    def size(self) -> int:
        """Bytes of its body that are kept."""

    def wait(self) -> None:
        """It is to wait: its client may send no more than is on its way."""

    def traceparent(self) -> bytes:
        """What its client says of its trace; empty if nothing."""

    def go(self, answered: Answered | None = None) -> None:
        """A backend can take it. `answered`: called as its answer begins."""

    def refuse(self, error: HeadraceError) -> None:
        """Nobody will."""


class HeldFlow:
    """A request over HTTP/1.1, or over HTTP/2 without gRPC; a WebSocket begins as one."""

    def __init__(self, flow: Flow, exchange: Exchange) -> None:
        self._flow = flow
        self._exchange = exchange

    @property
    def since(self) -> float:
        """See `Held`."""
        return self._flow.held_since

    @since.setter
    def since(self, now: float) -> None:
        self._flow.held_since = now

    def gone(self) -> bool:
        """See `Held`."""
        return self._exchange.closed

    def size(self) -> int:
        """See `Held`."""
        return len(self._exchange.body) + self._flow.early_bytes()

    def wait(self) -> None:
        """See `Held`."""
        self._flow.held = True
        # For the wire to take one who says no more for one who has left.
        self._exchange.on_disconnect = _left
        if self._flow.sending:
            self._exchange.pause_body()

    def traceparent(self) -> bytes:
        """See `Held`."""
        return self._exchange.head.get(TRACEPARENT) or b""

    def go(self, answered: Answered | None = None) -> None:
        """See `Held`."""
        self._flow.held = False
        if answered is not None:
            _before(self._flow, ("answered", "answer_begun"), lambda: answered(self))
        self._flow.start()

    def refuse(self, error: HeadraceError) -> None:
        """See `Held`."""
        self._flow.held = False
        self._exchange.on_disconnect = None
        self._exchange.fail(error)


def _left() -> None:
    """It is found out by `HeldFlow.gone`."""


class HeldCall:
    """A gRPC call. Its own deadline goes on while it waits."""

    def __init__(self, call: ProxiedCall) -> None:
        self._call = call

    @property
    def since(self) -> float:
        """See `Held`."""
        return self._call.held_since

    @since.setter
    def since(self, now: float) -> None:
        self._call.held_since = now

    def gone(self) -> bool:
        """See `Held`."""
        return self._call.over

    def size(self) -> int:
        """See `Held`."""
        return self._call.kept_bytes

    def wait(self) -> None:
        """See `Held`."""
        self._call.late = True
        self._call.pause()

    def traceparent(self) -> bytes:
        """See `Held`."""
        return self._call.head.get(TRACEPARENT) or b""

    def go(self, answered: Answered | None = None) -> None:
        """See `Held`."""
        if answered is not None:
            _before(self._call, ("answer_head", "answer_whole"), lambda: answered(self))
        self._call.dispatch()

    def refuse(self, error: HeadraceError) -> None:
        """See `Held`."""
        self._call.refuse(error)


def _before(request: object, methods: Sequence[str], tell: Callable[[], None]) -> None:
    """Have `tell` called before the first of these methods is.

    On this one object: requests that have not waited are not asked, so that they pay nothing for the question.
    """
    own: dict[str, Any] = vars(request)

    def first(method: Callable[..., Any]) -> Callable[..., Any]:
        def told(*given: Any, **named: Any) -> Any:
            for each in methods:
                own.pop(each, None)
            try:
                tell()
            except Exception:
                log.exception("a request's wait could not be told; it is answered all the same")
            return method(*given, **named)

        return told

    own.update({each: first(getattr(request, each)) for each in methods})
