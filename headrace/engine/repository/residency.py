# SPDX-License-Identifier: Apache-2.0
"""One model that loads on demand: its folder, its size, the requests that wait for it, and what is shown of it.

`on_demand` and `resident_memory` change it; the console and the metrics show a `Residency`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.core.errors import HeadraceError, Unavailable
from headrace.core.telemetry.progress import ProgressEvent
from headrace.engine.repository.load_plan import LoadPlan
from headrace.engine.repository.memory_budget import MemoryUse
from headrace.engine.repository.scan import ScannedModel
from headrace.models.config.types import ModelConfig

Done = Callable[[HeadraceError | None], None]
"""Called once, with None when the model serves, else with the error for the request."""


class ModelNotLoaded(Unavailable):
    """Raise for a model that is not loaded at the moment, and loads when a request waits for it."""

    def __init__(self, model: str) -> None:
        super().__init__(f"model '{model}' is not loaded at the moment: send it a request, which loads it")
        self.model = model


class Residency(NamedTuple):
    """What the console and the metrics show of a model that loads on demand."""

    name: str
    state: str
    """resident, loading, evicted, not loaded or failed."""
    reason: str
    pinned: bool
    use: MemoryUse
    """What it takes now, or else took when it was last loaded."""
    counted: bool
    """Whether `use` counts against the limits now."""
    waiting: int
    """Requests that wait for it."""
    loads: int
    failed_loads: int
    evictions: int
    last_used_seconds: float | None
    """How long ago its last request ended; None if it is not loaded or was not used."""
    load_seconds: float | None
    """How long its last load took."""
    progress: ProgressEvent | None


class Waiter:
    """A request that waits for a model."""

    __slots__ = ("done", "timer")

    def __init__(self, done: Done) -> None:
        self.done = done
        self.timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class OnDemandModel:
    """One model of the folder."""

    name: str
    scanned: ScannedModel
    plan: LoadPlan | None
    pinned: bool
    key: str = ""
    """The digest of its content; "" before the first load."""
    size: MemoryUse | None = None
    """As measured, now or at an earlier start."""
    estimate: MemoryUse = field(default_factory=dict)
    """The size of its files, until it is measured."""
    charged: MemoryUse = field(default_factory=dict)
    """What counts against the limits now."""
    waiters: list[Waiter] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    changed: bool = False
    """Whether its files changed while it was loaded or loading."""
    problem: HeadraceError | None = None
    failures: int = 0
    """Failed loads since the last good one."""
    retry_at: float = 0.0
    stage: str = ""
    load_began: float = 0.0
    load_seconds: float | None = None
    loaded_ns: int = 0
    evicted: bool = False
    completed: LoadPlan | None = None
    """The plan that remembers the completed configurations, so that only the first load reads the files for them."""
    config: ModelConfig | None = None
    """The configuration of the last load."""
    loads: int = 0
    failed_loads: int = 0
    evictions: int = 0


def residency_json(residency: Residency) -> Mapping[str, object]:
    """Return a residency for the console."""
    return {
        "state": residency.state,
        "reason": residency.reason,
        "pinned": residency.pinned,
        "memory": dict(residency.use),
        "waiting": residency.waiting,
        "loads": residency.loads,
        "evictions": residency.evictions,
        "last_used_seconds": residency.last_used_seconds,
        "load_seconds": residency.load_seconds,
    }
