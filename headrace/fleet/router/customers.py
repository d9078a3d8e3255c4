# SPDX-License-Identifier: Apache-2.0
"""What pools and connections know of those who use them. `flows.Flow` is both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.fleet.router.answers import AnswerHead
    from headrace.fleet.router.upstream import Upstream
    from headrace.net.http.exchange import Buffer


class Applicant(Protocol):
    """Who waits for a new connection."""

    def connected(self, connection: Upstream) -> bool:
        """Here it is. False: it is not needed any more."""

    def unreachable(self, why: str) -> None:
        """It could not be made."""


class Customer(Protocol):
    """Whose request a connection carries."""

    plain: bool
    """A whole answer is one with a body, and the end: the request is not HEAD, and all of it is sent."""
    sending: bool
    """Its body has not come to its end: the connection cannot be used again if the answer does so first."""

    @property
    def silent(self) -> bool:
        """The answer has no body, whatever its head says: the request is HEAD."""

    @property
    def upgrade(self) -> bool:
        """101 is an answer to it."""

    def answered(self, head: AnswerHead, body: Buffer) -> None:
        """A whole answer."""

    def answer_begun(self, head: AnswerHead, length: int) -> None:
        """A streamed answer; `length` is -1 if it is not told."""

    def answer_piece(self, data: Buffer) -> bool:
        """A piece of it. False asks the connection to read no more until `resume`."""

    def answer_chunk(self, data: bytes, begin: int) -> bool:
        """The same, as the backend framed it: one chunk, whose text begins there."""

    def answer_ended(self) -> None:
        """The end of it."""

    def switched(self, head: AnswerHead, rest: bytes) -> None:
        """101: the connection is the customer's (`Upstream.detach`)."""

    def failed(self, why: str, *, untouched: bool = False, late: bool = False) -> None:
        """There will be no more of an answer. `untouched`: nothing of it had come; `late`: it took too long."""

    def writable(self) -> None:
        """The backend takes more, after `write_paused` was true."""
