# SPDX-License-Identifier: Apache-2.0
"""What versions have done, as JSON for the other workers of a server, and added up again for statistics and status.

Called by `gathering` and `workers`. Everything counted that those two show is added; of what is not a count (the last
batches) the asked worker's own is shown. Metrics go another way: `telemetry.merging`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.engine.responses import ResponseStats
from headrace.engine.statistics import BatchStats, RequestStats, VersionStatistics

Numbers = dict[str, Any]

_BY_SIZE: dict[str, type[RequestStats | BatchStats | ResponseStats]] = {
    "by_rows": RequestStats,
    "batches": BatchStats,
    "responses": ResponseStats,  # by place, which is a number too
}


def numbers_of(statistics: VersionStatistics) -> Numbers:
    """A version's counts as JSON."""
    numbers: Numbers = {
        "received": statistics.received,
        "settled": statistics.settled,
        "last": statistics._last_ns,
        "failures": dict(statistics.failures),
        "reasons": {reason: count for reason, count in statistics.log.reasons.items() if count},
    }
    for name, kind in _BY_SIZE.items():
        sizes: dict[int, Any] = getattr(statistics, name)
        numbers[name] = {str(size): [getattr(stats, slot) for slot in kind.__slots__] for size, stats in sizes.items()}
    return numbers


def added_up(own: VersionStatistics, others: Iterable[Numbers]) -> VersionStatistics:
    """The counts of one version in several workers, together."""
    total = VersionStatistics()
    total.log.recent = own.log.recent
    for numbers in (numbers_of(own), *others):
        _add(total, numbers)
    return total


def ended(numbers: Numbers) -> Numbers:
    """The counts of a version whose worker has died: nothing is in flight there."""
    return numbers | {"settled": numbers["received"]}


def together(first: Any, second: Any) -> Any:
    """Two answers of `numbers_of`, or objects with such in them, as one."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict):
        made = {name: together(first.get(name), second.get(name)) for name in first.keys() | second.keys()}
        if "last" in made:
            made["last"] = max(first["last"], second["last"])
        return made
    if isinstance(first, list):
        return [one + other for one, other in zip(first, second, strict=True)]
    return first + second


def _add(total: VersionStatistics, numbers: Numbers) -> None:
    total.received += numbers["received"]
    total.settled += numbers["settled"]
    # The machine's monotonic clock is the same in every process.
    total._last_ns = max(total._last_ns, numbers["last"])
    total.failures.update(numbers["failures"])
    for reason, count in numbers["reasons"].items():
        total.log.reasons[reason] = total.log.reasons.get(reason, 0) + count
    for name, kind in _BY_SIZE.items():
        sizes: dict[int, Any] = getattr(total, name)
        for size, values in numbers[name].items():
            stats = sizes.setdefault(int(size), kind())
            for slot, value in zip(kind.__slots__, values, strict=True):
                setattr(stats, slot, getattr(stats, slot) + value)
