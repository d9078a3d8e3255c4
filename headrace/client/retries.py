# SPDX-License-Identifier: Apache-2.0
"""Retries and deadlines of a request."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import Enum

from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidArgument


class Failure(Enum):
    """The kind of a failed attempt."""

    UNSENT = "unsent"
    """No server received the whole request: nothing was computed."""
    RETRY_LATER = "retry later"
    """The server refused the request for now and said when to retry."""
    LOST = "lost"
    """The request was sent, and the connection broke before the response: it may have been computed."""
    FINAL = "final"
    """Another attempt would fail, too."""


class AttemptFailed(Exception):
    """Raised by a transport for one attempt; the client retries, or raises the error inside."""

    def __init__(self, error: HeadraceError, failure: Failure) -> None:
        super().__init__(error.message)
        self.error = error
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a request is sent again, and the waits between. Never beyond the request's timeout.

    Only a request that cannot have been computed is sent again: when there was no connection, when it broke before the
    whole request was sent, and after 503, 429 or their gRPC codes with a Retry-After.
    """

    attempts: int = 4
    """Attempts in all, the first included."""
    first_seconds: float = 0.1
    """The longest wait before the second attempt; doubled for each one after."""
    most_seconds: float = 5.0
    """The longest wait, unless the server's Retry-After is longer."""
    lost_answers: bool = False
    """Also send again when the connection broke before the response. The model may then compute twice: use it only for
    stateless models. Requests for information about models are always sent again.
    """

    def __post_init__(self) -> None:
        """Check the values."""
        if self.attempts < 1 or self.first_seconds < 0 or self.most_seconds < 0:
            raise InvalidArgument("Retry: attempts must be 1 or more, and the seconds not negative")

    def should_retry(self, failure: Failure, *, repeatable: bool) -> bool:
        """Return whether to send a request again after this failure."""
        return failure in (Failure.UNSENT, Failure.RETRY_LATER) or (
            failure is Failure.LOST and (repeatable or self.lost_answers)
        )

    def wait_seconds(self, attempts: int, retry_after: float | None, jitter: float) -> float:
        """Return the wait after a number of attempts; `retry_after` is the server's Retry-After, `jitter` is from 0 to 1."""
        longest = min(self.most_seconds, self.first_seconds * 2.0 ** min(attempts - 1, 62))
        if retry_after is not None:
            # Clients that were refused at the same moment must not return at the same moment.
            return retry_after + jitter * longest / 2
        return longest * (0.5 + jitter / 2)


DEFAULT_RETRY = Retry()

NO_RETRY = Retry(attempts=1)
"""Send each request once."""


class Deadline:
    """The time for a request, all attempts together. None: unlimited."""

    def __init__(self, seconds: float | None, what: str) -> None:
        if seconds is not None and not seconds > 0:
            raise InvalidArgument(f"timeout must be more than 0 seconds (math.inf for no limit), and not {seconds}")
        unlimited = seconds is None or math.isinf(seconds)
        self._seconds = seconds
        self._end = None if unlimited else time.monotonic() + (seconds or 0.0)
        self._what = what

    def left(self) -> float | None:
        """Return the seconds left; raise DeadlineExceeded if there are none."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.passed()
        return left

    def covers(self, seconds: float) -> bool:
        """Return whether there is time to wait so long."""
        return self._end is None or time.monotonic() + seconds < self._end

    def error_for(self, error: TimeoutError) -> Exception:
        """Return the error for a socket timeout: the deadline has passed, or (with an errno) the peer is gone."""
        return self.passed() if error.errno is None else error

    def passed(self) -> DeadlineExceeded:
        """Return the error for a deadline that passed."""
        return DeadlineExceeded(f"{self._what}: no answer within the timeout of {self._seconds:g} s")
