# SPDX-License-Identifier: Apache-2.0
"""StreamInfer: requests are computed as they come, together where they can be, and answered in the order they came.

Opened by `grpc`, one per call. A request that is wrong has an answer that says so, and the stream goes on. A decoupled
model may answer a request several times, or not at all. Who sends faster than we compute, or does not read, is held back.
"""

from __future__ import annotations

from collections import deque

from headrace.api.v1.accounts import V1Accounts
from headrace.api.v1.data import Pieces
from headrace.api.v1.decoding import Accepted, Ticket, decode_request
from headrace.api.v1.encoding import empty_header, encode_response
from headrace.api.v1.envelopes import close_envelope, open_envelope
from headrace.api.v1.headers import Header
from headrace.api.v1.shared_memory import SharedMemory
from headrace.core.messages import InferResponse
from headrace.core.tensors import Buffer
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending import Pending
from headrace.net.grpc.call import GrpcCall

_MOST_REQUESTS = 64
_MOST_BYTES = 16 * 1024 * 1024
"""Unanswered requests of one stream, and their bytes, before the client is held back."""


class _Slot:
    """A request's place in the order."""

    __slots__ = ("accepted", "answers", "header", "over", "pending", "size", "ticket")

    def __init__(self, size: int, ticket: Ticket) -> None:
        self.size = size
        self.ticket = ticket
        self.header: Header | None = None
        self.accepted: Accepted | None = None
        self.pending: Pending | None = None
        self.answers: list[list[Buffer]] = []
        """Those that wait for their turn."""
        self.over = False


class InferStream:
    """See the module."""

    def __init__(self, call: GrpcCall, plane: DataPlane, accounts: V1Accounts, memory: SharedMemory | None) -> None:
        self._call = call
        self._plane = plane
        self._accounts = accounts
        self._memory = memory
        self._slots: deque[_Slot] = deque()
        self._bytes = 0
        self._held = False
        self._ended = False
        self._writable = True
        call.on_message = self._on_message
        call.on_half_close = self._on_half_close
        call.on_writable = self._on_writable
        call.on_cancel = self._on_cancel

    def _on_message(self, message: Buffer) -> None:
        slot = _Slot(len(message), Ticket(self._accounts))
        envelope = open_envelope(message, self._plane)
        slot.header = envelope.header
        self._slots.append(slot)
        self._bytes += slot.size
        if len(self._slots) >= _MOST_REQUESTS or self._bytes >= _MOST_BYTES:
            self._held = True
            self._call.pause()

        def answered(result: InferResponse | BaseException | None, final: bool) -> None:
            self._answered(slot, result, final)

        name, version, pieces = envelope.model_name, envelope.version, Pieces(envelope.pieces)
        try:
            slot.accepted = decode_request(self._plane, slot.ticket, name, version, slot.header, pieces, self._memory)
            slot.pending = self._plane.infer_stream(slot.accepted.request, answered)
        except Exception as error:
            self._answered(slot, error, True)

    def _answered(self, slot: _Slot, result: InferResponse | BaseException | None, final: bool) -> None:
        if slot.over:
            return
        slot.over = final
        if isinstance(result, InferResponse):
            try:
                slot.answers.append(self._encode(slot, result))
            except Exception as error:
                result = error
        if isinstance(result, BaseException):
            status = self._accounts.status(slot.ticket.number, result)
            slot.answers.append(close_envelope(status, empty_header(slot.header), []))
        self._flush()

    def _encode(self, slot: _Slot, result: InferResponse) -> list[Buffer]:
        if slot.accepted is None:
            raise RuntimeError("an answer came to a request that was never begun")
        encoded = encode_response(slot.accepted, result)
        return close_envelope(self._accounts.status(slot.ticket.number), encoded.header, encoded.raw)

    def _flush(self) -> None:
        """Send what has its turn."""
        slots = self._slots
        while slots and self._writable:
            slot = slots[0]
            while slot.answers and self._writable:
                self._writable = self._call.send(slot.answers.pop(0))
            if slot.answers or not slot.over:
                break
            slots.popleft()
            self._bytes -= slot.size
        if self._held and len(slots) <= _MOST_REQUESTS // 2 and self._bytes <= _MOST_BYTES // 2:
            self._held = False
            self._call.resume()
        if self._ended and not slots:
            self._call.finish()

    def _on_half_close(self) -> None:
        self._ended = True
        self._flush()

    def _on_writable(self) -> None:
        self._writable = True
        self._flush()

    def _on_cancel(self) -> None:
        slots, self._slots = self._slots, deque()
        for slot in slots:
            slot.over = True
            if slot.pending is not None:
                slot.pending.cancel()
