# SPDX-License-Identifier: Apache-2.0
"""KV transfer between prefill and decode servers: roles, settings and signed transfer tokens. No I/O.

A prefill server computes a prompt and keeps the full pages of its KV cache. It returns a signed transfer token with the
model that computed the pages, a digest of their tokens, the number of pages and the address to fetch them from. A decode
server receives the request with the token, fetches the pages and computes the rest of the prompt: less than a page, and
one token. The decode server samples every token, also the first one, so the output does not depend on whether pages were
transferred.

    text = token.signed(key)                       # in a prefill response, and in the TRANSFER_HEADER of a request
    token = TransferToken.parse(text, key, now)    # raises InvalidTransferToken
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
"""A server without a role computes whole requests. A prefill server computes prompts, and whole requests if
clients send them. A decode server computes requests whose prompt was prefilled."""

PREFILL_PATH = "/v1/headrace/prefill"
"""Path for prefill requests; the body is that of a chat or completions request."""
TRANSFER_HEADER = b"x-headrace-handing"
"""In a request to a decode server: the transfer token. In a request to a prefill server: the proof that the sender knows
the key."""
MAX_TOKEN_CHARACTERS = 2048
MIN_KEY_BYTES = 16
KEY_VARIABLE = "HEADRACE_HANDING_KEY"
"""Environment variable with the key of the fleet."""
CLOCK_SKEW_SECONDS = 60.0
"""Allowed difference between the clocks of two machines."""
_FILE = re.compile(r"[0-9a-zA-Z_-]{1,64}/[0-9a-f]{32}|")
_HEX = re.compile(r"[0-9a-f]{32}")
_HOST = re.compile(r"[0-9A-Za-z.:_-]{0,253}")


@dataclass(frozen=True, slots=True)
class KvTransferSettings:
    """A server's role in KV transfer."""

    role: Role = ""
    key: bytes = b""
    """Signs transfer tokens; the same on all servers. Empty: the key that the servers of one machine share."""
    host: str = "127.0.0.1"
    port: int = 0
    """Address from which decode servers on other machines fetch pages; they must be able to reach it."""
    keep_seconds: float = 30.0
    """How long a prefill server keeps pages that are not fetched."""
    keep_bytes: int = 1 << 30
    """Maximum bytes of kept pages; above that, decode servers compute the prompts themselves."""
    take_seconds: float = 10.0
    """Timeout for fetching pages; after it the decode server computes the prompt itself."""


class InvalidTransferToken(ValueError):
    """The transfer token is malformed, expired or not signed with our key."""


@dataclass(frozen=True, slots=True)
class TransferToken:
    """KV-cache pages that a prefill server keeps, and where to fetch them."""

    id: str
    model: str
    """Identity of the weights, their adapters and the page layout."""
    digest: str
    """Digest of all tokens in the pages and of what else the pages depend on: an adapter, images."""
    pages: int
    page_bytes: int
    file: str
    """Path in the machine's shared memory."""
    host: str
    port: int
    """TCP address of the pages; port 0 if they are not available over TCP."""
    expires: float
    """Unix time in seconds."""

    @property
    def size(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_bytes

    def signed(self, key: bytes) -> str:
        """Return the token as signed text that fits in a header."""
        payload = urlsafe_b64encode(orjson.dumps(asdict(self))).rstrip(b"=")
        return f"{payload.decode()}.{signature(key, b'offer', payload)}"

    @classmethod
    def parse(cls, text: str, key: bytes, now: float) -> TransferToken:
        """Verify and parse a signed token. The signature is verified first, before untrusted content is parsed."""
        payload, _, proof = text.partition(".")
        if len(text) > MAX_TOKEN_CHARACTERS or not text.isascii():
            raise InvalidTransferToken("it is not a transfer token")
        if not hmac.compare_digest(proof, signature(key, b"offer", payload.encode())):
            raise InvalidTransferToken("it is not signed with our key")
        try:
            fields = orjson.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
            token = cls(**fields)
        except (NotBase64, orjson.JSONDecodeError, TypeError):
            raise InvalidTransferToken("it is of another version of Headrace") from None
        token._check()
        if now > token.expires + CLOCK_SKEW_SECONDS:
            raise InvalidTransferToken("it has expired")
        return token

    def _check(self) -> None:
        strings = (self.id, self.model, self.digest, self.file, self.host)
        numbers = (self.pages, self.page_bytes, self.port)
        valid = (
            all(isinstance(string, str) for string in strings)
            and all(type(number) is int and 0 <= number < 2**50 for number in numbers)
            and isinstance(self.expires, float | int)
            and _HEX.fullmatch(self.id)
            and _FILE.fullmatch(self.file)
            and _HOST.fullmatch(self.host)
            and self.port < 65536
        )
        if not valid:
            raise InvalidTransferToken("it is of another version of Headrace")


def signature(key: bytes, purpose: bytes, *parts: bytes) -> str:
    """Return the HMAC of these parts for one purpose; it is not valid for any other purpose."""
    mac = hmac.new(key, purpose, hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.hexdigest()


def prefill_proof(key: bytes, body: bytes, now: float) -> bytes:
    """Return the proof that a router sends to a prefill server: it knows the key and sends this body now."""
    time = b"%d" % int(now)
    return time + b"." + signature(key, b"ask", time, hashlib.sha256(body).digest()).encode()


def is_valid_prefill_proof(key: bytes, proof: bytes, body: bytes, now: float) -> bool:
    """Return whether a prefill proof is valid for this body and recent."""
    time, _, _ = proof.partition(b".")
    if not time.isdigit() or len(time) > 12 or abs(now - int(time)) > CLOCK_SKEW_SECONDS:
        return False
    return hmac.compare_digest(proof, prefill_proof(key, body, int(time)))
