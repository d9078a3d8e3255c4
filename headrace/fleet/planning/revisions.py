# SPDX-License-Identifier: Apache-2.0
"""Two revisions of a component at once, where Knative does not keep them: canary, promotion, rollback.

The component's own workload has the revision that was rolled out; a second one, named `...-canary`, has what the service
asks for now, as long as `canaryTrafficPercent` is below 100. What to do follows from the service and what is live, and from
nothing that has to be remembered:

- the percentage is removed, or 100: *promotion*. The component's own workload gets the new pods; the canary keeps its share
  of the requests until they are all up, and goes.
- the service asks for what was rolled out again, or the percentage is 0: *rollback*. All requests go to the old pods.

Pods that are to go get no requests first, and go when whoever splits the requests knows of that: the share that a canary was
given last is written on it.

Where a service has steps (`fleet.rollouts`), the percentage is the step's that its status tells of.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

from headrace.fleet.merging import Component
from headrace.fleet.planning.site import REVISION_LABEL, available, digest_of
from headrace.fleet.rollouts.policy import Policy
from headrace.fleet.rollouts.state import asked_share, state_of
from headrace.fleet.words import NOTHING, Document, annotations_of, items, labels_of, part, text, whole

SHARE = "ome.io/canary-traffic-percent"
"""Annotation of a canary's workload: the share that it was given last."""


@dataclass(frozen=True)
class Rollout:
    """Which revisions a component has, and which share of the requests the newest gets."""

    state: Literal["single", "canary", "promoting"]
    latest: str
    """The revision that the service asks for."""
    stable: str
    """The one under the component's own name; the same as `latest` but in a canary."""
    asked: int | None = None
    """`canaryTrafficPercent`, or the share of the step."""
    percent: int = 100
    """What `latest` gets now: nothing before one of its pods answers."""
    kept: Document | None = None
    """The live workload whose pods stay as they are."""
    policy: Policy | None = None
    """Its steps, if it has any."""
    settled: bool = False
    """In a canary: whether all pods of the newest answer."""
    stuck: str = ""
    """In a canary: why they will not, as far as one can tell."""
    held: int | None = None
    """Replicas of a canary that gets no more requests, as long as some may still be on their way to it."""
    trial: bool = False
    """Knative has the newest beside the one before, and its steps judge it."""

    @property
    def judged(self) -> bool:
        """Whether the newest revision stands beside the one before, and may yet be taken back."""
        return self.trial or self.state == "canary"

    @property
    def two(self) -> bool:
        """Whether there is a second workload."""
        return self.state != "single"


def revision_of(component: Component) -> str:
    """Ten characters that stand for the pods of a component. Labels and replicas make no revision."""
    pods = [component.pod, component.leader, component.worker, component.worker_size]
    return digest_of(json.dumps(pods, sort_keys=True, default=str))


def rollout(
    component: Component,
    stable: Document | None,
    canary: Document | None,
    told: Document = NOTHING,
    policy: Policy | None = None,
    calm: bool = True,
) -> Rollout:
    """What to do with a component, by its live workloads and what its status told last.

    calm: who splits the requests does so as it was told last.
    """
    latest = revision_of(component)
    asked = asked_share(policy, state_of(told), latest, component.extension.canary_traffic_percent)
    found = _rollout(latest, asked, stable, canary, told, calm)
    idle = found.two and found.percent == 0 and canary is not None and not _drained(canary, calm)
    return replace(found, policy=policy, held=whole(canary, "spec", "replicas") if idle else None)


def _rollout(
    latest: str, asked: int | None, stable: Document | None, canary: Document | None, told: Document, calm: bool
) -> Rollout:
    if stable is None or _never_answered(stable, told):
        return Rollout("single", latest, latest, asked)
    running = labels_of(stable).get(REVISION_LABEL, "")
    second = labels_of(canary).get(REVISION_LABEL, "") if canary is not None else ""
    if running == latest:
        if canary is not None and second == latest and not settled(stable):
            return Rollout("promoting", latest, latest, asked, _share(stable, canary))
        if canary is not None and second == latest and not _drained(canary, calm):
            return Rollout("promoting", latest, latest, asked, 0)
        return Rollout("single", latest, latest, asked)
    if asked is not None and asked < 100:
        mine = canary if second == latest else None
        ready = available(mine) > 0
        whole_one = mine is not None and ready and settled(mine)
        percent = asked if ready else 0
        return Rollout(
            "canary", latest, running, asked, percent, kept=stable, settled=whole_one, stuck=stuck_because(mine)
        )
    if second == latest:
        return Rollout("promoting", latest, latest, asked, _share(stable, canary))
    return Rollout("single", latest, latest, asked)


def settled(live: Document) -> bool:
    """Whether all pods of a live workload are the newest, and answer."""
    status, wanted = part(live, "status"), whole(live, "spec", "replicas")
    wanted = 1 if wanted is None else wanted
    seen, generation = whole(status, "observedGeneration"), whole(live, "metadata", "generation")
    if seen is not None and generation is not None and seen < generation:
        return False
    return (whole(status, "updatedReplicas") or 0) >= wanted and available(live) >= wanted


def stuck_because(live: Document | None) -> str:
    """Why the pods of a live workload will not come, where it says so; "" while they may."""
    for each in items(live, "status", "conditions"):
        if (text(each, "type"), text(each, "status")) == ("Progressing", "False"):
            return text(each, "message") or text(each, "reason") or "its pods do not come up"
    return ""


def _never_answered(stable: Document, told: Document) -> bool:
    """Whether a workload is broken from its beginning: there is nothing to keep, and what comes next takes its place."""
    if not told or text(told, "latestRolledoutRevision") or text(told, "latestReadyRevision"):
        return False
    return available(stable) == 0 and whole(stable, "spec", "replicas") != 0


def _drained(canary: Document, calm: bool) -> bool:
    """Whether a canary was told to get nothing at an earlier look, and that has arrived."""
    return available(canary) == 0 or (calm and annotations_of(canary).get(SHARE) == "0")


def _share(stable: Document, canary: Document | None) -> int:
    """What a canary has during its promotion: what it had, or all while nobody else answers (a group that is replaced)."""
    if available(canary) > 0 and available(stable) == 0:
        return 100
    share = annotations_of(canary).get(SHARE, "") if canary is not None else ""
    return min(int(share), 100) if share.isdecimal() and share.isascii() and len(share) < 4 else 0
