# SPDX-License-Identifier: Apache-2.0
"""Rate limits, counted in memory that the workers of one server share.

`SubjectResolver` determines the subject of a request (an API key, a user or an address), `RateLimiter` applies all
limits, and `BucketTable` stores the counts. `redis_rate_limits` counts by the same rules in Redis. The guards of
`programs.serve` call it for each request; time and subjects are passed in.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import mmap
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, lockf
from pathlib import Path
from struct import Struct
from typing import Protocol

from headrace.api.access.api_keys import ApiKey
from headrace.api.access.settings import RateBy, RateLimit, RateLimits
from headrace.core.errors import InvalidArgument, ResourceExhausted

_NANO = 1_000_000_000
_SUBJECT_NAMES = {"key": "this API key", "user": "this user", "address": "this address"}
_MAX_SECONDS = 366 * 86400


_WAYS = 8
_SET_WORDS = 2 * _WAYS
"""Eight tags, then the eight buckets' times in nanoseconds; a tag of 0 marks an empty slot."""
_HEADER_WORDS = 8
_SECRET_BYTES = 16
_WORD_BYTES = 8
_HASH = Struct("=QI")
DEFAULT_SETS = 65536
"""Half a million subjects, in at most 8 MiB: the kernel allocates memory as sets are used."""
_STRIPES = 1024
_TRY_LOCK = LOCK_EX | LOCK_NB
_LOCK_SECONDS = 0.05
"""Longest wait for a lock. A worker holds one for microseconds; if it was stopped meanwhile, a count may be lost."""
_CACHED_SLOTS = 16384
_CACHED_SUBJECT_BYTES = 256
Slot = tuple[int, int, int]
"""The word at which a subject's tag was last seen, the tag, and the number of its lock."""
FORWARDED = b"x-forwarded-for"
UNIX = "unix"
"""The peer name of a client on a UNIX socket, also among the trusted proxies."""
_CACHED_ADDRESSES = 16384
_CACHED_ADDRESS_BYTES = 512
_USER_BYTES = 256
_BY_KEY = {"key"}
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RateRule:
    """A limit in nanoseconds: one request each `interval`, up to `tolerance` ahead of time."""

    __slots__ = ("_lines", "by", "capacity", "interval", "requests", "seconds", "tolerance")

    def __init__(self, limit: RateLimit) -> None:
        if limit.requests < 1 or not 0 < limit.seconds <= _MAX_SECONDS or limit.burst < 0:
            raise InvalidArgument("a rate limit is one request or more, in more than 0 seconds and at most 366 days")
        self.by: RateBy = limit.by
        self.requests = limit.requests
        self.seconds = limit.seconds
        self.capacity = limit.burst or limit.requests
        self.interval = max(1, int(limit.seconds * _NANO / limit.requests))
        self.tolerance = self.interval * self.capacity
        self._lines = (
            b"ratelimit-limit: %d\r\nx-ratelimit-limit: %d\r\n"
            b"ratelimit-remaining: %%d\r\nx-ratelimit-remaining: %%d\r\n"
            b"ratelimit-reset: %%d\r\nx-ratelimit-reset: %%d\r\n"
        ) % (self.capacity, self.capacity)

    def remaining(self, debt: int) -> int:
        """Return how many more requests could pass now, from the debt that `RateLimiter.take` returned."""
        return (self.tolerance - debt) // self.interval if debt > 0 else 0

    def header_lines(self, debt: int, wall: float) -> bytes:
        """Return the response's header lines about this limit.

        The reset of the IETF draft's fields counts seconds; that of the older X- fields is a time, as GitHub's.
        """
        if debt > 0:
            left = (self.tolerance - debt) // self.interval
            seconds = -(-debt // _NANO)
        else:
            left = 0
            seconds = -((self.interval + debt - self.tolerance) // _NANO)
        return self._lines % (left, left, seconds, wall + seconds + 1)

    def refusal(self, debt: int) -> ResourceExhausted:
        """Return the error for a request that may not pass."""
        wait = -debt / _NANO
        text = f"{_SUBJECT_NAMES[self.by]} may send {self.requests} requests in {self.seconds:g} seconds: wait {wait:.3g} s"
        return ResourceExhausted(text, retry_after_seconds=wait)


Decision = tuple[RateRule, int]
"""The rule that refused a request, or the tightest of those it passed, and the bucket's debt: the nanoseconds until the
bucket is full again. A negative debt: the request may not pass, and could after so many nanoseconds."""


class RateLimiter:
    """All limits of a server, counted in its memory. A request that one limit refuses is not counted by the others."""

    def __init__(self, limits: Sequence[RateLimit], table: BucketTable | None = None) -> None:
        self.rules = [RateRule(limit) for limit in limits]
        self._table = table or BucketTable()

    def take(self, subjects: Sequence[bytes], now: float) -> Decision:
        """Count one request against every limit; `subjects` has one entry per limit."""
        now_ns = int(now * _NANO)
        rules = self.rules
        table = self._table
        rule = rules[0]
        debt = table.charge(subjects[0], now_ns, rule.interval, rule.tolerance)
        if len(rules) == 1 or debt < 0:
            return rule, debt
        tightest = rule, debt
        for number in range(1, len(rules)):
            rule = rules[number]
            debt = table.charge(subjects[number], now_ns, rule.interval, rule.tolerance)
            if debt < 0:
                for earlier in range(number):
                    table.refund(subjects[earlier], rules[earlier].interval)
                return rule, debt
            if rule.remaining(debt) < tightest[0].remaining(tightest[1]):
                tightest = rule, debt
        return tightest

    def close(self) -> None:
        """Close the table."""
        self._table.close()


class BucketTable:
    """A table of rate-limit buckets of a fixed size; with a `path`, in memory that the workers of one server share.

    A bucket is one number: the time at which everything it admitted is paid for (GCRA, the generic cell rate algorithm:
    a token bucket without a clock of its own). A bucket whose time has passed equals an empty slot, so nothing is
    cleaned up. Subjects are hashed into sets of eight; in a full set the bucket with the smallest debt is evicted, so a
    million addresses take no more memory than one. The hash is keyed with a secret of the server, so clients cannot
    choose colliding addresses.

    With a file, each update holds a lock on the part of the file that has the set. The kernel frees the locks of a
    process that dies. One event loop per process: the locks do not exclude threads.
    """

    def __init__(self, path: Path | None = None, sets: int = DEFAULT_SETS) -> None:
        size = (_HEADER_WORDS + sets * _SET_WORDS) * _WORD_BYTES
        self._sets = sets
        self._slots: dict[bytes, Slot] = {}
        self._file = -1
        if path is None:
            self._memory: mmap.mmap | bytearray = bytearray(size)
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        # Memory views: reading an item takes a quarter of the time of `struct`.
        self._tags = memoryview(self._memory).cast("Q")
        self._times = memoryview(self._memory).cast("q")
        self._secret = self._shared_secret()

    def charge(self, subject: bytes, now: int, interval: int, tolerance: int) -> int:
        """Take one token from a bucket that gains one per `interval` and holds `tolerance / interval`; all nanoseconds.

        Return the bucket's debt (the time until it is full), or minus the time to wait if it is empty.
        """
        slot = self._slots.get(subject)
        if slot is None:
            slot = self._first_slot(subject)
        word, tag, stripe = slot
        file = self._file
        if file >= 0:
            try:
                lockf(file, _TRY_LOCK, 1, stripe)
            except OSError:
                file = self._wait(stripe)
        try:
            times = self._times
            if self._tags[word] != tag:
                word = self._find_word(subject, slot)
            debt = times[word + _WAYS] - now
            debt = interval if debt < 0 else debt + interval
            if debt > tolerance:
                return tolerance - debt
            times[word + _WAYS] = now + debt
            return debt
        finally:
            if file >= 0:
                lockf(file, LOCK_UN, 1, stripe)

    def refund(self, subject: bytes, interval: int) -> None:
        """Give back a token: another limit refused the request."""
        slot = self._slots.get(subject) or self._first_slot(subject)
        word, tag, stripe = slot
        file = self._file
        if file >= 0:
            file = self._wait(stripe)
        try:
            if self._tags[word] != tag:
                word = self._find_word(subject, slot)
            self._times[word + _WAYS] = max(0, self._times[word + _WAYS] - interval)
        finally:
            if file >= 0:
                lockf(file, LOCK_UN, 1, stripe)

    def close(self) -> None:
        """Release the memory."""
        if self._file >= 0:
            self._tags.release()
            self._times.release()
            if isinstance(self._memory, mmap.mmap):
                self._memory.close()
            os.close(self._file)
            self._file = -1

    def _first_slot(self, subject: bytes) -> Slot:
        digest = hashlib.blake2b(subject, digest_size=_HASH.size, key=self._secret).digest()
        tag, number = _HASH.unpack(digest)
        number %= self._sets
        slot = _HEADER_WORDS + number * _SET_WORDS, tag or 1, number % _STRIPES
        self._cache(subject, slot)
        return slot

    def _find_word(self, subject: bytes, slot: Slot) -> int:
        """Return the word of a subject's tag, adding the tag to its set if needed. The caller holds the lock."""
        word, tag, stripe = slot
        first = word - (word - _HEADER_WORDS) % _SET_WORDS
        tags = self._tags[first : first + _WAYS].tolist()
        if tag in tags:
            word = first + tags.index(tag)
        else:
            times = self._times[first + _WAYS : first + _SET_WORDS].tolist()
            word = first + times.index(min(times))
            self._tags[word] = tag
            self._times[word + _WAYS] = 0
        self._cache(subject, (word, tag, stripe))
        return word

    def _cache(self, subject: bytes, slot: Slot) -> None:
        if len(subject) <= _CACHED_SUBJECT_BYTES:
            # The hash costs more than the rest of a charge. Clients choose subjects, so the cache is bounded.
            if len(self._slots) >= _CACHED_SLOTS:
                self._slots.clear()
            self._slots[subject] = slot

    def _wait(self, stripe: int) -> int:
        """Wait for a lock that another worker holds; return -1 if it is not released in time."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            with contextlib.suppress(BlockingIOError, PermissionError):
                lockf(self._file, _TRY_LOCK, 1, stripe)
                return self._file
            if time.monotonic() > deadline:
                return -1
            os.sched_yield()

    def _shared_secret(self) -> bytes:
        """Return the hash key of the table; the first worker creates it."""
        if self._file >= 0:
            lockf(self._file, LOCK_EX, 1, _STRIPES)
        try:
            secret = self._memory[:_SECRET_BYTES]
            if not any(secret):
                secret = secrets.token_bytes(_SECRET_BYTES)
                self._memory[:_SECRET_BYTES] = secret
            return bytes(secret)
        finally:
            if self._file >= 0:
                lockf(self._file, LOCK_UN, 1, _STRIPES)


class RequestHead(Protocol):
    """The part of a request's head that is read here."""

    @property
    def by_name(self) -> Mapping[bytes, bytes]:
        """The fields by lower-case name; the last one where a name is repeated."""

    @property
    def fields(self) -> Sequence[tuple[bytes, bytes]]:
        """All fields, in order."""


class SubjectResolver:
    """Determines, for each limit, the subject that a request counts for.

    Any client can write `x-forwarded-for`, so it is read from the right, and only as far as the addresses are trusted
    proxies. An IPv6 address counts by its /64, the least that one subscriber has.
    """

    def __init__(self, rates: RateLimits) -> None:
        self._limits = [(limit.by, b"%d" % number) for number, limit in enumerate(rates.limits)]
        self._kinds = {limit.by for limit in rates.limits}
        self._user_header = rates.user_header.lower().encode()
        self._trusted_networks = tuple(_network(proxy) for proxy in rates.trusted_proxies if proxy != UNIX)
        self._trusts_unix = UNIX in rates.trusted_proxies
        self._trusts_proxies = bool(rates.trusted_proxies)
        self._addresses: dict[tuple[str, bytes], bytes] = {}
        self._by_key_name: dict[str, list[bytes]] = {}

    def resolve(self, peer: str, head: RequestHead, key: ApiKey | None) -> list[bytes]:
        """Return one subject per limit, in order. No two limits share a subject."""
        if key is None or self._kinds != _BY_KEY:
            return self._subjects(peer, head, key)
        # The usual case. The cache is bounded by the number of keys in the file.
        subjects = self._by_key_name.get(key.name)
        if subjects is None:
            subjects = self._by_key_name[key.name] = self._subjects(peer, head, key)
        return subjects

    def _subjects(self, peer: str, head: RequestHead, key: ApiKey | None) -> list[bytes]:
        subjects: list[bytes] = []
        for by, number in self._limits:
            if by == "user":
                user = head.by_name.get(self._user_header)
                if user:
                    subjects.append(number + b"u" + user[:_USER_BYTES])
                    continue
            if by != "address" and key is not None:
                subjects.append(number + b"k" + key.name.encode())
            else:
                subjects.append(number + b"a" + self.address(peer, head))
        return subjects

    def address(self, peer: str, head: RequestHead) -> bytes:
        """Return the client's address: the peer's, or the one that trusted proxies forwarded."""
        forwarded = b""
        host = peer.rpartition(":")[0] or peer
        if self._trusts_proxies and FORWARDED in head.by_name:
            forwarded = b",".join(value for name, value in head.fields if name == FORWARDED)
        address = self._addresses.get((host, forwarded))
        if address is None:
            address = self._client_address(host, forwarded)
            if len(forwarded) <= _CACHED_ADDRESS_BYTES:
                if len(self._addresses) >= _CACHED_ADDRESSES:
                    self._addresses.clear()
                self._addresses[host, forwarded] = address
        return address

    def _client_address(self, host: str, forwarded: bytes) -> bytes:
        address = _parse_address(host)
        if forwarded and (self._is_trusted(address) if address is not None else host == UNIX and self._trusts_unix):
            for text in reversed(forwarded.decode("latin-1").split(",")):
                previous = _parse_address(text.strip())
                if previous is None:
                    break  # nothing to the left of an invalid address can be trusted
                address = previous
                if not self._is_trusted(address):
                    break
        if address is None:
            return host.encode()
        if isinstance(address, ipaddress.IPv6Address):
            return str(ipaddress.IPv6Network((address, 64), strict=False)).encode()
        return str(address).encode()

    def _is_trusted(self, address: _Address) -> bool:
        return any(address in network for network in self._trusted_networks)


def _parse_address(text: str) -> _Address | None:
    """Parse an address with or without a port."""
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
            f"{text!r} is not a trusted proxy: give an address, a network such as 10.0.0.0/8, or '{UNIX}'"
        ) from None
