# SPDX-License-Identifier: Apache-2.0
"""The rate limiter: resources that the executions of several models share (`rate_limiter` in model configurations).

One rate limiter for all models, in the event loop's thread. An instance acquires its resources for one execution and
releases them; a release wakes the instances that were refused, in the order of their turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol
from weakref import WeakKeyDictionary

from headrace.core.errors import InvalidArgument
from headrace.models.config.types import Resource


class RateLimited(Protocol):
    """An instance, as seen by the rate limiter."""

    name: str
    resources: tuple[Resource, ...]
    priority: int
    device: str
    """Resources that are not global exist once per device."""


class RateLimiter:
    """Counts the used units of each resource."""

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits or {})
        """By resource name; a resource without a limit has as many units as its largest user needs."""
        self._needed: Counter[tuple[str, str]] = Counter()
        self._used: Counter[tuple[str, str]] = Counter()
        # By instance, not by name: two versions of a model have instances of the same names.
        self._turns: WeakKeyDictionary[RateLimited, int] = WeakKeyDictionary()
        """The turn of each instance's next execution, counted in executions of priority 1."""
        self._now = 0
        """The turn of the latest execution: an instance that was idle does not catch up."""
        self._refused: dict[RateLimited, Callable[[], None]] = {}
        self._waiting: dict[RateLimited, int] = {}
        """The turns of refused instances, which try again each time they are woken."""

    def admit(self, instance: RateLimited) -> None:
        """Register an instance before its first execution; raise if it could never run."""
        for resource in instance.resources:
            limit = self._limits.get(resource.name)
            if limit is not None and resource.count > limit:
                raise InvalidArgument(
                    f"instance '{instance.name}' needs {resource.count} of resource '{resource.name}', of which there "
                    f"are {limit}: give more with --rate-limit-resource={resource.name}:{resource.count}"
                )
            key = _key(instance, resource)
            self._needed[key] = max(self._needed[key], resource.count)

    def acquire(self, instance: RateLimited, wake: Callable[[], None]) -> bool:
        """Acquire the resources for an execution. If some are missing, call `wake` once when they may be available."""
        if not instance.resources:
            return True
        turn = self._turn(instance)
        if self._short(instance) or self._another_first(instance, turn):
            self._refused[instance] = wake
            self._waiting[instance] = turn
            return False
        for resource in instance.resources:
            self._used[_key(instance, resource)] += resource.count
        self._waiting.pop(instance, None)
        self._now = max(self._now, turn)
        self._turns[instance] = turn + max(1, instance.priority)
        return True

    def release(self, instance: RateLimited, on_room: Callable[[], None] | None = None) -> None:
        """Release the resources of an execution and wake refused instances; also this one, if `again` is given."""
        if not instance.resources:
            return
        for resource in instance.resources:
            self._used[_key(instance, resource)] -= resource.count
        refused, self._refused = self._refused, {}
        # An instance that was woken before and has not tried again needs nothing any more.
        self._waiting = {waiting: self._waiting[waiting] for waiting in refused}
        if on_room is not None:
            refused[instance] = on_room
        for waiting in sorted(refused, key=self._turn):
            refused[waiting]()

    def _turn(self, instance: RateLimited) -> int:
        """Return the turn. An instance of priority 2 gets half as many executions as one of priority 1 under full load."""
        waiting = self._waiting.get(instance)
        return max(self._now, self._turns.get(instance, 0)) if waiting is None else waiting

    def _short(self, instance: RateLimited) -> bool:
        for resource in instance.resources:
            key = _key(instance, resource)
            if self._used[key] + resource.count > self._limits.get(resource.name, self._needed[key]):
                return True
        return False

    def _another_first(self, instance: RateLimited, turn: int) -> bool:
        """Return whether the free units are reserved for an instance whose turn is earlier and that needs more of them.

        Only until the next release: then all instances try again, so nothing stays reserved for an instance that is gone.
        """
        needed = {_key(instance, resource) for resource in instance.resources}
        return any(
            self._waiting[other] < turn and any(_key(other, resource) in needed for resource in other.resources)
            for other in self._refused
            if other is not instance
        )


def _key(instance: RateLimited, resource: Resource) -> tuple[str, str]:
    return (resource.name, "" if resource.is_global else instance.device)
