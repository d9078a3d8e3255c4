# SPDX-License-Identifier: Apache-2.0
"""The contract of a container runtime: what a container is, and how it is started, watched and stopped.

`container` is written against it; `process_runtime` and `docker_runtime` implement it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Protocol

from headrace.fleet.local.container_command import ContainerCommand
from headrace.fleet.selection.model_match import parse_quantity
from headrace.platforms.kubernetes_client.objects import Document, get_mapping

RECORD = "process.json"
"""File in a container's folder that identifies what runs; written before it runs."""
LOG, PREVIOUS = "log", "log.previous"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
_MIN_MEMORY = 4 << 20


@dataclass(frozen=True)
class ResourceLimits:
    """The limits of one container; None: no limit."""

    memory: int | None = None
    """In bytes."""
    cores: float | None = None
    """Maximum CPU cores."""
    share: float | None = None
    """Guaranteed cores under contention."""
    tasks: int | None = None
    """Maximum processes and threads."""

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.memory, self.cores, self.share, self.tasks))


def resource_limits(container: Document, max_tasks: int = 0) -> ResourceLimits:
    """Return the limits of a container's `resources`; invalid quantities are ignored. `max_tasks`: 0 for no limit."""
    limits, requests = get_mapping(container, "resources", "limits"), get_mapping(container, "resources", "requests")
    memory, cores = parse_quantity(limits.get("memory")), parse_quantity(limits.get("cpu"))
    share = parse_quantity(requests.get("cpu")) or cores
    return ResourceLimits(
        max(int(memory), _MIN_MEMORY) if memory else None,
        cores if cores and cores > 0 else None,
        share if share and share > 0 else None,
        max_tasks or None,
    )


def thread_environment(limits: ResourceLimits, machine_cores: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that limit the thread pools of numeric libraries to the cores of a container, unless it sets one.

    By default such a pool has a thread for each core of the machine: eight threads in a container with one core wait for
    each other. A CPU request is a minimum, so it sets nothing: with idle cores, more threads are faster.
    """
    cores = limits.cores
    if cores is None or any(name in environment for name in THREAD_VARIABLES):
        return {}
    return dict.fromkeys(THREAD_VARIABLES, str(max(1, min(ceil(cores), machine_cores))))


@dataclass(frozen=True)
class VolumeMount:
    """A folder or file of the machine that a container sees at `mount_path`."""

    mount_path: str
    host_path: str
    read_only: bool = False


@dataclass(frozen=True)
class ContainerSpec:
    """One container, ready to be started."""

    pod: str
    """The uid of its pod."""
    name: str
    folder: Path
    """The folder of its record and its log."""
    command: ContainerCommand
    work_folder: Path
    """Its working directory."""
    image: str = ""
    mounts: Sequence[VolumeMount] = ()
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    gpus: tuple[str, ...] = ()
    shared_memory: int | None = None
    """Bytes of /dev/shm, if the pod sets them."""
    document: Mapping[str, object] = field(default_factory=dict)
    """The container in the pod's manifest, for what only images have: the user, the working directory."""
    low_priority: bool = False
    """Whether this container has a lower CPU priority until it is ready."""


@dataclass(frozen=True)
class ExitStatus:
    """How a container ended."""

    code: int | None
    """Negative for a signal; None if it is unknown."""
    reason: str = ""
    """Kubernetes' reason, such as OOMKilled, if more is known than the code."""
    message: str = ""


class RunningContainer(Protocol):
    """A container that runs, also one that an earlier daemon started."""

    @property
    def label(self) -> str:
        """For events: `process 12`."""

    @property
    def session(self) -> int | None:
        """The session of its processes, to measure their resource usage."""

    async def wait(self) -> ExitStatus:
        """Wait for its end."""

    async def stop(self, grace_seconds: float) -> None:
        """Stop it; no process of it runs after this."""

    async def remove(self) -> None:
        """Kill it and remove everything of it but its log."""

    async def exec(self, args: Sequence[str], variables: Mapping[str, str], seconds: float) -> bool:
        """Run a command in it; return whether it succeeds."""

    async def logs(self, tail: int, max_bytes: int) -> str:
        """Return the last lines of its log."""

    def mark_ready(self) -> None:
        """Give it the same priority as other containers: it serves from now on."""

    def detach(self) -> None:
        """Leave it running when the daemon ends."""


class ContainerRuntime(Protocol):
    """A container runtime."""

    runs_images: bool
    """Whether containers have a file system of their own: then folders are mounted, and paths stay unchanged."""

    async def open(self, pods: Collection[str]) -> None:
        """Connect, before anything else, and remove containers of pods that are not in `pods`. Raises FailedPrecondition."""

    def adopt(self, folder: Path) -> RunningContainer | None:
        """Return what runs by the record in a container's folder."""

    async def start(self, spec: ContainerSpec) -> RunningContainer:
        """Start a container. Raises ContainerStartError, OSError, FailedPrecondition; then nothing runs."""

    async def close(self) -> None:
        """Release its resources; containers keep running."""
