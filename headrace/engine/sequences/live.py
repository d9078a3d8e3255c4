# SPDX-License-Identifier: Apache-2.0
"""A sequence on its way, and one step of it: a request as the model is to see it.

Made by the scheduler. A `Step` stands in for the caller's `Pending` in the hands of a runner, so that it is known when
the model is done with a request even where the caller has given up on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.backends.contract import Array
from headrace.core.messages import NO_PARAMETERS, InferRequest, InferResponse, Parameters
from headrace.core.tensors import Tensor
from headrace.engine.scheduling.pending import ANSWERED, Owner, Pending
from headrace.engine.sequences.flags import Flags, SequenceId

if TYPE_CHECKING:
    from headrace.engine.sequences.lanes import Lane


class Entry(NamedTuple):
    """A request that waits for those of its sequence before it."""

    pending: Pending
    flags: Flags
    number: int
    """Which of all requests it was."""


class LiveSequence:
    """From a START to whatever ends it."""

    __slots__ = (
        "before",
        "closed",
        "corrid",
        "head",
        "heir",
        "id",
        "idle_since_ns",
        "lane",
        "over",
        "queue",
        "running",
        "slot",
        "state",
    )

    def __init__(self, id: SequenceId, corrid: Tensor | None, state: dict[str, Array]) -> None:
        self.id = id
        self.corrid = corrid
        """The control input that tells the model which sequence it is, where the model wants to know."""
        self.state = state
        """Implicit state, by the name of its input."""
        self.queue: deque[Entry] = deque()
        self.head: Step | None = None
        """The first of the queue, when the model may have it."""
        self.running: Step | None = None
        self.closed = False
        """No more requests come: its END has, or it was idle too long, was cancelled, or began anew."""
        self.over = False
        """Closed, and nothing of it is left."""
        self.before: LiveSequence | None = None
        """One of the same id that must be over before this one begins."""
        self.heir: LiveSequence | None = None
        """The one that began anew under the same id: it gets the seat."""
        self.lane: Lane | None = None
        self.slot = -1
        self.idle_since_ns: int | None = None


class Step(Pending):
    """One request of a sequence, or a filler for a slot that has none, as a runner gets it."""

    sequence: LiveSequence | None

    def __init__(
        self,
        owner: Owner,
        request: InferRequest,
        key: Hashable,
        arrived_ns: int,
        told: Callable[[Step], None],
        *,
        sequence: LiveSequence | None = None,
        asked: Pending | None = None,
        flags: Flags | None = None,
        number: int = 0,
    ) -> None:
        super().__init__(owner, request, 1, key, _nobody, arrived_ns)
        self.sequence = sequence
        self.asked = asked
        """The caller's; None for a filler."""
        self.flags = flags
        self.number = number
        self.told = told
        if asked is None:
            # Nobody counts it, nobody is answered.
            self.state = ANSWERED

    @property
    def cancelled(self) -> bool:
        """Nobody waits any more; the model's work on it goes on all the same."""
        return self.asked is None or self.asked.state == ANSWERED

    def reply(
        self,
        outputs: Sequence[Tensor] | BaseException | None,
        *,
        final: bool = True,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        """One of the answers, for the caller; after the last one the sequence goes on."""
        if self.state == ANSWERED or self.asked is None:
            return
        if final or isinstance(outputs, BaseException):
            self.state = ANSWERED
            self.told(self)
        self.asked.reply(outputs, final=final, parameters=parameters)

    def finish(self, outputs: Sequence[Tensor] | BaseException, parameters: Parameters = NO_PARAMETERS) -> None:
        """The only answer."""
        self.reply(outputs, parameters=parameters)


def _nobody(_: InferResponse | BaseException) -> None:
    """Steps answer through the request they stand for."""
