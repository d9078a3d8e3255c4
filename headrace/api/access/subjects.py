# SPDX-License-Identifier: Apache-2.0
"""Whom a request is counted for: the holder of a key, a user, or an address.

Asked by the guards of `apps` for each request under a rate limit. `x-forwarded-for` is what anyone may write, so it is
read from the right, and only as far as the addresses are those of proxies that the settings trust. An IPv6 address counts
by its /64, which is what one subscriber has at least.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace.api.access.keys import ApiKey
from headrace.api.access.settings import RateLimits
from headrace.core.errors import InvalidArgument

FORWARDED = b"x-forwarded-for"
UNIX = "unix"
"""What a client on a UNIX socket is called, among the trusted proxies too."""

_REMEMBERED = 16384
_REMEMBERED_BYTES = 512
_USER_BYTES = 256
_BY_KEY = {"key"}

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Head(Protocol):
    """What is read of a request's head."""

    @property
    def by_name(self) -> Mapping[bytes, bytes]:
        """The fields by lower-case name; the last where a name is repeated."""

    @property
    def fields(self) -> Sequence[tuple[bytes, bytes]]:
        """All of them, in order."""


class Subjects:
    """Finds, for each limit, whom a request is counted for."""

    def __init__(self, rates: RateLimits) -> None:
        self._limits = [(limit.by, b"%d" % number) for number, limit in enumerate(rates.limits)]
        self._kinds = {limit.by for limit in rates.limits}
        self._user_header = rates.user_header.lower().encode()
        self._trusted = tuple(_network(proxy) for proxy in rates.trusted_proxies if proxy != UNIX)
        self._trusts_unix = UNIX in rates.trusted_proxies
        self._trusts = bool(rates.trusted_proxies)
        self._addresses: dict[tuple[str, bytes], bytes] = {}
        self._of_keys: dict[str, list[bytes]] = {}

    def of(self, peer: str, head: Head, key: ApiKey | None) -> list[bytes]:
        """For each limit, in order. No two limits share a subject."""
        if key is None or self._kinds != _BY_KEY:
            return self._made(peer, head, key)
        # Most often; and there are no more keys than the file has.
        made = self._of_keys.get(key.name)
        if made is None:
            made = self._of_keys[key.name] = self._made(peer, head, key)
        return made

    def _made(self, peer: str, head: Head, key: ApiKey | None) -> list[bytes]:
        made: list[bytes] = []
        for by, number in self._limits:
            if by == "user":
                user = head.by_name.get(self._user_header)
                if user:
                    made.append(number + b"u" + user[:_USER_BYTES])
                    continue
            if by != "address" and key is not None:
                made.append(number + b"k" + key.name.encode())
            else:
                made.append(number + b"a" + self.address(peer, head))
        return made

    def address(self, peer: str, head: Head) -> bytes:
        """The client's address: the peer's, or what proxies that are trusted say it is."""
        forwarded = b""
        host = peer.rpartition(":")[0] or peer
        if self._trusts and FORWARDED in head.by_name:
            forwarded = b",".join(value for name, value in head.fields if name == FORWARDED)
        found = self._addresses.get((host, forwarded))
        if found is None:
            found = self._found(host, forwarded)
            if len(forwarded) <= _REMEMBERED_BYTES:
                if len(self._addresses) >= _REMEMBERED:
                    self._addresses.clear()
                self._addresses[host, forwarded] = found
        return found

    def _found(self, host: str, forwarded: bytes) -> bytes:
        address = _parsed(host)
        if forwarded and (self._is_trusted(address) if address is not None else host == UNIX and self._trusts_unix):
            for text in reversed(forwarded.decode("latin-1").split(",")):
                before = _parsed(text.strip())
                if before is None:
                    break  # who comes after an address that is none is anybody's guess
                address = before
                if not self._is_trusted(address):
                    break
        if address is None:
            return host.encode()
        if isinstance(address, ipaddress.IPv6Address):
            return str(ipaddress.IPv6Network((address, 64), strict=False)).encode()
        return str(address).encode()

    def _is_trusted(self, address: _Address) -> bool:
        return any(address in network for network in self._trusted)


def _parsed(text: str) -> _Address | None:
    """An address, with or without a port."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _network(text: str) -> _Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise InvalidArgument(
            f"{text!r} is no trusted proxy: give an address, a network such as 10.0.0.0/8, or '{UNIX}'"
        ) from None
