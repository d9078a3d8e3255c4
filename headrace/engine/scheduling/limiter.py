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
from headrace.modelconfig.types import Resource


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
        self._executions: WeakKeyDictionary[Limited, int] = WeakKeyDictionary()
        self._refused: dict[Limited, Callable[[], None]] = {}

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
        for resource in instance.resources:
            key = _key(instance, resource)
            if self._used[key] + resource.count > self._limits.get(resource.name, self._needed[key]):
                self._refused[instance] = wake
                return False
        for resource in instance.resources:
            self._used[_key(instance, resource)] += resource.count
        self._executions[instance] = self._executions.get(instance, 0) + 1
        return True

    def release(self, instance: Limited) -> None:
        """Give back what an execution took, and wake those who wait."""
        if not instance.resources:
            return
        for resource in instance.resources:
            self._used[_key(instance, resource)] -= resource.count
        refused, self._refused = self._refused, {}
        for waiting in sorted(refused, key=self._turn):
            refused[waiting]()

    def _turn(self, instance: Limited) -> int:
        """An instance of priority 2 gets half as many executions as one of priority 1 when both always want more."""
        return self._executions.get(instance, 0) * max(1, instance.priority)


def _key(instance: Limited, resource: Resource) -> tuple[str, str]:
    return (resource.name, "" if resource.is_global else instance.device)
