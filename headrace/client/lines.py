# SPDX-License-Identifier: Apache-2.0
"""What HTTP needs of sockets, so that it is written once: `blocking` has it with sockets, `looping` with asyncio.

All methods that wait are coroutines. The blocking ones never suspend, so that `blocking.to_end` can run them without a
loop.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Protocol

from headrace.client.addresses import Address
from headrace.client.retrying import Deadline
from headrace.core.tensors import Buffer


class Line(Protocol):
    """One connection. Raises `OSError` when it breaks, `DeadlineExceeded` when the time is over."""

    async def send(self, buffers: Sequence[Buffer], deadline: Deadline) -> None:
        """Send all of it."""

    async def receive(self, deadline: Deadline) -> bytes:
        """What has come, at least a byte; nothing at the end."""

    async def fill(self, view: memoryview, deadline: Deadline) -> int:
        """Receive until a buffer is full, or the end; how much that was."""

    def is_stale(self) -> bool:
        """Whether an idle connection is of no use any more: closed by the server, or it said something unasked."""

    def close(self) -> None:
        """Cut it; what was not received is lost."""


class Lines(Protocol):
    """Makes connections, and waits."""

    async def connect(self, address: Address, tls: ssl.SSLContext | None, deadline: Deadline) -> Line:
        """Connect and shake hands."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""
