# SPDX-License-Identifier: Apache-2.0
"""The bytes of a request's inputs, from which `decoding` takes one after the other: end to end, or each by itself."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.tensors import Buffer


class Body:
    """The data of all inputs, end to end, as HTTP brings it."""

    def __init__(self, body: Buffer) -> None:
        self._view = memoryview(body)
        self._position = 0

    @property
    def size(self) -> int | None:
        """Of everything."""
        return len(self._view)

    @property
    def rest(self) -> int:
        """Bytes that no input has taken."""
        return len(self._view) - self._position

    def start(self) -> Buffer:
        """Everything, from its first byte."""
        return self._view

    def take(self, size: int | None) -> Buffer:
        """The next input, of this size or as much as there is."""
        start = self._position
        self._position = len(self._view) if size is None else min(start + size, len(self._view))
        return self._view[start : self._position]


class Pieces:
    """The data of each input by itself, as gRPC brings it."""

    size = None

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._next = 0

    @property
    def rest(self) -> int:
        """Pieces that no input has taken."""
        return len(self._pieces) - self._next

    def start(self) -> Buffer:
        """The first piece."""
        return self._pieces[0] if self._pieces else b""

    def take(self, size: int | None) -> Buffer:
        """The next input, of whatever size it is."""
        index = self._next
        self._next += 1
        return self._pieces[index] if index < len(self._pieces) else b""


Data = Body | Pieces
