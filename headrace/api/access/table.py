# SPDX-License-Identifier: Apache-2.0
"""A table of rate-limit buckets of a fixed size, in memory that the workers of one server share.

Used by `rates`. A bucket is one number: the time at which everything it admitted will have been paid for (GCRA, the
generic cell rate algorithm, which is a token bucket without a clock of its own). A bucket whose time has passed is as good
as none, so nothing need be swept. Subjects are hashed into sets of eight; where all eight of a set are in use, the one
that owes least is forgiven, so a million addresses take no more room than one. The hash is keyed with a secret of the
server: nobody can choose addresses that meet.

With a file, each update is made under a lock on the part of the file the set is in. The kernel frees the locks of a
process that dies. One event loop per process: the locks do not keep threads apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import time
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, lockf
from pathlib import Path
from struct import Struct

_WAYS = 8
_SET_WORDS = 2 * _WAYS
"""Eight tags, then the eight buckets' times in nanoseconds; a tag of 0 is an empty place."""
_HEADER_WORDS = 8
_SECRET_BYTES = 16
_WORD_BYTES = 8
_HASH = Struct("=QI")
DEFAULT_SETS = 65536
"""Half a million subjects, in at most 8 MiB: memory is taken as sets come into use."""

_STRIPES = 1024
_TRY = LOCK_EX | LOCK_NB
_PATIENCE_SECONDS = 0.05
"""For a lock. Who holds one has it for microseconds, unless the process was stopped in between; then counts may slip."""

_PLACES = 16384
_PLACE_BYTES = 256

Place = tuple[int, int, int]
"""The word where a subject's tag was last seen, the tag, and which lock is for it."""


class BucketTable:
    """See the module. Without a `path`, for one process."""

    def __init__(self, path: Path | None = None, sets: int = DEFAULT_SETS) -> None:
        size = (_HEADER_WORDS + sets * _SET_WORDS) * _WORD_BYTES
        self._sets = sets
        self._places: dict[bytes, Place] = {}
        self._file = -1
        if path is None:
            self._memory: mmap.mmap | bytearray = bytearray(size)
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
        # Views, because an item of one is read in a quarter of the time that `struct` takes.
        self._tags = memoryview(self._memory).cast("Q")
        self._times = memoryview(self._memory).cast("q")
        self._secret = self._shared_secret()

    def charge(self, subject: bytes, now: int, interval: int, tolerance: int) -> int:
        """Take one from a bucket that refills one each `interval` and holds `tolerance / interval`; all nanoseconds.

        Returns what the bucket owes now (how long until it is full), or minus the time to wait if it has none left.
        """
        place = self._places.get(subject)
        if place is None:
            place = self._first_place(subject)
        word, tag, stripe = place
        file = self._file
        if file >= 0:
            try:
                lockf(file, _TRY, 1, stripe)
            except OSError:
                file = self._wait(stripe)
        try:
            times = self._times
            if self._tags[word] != tag:
                word = self._find(subject, place)
            owes = times[word + _WAYS] - now
            owes = interval if owes < 0 else owes + interval
            if owes > tolerance:
                return tolerance - owes
            times[word + _WAYS] = now + owes
            return owes
        finally:
            if file >= 0:
                lockf(file, LOCK_UN, 1, stripe)

    def refund(self, subject: bytes, interval: int) -> None:
        """Give one back that was taken: another limit refused the request."""
        place = self._places.get(subject) or self._first_place(subject)
        word, tag, stripe = place
        file = self._file
        if file >= 0:
            file = self._wait(stripe)
        try:
            if self._tags[word] != tag:
                word = self._find(subject, place)
            self._times[word + _WAYS] = max(0, self._times[word + _WAYS] - interval)
        finally:
            if file >= 0:
                lockf(file, LOCK_UN, 1, stripe)

    def close(self) -> None:
        """Let go of the memory."""
        if self._file >= 0:
            self._tags.release()
            self._times.release()
            if isinstance(self._memory, mmap.mmap):
                self._memory.close()
            os.close(self._file)
            self._file = -1

    def _first_place(self, subject: bytes) -> Place:
        digest = hashlib.blake2b(subject, digest_size=_HASH.size, key=self._secret).digest()
        tag, number = _HASH.unpack(digest)
        number %= self._sets
        place = _HEADER_WORDS + number * _SET_WORDS, tag or 1, number % _STRIPES
        self._remember(subject, place)
        return place

    def _find(self, subject: bytes, place: Place) -> int:
        """The word of a subject's tag, which is put there if it is nowhere in its set. Under the lock."""
        word, tag, stripe = place
        first = word - (word - _HEADER_WORDS) % _SET_WORDS
        tags = self._tags[first : first + _WAYS].tolist()
        if tag in tags:
            word = first + tags.index(tag)
        else:
            times = self._times[first + _WAYS : first + _SET_WORDS].tolist()
            word = first + times.index(min(times))
            self._tags[word] = tag
            self._times[word + _WAYS] = 0
        self._remember(subject, (word, tag, stripe))
        return word

    def _remember(self, subject: bytes, place: Place) -> None:
        if len(subject) <= _PLACE_BYTES:
            # A hash costs more than the rest together. Clients choose subjects, so the memory of them is bounded.
            if len(self._places) >= _PLACES:
                self._places.clear()
            self._places[subject] = place

    def _wait(self, stripe: int) -> int:
        """Get a lock that another worker has; -1 if it does not give it back in time."""
        ends = time.monotonic() + _PATIENCE_SECONDS
        while True:
            with contextlib.suppress(BlockingIOError, PermissionError):
                lockf(self._file, _TRY, 1, stripe)
                return self._file
            if time.monotonic() > ends:
                return -1
            os.sched_yield()

    def _shared_secret(self) -> bytes:
        """The first worker makes it."""
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
