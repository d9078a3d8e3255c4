# SPDX-License-Identifier: Apache-2.0
"""What the loops need of a protocol: lanes, each with one request under way. `http_lane` and `grpc_lane` have it.

Callbacks and no futures, because a load generator that costs more than the server measures itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Done = Callable[[str, str], None]
"""Called once for each request: the kind of error and its text, or "" and "" when it was answered well."""

TIMED_OUT = "timeout"
NO_CONNECTION = "no connection"
LOST = "connection lost"
NEVER_SENT = "never sent"


class Lane(Protocol):
    """A connection, or a share of one, with one request at a time. Opens itself, and again when it broke."""

    def ask(self, done: Done) -> None:
        """Send the request. `done` is called later, never from within."""

    def expire(self, before: float) -> None:
        """Give up a request that was sent before this time of `time.perf_counter`."""

    def close(self) -> None:
        """Let go of what is under way, without a word to anyone."""


class Target(Protocol):
    """A server, and the one request that is sent to it."""

    def lane(self) -> Lane:
        """Another lane."""

    async def close(self) -> None:
        """End all connections."""
