# SPDX-License-Identifier: Apache-2.0
"""Request queues: first in, first out, or by priority with the queue policies of a model's configuration.

Owned by schedulers. A cancelled request keeps its place, without its tensors, until it reaches the front or cancelled
requests are about as many as live ones.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from headrace.core.errors import InvalidArgument, Unavailable
from headrace.engine.scheduling.pending_request import ANSWERED, QUEUED, PendingRequest
from headrace.models.config.types import DynamicBatching, QueuePolicy

_MIN_SWEEP = 256
"""Queue length below which cancelled requests are not removed from the middle."""


class Queue(Protocol):
    """A queue of a scheduler."""

    def __len__(self) -> int:
        """Return the number of requests, cancelled ones included."""

    def __iter__(self) -> Iterator[PendingRequest]:
        """Iterate over the requests in the order in which they will be computed."""

    def append(self, pending: PendingRequest) -> None:
        """Add a request; raise if the queue does not accept it."""

    def take(self, count: int) -> list[PendingRequest]:
        """Remove and return the first `count` live requests; cancelled ones before and between them are dropped."""

    def expire(self, now_ns: int) -> int | None:
        """Apply the timeout action to expired requests; return when the next one expires, or None."""


class FifoQueue:
    """First in, first out; requests do not expire."""

    def __init__(self) -> None:
        self._waiting: deque[PendingRequest] = deque()
        self._sweep_at = _MIN_SWEEP
        self.append = self._waiting.append
        """The deque's own method: there is nothing to check."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(self._waiting)

    def take(self, count: int) -> list[PendingRequest]:
        """Remove and return the first `count` live requests."""
        waiting = self._waiting
        if count == 1 and waiting and waiting[0].state != ANSWERED:
            return [waiting.popleft()]
        return _take(waiting, count)

    def expire(self, now_ns: int) -> None:
        """Drop cancelled requests: at the front at once, elsewhere when the queue is long."""
        waiting = self._waiting
        while waiting and waiting[0].state == ANSWERED:
            waiting.popleft()
        if len(waiting) > self._sweep_at:
            self._sweep_at = _sweep(waiting)


class BackgroundLast:
    """A queue with background requests, which come after all others, whatever the levels of those."""

    def __init__(self, others: Queue) -> None:
        self._others = others
        self._background = FifoQueue()

    def __len__(self) -> int:
        return len(self._others) + len(self._background)

    def __iter__(self) -> Iterator[PendingRequest]:
        yield from self._others
        yield from self._background

    def append(self, pending: PendingRequest) -> None:
        """Add a request. Those in the background neither fill a level nor expire: their sender bounds them."""
        (self._background if pending.request.is_background else self._others).append(pending)

    def take(self, count: int) -> list[PendingRequest]:
        """Remove and return the first `count` live requests."""
        requests = self._others.take(count)
        if len(requests) < count:
            requests += self._background.take(count - len(requests))
        return requests

    def expire(self, now_ns: int) -> int | None:
        """Apply the timeout action to expired requests; return when the next one expires, or None."""
        self._background.expire(now_ns)
        return self._others.expire(now_ns)


class PolicyQueue:
    """Priority levels, each with its queue policy: maximum size, timeout and timeout action."""

    def __init__(self, batching: DynamicBatching, model_name: str) -> None:
        self._model_name = model_name
        self._levels = batching.priority_levels
        self._default_level = batching.default_priority_level or max(1, (batching.priority_levels + 1) // 2)
        policies = batching.priority_queue_policies
        count = max(1, batching.priority_levels)
        self._queues = [_Level(policies.get(n, batching.default_queue_policy)) for n in range(1, count + 1)]
        self._deadlines: list[list[Any]] = []
        """A heap of [time, number, request]; the request is None once it has left the queue."""
        self._entries: dict[PendingRequest, list[Any]] = {}
        self._numbers = 0
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        return sum(len(level.waiting) + len(level.late) for level in self._queues)

    def __iter__(self) -> Iterator[PendingRequest]:
        for level in self._queues:
            yield from level.waiting
            yield from level.late

    def append(self, pending: PendingRequest) -> None:
        """Add a request; raise if its level is full or its priority is invalid."""
        level = self._queues[self._level_of(pending) - 1]
        policy = level.policy
        if policy.max_queue_size and level.live_count() >= policy.max_queue_size:
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
            if len(self._deadlines) > self._sweep_at:
                self._sweep_deadlines()
        pending.level = self._queues.index(level)
        level.waiting.append(pending)

    def take(self, count: int) -> list[PendingRequest]:
        """Remove and return the first `count` live requests."""
        requests: list[PendingRequest] = []
        for level in self._queues:
            for queue in (level.waiting, level.late):
                if len(requests) < count:
                    requests += _take(queue, count - len(requests))
        for pending in requests:
            self._clear_deadline(pending)
        return requests

    def _clear_deadline(self, pending: PendingRequest) -> None:
        """Drop the reference to a request that can no longer expire; its time stays in the heap."""
        entry = self._entries.pop(pending, None)
        if entry is not None:
            entry[2] = None

    def expire(self, now_ns: int) -> int | None:
        """Apply the timeout action to expired requests; return when the next one expires, or None."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now_ns or _has_left_queue(deadlines[0][2])):
            _, _, pending = heapq.heappop(deadlines)
            if pending is not None:
                self._entries.pop(pending, None)
            if _has_left_queue(pending):
                continue
            level = self._queues[pending.level]
            if level.policy.timeout_action == "delay":
                level.waiting.remove(pending)
                level.late.append(pending)
            else:
                pending.cancel(Unavailable("Request timeout expired"))
        for level in self._queues:
            level.sweep()
        return deadlines[0][0] if deadlines else None

    def _sweep_deadlines(self) -> None:
        for pending in [pending for pending in self._entries if _has_left_queue(pending)]:
            del self._entries[pending]
        self._deadlines = list(self._entries.values())
        heapq.heapify(self._deadlines)
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._deadlines))

    def _level_of(self, pending: PendingRequest) -> int:
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
        self.waiting: deque[PendingRequest] = deque()
        self.late: deque[PendingRequest] = deque()
        """Expired requests of a policy with the action `delay`: computed after the others."""
        self._sweep_at = _MIN_SWEEP

    def sweep(self) -> None:
        for queue in (self.waiting, self.late):
            while queue and queue[0].state == ANSWERED:
                queue.popleft()
        if len(self.waiting) > self._sweep_at:
            self._sweep_at = _sweep(self.waiting)

    def live_count(self) -> int:
        self.sweep()
        return sum(1 for queue in (self.waiting, self.late) for pending in queue if pending.state != ANSWERED)


def _has_left_queue(pending: PendingRequest | None) -> bool:
    return pending is None or pending.state != QUEUED


def _timeout_of(pending: PendingRequest, policy: QueuePolicy) -> int:
    """Return the timeout in microseconds; a caller may shorten the default if the policy allows it, as in Triton."""
    default = policy.default_timeout_microseconds
    if not policy.allow_timeout_override:
        return default
    timeout = pending.request.parameters.get("timeout", 0)
    if type(timeout) is not int or timeout <= 0:
        return default
    return min(default, timeout) if default else timeout


def _sweep(queue: deque[PendingRequest]) -> int:
    """Drop all cancelled requests; return the length at which to sweep next, so that the cost per request is constant."""
    live = [pending for pending in queue if pending.state != ANSWERED]
    queue.clear()
    queue.extend(live)
    return max(_MIN_SWEEP, 2 * len(live))


def _take(queue: deque[PendingRequest], count: int) -> list[PendingRequest]:
    requests: list[PendingRequest] = []
    while queue and len(requests) < count:
        pending = queue.popleft()
        if pending.state != ANSWERED:
            requests.append(pending)
    return requests
