# SPDX-License-Identifier: Apache-2.0
"""The slots of a model instance for adapters: which adapter is in device memory, who uses it, and who waits for a slot.

A slot is memory of a fixed size in every layer, so that captured steps find whatever adapter it has at the same address. An
adapter that a request uses is never evicted; of the others, the least recently used one is. For the engine's thread only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from headrace.backends.llm.adapter_fit import LoadedAdapter
from headrace.backends.llm.lora import LoraAdapters
from headrace.backends.llm.metrics import AdapterMetrics

log = logging.getLogger("headrace.backends.llm")

_MOST_PASSES = 32
"""How many requests with adapters in slots may start before one that waits for a slot: with more, its slot might never
become idle."""


class AdapterUser(Protocol):
    """A request, as the slots see it."""

    adapter: LoadedAdapter | None


User = TypeVar("User", bound=AdapterUser)


@dataclass(slots=True, eq=False)
class _Slot:
    number: int
    adapter: LoadedAdapter
    users: int = 0


class AdapterSlots(Generic[User]):
    """The slots of one instance."""

    def __init__(self, lora: LoraAdapters, metrics: AdapterMetrics) -> None:
        self._lora = lora
        self._metrics = metrics
        self._free = list(range(lora.slots))[::-1]
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        """By the adapter's name, least recently used first."""
        self._held: dict[User, _Slot] = {}
        self._waiting: deque[User] = deque()
        self._passes = 0
        """Requests that started since the first of those that wait came."""
        self._has_changed = False
        """Whether a slot has become idle since the requests that wait were looked at."""

    @property
    def resident(self) -> list[str]:
        """The names of the adapters in slots, least recently used first."""
        return list(self._slots)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    def acquire(self, user: User) -> bool:
        """Bring the adapter of a request into a slot and keep it there; or queue the request and return False."""
        if user in self._held or user.adapter is None:
            return True
        if not (self._waiting and self._passes >= _MOST_PASSES) and self._take(user, user.adapter):
            self._passes += bool(self._waiting)
            return True
        self._passes = self._passes if self._waiting else 0
        self._waiting.append(user)
        self._metrics.waiting.add(1)
        return False

    def release(self, user: User) -> None:
        """A request has ended, or gives up waiting."""
        slot = self._held.pop(user, None)
        if slot is not None:
            slot.users -= 1
            self._has_changed |= not slot.users
        elif user.adapter is not None and user in self._waiting:
            self._waiting.remove(user)
            self._metrics.waiting.add(-1)
            self._has_changed = True  # the next one may be the first now

    def take_ready(self) -> list[User]:
        """Return the requests that have a slot now, oldest first."""
        if not (self._waiting and self._has_changed):
            return []
        self._has_changed = False
        ready: list[User] = []
        still: deque[User] = deque()
        for user in self._waiting:
            passes = bool(still)
            may_start = not passes or self._passes < _MOST_PASSES
            try:
                has_slot = may_start and user.adapter is not None and self._take(user, user.adapter)
            except Exception:
                log.exception("Adapter '%s' could not be copied into a slot.", user.adapter and user.adapter.name)
                has_slot = True  # `acquire` tries again, and its error is this request's
            if has_slot:
                self._passes = self._passes + 1 if passes else 0
                ready.append(user)
            else:
                still.append(user)
        self._metrics.waiting.add(len(still) - len(self._waiting))
        self._waiting = still
        return ready

    def queued(self) -> list[User]:
        """Return the requests that wait for a slot."""
        return list(self._waiting)

    def close(self) -> None:
        """Count the adapters no longer."""
        self._metrics.resident.add(-len(self._slots))
        self._metrics.waiting.add(-len(self._waiting))
        self._slots.clear()
        self._held.clear()
        self._waiting.clear()

    def _take(self, user: User, adapter: LoadedAdapter) -> bool:
        slot = self._slots.get(adapter.name)
        if slot is None or slot.adapter.digest != adapter.digest:
            # The same name with other content waits until no request uses the old one.
            slot = self._place(adapter, slot)
            if slot is None:
                return False
        self._slots.move_to_end(adapter.name)
        slot.users += 1
        self._held[user] = slot
        return True

    def _place(self, adapter: LoadedAdapter, old: _Slot | None) -> _Slot | None:
        """Copy an adapter into a slot that is free or idle; None if there is none."""
        if old is not None and old.users:
            return None
        idle = old or (None if self._free else next((slot for slot in self._slots.values() if not slot.users), None))
        if idle is None and not self._free:
            return None
        replaced = ""
        if idle is not None:
            replaced = idle.adapter.name
            del self._slots[replaced]
            self._free.append(idle.number)
            self._metrics.resident.add(-1)
            if idle is not old:
                self._metrics.evicted("device")
        number = self._free[-1]
        self._lora.place(number, adapter.name, adapter.weights, replaced)
        self._free.pop()
        slot = self._slots[adapter.name] = _Slot(number, adapter)
        self._metrics.resident.add(1)
        return slot
