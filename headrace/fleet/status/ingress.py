# SPDX-License-Identifier: Apache-2.0
"""`IngressReady`: whether there is a way in from outside, as the gateway says and not only as we asked."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.fleet.names import CLUSTER_LOCAL, VISIBILITY_LABEL
from headrace.fleet.status.conditions import INGRESS_READY, Condition
from headrace.fleet.status.observed import Observed, named, records
from headrace.fleet.status.workloads import ready, workloads
from headrace.fleet.words import Document, kind_of, labels_of, name_of, text

_WAYS_IN = ("Ingress", "HTTPRoute", "VirtualService")
FRONT = "front"
"""The component label of the router that wakes a service, or splits its requests."""


def ingress_ready(service: Document, objects: Sequence[Document], observed: Observed) -> Condition:
    """Whether the way in that was planned is open."""
    ways = named(objects, *_WAYS_IN)
    outside = [each for each in named(objects, "Service") if name_of(each) == name_of(service)]
    for each in [*ways, *outside]:
        if observed.live(each) is None:
            said = f"{kind_of(each)} {name_of(each)} has not been made yet"
            return Condition(INGRESS_READY, "Unknown", "Creating", said)
    for each in workloads(objects, FRONT):
        front = ready(INGRESS_READY, each, observed, observed.pods_of(FRONT))
        if front.status != "True":
            return front
    if not ways:
        local = labels_of(service).get(VISIBILITY_LABEL) == CLUSTER_LOCAL
        return Condition(INGRESS_READY, "True", "ClusterLocal" if local else "IngressDisabled")
    found = [_route(observed.live(each) or each) for each in ways if kind_of(each) == "HTTPRoute"]
    return next((each for each in found if each.status != "True"), Condition(INGRESS_READY, "True"))


def _route(live: Document) -> Condition:
    parents = records(live, "status", "parents")
    if not parents:
        said = f"no gateway has accepted HTTPRoute {name_of(live)} yet"
        return Condition(INGRESS_READY, "Unknown", "WaitingForGateway", said)
    for parent in parents:
        for each in records(parent, "conditions"):
            if text(each, "type") in ("Accepted", "ResolvedRefs") and text(each, "status") == "False":
                said = f"HTTPRoute {name_of(live)}: {text(each, 'message')}"
                return Condition(INGRESS_READY, "False", text(each, "reason"), said)
    return Condition(INGRESS_READY, "True")
