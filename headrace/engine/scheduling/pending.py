# SPDX-License-Identifier: Apache-2.0
"""A request on its way: from the data plane, through a queue and an instance, to its answer.

Made by a version when it has checked a request; held by queues and batches; answered by runners. It is also the caller's
handle for giving up. Everything happens in the loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from headrace.core.errors import Cancelled, HeadraceError, Internal
from headrace.core.messages import NO_PARAMETERS, InferRequest, InferResponse, Parameters
from headrace.core.tensors import Tensor

if TYPE_CHECKING:
    from headrace.engine.scheduling.batches import BatchRecord
    from headrace.engine.scheduling.watching import Watch

log = logging.getLogger("headrace.engine")

Done = Callable[[InferResponse | BaseException], None]
"""Who waits for one answer."""

Answered = Callable[[InferResponse | BaseException | None, bool], None]
"""Who waits for any number of answers: each, and whether it is the last; None when the last one is empty."""

QUEUED, RUNNING, ANSWERED = range(3)


class Owner(Protocol):
    """The version a request is for: it keeps the accounts and names itself in the answer."""

    name: str
    version_text: str
    follows: bool
    """Whether it wants to see every answer; else who computes a request alone may count it and tell its caller."""
    watch: Watch | None
    """Whom to tell when its requests were computed, while somebody watches; then it `follows` too."""

    def settle(self, pending: Pending, outputs: Sequence[Tensor] | BaseException | None) -> None:
        """A request has had its last answer: count it. Called just before the caller is told."""


class Pending:
    """One request with one answer to come."""

    # What most requests never set has its default here: every request pays for what `__init__` sets.
    state = QUEUED
    formed: BatchRecord | None = None
    """How its batch came about, once it has one."""
    on_cancel: Callable[[], None] | None = None
    cache_key: bytes | None = None
    looked_ns = 0
    """How long it was looked for in the cache, in vain."""
    sequence: object | None = None
    """What the sequence scheduler needs to know of it."""
    expires_ns = 0
    level = 0
    """The last two are for the queues that use them."""

    def __init__(
        self, owner: Owner, request: InferRequest, rows: int, key: Hashable, done: Done, arrived_ns: int
    ) -> None:
        self.owner = owner
        self.request = request
        self.rows = rows
        self.key = key
        """Requests with different keys cannot share a batch."""
        self.done: Callable[[Any], None] = done
        """Gets the one answer, or a stream's last, which may be None."""
        self.arrived_ns = arrived_ns

    @property
    def cancelled(self) -> bool:
        """Nobody waits any more."""
        return self.state == ANSWERED

    def cancel(self, reason: HeadraceError | None = None) -> None:
        """Give up: queued work will not be computed, running work is not waited for. Without effect once answered."""
        if self.state == ANSWERED:
            return
        told, self.on_cancel = self.on_cancel, None
        queued = self.state == QUEUED
        try:
            self.finish(reason or Cancelled("the request was cancelled"))
        except Exception:  # of the caller, who has gone: whoever cancels has others to tell
            log.exception("a cancelled caller could not be told")
        if queued:
            self.request = _NO_REQUEST  # its tensors need not wait for its place in the queue
        if told is not None:
            told()

    def reply(
        self,
        outputs: Sequence[Tensor] | BaseException | None,
        *,
        final: bool = True,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        """The one answer. More of them, and none at all, are mistakes of a model that is not decoupled."""
        if self.state == ANSWERED:
            return
        if outputs is None or not (final or isinstance(outputs, BaseException)):
            outputs = _not_decoupled(self.owner.name)
        self.finish(outputs, parameters)

    def finish(self, outputs: Sequence[Tensor] | BaseException, parameters: Parameters = NO_PARAMETERS) -> None:
        """Count the request and tell its caller; from here on it is nobody's."""
        self.state = ANSWERED
        owner = self.owner
        owner.settle(self, outputs)
        # Let go of the caller, who often holds us for `cancel`: a circle would stay in memory until it is looked for.
        done, self.done = self.done, _nobody
        if isinstance(outputs, BaseException):
            done(outputs)
        else:
            done(InferResponse(owner.name, owner.version_text, outputs, self.request.id, parameters))

    def deliver(self, outputs: Sequence[Tensor]) -> None:
        """Tell the caller of a request that is counted already."""
        self.state = ANSWERED
        owner = self.owner
        done, self.done = self.done, _nobody
        done(InferResponse(owner.name, owner.version_text, outputs, self.request.id))


class StreamPending(Pending):
    """One request with any number of answers to come."""

    def __init__(
        self, owner: Owner, request: InferRequest, rows: int, key: Hashable, answered: Answered, arrived_ns: int
    ) -> None:
        super().__init__(owner, request, rows, key, partial(_last, answered), arrived_ns)
        self.answered = answered

    def reply(
        self,
        outputs: Sequence[Tensor] | BaseException | None,
        *,
        final: bool = True,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        """One of the answers."""
        if self.state == ANSWERED:
            return
        if outputs is None:
            if final:
                self.state = ANSWERED
                self.owner.settle(self, None)
                done, self.answered, self.done = self.done, _no_stream, _nobody
                done(None)
        elif final or isinstance(outputs, BaseException):
            self.finish(outputs, parameters)
        else:
            owner = self.owner
            response = InferResponse(owner.name, owner.version_text, outputs, self.request.id, parameters)
            self.answered(response, False)

    def finish(self, outputs: Sequence[Tensor] | BaseException, parameters: Parameters = NO_PARAMETERS) -> None:
        """See `Pending.finish`."""
        self.answered = _no_stream
        super().finish(outputs, parameters)


_NO_REQUEST = InferRequest("", ())


def _nobody(result: InferResponse | BaseException | None) -> None:
    """Whom an answered request tells."""


def _no_stream(result: InferResponse | BaseException | None, final: bool) -> None:
    """The same, of a stream."""


def _last(answered: Answered, result: InferResponse | BaseException | None) -> None:
    answered(result, True)


def _not_decoupled(name: str) -> HeadraceError:
    return Internal(
        f"model '{name}' did not give exactly one response: a model that gives none or several needs "
        "'model_transaction_policy { decoupled: true }' in its configuration"
    )
