# SPDX-License-Identifier: Apache-2.0
"""Header blocks from one side of the router to the other, each worked out once for all calls that repeat it.

A client's head becomes a `RequestPlan`, kept in the head's `memo`; a backend's block becomes an `Answer`, kept by
`AnswerReader`. Both hold the block that goes out on the other side, ready to be written.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.fleet.router.backend import Outcome
from headrace.fleet.router.requests import HOP_BY_HOP, VIA_NAME
from headrace.net.grpc.metadata import parse_timeout
from headrace.net.grpc.status import Status
from headrace.net.http2.frames import ErrorCode, StreamFault
from headrace.net.http2.headers import HeaderReader, encode_field, encode_fields, encode_status

if TYPE_CHECKING:
    from headrace.core.limits import Limits
    from headrace.net.http.heads import Field, RequestHead

# Entries of HPACK's static table.
_POST = b"\x83"
_SCHEMES = {"http": b"\x86", "https": b"\x87"}
_TE = encode_field(b"te", b"trailers")

_REMEMBERED_BYTES = 256 * 1024
_FIELD_COST = 64
_LONGEST_TIMEOUT_MILLISECONDS = 99_999_999
_REFUSING = frozenset((502, 503, 504))
_ERRED = frozenset((Status.UNKNOWN, Status.INTERNAL, Status.DATA_LOSS))
_MOST_HOPS = 8
"""How often a call may have passed a router of this name: a chain of them has its uses, a circle has none."""
_ADDRESSES = re.compile(rb"[A-Za-z0-9 ,.:;\[\]_-]{1,1024}")
_NEVER = HOP_BY_HOP | {b"host", b"x-forwarded-for", b"grpc-timeout"}
"""Of the connection, or written here."""
_UNTRUSTED = _NEVER | {b"forwarded", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-port", b"x-real-ip"}


class RequestPlan:
    """How calls with one and the same head, of one client, are passed on. Shared by all of them, never changed."""

    __slots__ = ("_bare", "block", "error", "names_host", "timeout_seconds")

    def __init__(self, head: RequestHead, client: str, *, keep_host: bool, trust_forwarded: bool) -> None:
        self.error: HeadraceError | None = None
        """Why no call with this head is passed on."""
        self.timeout_seconds: float | None = None
        self.names_host = keep_host and bool(head.authority)
        """Whether the block has an `:authority`; if not, the backend's own goes before it."""
        target = head.path + b"?" + head.query if head.query else head.path
        pieces = [_POST, encode_field(b":path", target)]
        if self.names_host:
            pieces.append(encode_field(b":authority", head.authority))
        pieces.append(_TE)
        pieces += [encode_field(name, value) for name, value in _passed_on(head, trust_forwarded)]
        pieces += [encode_field(name, value) for name, value in _forwarding(head, client, trust_forwarded)]
        self._bare = b"".join(pieces)
        self.block = self._bare
        """The whole head but for the scheme, which depends on the backend."""
        timeout = head.get(b"grpc-timeout")
        try:
            if head.method != b"POST":
                raise InvalidArgument("gRPC calls are POST requests")
            if sum(value.count(VIA_NAME) for name, value in head.fields if name == b"via") >= _MOST_HOPS:
                raise FailedPrecondition("the call goes in a circle: a router has itself among its backends")
            if timeout is not None:
                self.timeout_seconds = parse_timeout(timeout)
                self.block += encode_field(b"grpc-timeout", timeout)
        except HeadraceError as error:
            self.error = error

    def block_after(self, seconds: float) -> bytes:
        """The block for a call that has waited: its backend has only the rest of the time."""
        if self.timeout_seconds is None:
            return self.block
        left = round(1000 * (self.timeout_seconds - seconds))
        if left > _LONGEST_TIMEOUT_MILLISECONDS:
            return self.block  # over a day: what it waited is nothing against that
        return self._bare + encode_field(b"grpc-timeout", b"%dm" % max(left, 1))


def _passed_on(head: RequestHead, trust: bool) -> list[Field]:
    """The fields that are the client's to say."""
    left_out = _NEVER if trust else _UNTRUSTED
    # Some servers read `_` as `-`: what may not be said with one may not be said with the other.
    return [
        (name, value)
        for name, value in head.fields
        if name not in left_out and (b"_" not in name or name.replace(b"_", b"-") not in left_out)
    ]


def _forwarding(head: RequestHead, client: str, trust: bool) -> list[Field]:
    """Who the client is, what it asked for, and that we stand between."""
    before = [value for name, value in head.fields if name == b"x-forwarded-for" and _ADDRESSES.fullmatch(value)]
    fields = [
        (b"x-forwarded-for", b", ".join([*before, client.encode("latin-1", "replace")])),
        (b"via", b"2 " + VIA_NAME),
    ]
    if not trust or b"x-forwarded-proto" not in head.by_name:
        fields.append((b"x-forwarded-proto", head.scheme))
    if head.authority and (not trust or b"x-forwarded-host" not in head.by_name):
        fields.append((b"x-forwarded-host", head.authority))
    return fields


def opening_blocks(scheme: str, host: str, port: int) -> tuple[bytes, bytes]:
    """What a plan's block follows on a connection: the scheme, and the scheme with the backend's own name."""
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return _SCHEMES[scheme], _SCHEMES[scheme] + encode_field(b":authority", name.encode())


class Answer:
    """A header block of a backend, as it goes on to the client."""

    __slots__ = ("block", "grpc_status", "outcome", "status")

    def __init__(self, status: int, fields: list[Field]) -> None:
        self.status = status
        """HTTP's; 0 for trailers."""
        self.grpc_status = -1
        """-1 where the block has none."""
        kept = [(bytes(name), bytes(value)) for name, value in fields if name not in HOP_BY_HOP]
        for name, value in kept:
            if name == b"grpc-status":
                self.grpc_status = int(value) if value.isdigit() and len(value) < 4 else 2
        refused = self.grpc_status == Status.UNAVAILABLE or status in _REFUSING
        erred = self.grpc_status in _ERRED or status >= 500
        self.outcome = Outcome.REFUSED if refused else Outcome.ERRED if erred else Outcome.OK
        """What it says of the backend."""
        try:
            self.block = (encode_status(status) if status else b"") + encode_fields(kept)
        except ValueError:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a field of the answer is malformed") from None


class AnswerReader(HeaderReader):
    """Decodes the header blocks of one connection to a backend."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._heads: dict[bytes, Answer] = {}
        self._tails: dict[bytes, Answer] = {}
        self._answers_bytes = 0

    def answer_head(self, block: bytes) -> Answer:
        """The head of an answer."""
        answer = self._heads.get(block)
        if answer is None:
            fields, stable = self._decode(block)
            names = [name for name, _ in fields]
            if names[:1] != [b":status"] or any(name[:1] == b":" for name in names[1:]):
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "an answer begins with one :status")
            status = bytes(fields[0][1])
            if len(status) != 3 or not status.isdigit() or not 100 <= int(status) <= 599:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, ":status is no status")
            answer = Answer(int(status), fields[1:])
            if stable:
                self._keep(self._heads, block, answer, len(fields))
        return answer

    def answer_tail(self, block: bytes) -> Answer:
        """The trailers of an answer."""
        answer = self._tails.get(block)
        if answer is None:
            fields, stable = self._decode(block)
            if any(name[:1] == b":" for name, _ in fields):
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "pseudo-header in trailers")
            answer = Answer(0, fields)
            if stable:
                self._keep(self._tails, block, answer, len(fields))
        return answer

    def known(self, head_block: bytes, tail_block: bytes) -> tuple[Answer, Answer] | None:
        """Head and trailers of an answer, if both have been seen before; interim heads are none."""
        head = self._heads.get(head_block)
        tail = self._tails.get(tail_block)
        return (head, tail) if head is not None and tail is not None and head.status >= 200 else None

    def _keep(self, answers: dict[bytes, Answer], block: bytes, answer: Answer, fields: int) -> None:
        cost = len(block) + len(answer.block) + _FIELD_COST * (fields + 2)
        if cost > _REMEMBERED_BYTES // 4:
            return
        self._answers_bytes += cost
        if self._answers_bytes > _REMEMBERED_BYTES:
            self._forget()
            self._answers_bytes = cost
        answers[block] = answer

    def _forget(self) -> None:
        self._heads.clear()
        self._tails.clear()
        self._answers_bytes = 0

    def _decode(self, block: bytes) -> tuple[list[Field], bool]:
        """See `HeaderReader._decode`. We ask backends for no dynamic table; some go on to index into one of size 0."""
        entries = self._table.dynamic_entries
        had = len(entries)
        fields, stable = super()._decode(block)
        if stable:
            return fields, True
        if had or entries:
            self._forget()
            return fields, False
        return fields, not 0x20 <= block[0] < 0x40
