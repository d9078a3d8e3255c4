# SPDX-License-Identifier: Apache-2.0
"""The words of prefill and decode apart: who has which part, and the ticket for pages that one hands to another.

A server with the role `prefill` computes a prompt and keeps the full pages of its keys and values. What it answers is a
ticket, an `Offer` that is signed: which model computed them, which tokens they stand for (by a digest), how many there are,
and where the bytes lie. A server with the role `decode` gets the request with the ticket, takes the pages and goes on; what
is left of the prompt, less than a page and one token, it computes itself. So it is the decoder that samples every token, the
first one too, and an answer does not depend on whether its pages were handed over. No I/O here.

    told = offer.signed(key)                  # in the answer of a prefill, and in the header HEADER of a request
    offer = Offer.read(told, key, now)        # raises BadTicket
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NotBase64
from dataclasses import asdict, dataclass
from typing import Literal

import orjson

Role = Literal["", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("", "prefill", "decode")
"""Whole requests; prompts for others (and whole requests too, where somebody asks); requests whose prompt came."""

PREFILL_PATH = "/v1/headrace/prefill"
"""Where a prefill is asked, with the body of a chat or a completions request."""
HEADER = b"x-headrace-handing"
"""A request to a decoder: the ticket. A request to a prefill: the proof that its sender knows the key."""
LONGEST_TICKET = 2048
LEAST_KEY_BYTES = 16
_CLOCKS_APART_SECONDS = 60.0
"""Machines need not agree on the time better than that."""
_FILE = re.compile(r"[0-9a-zA-Z_-]{1,64}/[0-9a-f]{32}|")
_HEX = re.compile(r"[0-9a-f]{32}")
_HOST = re.compile(r"[0-9A-Za-z.:_-]{0,253}")


@dataclass(frozen=True, slots=True)
class HandingSettings:
    """What a server is told of its part."""

    role: Role = ""
    key: bytes = b""
    """What tickets are signed with, the same for all servers; empty for the one that servers of one machine share."""
    host: str = "127.0.0.1"
    port: int = 0
    """Where a prefill gives pages to decoders of other machines: an address that they reach, for they are told it."""
    keep_seconds: float = 30.0
    """How long a prefill keeps pages that nobody takes."""
    keep_bytes: int = 1 << 30
    """How many bytes of them; beyond that prompts are computed by the decoders."""
    take_seconds: float = 10.0
    """How long taking may last, before the decoder computes the prompt itself."""


class BadTicket(ValueError):
    """A ticket that is not one of ours, or not any more."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Pages that somebody keeps."""

    id: str
    model: str
    """The identity of the weights, their adapters and the shape of their pages."""
    digest: str
    """Of all tokens of the pages, and of what else they depend on: an adapter, pictures."""
    pages: int
    page_bytes: int
    file: str
    """Where they lie in the shared memory of the machine."""
    host: str
    port: int
    """Where they are to be had over TCP; 0 for nowhere."""
    expires: float
    """Seconds of the Unix clock."""

    @property
    def size(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_bytes

    def signed(self, key: bytes) -> str:
        """As a ticket: text that a header can carry."""
        said = urlsafe_b64encode(orjson.dumps(asdict(self))).rstrip(b"=")
        return f"{said.decode()}.{signature(key, b'offer', said)}"

    @classmethod
    def read(cls, ticket: str, key: bytes, now: float) -> Offer:
        """Check and read a ticket. The signature comes first: nothing that a stranger wrote is looked at."""
        said, _, proof = ticket.partition(".")
        if len(ticket) > LONGEST_TICKET or not ticket.isascii():
            raise BadTicket("it is no ticket")
        if not hmac.compare_digest(proof, signature(key, b"offer", said.encode())):
            raise BadTicket("it is not signed with our key")
        try:
            members = orjson.loads(urlsafe_b64decode(said + "=" * (-len(said) % 4)))
            offer = cls(**members)
        except (NotBase64, orjson.JSONDecodeError, TypeError):
            raise BadTicket("it is of another version of Headrace") from None
        offer._check()
        if now > offer.expires + _CLOCKS_APART_SECONDS:
            raise BadTicket("it is too old")
        return offer

    def _check(self) -> None:
        texts = (self.id, self.model, self.digest, self.file, self.host)
        numbers = (self.pages, self.page_bytes, self.port)
        right = (
            all(isinstance(each, str) for each in texts)
            and all(type(each) is int and 0 <= each < 2**50 for each in numbers)
            and isinstance(self.expires, float | int)
            and _HEX.fullmatch(self.id)
            and _FILE.fullmatch(self.file)
            and _HOST.fullmatch(self.host)
            and self.port < 65536
        )
        if not right:
            raise BadTicket("it is of another version of Headrace")


def signature(key: bytes, purpose: bytes, *parts: bytes) -> str:
    """Of these parts, for one purpose: what is signed for another is no good for it."""
    made = hmac.new(key, purpose, hashlib.sha256)
    for part in parts:
        made.update(len(part).to_bytes(8, "big") + part)
    return made.hexdigest()


def proof_of_asking(key: bytes, body: bytes, now: float) -> bytes:
    """What a router shows a prefill: it knows the key, and asks for this body, now."""
    time = b"%d" % int(now)
    return time + b"." + signature(key, b"ask", time, hashlib.sha256(body).digest()).encode()


def may_ask(key: bytes, proof: bytes, body: bytes, now: float) -> bool:
    """Whether that is so."""
    time, _, _ = proof.partition(b".")
    if not time.isdigit() or len(time) > 12 or abs(now - int(time)) > _CLOCKS_APART_SECONDS:
        return False
    return hmac.compare_digest(proof, proof_of_asking(key, body, int(time)))
