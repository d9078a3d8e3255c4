# SPDX-License-Identifier: Apache-2.0
"""What to run for a container of a pod: its folders are made, and it becomes a command. Called by `replica`; blocking."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.fleet.local.commands import Surroundings, line_of
from headrace.fleet.local.contract import Around
from headrace.fleet.local.driving import Box, Mounted
from headrace.fleet.local.limits import limits_of, thread_variables
from headrace.fleet.local.machine import Placement, visible
from headrace.fleet.local.processes import passed_on
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.volumes import mounted, shared_memory
from headrace.fleet.words import Document, text

if TYPE_CHECKING:
    from headrace.fleet.local.replica import Replica


class Starting:
    """How containers of one pod are started. Each is asked for anew, as what it needs may have changed."""

    def __init__(self, replica: Replica, around: Around, settings: LocalSettings, *, runs_images: bool) -> None:
        self._replica = replica
        self._around = around
        self._settings = settings
        self._runs_images = runs_images

    def box(self, container: Document, folder: Path) -> Box:
        """A container of a pod that has its place. Raises CannotRun, OSError, and ResourceExhausted while it has to wait."""
        pod, placement = self._replica.record.document, self._replica.record.placement or Placement()
        models = self._around.models(self._replica)
        mounts = mounted(pod, container, self._replica.folder, self._find, models, other_users=self._runs_images)
        line = line_of(self._surroundings(placement, mounts), container)
        limits = limits_of(container, self._settings.max_processes)
        said = {**({} if self._runs_images else passed_on(os.environ)), **line.variables}
        threads = thread_variables(limits, len(os.sched_getaffinity(0)), said)
        work = folder / "work"
        work.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Box(
            self._replica.record.uid,
            text(container, "name"),
            folder,
            replace(line, variables={**threads, **line.variables}),
            work,
            text(container, "image"),
            mounts,
            limits,
            placement.gpus,
            shared_memory(pod, container),
            container,
            self._replica.record.spare,
        )

    def surroundings(self, container: Document) -> Surroundings:
        """What a probe's command finds. Raises as `box`."""
        pod, placement = self._replica.record.document, self._replica.record.placement or Placement()
        models: Mapping[str, str] = self._around.models(self._replica)
        mounts = mounted(pod, container, self._replica.folder, self._find, models, other_users=self._runs_images)
        return self._surroundings(placement, mounts)

    def _surroundings(self, placement: Placement, mounts: Sequence[Mounted]) -> Surroundings:
        record = self._replica.record
        moved = [(each.inside, each.here) for each in mounts if each.here != each.inside.rstrip("/")]
        return Surroundings(
            record.document,
            self._settings.node,
            placement.ports,
            self._around.leader_ports(self._replica),
            () if self._runs_images else moved,
            self._around.hosts(record.service[0]),
            {**record.variables, **({} if self._runs_images else visible(placement))},
            self._find,
            self._runs_images,
        )

    def _find(self, kind: str, name: str) -> Document | None:
        return self._around.find(text(self._replica.record.document, "metadata", "namespace"), kind, name)
