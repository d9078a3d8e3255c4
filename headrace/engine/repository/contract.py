# SPDX-License-Identifier: Apache-2.0
"""What the repository asks of the side that computes: open a version, and retire it.

And what it wants to know of a configuration before it does. Implemented by the engine's queues and instances, and by
fakes in tests. The repository decides when; how is not its business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.backends.contract import ModelFiles
from headrace.core.telemetry.progress import Reporter
from headrace.models.config.types import EnsembleStep, ModelConfig, VersionPolicy


class LoadedVersion(Protocol):
    """One version that serves."""

    @property
    def config(self) -> ModelConfig:
        """As it was loaded."""

    @property
    def version(self) -> int:
        """Its number."""

    async def retire(self, grace_seconds: float) -> None:
        """Take no new requests, let those in flight finish, or tell them when the grace is over, and free everything.

        Called once, after no look-up finds the version any more; its memory is free when this returns.
        """


OpenVersion = Callable[[ModelConfig, ModelFiles, Reporter], Awaitable[LoadedVersion]]
"""Load a version and warm it up: it can serve when this returns.

Raises a `HeadraceError` with words for the operator, or anything else, which only the log sees. Takes care of its own
threads. When it is cancelled it frees what it has loaded so far.
"""


def _nothing() -> None:
    """For plans that nothing can be hurried with."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a configuration says before the files of a version were asked."""

    policy: VersionPolicy
    finish: Callable[[ModelFiles], ModelConfig]
    """The whole configuration for one version. May block."""
    is_ensemble: bool = False
    steps: tuple[EnsembleStep, ...] = ()
    """The models an ensemble uses."""
    abandon: Callable[[], None] = _nothing
    """Let what is being opened by this plan fail soon, as far as its backend can. From the loop's thread."""


ReadPlan = Callable[[Path, str | None, int], Plan]
"""The plan of the model in a folder, with the configuration given as JSON instead of a file, and the number of GPUs."""
