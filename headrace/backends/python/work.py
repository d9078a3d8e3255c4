# SPDX-License-Identifier: Apache-2.0
"""Requests in the hands of a process: how the child gets them, and which of them are still to be answered.

Called by `instance`. What a packed request is, `child.requests.received_request` reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.backends.contract import Work
from headrace.backends.python.arena import Arena
from headrace.backends.python.frames import Buffer
from headrace.backends.python.packing import Packed, pack
from headrace.core.errors import HeadraceError
from headrace.core.messages import InferRequest

_Numbered = tuple[int, Work]

_START, _END = 1, 2
# What the protocols put among the parameters but Triton's models do not find there.
_NOT_PARAMETERS = frozenset(
    {
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "binary_data_output",
        "binary_data",
        "triton_enable_empty_final_response",
    }
)


def packed_request(number: int, request: InferRequest, arena: Arena | None, pieces: list[Buffer]) -> Packed:
    """Everything a model may ask of a request, its tensors placed."""
    parameters = request.parameters
    correlation_id: object = 0
    flags = timeout = 0
    rest = None
    if parameters:
        given = parameters.get("timeout")
        correlation_id = parameters.get("sequence_id", 0)
        flags = _START * bool(parameters.get("sequence_start")) + _END * bool(parameters.get("sequence_end"))
        timeout = given if isinstance(given, int) else 0
        rest = {name: value for name, value in parameters.items() if name not in _NOT_PARAMETERS}
    return [
        number,
        request.id,
        correlation_id,
        flags,
        timeout,
        rest,
        [output.name for output in request.outputs],
        request.model_name,
        int(request.model_version or -1),
        pack(request.inputs, arena, pieces),
    ]


class Outstanding:
    """The requests of one process, by number, until their last answer."""

    def __init__(self, max_batch_size: int) -> None:
        self.works: dict[int, Work] = {}
        self.again: list[int] = []
        """Those that are to be executed once more. Some may get their last answer meanwhile, by a thread of the model."""
        self._max_batch_size = max_batch_size
        self._last = 0
        self._told: set[int] = set()

    def entered(self, batch: Sequence[Work]) -> list[_Numbered]:
        """Number a batch; with those that are to be executed once more, as far as there is room."""
        first = self._last + 1
        self._last += len(batch)
        numbered = list(enumerate(batch, first))
        if self.again:
            room = self._max_batch_size - sum(_rows(work.request) for work in batch)
            numbered += self._waiting(room)
        self.works.update(numbered)
        return numbered

    def left_over(self) -> Iterator[list[_Numbered]]:
        """Batches of those that are to be executed once more and have found no other to go with."""
        while self.again:
            first = self._waiting(self._max_batch_size)
            # Without batching, or too large for it: one after the other.
            batch = first or [(number, self.works[number]) for number in self.again[:1]]
            self.again = self.again[0 if first else 1 :]
            if batch:
                yield batch

    def answered(self, number: int) -> Work | None:
        """The last answer to a request is here."""
        self._told.discard(number)
        return self.works.pop(number, None)

    def newly_cancelled(self) -> list[int]:
        """Those nobody waits for any more; each is named once."""
        cancelled = [number for number, work in self.works.items() if work.cancelled and number not in self._told]
        self._told.update(cancelled)
        return cancelled

    def fail_all(self, error: HeadraceError) -> None:
        """The process cannot answer any more."""
        works = list(self.works.values())
        self.works.clear()
        self._told.clear()
        self.again.clear()
        for work in works:
            work.reply(error)

    def _waiting(self, room: int) -> list[_Numbered]:
        waiting = [number for number in self.again if number in self.works]
        taken: list[_Numbered] = []
        while waiting and room >= (rows := _rows(self.works[waiting[0]].request)):
            room -= rows
            number = waiting.pop(0)
            taken.append((number, self.works[number]))
        self.again = waiting
        return taken


def _rows(request: InferRequest) -> int:
    for tensor in request.inputs:
        return tensor.shape[0] if tensor.shape else 1
    return 1
