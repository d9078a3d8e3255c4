# SPDX-License-Identifier: Apache-2.0
"""What the fleet needs of the operating system beside containers: the time, processes of its own, listening sockets.

Made by `program`, and passed to whatever reads a clock or starts routers and jobs; containers are run by a `driving.Driver`.
Tests pass a simulated one, so that minutes of a fleet take milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.core.clock import Clock
from headrace.fleet.local.processes import Command, Process, spawn
from headrace.fleet.local.scaling.usage import Usage
from headrace.net.sockets import Address, Listener


class System:
    """This machine's."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def now(self) -> datetime:
        """The date and time, in UTC."""
        return datetime.fromtimestamp(self.clock.wall(), UTC)

    def spawn(self, command: Command, log: Path, record: Callable[[Mapping[str, Any]], None]) -> Process:
        """See `processes.spawn`."""
        return spawn(command, log, record)

    def found(self, record: Mapping[str, Any] | None) -> Process | None:
        """See `Process.found`."""
        return Process.found(record)

    def listen(self, address: Address) -> Listener:
        """Listen there, for a process to accept. Raises FailedPrecondition."""
        return Listener(address)

    def usage(self) -> Usage:
        """What processes use of cores and memory."""
        return Usage()
