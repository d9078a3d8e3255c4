# SPDX-License-Identifier: Apache-2.0
"""A service in a few words: is it ready, where is it, and why is it not. Pure; for tables and for who waits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from headrace.fleet.names import DEPLOYMENT_MODE, PD_DISAGGREGATED, VIRTUAL
from headrace.fleet.status.conditions import LATEST_DEPLOYMENT_READY, READY
from headrace.fleet.status.models import BLOCKED, INVALID
from headrace.fleet.status.observed import condition_of, records
from headrace.fleet.words import Document, annotations_of, name_of, part, text, whole

_FAILURES = frozenset({"ReconcileError", "InternalError", "ProgressDeadlineExceeded", "RolledBack"})
_WHOSE = re.compile(r"^[A-Z][A-Za-z]*Ready: ")

NOT_SEEN = "the operator has not looked at it yet"
NOT_SEEN_AGAIN = "the operator has not looked at the last change yet"


@dataclass(frozen=True)
class Summary:
    """One service."""

    namespace: str
    name: str
    ready: str
    """True, False or Unknown."""
    url: str
    address: str
    mode: str
    model: str
    runtime: str
    ready_replicas: int
    replicas: int
    traffic: str
    """`20% new, 80% old`."""
    state: str
    """Of the model: Pending, Loading, Loaded, Standby, FailedToLoad."""
    reason: str
    """Why it is not ready, in words; "" if it is."""
    created: str


def summary(service: Document) -> Summary:
    """What there is to say of a service."""
    status = part(service, "status")
    components = components_of(service)
    condition = condition_of(service, READY)
    return Summary(
        namespace=text(service, "metadata", "namespace"),
        name=name_of(service),
        ready=text(condition, "status") or "Unknown",
        url=text(status, "url"),
        address=text(status, "address", "url"),
        mode=mode_of(service),
        model=text(status, "model", "name") or text(service, "spec", "model", "name"),
        runtime=text(status, "runtime", "name") or text(service, "spec", "runtime", "name"),
        ready_replicas=sum(whole(each, "readyReplicas") or 0 for each in components.values()),
        replicas=sum(whole(each, "replicas") or 0 for each in components.values()),
        traffic=traffic_of(components.values()),
        state=text(status, "modelStatus", "modelRevisionStates", "targetModelState"),
        reason=reason_of(service),
        created=text(service, "metadata", "creationTimestamp"),
    )


def components_of(service: Document) -> dict[str, Document]:
    """What the status tells of each component."""
    told = part(service, "status", "components")
    return {name: part(told, name) for name in told}


def mode_of(service: Document) -> str:
    """How it is run: that of the service as a whole where it has one, else that of its engine."""
    said = annotations_of(service).get(DEPLOYMENT_MODE, "")
    if said in (VIRTUAL, PD_DISAGGREGATED):
        return said
    if part(service, "spec").get("decoder") is not None:
        return PD_DISAGGREGATED
    return text(service, "status", "components", "engine", "mode") or said


def traffic_of(components: Iterable[Document]) -> str:
    """The shares of the component that has two revisions; `100%` where none has."""
    told = ""
    for each in components:
        shares = records(each, "traffic")
        if len(shares) > 1:
            new = sum(whole(one, "percent") or 0 for one in shares if one.get("latestRevision") is True)
            return f"{new}% new, {100 - new}% old"
        told = told or ("100%" if shares else "")
    return told


def reason_of(service: Document) -> str:
    """Why a service is not ready; "" if it is, and what was asked for last is what runs."""
    if not part(service, "status"):
        return NOT_SEEN
    if not is_current(service):
        return NOT_SEEN_AGAIN
    for kind in (READY, LATEST_DEPLOYMENT_READY):
        found = condition_of(service, kind)
        if found is not None and text(found, "status") != "True":
            return _words(text(found, "reason"), text(found, "message"))
    return "" if condition_of(service, READY) is not None else NOT_SEEN


def is_current(service: Document) -> bool:
    """Whether the status is about the spec as it is now."""
    generation = whole(service, "metadata", "generation")
    return generation is None or (whole(service, "status", "observedGeneration") or 0) >= generation


Verdict = Literal["ready", "invalid", "failing", "waiting"]


def verdict(service: Document) -> Verdict:
    """Where a service is on its way. `invalid`: it must be edited; `failing`: pods fail, and may yet come round."""
    if not is_current(service) or condition_of(service, READY) is None:
        return "waiting"
    said = [text(condition_of(service, each), "status") for each in (READY, LATEST_DEPLOYMENT_READY)]
    if said[0] == "True" and said[1] in ("", "True"):
        return "ready"
    transition = text(service, "status", "modelStatus", "transitionStatus")
    if transition == INVALID:
        return "invalid"
    # A pod that waits for a node or its image is none that fails, however long it takes.
    reasons = {text(condition_of(service, each), "reason") for each in (READY, LATEST_DEPLOYMENT_READY)}
    return "failing" if transition == BLOCKED or reasons & _FAILURES else "waiting"


def age(created: str, now: datetime) -> str:
    """`5s`, `12m`, `3h`, `40d`: as kubectl writes it, but never two units."""
    try:
        since = datetime.fromisoformat(created)
    except ValueError:
        return "-"
    seconds = max(int((now - (since if since.tzinfo else since.replace(tzinfo=UTC))).total_seconds()), 0)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _words(reason: str, message: str) -> str:
    """`ImagePullBackOff: container ome-container: no such image`."""
    whole_of_it = " ".join(message.split())
    said = _WHOSE.sub("", whole_of_it)
    if said in ("", reason):
        # A bare word, such as Waiting: whose it is says more.
        return whole_of_it or reason
    return said if not reason or reason in said else f"{reason}: {said}"
