# SPDX-License-Identifier: Apache-2.0
"""What a platform must be able to do for a service: start it, say how it is, tell its log, reach it, stop it.

`jobs` calls drivers and keeps their handles in its records. A driver finds what it started again by the job's id alone, so
that a handle that was never recorded, because the gateway was killed, is no loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

PORT = "{port}"
"""A word of `LaunchSpec.argv` that the driver replaces by the port it chose."""

SECRET = "{secret:%s}"  # noqa: S105  # a form, not a secret
"""A word of `LaunchSpec.argv` for which the started program reads a secret text: `SECRET % "job"`."""

FILE = "{file:%s}"
"""A word of `LaunchSpec.argv` that the driver replaces by the path of a secret file: `FILE % "credentials"`."""

Phase = Literal["starting", "running", "ended", "gone"]
"""`ended`: it ran and does no more, and its log can still be read. `gone`: the platform knows nothing of it."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a platform needs, and whether it is there."""

    name: str
    passed: bool
    message: str
    """What was found, or what to do."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the host that a container sees, to be read only."""

    host: str
    inside: str


@dataclass(frozen=True, slots=True)
class Container:
    """What platforms run that are given a command and not a function of this package."""

    image: str
    """"" where the platform is to run the command without a container: bare processes of Slurm."""
    command: str
    """One line for a POSIX shell, the same on all platforms; it has nothing secret in it."""
    port: int = 8080
    """Where the command listens."""
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One service to be started."""

    job_id: str
    """A UUID: it names the service on every platform."""
    target: str = ""
    """For `process`: the function that is the program, "module:function"."""
    argv: tuple[str, ...] = ()
    """Its words, with `PORT` and `SECRET` for what is filled in. Everybody on the machine may read the others."""
    container: Container | None = None
    """For every other platform."""
    host_port: int | None = None
    """Where the service is to be reached on the machine that publishes or forwards it; None: the driver chooses."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables to set, beside the few that are passed on. For `process` they may be secret."""
    secret_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables to set that nobody may see: not on a command line, in a manifest, or where the platform shows a service."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Texts for the words `SECRET % name`: neither on the command line nor in the environment."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """JSON for the words `FILE % name`: each is a file that its owner alone may read, and is gone with the service."""
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    """For platforms that have labels: org, experiment."""


@dataclass(frozen=True, slots=True)
class Handle:
    """Something that was started, as a record keeps it."""

    job_id: str
    driver: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """For people and for the registry: pid, port, the platform's own id, node. A driver does without it where it can."""


@dataclass(frozen=True, slots=True)
class Observed:
    """How something is just now."""

    phase: Phase
    name: str = ""
    """What the platform calls it: a pod's name, a process's number."""
    word: str = "Unknown"
    """The platform's status in Kubernetes' words: Pending, Running, Succeeded, Failed, Terminating, Unknown."""
    exit_code: int | None = None
    reason: str = ""
    """Why it ended, where the platform tells."""


class Driver(Protocol):
    """A platform. Every method may be called at any time, in any order, and again after a crash at any point.

    All raise classes of `core.errors`: FailedPrecondition where the platform is not as it must be, ResourceExhausted where
    there is no room, Unavailable where it does not answer.
    """

    name: str
    """`process`, ..."""
    place: str
    """Which machine, cluster or account this is: drivers of the same place see the same services."""

    async def preflight(self) -> list[Check]:
        """What must be there before anything is started."""

    async def start(self, spec: LaunchSpec) -> Handle:
        """Start a service; it need not answer yet. Raises AlreadyExists if this job's was started before."""

    async def status(self, handle: Handle) -> Observed:
        """Look at it. `handle.data` may be empty."""

    async def logs(self, handle: Handle, tail: int) -> str:
        """The last `tail` lines; "" where there are none."""

    async def endpoint(self, handle: Handle) -> str | None:
        """Where it listens, "http://host:port"; None if it is not there."""

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """End it and remove every trace of it, the log too. Nothing to end is success."""

    async def found(self) -> dict[str, Observed]:
        """Everything of this place that was started and not stopped, by job id, and how it is. One look for all."""

    async def close(self) -> None:
        """Let go of this process's own means; what was started runs on."""
