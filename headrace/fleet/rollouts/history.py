# SPDX-License-Identifier: Apache-2.0
"""The revision history of a service, in `status.history`: its last specs, so that an earlier one can be restored.

Both controllers record it with the status; `headrace rollout history` and `undo` read it. Replica counts, autoscaling and
the canary's share are not part of a revision: they change no pods, and an undo leaves them alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from headrace.fleet.status.conditions import format_time, get_mappings
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_mapping, get_str

HISTORY: Final = "history"
MAX_REVISIONS: Final = 10
_MAX_BYTES: Final = 128 * 1024
"""Of all specs together: an object may have 1.5 MB in etcd."""
_NOT_REVISED: Final = frozenset(
    {
        "minReplicas",
        "maxReplicas",
        "scaleMetric",
        "scaleTarget",
        "kedaConfig",
        "autoscaler",
        "slo",
        "canaryTrafficPercent",
    }
)
_MAX_CHANGES: Final = 3
_MAX_VALUE: Final = 60


@dataclass(frozen=True)
class Revision:
    """One revision of a service."""

    number: int
    time: str
    """When it became the newest one."""
    spec: Mapping[str, Any]
    """The spec without what is not part of a revision."""


def revised_spec(service: Document) -> dict[str, Any]:
    """Return the part of a service's spec that makes a revision."""
    return {name: _without_scaling(value) for name, value in get_mapping(service, "spec").items()}


def read_history(service: Document) -> list[Revision]:
    """Return the revisions of a service, oldest first. Invalid entries are left out."""
    revisions = []
    for entry in get_mappings(service, "status", HISTORY):
        try:
            spec = json.loads(get_str(entry, "spec"))
        except (ValueError, RecursionError):
            continue
        number = get_int(entry, "revision")
        if isinstance(spec, dict) and number is not None:
            revisions.append(Revision(number, get_str(entry, "time"), spec))
    return sorted(revisions, key=lambda revision: revision.number)


def next_history(service: Document, now: datetime) -> list[dict[str, Any]]:
    """Return the history with the current spec as its newest entry. A spec that was there before moves to the end."""
    revisions = read_history(service)
    spec = revised_spec(service)
    if not revisions or revisions[-1].spec != spec:
        number = revisions[-1].number + 1 if revisions else 1
        revisions = [revision for revision in revisions if revision.spec != spec]
        revisions.append(Revision(number, format_time(now), spec))
    entries = [
        {"revision": revision.number, "time": revision.time, "spec": json.dumps(revision.spec, sort_keys=True)}
        for revision in revisions[-MAX_REVISIONS:]
    ]
    while len(entries) > 1 and sum(len(str(entry["spec"])) for entry in entries) > _MAX_BYTES:
        del entries[0]
    return entries


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return in words what one spec changes of another: `model.name: a -> b`."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    paths = [path for path in dict.fromkeys([*new, *old]) if old.get(path) != new.get(path)]
    shown = [f"{path}: {_text(old.get(path))} -> {_text(new.get(path))}" for path in paths[:_MAX_CHANGES]]
    more = [f"and {len(paths) - _MAX_CHANGES} more"] if len(paths) > _MAX_CHANGES else []
    return ", ".join([*shown, *more])


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch from one mapping to the other."""
    patch: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            inner = merge_patch(old, value)
            if inner:
                patch[name] = inner
        elif name not in before or old != value:
            patch[name] = value
    return patch


def _without_scaling(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: inner for name, inner in value.items() if name not in _NOT_REVISED}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    elif path:
        yield path, value


def _text(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
