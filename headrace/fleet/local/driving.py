# SPDX-License-Identifier: Apache-2.0
"""What runs containers: processes of this machine, or a Docker engine. `container` is written against this."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace.fleet.local.commands import Line
from headrace.fleet.local.limits import Limits

RECORD = "process.json"
"""In a container's folder: who runs, kept before it does anything."""
LOG, PREVIOUS = "log", "log.previous"


@dataclass(frozen=True)
class Mounted:
    """A folder or file that a container finds."""

    inside: str
    here: str
    read_only: bool = False


@dataclass(frozen=True)
class Box:
    """One container, ready to be run."""

    pod: str
    """The uid of its pod."""
    name: str
    folder: Path
    """Its own, for its record and its log."""
    line: Line
    work: Path
    """Where it may put files."""
    image: str = ""
    mounts: Sequence[Mounted] = ()
    limits: Limits = field(default_factory=Limits)
    gpus: tuple[str, ...] = ()
    shared_memory: int | None = None
    """Bytes of /dev/shm, if it says how many."""
    spec: Mapping[str, object] = field(default_factory=dict)
    """The container's own words, for what only images have: its user, its folder."""
    modest: bool = False
    """Until it is ready, others come first."""


@dataclass(frozen=True)
class Ended:
    """How a container ended."""

    code: int | None
    """Negative for a signal; None if nobody knows."""
    reason: str = ""
    """One word of Kubernetes, where more is known than the code tells."""
    message: str = ""


class Running(Protocol):
    """What runs for a container, also one that another daemon has started."""

    @property
    def label(self) -> str:
        """For events: `process 12`."""

    @property
    def session(self) -> int | None:
        """The session of its processes, for who measures them."""

    async def ended(self) -> Ended:
        """Wait for its end."""

    async def end(self, grace_seconds: float) -> None:
        """Ask it to end; nothing of it runs after this."""

    async def clear(self) -> None:
        """Nothing of it runs or is kept after this, but its log."""

    async def run(self, words: Sequence[str], variables: Mapping[str, str], seconds: float) -> bool:
        """Whether a command inside of it ends well."""

    async def said(self, tail: int, most_bytes: int) -> str:
        """The last lines that it said."""

    def is_ready(self) -> None:
        """It serves from now on: nobody comes before it any more."""

    def let_go(self) -> None:
        """The daemon ends, and this runs on."""


class Driver(Protocol):
    """One way to run containers."""

    runs_images: bool
    """Whether a container has files of its own: then folders are bound, and paths stay as they are."""

    async def open(self, pods: Collection[str]) -> None:
        """Before all else. What is left of pods that are not among these goes. Raises FailedPrecondition."""

    def found(self, folder: Path) -> Running | None:
        """What runs by the record in a container's folder."""

    async def start(self, box: Box) -> Running:
        """Run it. Raises CannotRun, OSError, FailedPrecondition; then nothing runs."""

    async def close(self) -> None:
        """Let go of everything."""
