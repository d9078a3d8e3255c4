# SPDX-License-Identifier: Apache-2.0
"""The contract of a platform driver: start a service, report its status, log and endpoint, and stop it.

`jobs` and the launcher call drivers and record their handles. A driver finds a service again by its job id alone, so that a
handle that was never recorded, because the gateway was killed, is not lost.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from headrace.core.errors import InvalidArgument

PORT = "{port}"
"""An argument of `LaunchSpec.argv` that the driver replaces by the port it chose."""

SECRET = "{secret:%s}"  # noqa: S105  # a form, not a secret
"""An argument of `LaunchSpec.argv` that the started program replaces by a secret text: `SECRET % "job"`."""

FILE = "{file:%s}"
"""An argument of `LaunchSpec.argv` that the driver replaces by the path of a secret file: `FILE % "credentials"`."""

Phase = Literal["starting", "running", "ended", "gone"]
"""`ended`: it no longer runs; its log can still be read. `gone`: the platform does not know it."""

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one preflight check of a platform."""

    name: str
    passed: bool
    message: str
    """What was found, or what to do."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the host that is mounted read-only into a container."""

    host: str
    inside: str


@dataclass(frozen=True, slots=True)
class Container:
    """What the platforms other than `process` run: an image and a command."""

    image: str
    """"" to run the command without a container: bare processes of Slurm."""
    command: str
    """One line for a POSIX shell, the same on all platforms; it contains no secrets."""
    port: int = 8080
    """The port that the command listens on."""
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One service to start."""

    job_id: str
    """A UUID: it names the service on every platform."""
    target: str = ""
    """For `process`: the function that is the program, "module:function"."""
    argv: tuple[str, ...] = ()
    """Its arguments, with the placeholders `PORT`, `SECRET` and `FILE`. Every user of the machine can read them."""
    container: Container | None = None
    """The container; for all platforms except `process`."""
    host_port: int | None = None
    """The port of the service on the machine that publishes or forwards it; None: the driver chooses."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables to set in addition to the few that are inherited. For `process` they may be secret."""
    secret_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Secret variables: never on a command line, in a manifest, or in what the platform shows of a service."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Texts for the arguments `SECRET % name`: neither on the command line nor in the environment."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """JSON for the arguments `FILE % name`: files that only their owner can read, removed with the service."""
    gpus: int = 0
    """GPUs on each node."""
    nodes: int = 1
    """How many nodes run the command together; only Slurm has more than one."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """For platforms that have labels: org, experiment."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A started service, as a record stores it."""

    job_id: str
    driver: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """More data for users and the registry: pid, port, the platform's own id, node. A driver works without it if it can."""


@dataclass(frozen=True, slots=True)
class PlatformStatus:
    """The status of a service, as its platform reports it."""

    phase: Phase
    name: str = ""
    """The platform's name for it: the name of a pod, the number of a process."""
    pod_phase: str = "Unknown"
    """The platform's status in Kubernetes' words: Pending, Running, Succeeded, Failed, Terminating, Unknown."""
    exit_code: int | None = None
    reason: str = ""
    """Why it ended, if the platform reports it."""


class Driver(Protocol):
    """A platform. Every method may be called at any time, in any order, and again after a crash at any point.

    Methods raise classes of `core.errors`: FailedPrecondition if the platform is not set up, ResourceExhausted if it has no
    capacity, Unavailable if it does not answer.
    """

    name: str
    """`process`, ..."""
    place: str
    """The machine, cluster or account: drivers of the same place see the same services."""

    async def preflight(self) -> list[Check]:
        """Check what the platform needs before a service is started."""

    async def start(self, spec: LaunchSpec) -> Handle:
        """Start a service; it need not answer yet. Raises AlreadyExists if the job's service was started before."""

    async def status(self, handle: Handle) -> PlatformStatus:
        """Return its status. `handle.data` may be empty."""

    async def logs(self, handle: Handle, tail: int) -> str:
        """Return the last `tail` lines of its log; "" if there are none."""

    async def endpoint(self, handle: Handle) -> str | None:
        """Return its URL, "http://host:port"; None if it does not run."""

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """Stop it and remove everything of it, the log too. Succeeds if there is nothing to stop."""

    async def list_services(self) -> dict[str, PlatformStatus]:
        """Return the status of every service of this place that was started and not stopped, by job id, in one query."""

    async def close(self) -> None:
        """Release the threads and connections of this process; services keep running."""


def is_job_id(text: str) -> bool:
    """Whether a text is a UUID in its canonical form, and so safe as the name of a file."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def check_job_id(job_id: str) -> str:
    """Return the job id. Raises InvalidArgument if it is not a UUID: it names objects of platforms and folders."""
    if not is_job_id(job_id):
        raise InvalidArgument("a service's job id is a UUID, written in lower case")
    return job_id


def check_spec(spec: LaunchSpec) -> None:
    """Raise InvalidArgument for values that no platform can pass on. The message contains no value: it may be secret."""
    check_job_id(spec.job_id)
    for name, value in (*spec.environment.items(), *spec.secret_environment.items()):
        if not _VARIABLE_NAME.fullmatch(name):
            raise InvalidArgument(
                f"{name!a} cannot be the name of a variable: use ASCII letters, digits and _, and no digit first"
            )
        if "\0" in value:
            raise InvalidArgument(f"the variable {name} has a zero byte in its value; no program can be given that")
    duplicates = spec.environment.keys() & spec.secret_environment.keys()
    if duplicates:
        raise InvalidArgument(
            f"{', '.join(sorted(duplicates))}: given as a plain and as a secret variable; give it once"
        )
    if spec.container is not None:
        texts = [spec.container.image, spec.container.command]
        texts += [path for mount in spec.container.mounts for path in (mount.host, mount.inside)]
        if any("\0" in text for text in texts):
            raise InvalidArgument("an image, a command or a mount cannot have a zero byte")
    if any("\0" in text for pair in spec.labels.items() for text in pair):
        raise InvalidArgument("a label cannot have a zero byte")
