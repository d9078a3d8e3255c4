# SPDX-License-Identifier: Apache-2.0
"""What to run for a pod: its folders are made, and its container becomes a command. Called by `replica`; blocking."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.fleet.local.commands import CannotRun, Line, Surroundings, line_of
from headrace.fleet.local.contract import Around
from headrace.fleet.local.machine import Placement, visible
from headrace.fleet.local.processes import Command, headrace_words, passed_on
from headrace.fleet.local.volumes import mounted
from headrace.fleet.words import Document, text

if TYPE_CHECKING:
    from headrace.fleet.local.replica import Replica


def command_of(replica: Replica, around: Around, node: str, models: Mapping[str, str]) -> Command:
    """The command of a pod that has its place. Raises CannotRun, OSError, and ResourceExhausted while it has to wait."""
    record, folder = replica.record, replica.folder
    namespace = text(record.document, "metadata", "namespace")

    def find(kind: str, name: str) -> Document | None:
        return around.find(namespace, kind, name)

    placement = record.placement or Placement()
    paths = mounted(record.document, folder, find, models)
    line = line_of(
        Surroundings(
            record.document,
            node,
            placement.ports,
            around.leader_ports(replica),
            paths,
            around.hosts(namespace),
            {**record.variables, **visible(placement)},
            find,
        )
    )
    work = folder / "work"
    work.mkdir(exist_ok=True, mode=0o700)
    temporary = dict(paths).get("/tmp", str(work))  # noqa: S108  the container's
    environment = passed_on(os.environ) | {"PYTHONUNBUFFERED": "1", "TMPDIR": temporary} | dict(line.variables)
    return Command(_program(line, environment), environment, work)


def _program(line: Line, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The words with a path in front."""
    if line.ours:
        return (*headrace_words(), *line.words)
    found = shutil.which(line.words[0], path=environment.get("PATH"))
    if found is None and line.words[0] in ("python", "python3"):
        found = sys.executable
    if found is None:
        raise CannotRun(
            "ErrImageNeverPull",
            f"{line.words[0]} is not on this machine, and its image needs Docker, which is not either; install the program",
        )
    return (found, *line.words[1:])
