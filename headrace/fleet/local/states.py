# SPDX-License-Identifier: Apache-2.0
"""How a pod, a container or a job fares, and its file: read when a daemon starts, written when something changes.

Used by `replica`, `container` and `jobs`, whose states are data classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.core.errors import FailedPrecondition
from headrace.fleet.local.store import read_json, write_json
from headrace.fleet.words import Document

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FILE = "state.json"
T = TypeVar("T")


def state_read(fresh: T, said: Document | None) -> T:
    """Of a file, into a new one; what is not known counts as new."""
    for name, value in (said or {}).items():
        if hasattr(fresh, name) and isinstance(value, type(getattr(fresh, name))):
            setattr(fresh, name, value)
    return fresh


def state_in(folder: Path, fresh: T) -> T:
    """As the folder's file has it; a new one where there is none."""
    return state_read(fresh, read_json(folder / FILE))


def restated(
    state: DataclassInstance, folder: Path, changes: Mapping[str, Any], unwritten: Callable[[str], None]
) -> bool:
    """Change a state and its file; whether it is otherwise than before.

    unwritten: told why, where the file cannot be written. What the state is of runs on all the same; only another daemon
    would not know how it was.
    """
    before = asdict(state)
    for name, value in changes.items():
        setattr(state, name, value)
    after = asdict(state)
    if after == before:
        return False
    try:
        write_json(folder / FILE, after, lasting=False)
    except FailedPrecondition as error:
        unwritten(error.message)
    return True
