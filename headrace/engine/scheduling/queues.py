# SPDX-License-Identifier: Apache-2.0
"""Where requests wait: in the order they came, or by priority with the policies of a configuration.

Owned by schedulers. A request that is cancelled stays in its place, empty, until it comes to the front or there are
about as many of its kind as living ones; nothing of it is kept but that place.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from headrace.core.errors import InvalidArgument, Unavailable
from headrace.engine.scheduling.pending import ANSWERED, QUEUED, Pending
from headrace.models.config.types import DynamicBatching, QueuePolicy

_MANY = 256
"""Places among which it is worth looking for dead ones."""


class Queue(Protocol):
    """What a scheduler asks of its queue."""

    def __len__(self) -> int:
        """Places taken, those of cancelled requests among them."""

    def __iter__(self) -> Iterator[Pending]:
        """Everything waiting, in the order it will be computed."""

    def append(self, pending: Pending) -> None:
        """Let a request wait; raises when it may not."""

    def take(self, count: int) -> list[Pending]:
        """Take the first `count` living requests out, and whatever is dead before or between them."""

    def expire(self, now_ns: int) -> int | None:
        """Act on requests whose time is over; returns when the next one's is, or None."""


class FifoQueue:
    """First come, first served; nothing expires."""

    def __init__(self) -> None:
        self._waiting: deque[Pending] = deque()
        self._look_at = _MANY
        self.append = self._waiting.append
        """Nothing to decide, so that the queue's own method will do."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._waiting)

    def take(self, count: int) -> list[Pending]:
        """See `Queue.take`."""
        waiting = self._waiting
        if count == 1 and waiting and waiting[0].state != ANSWERED:
            return [waiting.popleft()]
        return _take(waiting, count)

    def expire(self, now_ns: int) -> None:
        """Nothing does; but the dead go: at the front at once, elsewhere when there are many places."""
        waiting = self._waiting
        while waiting and waiting[0].state == ANSWERED:
            waiting.popleft()
        if len(waiting) > self._look_at:
            self._look_at = _bury(waiting)


class PolicyQueue:
    """Priority levels, each with a policy of its own: how many may wait, how long, and what becomes of the late."""

    def __init__(self, batching: DynamicBatching, model_name: str) -> None:
        self._model_name = model_name
        self._levels = batching.priority_levels
        self._default_level = batching.default_priority_level or max(1, (batching.priority_levels + 1) // 2)
        policies = batching.priority_queue_policies
        count = max(1, batching.priority_levels)
        self._queues = [_Level(policies.get(n, batching.default_queue_policy)) for n in range(1, count + 1)]
        self._deadlines: list[list[Any]] = []
        """A heap of [when, number, request]; None for a request that has left the queue."""
        self._entries: dict[Pending, list[Any]] = {}
        self._numbers = 0
        self._look_at = _MANY

    def __len__(self) -> int:
        return sum(len(level.waiting) + len(level.late) for level in self._queues)

    def __iter__(self) -> Iterator[Pending]:
        for level in self._queues:
            yield from level.waiting
            yield from level.late

    def append(self, pending: Pending) -> None:
        """See `Queue.append`."""
        level = self._queues[self._level_of(pending) - 1]
        policy = level.policy
        if policy.max_queue_size and level.living() >= policy.max_queue_size:
            raise Unavailable(
                f"Exceeds maximum queue size: {policy.max_queue_size} requests are waiting for model "
                f"'{self._model_name}'. Try again later, or raise max_queue_size in its configuration"
            )
        timeout = _timeout_of(pending, policy)
        if timeout:
            pending.expires_ns = pending.arrived_ns + timeout * 1000
            self._numbers += 1
            entry = self._entries[pending] = [pending.expires_ns, self._numbers, pending]
            heapq.heappush(self._deadlines, entry)
            if len(self._deadlines) > self._look_at:
                self._bury_deadlines()
        pending.level = self._queues.index(level)
        level.waiting.append(pending)

    def take(self, count: int) -> list[Pending]:
        """See `Queue.take`."""
        taken: list[Pending] = []
        for level in self._queues:
            for queue in (level.waiting, level.late):
                if len(taken) < count:
                    taken += _take(queue, count - len(taken))
        for pending in taken:
            self._forget(pending)
        return taken

    def _forget(self, pending: Pending) -> None:
        """Let go of a request that expires no more, though its time stays in the heap."""
        entry = self._entries.pop(pending, None)
        if entry is not None:
            entry[2] = None

    def expire(self, now_ns: int) -> int | None:
        """See `Queue.expire`."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now_ns or _left(deadlines[0][2])):
            _, _, pending = heapq.heappop(deadlines)
            if pending is not None:
                self._entries.pop(pending, None)
            if _left(pending):
                continue
            level = self._queues[pending.level]
            if level.policy.timeout_action == "delay":
                level.waiting.remove(pending)
                level.late.append(pending)
            else:
                pending.cancel(Unavailable("Request timeout expired"))
        for level in self._queues:
            level.bury()
        return deadlines[0][0] if deadlines else None

    def _bury_deadlines(self) -> None:
        for pending in [pending for pending in self._entries if _left(pending)]:
            del self._entries[pending]
        self._deadlines = list(self._entries.values())
        heapq.heapify(self._deadlines)
        self._look_at = max(_MANY, 2 * len(self._deadlines))

    def _level_of(self, pending: Pending) -> int:
        priority = pending.request.parameters.get("priority", 0)
        if not self._levels or not priority:
            return self._default_level if self._levels else 1
        if type(priority) is not int or not 1 <= priority <= self._levels:
            raise InvalidArgument(
                f"priority {str(priority)[:32]!a} is not one of model '{self._model_name}': use 1 (most urgent) to "
                f"{self._levels}, or 0 for its default"
            )
        return priority


class _Level:
    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.waiting: deque[Pending] = deque()
        self.late: deque[Pending] = deque()
        """Those whose time is over, where the policy is to compute them after the others."""
        self._look_at = _MANY

    def bury(self) -> None:
        for queue in (self.waiting, self.late):
            while queue and queue[0].state == ANSWERED:
                queue.popleft()
        if len(self.waiting) > self._look_at:
            self._look_at = _bury(self.waiting)

    def living(self) -> int:
        self.bury()
        return sum(1 for queue in (self.waiting, self.late) for pending in queue if pending.state != ANSWERED)


def _left(pending: Pending | None) -> bool:
    return pending is None or pending.state != QUEUED


def _timeout_of(pending: Pending, policy: QueuePolicy) -> int:
    """In microseconds; a caller may shorten the default where the policy lets them, as in Triton."""
    default = policy.default_timeout_microseconds
    if not policy.allow_timeout_override:
        return default
    wanted = pending.request.parameters.get("timeout", 0)
    if type(wanted) is not int or wanted <= 0:
        return default
    return min(default, wanted) if default else wanted


def _bury(queue: deque[Pending]) -> int:
    """Drop the dead, wherever they are; returns the length at which to look again, so that it costs little per request."""
    living = [pending for pending in queue if pending.state != ANSWERED]
    queue.clear()
    queue.extend(living)
    return max(_MANY, 2 * len(living))


def _take(queue: deque[Pending], count: int) -> list[Pending]:
    taken: list[Pending] = []
    while queue and len(taken) < count:
        pending = queue.popleft()
        if pending.state != ANSWERED:
            taken.append(pending)
    return taken
