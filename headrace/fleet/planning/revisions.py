# SPDX-License-Identifier: Apache-2.0
"""Two revisions of a component at once, without Knative: canary, promotion, rollback.

The component's main workload has the stable revision; a second one, named `...-canary`, has the revision of the current
spec, as long as `canaryTrafficPercent` is below 100. The plan follows from the service and its live objects alone:

- the percentage is removed, or 100: *promotion*. The main workload gets the new pods; the canary keeps its share of the
  requests until all of them are ready, and is deleted.
- the service has the stable revision again, or the percentage is 0: *rollback*. All requests go to the stable pods.

Pods lose their requests before they are deleted, and are deleted only after the router has applied that: an annotation of
the canary has the share that it was given last.

For a service with steps (`fleet.rollouts`), the percentage is that of the step in its status.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

from headrace.fleet.merging import Component
from headrace.fleet.planning.context import REVISION_LABEL, available_replicas, digest_of
from headrace.fleet.rollouts.policy import RolloutPolicy
from headrace.fleet.rollouts.state import effective_share, read_state
from headrace.platforms.kubernetes_client.objects import (
    EMPTY,
    Document,
    annotations_of,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    labels_of,
)

SHARE = "ome.io/canary-traffic-percent"
"""Annotation of a canary's workload: its last share of the requests."""


@dataclass(frozen=True)
class Rollout:
    """The revisions of a component, and the share of the newest."""

    state: Literal["single", "canary", "promoting"]
    latest: str
    """The revision of the current spec."""
    stable: str
    """The revision of the main workload; differs from `latest` only in a canary."""
    requested_percent: int | None = None
    """`canaryTrafficPercent`, or the share of the step."""
    percent: int = 100
    """Current share of `latest`: 0 before one of its pods is available."""
    kept: Document | None = None
    """The live workload whose pods stay as they are."""
    policy: RolloutPolicy | None = None
    """The policy of a rollout by steps."""
    settled: bool = False
    """In a canary: whether all pods of the newest revision are available."""
    stuck: str = ""
    """In a canary: why they will not become available, if known."""
    held: int | None = None
    """Replicas of a canary that gets no new requests, while some may still be in flight to it."""
    trial: bool = False
    """Knative runs the newest revision next to the previous one, in a rollout by steps."""

    @property
    def judged(self) -> bool:
        """Whether the newest revision runs next to the previous one and may be rolled back."""
        return self.trial or self.state == "canary"

    @property
    def two(self) -> bool:
        """Whether there is a second workload."""
        return self.state != "single"


def revision_of(component: Component) -> str:
    """Return a digest of the pods of a component. Labels and replicas make no new revision."""
    pods = [component.pod, component.leader, component.worker, component.worker_size]
    return digest_of(json.dumps(pods, sort_keys=True, default=str))


def plan_rollout(
    component: Component,
    stable: Document | None,
    canary: Document | None,
    status: Document = EMPTY,
    policy: RolloutPolicy | None = None,
    split_settled: bool = True,
) -> Rollout:
    """Plan the revisions of a component, from its live workloads and its last status.

    split_settled: the router has applied its last shares.
    """
    latest = revision_of(component)
    requested = effective_share(policy, read_state(status), latest, component.extension.canary_traffic_percent)
    planned = _rollout(latest, requested, stable, canary, status, split_settled)
    idle = planned.two and planned.percent == 0 and canary is not None and not _is_drained(canary, split_settled)
    return replace(planned, policy=policy, held=get_int(canary, "spec", "replicas") if idle else None)


def _rollout(
    latest: str,
    requested: int | None,
    stable: Document | None,
    canary: Document | None,
    status: Document,
    split_settled: bool,
) -> Rollout:
    if stable is None or _was_never_ready(stable, status):
        return Rollout("single", latest, latest, requested)
    running = labels_of(stable).get(REVISION_LABEL, "")
    canary_revision = labels_of(canary).get(REVISION_LABEL, "") if canary is not None else ""
    if running == latest:
        if canary is not None and canary_revision == latest and not is_settled(stable):
            return Rollout("promoting", latest, latest, requested, _promotion_share(stable, canary))
        if canary is not None and canary_revision == latest and not _is_drained(canary, split_settled):
            return Rollout("promoting", latest, latest, requested, 0)
        return Rollout("single", latest, latest, requested)
    if requested is not None and requested < 100:
        current_canary = canary if canary_revision == latest else None
        ready = available_replicas(current_canary) > 0
        complete = current_canary is not None and ready and is_settled(current_canary)
        percent = requested if ready else 0
        return Rollout(
            "canary",
            latest,
            running,
            requested,
            percent,
            kept=stable,
            settled=complete,
            stuck=stuck_reason(current_canary),
        )
    if canary_revision == latest:
        return Rollout("promoting", latest, latest, requested, _promotion_share(stable, canary))
    return Rollout("single", latest, latest, requested)


def is_settled(live: Document) -> bool:
    """Whether all pods of a live workload are of its latest template and available.

    Available pods do not name their template. They are all of the latest one only if there are no other pods:
    during a rolling update with a surge pod, the old pods alone may be as many as wanted.
    """
    status, desired = get_mapping(live, "status"), get_int(live, "spec", "replicas")
    desired = 1 if desired is None else desired
    observed, generation = get_int(status, "observedGeneration"), get_int(live, "metadata", "generation")
    if observed is None and kind_of(live) == "Deployment":
        return False  # just created
    if observed is not None and generation is not None and observed < generation:
        return False
    updated = get_int(status, "updatedReplicas") or 0
    return (get_int(status, "replicas") or 0) == updated == available_replicas(live) and updated >= desired


def stuck_reason(live: Document | None, condition_type: str = "Progressing") -> str:
    """Return why the pods of a live workload will not become available; "" if they may."""
    for condition in get_list(live, "status", "conditions"):
        if (get_str(condition, "type"), get_str(condition, "status")) == (condition_type, "False"):
            return get_str(condition, "message") or get_str(condition, "reason") or "its pods do not come up"
    return ""


def _was_never_ready(stable: Document, status: Document) -> bool:
    """Whether a workload was never available: there is nothing to keep, and the next revision replaces it."""
    if not status or get_str(status, "latestRolledoutRevision") or get_str(status, "latestReadyRevision"):
        return False
    return available_replicas(stable) == 0 and get_int(stable, "spec", "replicas") != 0


def _is_drained(canary: Document, split_settled: bool) -> bool:
    """Whether a canary was given no requests in an earlier plan, and the router has applied that."""
    return available_replicas(canary) == 0 or (split_settled and annotations_of(canary).get(SHARE) == "0")


def _promotion_share(stable: Document, canary: Document | None) -> int:
    """Return the share of a canary during its promotion: the last one, or all if no stable pod is available."""
    if available_replicas(canary) > 0 and available_replicas(stable) == 0:
        return 100
    share = annotations_of(canary).get(SHARE, "") if canary is not None else ""
    return min(int(share), 100) if share.isdecimal() and share.isascii() and len(share) < 4 else 0
