# SPDX-License-Identifier: Apache-2.0
"""When a request is sent again, how long to wait before, and how much time is left. Pure; used by `session`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import Enum

from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidArgument


class Fate(Enum):
    """What is known of a request that failed."""

    UNSENT = "unsent"
    """It never reached a server as a whole: nothing was computed."""
    REFUSED_FOR_NOW = "refused for now"
    """The server did not take it, and said when to come back."""
    LOST = "lost"
    """It was sent, and the connection broke before the answer: it may have been computed."""
    FINAL = "final"
    """Sent again, it would fail again."""


class Failed(Exception):
    """Raised by transports for one try; `session` sends again, or raises the error inside."""

    def __init__(self, error: HeadraceError, fate: Fate) -> None:
        super().__init__(error.message)
        self.error = error
        self.fate = fate


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how patiently a request is sent again. Never beyond the request's own timeout.

    Sent again is what cannot have been computed: no connection, one that broke before the whole request was sent, and
    503, 429 or their like in gRPC with a time to come back (Retry-After).
    """

    attempts: int = 4
    """Tries in all, the first one included."""
    first_seconds: float = 0.1
    """The longest wait before the second try; doubled for each one after."""
    most_seconds: float = 5.0
    """No wait is longer, unless the server asks for it."""
    lost_answers: bool = False
    """Send again, too, when the connection broke before the answer came. The model may then compute twice: only for
    models that have no memory and do nothing but answer. Questions about models are always repeated."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if self.attempts < 1 or self.first_seconds < 0 or self.most_seconds < 0:
            raise InvalidArgument("Retry: attempts must be 1 or more, and the seconds not negative")

    def again(self, fate: Fate, *, repeatable: bool) -> bool:
        """Whether a request with this fate is sent again at all."""
        return fate in (Fate.UNSENT, Fate.REFUSED_FOR_NOW) or (fate is Fate.LOST and (repeatable or self.lost_answers))

    def wait_seconds(self, tried: int, asked: float | None, chance: float) -> float:
        """How long to wait after so many tries; `asked` is the server's wish, `chance` from 0 to 1 spreads clients."""
        longest = min(self.most_seconds, self.first_seconds * 2.0 ** min(tried - 1, 62))
        if asked is not None:
            # Those who were all sent away at the same moment should not all come back at the same moment.
            return asked + chance * longest / 2
        return longest * (0.5 + chance / 2)


DEFAULT_RETRY = Retry()

NO_RETRY = Retry(attempts=1)
"""Each request is sent once."""


class Deadline:
    """The time that a request has, all tries together. None for no end."""

    def __init__(self, seconds: float | None, what: str) -> None:
        if seconds is not None and not seconds > 0:
            raise InvalidArgument(f"timeout must be more than 0 seconds (math.inf for no limit), and not {seconds}")
        endless = seconds is None or math.isinf(seconds)
        self._seconds = seconds
        self._end = None if endless else time.monotonic() + (seconds or 0.0)
        self._what = what

    def left(self) -> float | None:
        """Seconds left; raises when there are none."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.passed()
        return left

    def covers(self, seconds: float) -> bool:
        """Whether there is time to wait so long."""
        return self._end is None or time.monotonic() + seconds < self._end

    def told(self, error: TimeoutError) -> Exception:
        """What a wait that took too long means: the deadline has passed, or (with a number) the peer is gone."""
        return self.passed() if error.errno is None else error

    def passed(self) -> DeadlineExceeded:
        """The error for a deadline that passed."""
        return DeadlineExceeded(f"{self._what}: no answer within the timeout of {self._seconds:g} s")
