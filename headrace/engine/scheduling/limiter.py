# SPDX-License-Identifier: Apache-2.0
"""Resources that executions of several models share, such as "at most two of these at once" (`rate_limiter`).

One limiter for all models, in the loop's thread. An instance takes what it needs for one execution and gives it back;
when something is given back, those that were refused are woken, the one whose turn it is first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol
from weakref import WeakKeyDictionary

from headrace.core.errors import InvalidArgument
from headrace.models.config.types import Resource


class Limited(Protocol):
    """An instance, as the limiter sees it."""

    name: str
    resources: tuple[Resource, ...]
    priority: int
    device: str
    """Resources that are not global exist once per device."""


class Limiter:
    """Counts what is left of each resource."""

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        self._limits = dict(limits or {})
        """By resource name; what is not named has as much as its greediest user needs."""
        self._needed: Counter[tuple[str, str]] = Counter()
        self._used: Counter[tuple[str, str]] = Counter()
        # By the instance, not by its name: two versions of a model have instances of the same names.
        self._turns: WeakKeyDictionary[Limited, int] = WeakKeyDictionary()
        """When each is to have its next execution, counted in executions of priority 1."""
        self._now = 0
        """The turn of the latest execution: who was away until now does not make up for it."""
        self._refused: dict[Limited, Callable[[], None]] = {}
        self._waiting: dict[Limited, int] = {}
        """The turns of those that were refused and ask again each time they are woken."""

    def admit(self, instance: Limited) -> None:
        """Know an instance before its first execution; raises for one that could never run."""
        for resource in instance.resources:
            limit = self._limits.get(resource.name)
            if limit is not None and resource.count > limit:
                raise InvalidArgument(
                    f"instance '{instance.name}' needs {resource.count} of resource '{resource.name}', of which there "
                    f"are {limit}: give more with --rate-limit-resource={resource.name}:{resource.count}"
                )
            key = _key(instance, resource)
            self._needed[key] = max(self._needed[key], resource.count)

    def acquire(self, instance: Limited, wake: Callable[[], None]) -> bool:
        """Take what an execution needs. If it is not there, `wake` is called once when it may be."""
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

    def release(self, instance: Limited, again: Callable[[], None] | None = None) -> None:
        """Give back what an execution took, and wake those who wait; among them, with `again`, who gives it back."""
        if not instance.resources:
            return
        for resource in instance.resources:
            self._used[_key(instance, resource)] -= resource.count
        refused, self._refused = self._refused, {}
        # Who was woken before and has not asked again wants nothing any more.
        self._waiting = {waiting: self._waiting[waiting] for waiting in refused}
        if again is not None:
            refused[instance] = again
        for waiting in sorted(refused, key=self._turn):
            refused[waiting]()

    def _turn(self, instance: Limited) -> int:
        """An instance of priority 2 gets half as many executions as one of priority 1 when both always want more."""
        waiting = self._waiting.get(instance)
        return max(self._now, self._turns.get(instance, 0)) if waiting is None else waiting

    def _short(self, instance: Limited) -> bool:
        for resource in instance.resources:
            key = _key(instance, resource)
            if self._used[key] + resource.count > self._limits.get(resource.name, self._needed[key]):
                return True
        return False

    def _another_first(self, instance: Limited, turn: int) -> bool:
        """Whether what is there is being saved for one whose turn is earlier and who needs more of it.

        Only until something is given back: then all are asked again, so nothing is saved for one that has gone.
        """
        wanted = {_key(instance, resource) for resource in instance.resources}
        return any(
            self._waiting[other] < turn and any(_key(other, resource) in wanted for resource in other.resources)
            for other in self._refused
            if other is not instance
        )


def _key(instance: Limited, resource: Resource) -> tuple[str, str]:
    return (resource.name, "" if resource.is_global else instance.device)
