# SPDX-License-Identifier: Apache-2.0
"""The status of one component: its conditions, revisions, traffic and replicas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.fleet.names import MAIN_CONTAINER, component_name
from headrace.fleet.planning.context import REVISION_LABEL
from headrace.fleet.rollouts.state import PROMOTED, ROLLED_BACK, RolloutState
from headrace.fleet.rollouts.state import read_state as rollout_of
from headrace.fleet.status.conditions import (
    Condition,
    ConditionStatus,
    Observed,
    condition_of,
    copy_condition,
    get_mappings,
    ready_type,
)
from headrace.fleet.status.model_status import ModelCopies, count_copies
from headrace.fleet.status.scaling import scaling_condition
from headrace.fleet.status.workloads import (
    FAILED,
    component_ready,
    desired_replicas,
    is_knative,
    is_rolled_out,
    pod_state,
    workload_ready,
    workloads,
)
from headrace.platforms.kubernetes_client.objects import (
    Document,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    labels_of,
    name_of,
)

if TYPE_CHECKING:
    from headrace.fleet.merging import Component
    from headrace.fleet.planning import Plan, Rollout


@dataclass(frozen=True)
class ComponentStatus:
    """The status of one component."""

    conditions: tuple[Condition, ...]
    """Its Ready condition first, then those of Knative and of its rollout."""
    latest: Condition
    """Whether the last change is rolled out."""
    entry: dict[str, Any]
    """Its entry in `status.components`."""
    copies: ModelCopies


def component_status(service: Document, plan: Plan, component: Component, observed: Observed) -> ComponentStatus:
    """Compute the status of one component of a plan."""
    name = component.name
    planned, pods = workloads(plan.objects, name), observed.pods_of(name)
    shares = shares_of(plan.rollouts[name]) if name in plan.rollouts else []
    silent = {share.digest for share in shares if share.percent == 0}
    serving = [workload for workload in planned if _digest(workload) not in silent] or planned
    newest = _newest(planned, shares)
    ready = component_ready(ready_type(name), serving, observed, pods)
    live = [workload for workload in map(observed.live, planned) if workload is not None]
    before = get_mapping(service, "status", "components", name)
    entry: dict[str, Any] = {"mode": component.mode}
    conditions, url = [ready], plan.urls.components.get(name, "")
    if planned and is_knative(planned[0]):
        entry |= _knative(live[0] if live else None, before)
        url = get_str(live[0], "status", "url") if live else ""
        conditions += _knative_conditions(name, live[0] if live else None)
    else:
        existing = {_digest(workload) for workload in planned if observed.live(workload) is not None}
        up = {_digest(workload) for workload in newest if _is_up(workload, observed, pods)}
        entry |= planned_revisions(component_name(name_of(service), name), shares, existing, up, before)
    state = rollout_of(before)
    if state is not None:
        entry["rollout"] = dict(get_mapping(before, "rollout"))
        conditions.append(rollout_condition(name, state))
    scaling = scaling_condition(service, name, plan.objects, observed)
    if scaling is not None:
        conditions.append(scaling)
    # The URL of a component that was once ready stays, even while it is not.
    if url and (ready.status == "True" or get_str(before, "url") == url):
        entry["url"] = url
    entry |= _replicas(planned, live, pods)
    if component.accelerator:
        entry["selectedAccelerator"] = _accelerator(component)
    current = bool(newest) and all(is_rolled_out(workload, observed) for workload in newest)
    digest = next((share.digest for share in shares if share.latest), "")
    recent = [pod for pod in pods if _digest(pod) in ("", digest)] if digest else pods
    copies = count_copies(
        pods,
        recent,
        suspended=bool(live)
        and ready.status == "True"
        and all(is_knative(workload) or desired_replicas(workload) == 0 for workload in live),
        current=current,
        revision=get_str(entry, "latestCreatedRevision"),
    )
    latest = _latest(ready, newest, current, observed, recent)
    if state is not None and (state.phase == ROLLED_BACK or (latest.status == "True" and state.phase != PROMOTED)):
        latest = replace(rollout_condition(name, state), type=ready.type)
    return ComponentStatus(tuple(conditions), latest, entry, copies)


def rollout_condition(name: str, state: RolloutState) -> Condition:
    """Return the condition of a rollout by steps. Its severity is Info: the old revision serves meanwhile."""
    statuses: dict[str, ConditionStatus] = {PROMOTED: "True", ROLLED_BACK: "False"}
    kind = f"{name.capitalize()}RolloutReady"
    return Condition(kind, statuses.get(state.phase, "Unknown"), state.phase, state.message, informs=True)


def _newest(planned: Sequence[Document], shares: Sequence[Share]) -> list[Document]:
    """Return the workloads of the latest revision. While a canary is promoted, these are its own and the main one."""
    latest = {share.digest for share in shares if share.latest}
    return [workload for workload in planned if not latest or _digest(workload) in ("", *latest)]


def _digest(document: Document) -> str:
    return labels_of(document).get(REVISION_LABEL, "")


def _is_up(planned: Document, observed: Observed, pods: Sequence[Document]) -> bool:
    return is_rolled_out(planned, observed) and workload_ready("", planned, observed, pods).status == "True"


def _knative(live: Document | None, before: Document) -> dict[str, Any]:
    address = get_str(live, "status", "address", "url")
    return knative_revisions(live, before) | ({"address": {"url": address}} if address else {})


def _knative_conditions(name: str, live: Document | None) -> list[Condition]:
    return [
        copy_condition(f"{name.capitalize()}{what}Ready", condition_of(live, knative_type), informs=True)
        for what, knative_type in (("Route", "RoutesReady"), ("Configuration", "ConfigurationsReady"))
    ]


def _latest(
    main: Condition, newest: Sequence[Document], current: bool, observed: Observed, recent: Sequence[Document]
) -> Condition:
    """Return whether the last change is rolled out. A component may be ready while its new revision fails."""
    if current and main.status == "True":
        return Condition(main.type, "True", informs=True)
    if main.status != "True":
        return Condition(main.type, main.status, main.reason, main.message, informs=True)
    failed = [state for state in map(pod_state, recent) if state.state == FAILED]
    if failed:
        message = f"pod {failed[-1].pod}: {failed[-1].message}"
        return Condition(main.type, "False", failed[-1].reason, message, informs=True)
    for workload in newest:
        stuck = condition_of(observed.live(workload), "Progressing")
        if get_str(stuck, "status") == "False":
            return Condition(main.type, "False", get_str(stuck, "reason"), get_str(stuck, "message"), informs=True)
    return Condition(main.type, "Unknown", "Progressing", "the new revision is being rolled out", informs=True)


def _replicas(planned: Sequence[Document], live: Sequence[Document], pods: Sequence[Document]) -> dict[str, Any]:
    if not live:
        return {}
    if is_knative(planned[0]):
        up = sum(get_str(condition_of(pod, "Ready"), "status") == "True" for pod in pods)
        return {"replicas": len(pods), "readyReplicas": up}
    if kind_of(live[0]) == "RayCluster":
        up = sum(get_str(cluster, "status", "state") == "ready" for cluster in live)
        return {"replicas": len(planned), "readyReplicas": up}
    return {
        "replicas": sum(desired_replicas(workload) for workload in live),
        "readyReplicas": sum(get_int(workload, "status", "readyReplicas") or 0 for workload in live),
    }


def _accelerator(component: Component) -> dict[str, Any]:
    """Return the chosen accelerator class, and what it added to the pod."""
    role, pod = ("leader", component.leader) if component.leader else ("pod", component.pod)
    entry: dict[str, Any] = {"acceleratorClass": component.accelerator, "reason": component.accelerator_reason}
    chosen = {
        name: value
        for name, value in get_mapping(pod, "nodeSelector").items()
        if component.origins.get(f"{role}.nodeSelector.{name}") == "accelerator"
    }
    if chosen:
        entry["nodeSelector"] = chosen
    for container in get_list(pod, "containers"):
        if get_str(container, "name") == MAIN_CONTAINER and get_mapping(container, "resources", "requests"):
            entry["resourceRequests"] = dict(get_mapping(container, "resources", "requests"))
    return entry


_TRAFFIC_FIELDS = {
    "revisionName": str,
    "configurationName": str,
    "percent": int,
    "latestRevision": bool,
    "tag": str,
    "url": str,
}
_MAX_REVISIONS = 10
_DIGITS = 5


@dataclass(frozen=True)
class Share:
    """A revision and its share of the requests."""

    digest: str
    percent: int
    latest: bool = False


def shares_of(rollout: Rollout) -> list[Share]:
    """Return the revisions of a component without Knative, the latest first."""
    if rollout.latest == rollout.stable:
        return [Share(rollout.latest, 100, latest=True)]
    return [Share(rollout.latest, rollout.percent, latest=True), Share(rollout.stable, 100 - rollout.percent)]


def knative_revisions(live: Document | None, before: Document) -> dict[str, Any]:
    """Return the revisions that a Knative Service reports."""
    created, latest = (
        get_str(live, "status", "latestCreatedRevisionName"),
        get_str(live, "status", "latestReadyRevisionName"),
    )
    traffic = [
        {name: record[name] for name, kind in _TRAFFIC_FIELDS.items() if type(record.get(name)) is kind}
        for record in get_mappings(live, "status", "traffic")
    ]
    return _with_rollout(created, latest, traffic, before)


def planned_revisions(
    name: str, shares: Sequence[Share], existing: Collection[str], ready_digests: Collection[str], before: Document
) -> dict[str, Any]:
    """Return the revisions of `llama-chat-engine`.

    existing, ready_digests: digests of the revisions that exist, and of those that are ready.
    """
    known = _numbered(name, [share.digest for share in reversed(shares) if share.digest in existing], before)
    names = {revision["digest"]: revision["name"] for revision in known}
    latest = [share.digest for share in shares if share.latest]
    created = next((names[digest] for digest in latest if digest in existing), get_str(before, "latestCreatedRevision"))
    latest_share = next(
        (names[digest] for digest in latest if digest in ready_digests), get_str(before, "latestReadyRevision")
    )
    traffic: list[dict[str, Any]] = []
    for share in shares:
        if share.digest not in existing or (share.percent == 0 and not share.latest):
            continue
        entry: dict[str, Any] = {"revisionName": names[share.digest], "percent": share.percent}
        traffic.append(entry | ({"latestRevision": True} if share.latest else {"latestRevision": False, "tag": "prev"}))
    return _with_rollout(created, latest_share, traffic, before) | ({"revisions": known} if known else {})


def _numbered(name: str, digests: Sequence[str], before: Document) -> list[dict[str, str]]:
    """Return the known revisions, and new ones with the next numbers."""
    known = [
        {"name": get_str(record, "name"), "digest": get_str(record, "digest")}
        for record in get_mappings(before, "revisions")
        if get_str(record, "name") and get_str(record, "digest")
    ]
    for digest in digests:
        if all(revision["digest"] != digest for revision in known):
            last = known[-1]["name"].rpartition("-")[2] if known else "0"
            number = int(last) + 1 if last.isdecimal() and last.isascii() and len(last) < 10 else 1
            known.append({"name": f"{name}-{number:0{_DIGITS}}", "digest": digest})
    retained = [revision for revision in known if revision["digest"] in digests]
    return [revision for revision in known if revision in retained or revision in known[-_MAX_REVISIONS:]]


def _with_rollout(created: str, ready_revision: str, traffic: list[dict[str, Any]], before: Document) -> dict[str, Any]:
    last, earlier = rolled_out_revisions(created, ready_revision, traffic, before)
    entry: dict[str, Any] = {
        "latestReadyRevision": ready_revision,
        "latestCreatedRevision": created,
        "previousRolledoutRevision": earlier,
        "latestRolledoutRevision": last,
        "traffic": traffic,
    }
    return {name: value for name, value in entry.items() if value}


def rolled_out_revisions(
    created: str, ready_revision: str, traffic: Sequence[Document], before: Document
) -> tuple[str, str]:
    """Return the revision that last had all requests, and the one before it.

    A revision that was rolled out and then gets less than all requests, while no other serves, is rolled back: the previous
    one counts as rolled out again, so that the next plan sends the rest of the requests there.
    """
    last, earlier = get_str(before, "latestRolledoutRevision"), get_str(before, "previousRolledoutRevision")
    share = next(
        (
            target
            for target in traffic
            if get_str(target, "revisionName") == ready_revision and target.get("latestRevision") is True
        ),
        None,
    )
    percent = get_int(share, "percent")
    if not ready_revision or percent is None:
        return last, earlier
    if last != ready_revision:
        return (ready_revision, last) if percent == 100 else (last, earlier)
    total = sum(
        get_int(target, "percent") or 0 for target in traffic if get_str(target, "revisionName") == ready_revision
    )
    if ready_revision == created and percent < 100 and total == 100 and earlier:
        return earlier, earlier
    return last, earlier
