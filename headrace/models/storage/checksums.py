# SPDX-License-Identifier: Apache-2.0
"""Verify downloaded files by the checksums that stores report.

S3 has the MD5 of an object in its ETag if it was uploaded in one part and is not encrypted with a customer key, and
more on request; Azure has Content-MD5 if the uploader has set it. Without a checksum only sizes and ETags are compared.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.core.limits import MIB
from headrace.models.storage.parallel import Stopped

_PIECE_BYTES = MIB
_MD5_TAG = re.compile(r'"?([0-9a-f]{32})"?')
_S3_HEADERS = {"sha256": "x-amz-checksum-sha256", "sha1": "x-amz-checksum-sha1", "crc32": "x-amz-checksum-crc32"}
_LENGTHS = {"md5": 16, "sha256": 32, "sha1": 20, "crc32": 4}


@dataclass(frozen=True, slots=True)
class Checksum:
    """An expected checksum."""

    kind: str
    """md5, sha1, sha256 or crc32."""
    digest: bytes

    def fits(self, path: Path, stopped: Stopped) -> bool:
        """Return whether a file has this checksum. Returns True early when stopped: the file is then not used."""
        hasher = _new_hasher(self.kind)
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(_PIECE_BYTES)
            view = memoryview(buffer)
            while count := file.readinto(buffer):
                if stopped():
                    return True
                hasher.update(view[:count])
        return hasher.digest() == self.digest


def from_etag(etag: str) -> Checksum | None:
    """Return the MD5 in an S3 ETag; None for multipart uploads (their ETag has a `-`)."""
    match = _MD5_TAG.fullmatch(etag)
    return Checksum("md5", bytes.fromhex(match[1])) if match else None


def from_hex(kind: str, text: str) -> Checksum | None:
    """Return a checksum from hex digits, as the Hub writes it; None if they are invalid."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None
    return Checksum(kind, digest) if len(digest) == _LENGTHS[kind] else None


def from_headers(headers: Mapping[str, str]) -> Checksum | None:
    """Return the best checksum in response headers (names in lower case)."""
    candidates = [(kind, headers.get(name, "")) for kind, name in _S3_HEADERS.items()]
    checksum_type = headers.get("x-amz-checksum-type", "").upper()
    if checksum_type != "FULL_OBJECT" and (checksum_type or "-" in headers.get("etag", "")):
        candidates = []  # A checksum of the parts' checksums, with unknown part sizes.
    for kind, text in (*candidates, ("md5", headers.get("content-md5", ""))):
        try:
            digest = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            continue
        if len(digest) == _LENGTHS[kind]:
            return Checksum(kind, digest)
    return None


def etag_is_md5(headers: Mapping[str, str]) -> bool:
    """Return whether an ETag that looks like an MD5 is one: not for objects encrypted with a customer key."""
    encrypted = headers.get("x-amz-server-side-encryption", "").lower()
    return encrypted in {"", "aes256"} and "x-amz-server-side-encryption-customer-algorithm" not in headers


class _Hasher(Protocol):
    def update(self, data: memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


def _new_hasher(kind: str) -> _Hasher:
    make: dict[str, Callable[[], _Hasher]] = {
        "md5": lambda: hashlib.md5(usedforsecurity=False),
        "sha1": lambda: hashlib.sha1(usedforsecurity=False),
        "sha256": hashlib.sha256,
        "crc32": _Crc32,
    }
    return make[kind]()
