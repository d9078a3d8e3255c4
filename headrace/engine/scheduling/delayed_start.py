# SPDX-License-Identifier: Apache-2.0
"""Delay a model's first batch until enough requests are queued, so that a test can expect exact batch counts.

The opener reads the two environment variables, which are those of Triton's own tests, when it makes a scheduler. Only a
scheduler that is delayed is a `DelayedBatchScheduler`, so all others pay nothing for the switch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from headrace.core.errors import InvalidArgument
from headrace.engine.scheduling.pending import Pending
from headrace.engine.scheduling.scheduler import BatchScheduler

REQUESTS_VARIABLE = "TRITONSERVER_DELAY_SCHEDULER"
BACKLOG_VARIABLE = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"
START_DELAYED = f"no batch before enough requests are queued, as {REQUESTS_VARIABLE} or {BACKLOG_VARIABLE} says"
"""Logged as a warning for each delayed model, since its first requests seem to hang."""
_COUNT = re.compile("[0-9]{0,9}")


class StartDelay(NamedTuple):
    """How many requests must be queued before the first batch; 0: none."""

    requests: int = 0
    backlog_requests: int = 0
    """Of sequences without a slot (direct strategy only)."""


def read_start_delay(environment: Mapping[str, str]) -> StartDelay:
    """Read both variables; raises `InvalidArgument` for a value that is not a count."""
    return StartDelay(_count(environment, REQUESTS_VARIABLE), _count(environment, BACKLOG_VARIABLE))


def _count(environment: Mapping[str, str], variable: str) -> int:
    value = environment.get(variable, "").strip()
    if not _COUNT.fullmatch(value):
        raise InvalidArgument(
            f"the environment variable {variable} is {value[:32]!a}: set it to a whole number of requests, or unset it"
        )
    return int(value or 0)


class DelayedBatchScheduler(BatchScheduler):
    """A batch scheduler that forms its first batch when enough requests are queued, and then works like any other."""

    _first_batch_after = 0

    def delay_start(self, requests: int) -> None:
        """Form no batch until this many requests are queued. Call before the first `add`."""
        self._first_batch_after = requests
        # `add` schedules `_pump` only if it is not scheduled yet.
        self.awake = True

    def add(self, pending: Pending) -> None:
        """See `BatchScheduler.add`."""
        super().add(pending)
        if self._first_batch_after and len(self._queue) >= self._first_batch_after:
            self._first_batch_after = 0
            self._loop.call_soon(self._pump)
