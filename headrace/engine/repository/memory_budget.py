# SPDX-License-Identifier: Apache-2.0
"""The memory budget of models that load on demand: what they use, what is too much, and which of them to evict.

Pure arithmetic; `on_demand` calls it. Memory is counted by place: "host", and "gpu0", "gpu1" and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.models.storage.errors import readable_bytes

MemoryUse = Mapping[str, int]
"""Bytes by place."""

HOST = "host"
NO_MEMORY: MemoryUse = {}


def gpu_place(index: int) -> str:
    """Return the place of a GPU's memory."""
    return f"gpu{index}"


def add_up(uses: Iterable[MemoryUse]) -> dict[str, int]:
    """Return the sum of several uses."""
    total: dict[str, int] = {}
    for use in uses:
        for place, size in use.items():
            total[place] = total.get(place, 0) + size
    return total


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded model that may be evicted."""

    name: str
    use: MemoryUse
    last_used_ns: int


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The limits by place; a place that is missing has no limit."""

    limits: MemoryUse

    def excess(self, *uses: MemoryUse) -> dict[str, int]:
        """Return the bytes over the limit, by place; empty if everything fits."""
        total = add_up(uses)
        return {place: total[place] - limit for place, limit in self.limits.items() if total.get(place, 0) > limit}

    def victims(self, excess: MemoryUse, residents: Sequence[Resident]) -> list[Resident] | None:
        """Return the least recently used models that free the excess; None if all of them together do not.

        A model that frees nothing of what is missing is kept, and so is one that later choices make unnecessary.
        """
        remaining = dict(excess)
        chosen: list[Resident] = []
        for resident in sorted(residents, key=lambda resident: resident.last_used_ns):
            if any(remaining[place] > 0 and resident.use.get(place, 0) > 0 for place in remaining):
                chosen.append(resident)
                _subtract(remaining, resident.use)
                if all(size <= 0 for size in remaining.values()):
                    return _without_unnecessary(chosen, excess)
        return None

    def sum_text(self, need: MemoryUse, others: Sequence[tuple[str, MemoryUse]], excess: MemoryUse) -> str:
        """Return the sum that does not fit, as text: 'host memory: 2.1 GB + 500.0 MB (pinned models) is over ...'."""
        texts = []
        for place in excess:
            parts = [readable_bytes(need.get(place, 0))]
            parts += [f"{readable_bytes(use[place])} ({label})" for label, use in others if use.get(place)]
            limit, option = readable_bytes(self.limits[place]), option_of(place)
            texts.append(f"{place_text(place)}: {' + '.join(parts)} is more than the {limit} of {option}")
        return "; ".join(texts)


def option_of(place: str) -> str:
    """Return the option that sets the limit of a place."""
    return "--host-memory-limit" if place == HOST else "--gpu-memory-limit"


def place_text(place: str) -> str:
    """Return a place for people."""
    return "host memory" if place == HOST else f"memory of GPU {place.removeprefix('gpu')}"


def _subtract(remaining: dict[str, int], use: MemoryUse) -> None:
    for place in remaining:
        remaining[place] -= use.get(place, 0)


def _without_unnecessary(chosen: list[Resident], excess: MemoryUse) -> list[Resident]:
    """Keep models that a larger one, chosen later, made unnecessary; the most recently used are kept first."""
    needed = list(chosen)
    for resident in reversed(chosen[:-1]):
        others = add_up(other.use for other in needed if other is not resident)
        if all(others.get(place, 0) >= size for place, size in excess.items()):
            needed.remove(resident)
    return needed
