# SPDX-License-Identifier: Apache-2.0
"""What a container may use, as its resources say. Pure; for `starting`, and for what runs containers.

Thread pools of numeric libraries are as large as the machine unless told: eight threads in a container that may use one core
wait for each other, so they are told. A request is the least that a container gets, not the most: with idle cores around it,
more threads are quicker, and nothing is told.

Cores are not given to containers one by one: the kernel fills idle cores better than a fixed choice, which would leave some
idle while neighbours wait. Only where no group of the kernel can hold a container to its limit is it tied to as many cores
(`process_driver`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from headrace.fleet.selection.measures import quantity
from headrace.fleet.words import Document, part

THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
_LEAST_MEMORY = 4 << 20


@dataclass(frozen=True)
class Limits:
    """Of one container. None: nothing is said."""

    memory: int | None = None
    """In bytes."""
    cores: float | None = None
    """That it may use at most."""
    share: float | None = None
    """Cores that it gets when others want them too."""
    tasks: int | None = None
    """Processes and threads."""

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.memory, self.cores, self.share, self.tasks))


def limits_of(container: Document, most_processes: int = 0) -> Limits:
    """By `resources`; what cannot be read counts as not said. `most_processes`: of each container here, 0 for any number."""
    most, asked = part(container, "resources", "limits"), part(container, "resources", "requests")
    memory, cores = quantity(most.get("memory")), quantity(most.get("cpu"))
    share = quantity(asked.get("cpu")) or cores
    return Limits(
        max(int(memory), _LEAST_MEMORY) if memory else None,
        cores if cores and cores > 0 else None,
        share if share and share > 0 else None,
        most_processes or None,
    )


def thread_variables(limits: Limits, cores_here: int, said: Mapping[str, str]) -> dict[str, str]:
    """How many threads libraries may start, as far as nobody says it already."""
    cores = limits.cores
    if cores is None or any(name in said for name in THREADS):
        return {}
    return dict.fromkeys(THREADS, str(max(1, min(ceil(cores), cores_here))))
