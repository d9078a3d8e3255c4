# SPDX-License-Identifier: Apache-2.0
"""One workload that is scaled by load: its samples, and what is decided of them. Owned by `autoscaling`; has no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.fleet.autoscaling.computing import Computation
from headrace.fleet.autoscaling.deciding import CALM, Panic, Sample, decide
from headrace.fleet.autoscaling.exposition import Series
from headrace.fleet.autoscaling.meter import CONCURRENCY, RPS, Meter
from headrace.fleet.local.scaling.aims import Aimed
from headrace.fleet.local.scaling.requests import Arrivals, Load


@dataclass(frozen=True)
class Change:
    """Another number of replicas, and why."""

    replicas: int
    message: str


class Keeper:
    """See the module."""

    def __init__(self, aimed: Aimed) -> None:
        self.aimed = aimed
        self.arrivals = Arrivals()
        self.computation = Computation(aimed.query) if aimed.query is not None else None
        self.busy = False
        """Whether requests were under way, or had come, at the last look."""
        self.failures = 0
        """Looks in a row that found nothing to count."""
        windows = aimed.aim.windows
        self._meter = Meter(windows)
        self._samples: deque[Sample] = deque(maxlen=int(windows.stable_seconds / windows.tick_seconds) + 1)
        self._panic: Panic = CALM
        self._wanted: int | None = None
        self._arrived = 0
        self._next = 0.0

    @property
    def by_requests(self) -> bool:
        """Whether routers are asked."""
        return self.aimed.metric in (CONCURRENCY, RPS)

    def due(self, now: float) -> bool:
        """Whether it is time for a decision, and the next one a tick later."""
        if now < self._next:
            return False
        self._next = now + self.aimed.aim.windows.tick_seconds
        return True

    def count(self, now: float, load: Load) -> None:
        """What routers saw."""
        self.busy = load.at_once > 0 or load.arrived > self._arrived
        self._arrived = load.arrived
        self._meter.add(now, load.at_once, load.arrived)

    def measure(self, now: float, value: float) -> None:
        """What was used, or what a query says."""
        self._samples.append(Sample(now, value))

    def compute(self, now: float, series: Series) -> None:
        """What replicas told. Raises FailedPrecondition where the query has no value."""
        if self.computation is None:
            return
        self.computation.add(now, series)
        value = self.computation.value(now)
        # A ratio says how many times too few there are.
        self.measure(now, value * (self._wanted or 1) if self.aimed.ratio else value)

    def decide(self, now: float, wanted: int, ready: int) -> Change | None:
        """What to change. wanted: replicas there should be so far."""
        aim = self.aimed.aim
        if self._wanted != wanted and (self._wanted is not None or wanted > aim.least):
            # Somebody else has said so, or a daemon before this one: it holds until the window knows better.
            self._panic = Panic(now + aim.windows.stable_seconds, wanted)
        self._wanted = wanted
        found = decide(self._taken, now, aim, ready, self._panic, wanted)
        if found is None:
            return None
        self._panic = found.panic
        if found.replicas == wanted:
            return None
        self._wanted = found.replicas
        said = self.aimed.says(found.average, found.seconds)
        return Change(found.replicas, f"{said}: {wanted} -> {found.replicas} replicas")

    @property
    def _taken(self) -> Sequence[Sample]:
        return self._meter.samples(self.aimed.metric) if self.by_requests else self._samples
