# SPDX-License-Identifier: Apache-2.0
"""The state of a service as a file, `<folder>/<job_id>_server.json`: for people and programs on the same machine.

Written by `service` after each move, whole or not at all, readable by its owner alone, without secrets. A folder that
belongs to somebody else is not written to: the default ones lie in a place where everybody may make them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition

log = logging.getLogger("headrace.microservice")


def own_folder(folder: Path) -> Path:
    """The folder, made if need be; raises if it is not ours alone to write."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.stat(folder)
    except OSError as error:
        raise FailedPrecondition(
            f"the folder {folder} cannot be made: {error.strerror}; name another with --models-dir"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        raise FailedPrecondition(f"{folder} is not a folder of this user: name another with --models-dir")
    return folder


class StateFile:
    """One file. A problem with it is logged once and fails nothing."""

    def __init__(self, folder: Path, job_id: str) -> None:
        self.path = folder / f"{job_id}_server.json"
        self._failed = False

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace it."""
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            own_folder(self.path.parent)
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(state, file, indent=2)
            fresh.replace(self.path)
        except (OSError, FailedPrecondition) as error:
            if not self._failed:
                text = error.message if isinstance(error, FailedPrecondition) else error.strerror
                log.warning("the state file %s cannot be written: %s", self.path, text)
            self._failed = True

    def remove(self) -> None:
        """The service has ended."""
        with contextlib.suppress(OSError):
            self.path.unlink()
