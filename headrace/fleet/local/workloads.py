# SPDX-License-Identifier: Apache-2.0
"""Deployments and LeaderWorkerSets of this machine: which replicas to make and to end, and the status that they have. Pure.

A unit is one replica: a pod, or a group of them. While units are replaced, a quarter more than wanted may be there, and no
fewer than wanted that answer: old ones go when new ones are ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from headrace.fleet.words import Document, kind_of, name_of, part, text, whole

HPA, KEDA = "HorizontalPodAutoscaler", "ScaledObject"
_SURGE = 0.25


@dataclass(frozen=True)
class Unit:
    """One replica of a workload that is not being ended."""

    name: str
    hash: str
    """Of the template it was made of."""
    ready: bool
    created: str = ""


@dataclass(frozen=True)
class Steps:
    """What to do now."""

    create: int = 0
    delete: tuple[str, ...] = ()


def steps(wanted: int, newest: str, units: Sequence[Unit], *, leaving: int = 0, recreate: bool = False) -> Steps:
    """What brings the units nearer to `wanted` of the `newest` template. `leaving`: those that are still being ended."""
    new = sorted((each for each in units if each.hash == newest), key=_worth)
    old = sorted((each for each in units if each.hash != newest), key=_worth)
    gone = [each.name for each in new[: max(0, len(new) - wanted)]]
    missing = max(0, wanted - len(new))
    if recreate:
        return Steps(0 if old or leaving else missing, (*gone, *(each.name for each in old)))
    ready = sum(each.ready for each in new)
    # An old one that does not answer helps nobody, unless the new ones have not been made yet.
    idle = [each.name for each in old if not each.ready] if not missing or ready else []
    spare = max(0, min(ready, wanted) + sum(each.ready for each in old) - wanted)
    replaced = [each.name for each in old if each.ready][:spare]
    room = wanted + ceil(wanted * _SURGE) - len(new) - len(old) if old else missing
    return Steps(max(0, min(missing, room)), (*gone, *idle, *replaced))


def _worth(unit: Unit) -> tuple[bool, str, str]:
    """Who goes first: those that do not answer, then the oldest."""
    return unit.ready, unit.created, unit.name


def workload_status(
    workload: Document, wanted: int, newest: str, units: Sequence[Unit], stuck: str = "", least: int | None = None
) -> dict[str, Any]:
    """What Kubernetes would tell. `stuck`: why nothing has moved for too long. `least`: replicas that must answer.

    What a load asked for beyond the least is no reason to say that a service does not answer.
    """
    ready = sum(each.ready for each in units)
    updated = sum(each.hash == newest for each in units)
    made: dict[str, Any] = {
        "observedGeneration": whole(workload, "metadata", "generation") or 1,
        "replicas": len(units),
        "updatedReplicas": updated,
        "readyReplicas": ready,
    }
    kind = kind_of(workload)
    if kind == "Deployment":
        made |= {"availableReplicas": ready, "unavailableReplicas": max(0, wanted - ready)}
    up = ready >= (wanted if least is None else min(wanted, least))
    word = "MinimumReplicasAvailable" if up else "MinimumReplicasUnavailable"
    said = f"{kind} has minimum availability." if up else f"{kind} does not have minimum availability."
    made["conditions"] = [{"type": "Available", "status": "True" if up else "False", "reason": word, "message": said}]
    if stuck:
        made["conditions"].append(
            {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": stuck}
        )
    else:
        word = "NewReplicaSetAvailable" if up and updated == len(units) == wanted else "ReplicaSetUpdated"
        made["conditions"].append({"type": "Progressing", "status": "True", "reason": word})
    return made


def wanted_of(workload: Document, scaler: Document | None) -> int:
    """How many there should be: what was asked for, within what its autoscaler allows. It rests at zero."""
    asked = whole(workload, "spec", "replicas")
    if scaler is None:
        return 1 if asked is None else asked
    least, most = bounds_of(scaler)
    # A HorizontalPodAutoscaler rests at zero; KEDA does where zero is its least.
    if asked == 0 and not whole(scaler, "spec", "minReplicaCount"):
        return 0
    return max(least, min(asked if asked is not None else least, most))


def bounds_of(scaler: Document) -> tuple[int, int]:
    """The fewest and the most replicas that an autoscaler makes of what runs."""
    least, most = ("minReplicas", "maxReplicas") if kind_of(scaler) != KEDA else ("minReplicaCount", "maxReplicaCount")
    few = whole(scaler, "spec", least) or 1
    return few, max(few, whole(scaler, "spec", most) or 1)


def scaler_of(workload: Document, objects: Sequence[Document]) -> Document | None:
    """The autoscaler of a workload: a HorizontalPodAutoscaler, or KEDA's ScaledObject."""
    for each in objects:
        if kind_of(each) in (HPA, KEDA):
            target = part(each, "spec", "scaleTargetRef")
            if (text(target, "kind"), text(target, "name")) == (kind_of(workload), name_of(workload)):
                return each
    return None


def templates_of(workload: Document) -> Sequence[Mapping[str, Any]]:
    """The pods of one unit, as templates: one, or a leader and its workers."""
    if kind_of(workload) != "LeaderWorkerSet":
        return [part(workload, "spec", "template")]
    group = part(workload, "spec", "leaderWorkerTemplate")
    leader = part(group, "leaderTemplate") or part(group, "workerTemplate")
    return [leader, *[part(group, "workerTemplate")] * ((whole(group, "size") or 1) - 1)]
