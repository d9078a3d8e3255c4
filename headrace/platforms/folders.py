# SPDX-License-Identifier: Apache-2.0
"""The files in which the process driver keeps what it knows of a service: written whole, read back after any crash."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import Unavailable

log = logging.getLogger("headrace.launch")

META = "launch.json"
"""Which process a service is."""


def is_id(text: str) -> bool:
    """A UUID in its one spelling, and so a name that cannot leave a folder."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What `META` says; None if there is none."""
    try:
        found = json.loads((folder / META).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        log.exception("%s cannot be read", folder / META)
        raise Unavailable(f"{folder / META} cannot be read; look at it and at the server's log") from None
    return found if isinstance(found, dict) else None


def write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all, also when the machine loses its power; for its owner alone."""
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
