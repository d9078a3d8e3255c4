# SPDX-License-Identifier: Apache-2.0
"""The rules of batching: how many of the waiting requests go together now, or how long to wait; and the record of why.

Called by the schedulers with a queue's requests in order. The rules are those of Triton's dynamic batcher: requests are
never reordered or split; the largest preferred size that can be reached is taken at once; anything else waits until it
cannot grow or its oldest request has waited long enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from headrace.engine.scheduling.pending import ANSWERED, Pending

Reason = Literal["full", "preferred", "delay expired", "shape change", "idle instance", "one at a time", "sequence"]
"""Why a batch was not made larger: it could not grow; it had a preferred size; its oldest request had waited enough; the
next request had another shape; an instance was idle and nothing was to be waited for; the model takes no batches; its
members were those sequences that had a request."""


@dataclass(frozen=True, slots=True)
class BatchRules:
    """What a model's configuration says of its batches."""

    max_rows: int
    preferred: frozenset[int] = frozenset()
    by_shape: bool = False
    """Whether requests can differ in shape, so that each must be compared with the first."""
    largest_preferred: int = field(init=False)
    """Batches are not made larger than this unless their oldest request has waited too long."""

    def __post_init__(self) -> None:
        """Work out what every choice needs."""
        object.__setattr__(self, "largest_preferred", max(self.preferred, default=self.max_rows))


class Choice(NamedTuple):
    """What to do with the front of a queue: run so many requests now, or, when that is 0, look again in `wait_ns`."""

    requests: int
    reason: Reason = "idle instance"
    wait_ns: int = 0


def choose(waiting: Iterable[Pending], rules: BatchRules, delay_ns: int, now_ns: int) -> Choice:
    """Choose the batch at the front of a queue. There must be at least one live request in it."""
    most, largest, preferred = rules.max_rows, rules.largest_preferred, rules.preferred
    rows = count = best = 0
    best_reason: Reason = "full"
    blocked: Reason | None = None
    oldest_ns = now_ns
    for pending in waiting:
        if pending.state == ANSWERED:
            continue
        if count == 0:
            first = pending
        else:
            if rows + pending.rows > largest and not best:
                best, best_reason = count, "full"
            if rows + pending.rows > most:
                blocked = "full"
                break
            if rules.by_shape and pending.key != first.key:
                blocked = "shape change"
                break
        rows += pending.rows
        count += 1
        oldest_ns = min(oldest_ns, pending.arrived_ns)
        if rows in preferred:
            best, best_reason = count, "preferred"
        if rows >= most:
            blocked = "full"
            break
    waited_ns = now_ns - oldest_ns
    expired = delay_ns != 0 and waited_ns >= delay_ns
    if best and not expired:
        return Choice(best, best_reason)
    if blocked is not None:
        return Choice(count, blocked)
    if rows >= largest:
        return Choice(count, "full")
    if expired:
        return Choice(count, "delay expired")
    if delay_ns == 0:
        return Choice(count, "idle instance")
    return Choice(0, wait_ns=delay_ns - waited_ns)


class BatchRecord(NamedTuple):
    """How one batch came about."""

    reason: Reason
    requests: int
    rows: int
    left_waiting: int
    """Requests that stayed in the queue."""
    oldest_waited_ns: int
    instance: str

    def __str__(self) -> str:
        return (
            f"{self.rows} row(s) of {self.requests} request(s) on {self.instance}: {self.reason}, oldest waited "
            f"{self.oldest_waited_ns / 1000:.0f} us, {self.left_waiting} left waiting"
        )


class BatchLog:
    """The last batches of a version, and how many there were for each reason."""

    def __init__(self) -> None:
        self.recent: deque[BatchRecord] = deque(maxlen=256)
        self.reasons: dict[str, int] = dict.fromkeys(get_args(Reason), 0)

    def add(self, record: BatchRecord) -> None:
        """Keep it, and let the oldest go."""
        self.recent.append(record)
        self.reasons[record.reason] += 1
