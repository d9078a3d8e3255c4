# SPDX-License-Identifier: Apache-2.0
"""The ids of a response and of its items and calls, and the time at which it was created: random, or repeatable."""

from __future__ import annotations

import secrets
import time
from hashlib import blake2b


class ResponseIds:
    """Makes random ids."""

    def hexadecimal(self, count: int) -> str:
        """Return the next id, of so many bytes."""
        return secrets.token_hex(count)

    def created(self) -> int:
        """Return when the response was created."""
        return int(time.time())


RANDOM_IDS = ResponseIds()


class RepeatableIds(ResponseIds):
    """Makes the same ids on every server that knows the secret of a stream, which others cannot guess."""

    def __init__(self, stream: str, created: int) -> None:
        self.stream = stream
        self._created = created
        self._count = 0

    def hexadecimal(self, count: int) -> str:
        """Return the next id, of so many bytes."""
        self._count += 1
        return blake2b(f"{self.stream} {self._count}".encode(), digest_size=count).hexdigest()

    def created(self) -> int:
        """Return when the first server began the response."""
        return self._created


def new_call_id(ids: ResponseIds) -> str:
    """Return an id for a tool call."""
    return f"call_{ids.hexadecimal(12)}"
