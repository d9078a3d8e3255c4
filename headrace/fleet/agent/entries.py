# SPDX-License-Identifier: Apache-2.0
"""What a node tells of one model: the JSON of its entry in the node's ConfigMap, with OME's names. Pure.

`reason` is ours: why a model is not there, and what to do. An entry says the same as long as nothing changes, so that it
need not be written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.fleet.agent.marks import FAILED, READY, UPDATING, ModelKey
from headrace.fleet.words import Document, part, text

_LONGEST_REASON = 1000


@dataclass(frozen=True)
class Told:
    """How far a download is."""

    done: int
    total: int | None
    speed: int
    """Bytes in a second."""
    at: str
    """The time of the last byte that was heard of."""


def updating(key: ModelKey, progress: Told | None = None) -> dict[str, Any]:
    """A model that is coming."""
    entry: dict[str, Any] = {"name": key[1], "status": UPDATING}
    if progress is not None:
        entry["progress"] = {
            "phase": "Downloading",
            **({"totalBytes": progress.total} if progress.total is not None else {}),
            "completedBytes": progress.done,
            "speedBytesPerSec": progress.speed,
            "lastUpdated": progress.at,
        }
    return entry


def ready(key: ModelKey, config: Mapping[str, Any], revision: str = "", path: str = "") -> dict[str, Any]:
    """A model that is there."""
    told: dict[str, Any] = dict(config)
    if revision:
        told["artifact"] = {"sha": revision, "parentPath": path, "childrenPaths": []}
    return {"name": key[1], "status": READY, **({"config": told} if told else {})}


def failed(key: ModelKey, reason: str) -> dict[str, Any]:
    """A model that did not come."""
    said = "".join(char if char.isprintable() else "?" for char in reason)
    return {"name": key[1], "status": FAILED, "reason": said[:_LONGEST_REASON]}


def written(entry: Mapping[str, Any]) -> str:
    """As it stands in the ConfigMap."""
    return msgspec.json.encode(entry, order="sorted").decode()


def entry_of(said: Any) -> Document:
    """An entry that somebody wrote; an empty one where it is none."""
    try:
        found = msgspec.json.decode(said) if isinstance(said, str) else None
    except msgspec.MsgspecError:
        return {}
    return part(found)


def state_of(entry: Document) -> str:
    """`Ready`, `Updating`, `Failed`; "" for others."""
    said = text(entry, "status")
    return said if said in (READY, UPDATING, FAILED) else ""
