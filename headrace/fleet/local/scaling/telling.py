# SPDX-License-Identifier: Apache-2.0
"""How a service scales, as conditions of its status: `EngineScalingActive` and the like. Pure; for `controller`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from headrace.fleet.status.conditions import shortened, time_text
from headrace.fleet.status.observed import records
from headrace.fleet.words import Document, text

if TYPE_CHECKING:
    from headrace.fleet.local.scaling.autoscaling import Note

_TYPE = "ScalingActive"
"""As HorizontalPodAutoscalers call it."""


def with_scaling(status: Document, components: Collection[str], notes: Sequence[Note], now: datetime) -> Document:
    """The status with what is known of each component that scales. It informs: whether a service is ready is another's.

    What was told before stays where nothing new is known: the daemon may have been another.
    """
    all_ = records(status, "conditions")
    before = {text(each, "type"): each for each in all_ if text(each, "type").endswith(_TYPE)}
    if not notes and not before:
        return status
    kept: list[Any] = [each for each in all_ if text(each, "type") not in before]
    for component in sorted(components):
        mine = [each for each in notes if each.component == component]
        if not mine:
            kept += [each for kind, each in before.items() if kind == f"{component.capitalize()}{_TYPE}"]
            continue
        worst = next((each for each in mine if not each.active), mine[-1])
        kind, truth = f"{component.capitalize()}{_TYPE}", "True" if worst.active else "False"
        old = before.get(kind, {})
        since = text(old, "lastTransitionTime") if text(old, "status") == truth else ""
        kept.append(
            {
                "type": kind,
                "status": truth,
                "reason": worst.reason,
                "message": shortened("; ".join(each.message for each in mine if each.active == worst.active)),
                "severity": "Info",
                "lastTransitionTime": since or time_text(now),
            }
        )
    return {**status, "conditions": kept}
