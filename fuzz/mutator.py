# SPDX-License-Identifier: Apache-2.0
"""Mutate inputs: small changes to bytes, words and numbers. The caller passes the random generator."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

_NUMBER = re.compile(rb"-?[0-9]+")
_NUMBERS = (b"0", b"-1", b"1", b"255", b"65536", b"2147483648", b"4294967296", b"9223372036854775807", b"-0", b"1e999")
_BYTES = (0x00, 0x01, 0x0A, 0x0D, 0x20, 0x22, 0x2C, 0x3A, 0x5B, 0x5C, 0x7B, 0x7D, 0x7F, 0x80, 0xC0, 0xFF)
_MOST_CHANGES = 5


class Mutator:
    """Mutates inputs; inserts one of `words` now and then."""

    def __init__(self, rng: random.Random, words: Sequence[bytes], most_bytes: int) -> None:
        self._rng = rng
        self._words = (*words, *_NUMBERS)
        self._most = most_bytes
        self._changes: tuple[Callable[[bytearray], None], ...] = (
            self._flip,
            self._set,
            self._delete,
            self._repeat,
            self._word,
            self._word,
            self._number,
            self._swap,
        )

    def mutated(self, data: bytes, other: bytes) -> bytes:
        """Return `data` with some changes, now and then with a piece of `other`."""
        changed = bytearray(data)
        if self._rng.random() < 0.2:
            at, piece = self._place(changed), self._piece(other)
            changed[at : at + self._rng.choice((0, len(piece)))] = piece
        for _ in range(self._rng.randint(1, _MOST_CHANGES)):
            self._rng.choice(self._changes)(changed)
        return bytes(changed[: self._most])

    def _place(self, data: bytes | bytearray) -> int:
        return self._rng.randint(0, len(data))

    def _piece(self, data: bytes | bytearray) -> bytes:
        start = self._place(data)
        return bytes(data[start : start + self._rng.randint(1, 64)])

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)

    def _set(self, data: bytearray) -> None:
        at = self._place(data)
        data[at : at + self._rng.randint(0, 1)] = bytes([self._rng.choice(_BYTES)])

    def _delete(self, data: bytearray) -> None:
        at = self._place(data)
        del data[at : at + self._rng.choice((1, 1, 2, 4, 16))]

    def _repeat(self, data: bytearray) -> None:
        at = self._place(data)
        data[at:at] = self._piece(data) * self._rng.choice((1, 1, 1, 2, 30))

    def _word(self, data: bytearray) -> None:
        at, word = self._place(data), self._rng.choice(self._words)
        data[at : at + self._rng.choice((0, len(word)))] = word

    def _number(self, data: bytearray) -> None:
        matches = list(_NUMBER.finditer(data))
        if matches:
            match = self._rng.choice(matches)
            data[match.start() : match.end()] = self._rng.choice(_NUMBERS)

    def _swap(self, data: bytearray) -> None:
        piece, at = self._piece(data), self._place(data)
        data[at : at + len(piece)] = piece
