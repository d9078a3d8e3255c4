# SPDX-License-Identifier: Apache-2.0
"""One component: its conditions, its entry in `status.components`, its copies of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.fleet.names import MAIN_CONTAINER, component_name
from headrace.fleet.planning.site import REVISION_LABEL
from headrace.fleet.rollouts.state import PROMOTED, ROLLED_BACK, State
from headrace.fleet.rollouts.state import state_of as rollout_of
from headrace.fleet.status.conditions import Condition, Truth, copied, ready_type
from headrace.fleet.status.models import Copies, copies_of
from headrace.fleet.status.observed import Observed, condition_of
from headrace.fleet.status.pods import FAILED, state_of
from headrace.fleet.status.revisions import Share, knative_revisions, planned_revisions, shares_of
from headrace.fleet.status.workloads import component_ready, is_knative, ready, replicas, rolled_out, workloads
from headrace.fleet.words import Document, items, kind_of, labels_of, name_of, part, text, whole

if TYPE_CHECKING:
    from headrace.fleet.merging import Component
    from headrace.fleet.planning import Plan


@dataclass(frozen=True)
class Seen:
    """What was seen of one component."""

    conditions: tuple[Condition, ...]
    """Its own first, then those of Knative and of its rollout."""
    latest: Condition
    """Whether what was asked for last is what runs."""
    told: dict[str, Any]
    """Its entry in `status.components`."""
    copies: Copies


def seen_of(service: Document, plan: Plan, component: Component, observed: Observed) -> Seen:
    """One component of a plan."""
    name = component.name
    planned, pods = workloads(plan.objects, name), observed.pods_of(name)
    shares = shares_of(plan.rollouts[name]) if name in plan.rollouts else []
    silent = {each.digest for each in shares if each.percent == 0}
    counted = [each for each in planned if _digest(each) not in silent] or planned
    newest = _newest(planned, shares)
    own = component_ready(ready_type(name), counted, observed, pods)
    live = [each for each in map(observed.live, planned) if each is not None]
    before = part(service, "status", "components", name)
    told: dict[str, Any] = {"mode": component.mode}
    conditions, url = [own], plan.urls.components.get(name, "")
    if planned and is_knative(planned[0]):
        told |= _knative(live[0] if live else None, before)
        url = text(live[0], "status", "url") if live else ""
        conditions += _knative_conditions(name, live[0] if live else None)
    else:
        made = {_digest(each) for each in planned if observed.live(each) is not None}
        done = {_digest(each) for each in newest if _up(each, observed, pods)}
        told |= planned_revisions(component_name(name_of(service), name), shares, made, done, before)
    state = rollout_of(before)
    if state is not None:
        told["rollout"] = dict(part(before, "rollout"))
        conditions.append(rollout_condition(name, state))
    # Where a component once answered it stays, even while it does not.
    if url and (own.status == "True" or text(before, "url") == url):
        told["url"] = url
    told |= _replicas(planned, live, pods)
    if component.accelerator:
        told["selectedAccelerator"] = _accelerator(component)
    current = bool(newest) and all(rolled_out(each, observed) for each in newest)
    digest = next((each.digest for each in shares if each.latest), "")
    recent = [each for each in pods if _digest(each) in ("", digest)] if digest else pods
    copies = copies_of(
        pods,
        recent,
        asleep=bool(live) and own.status == "True" and all(is_knative(each) or replicas(each) == 0 for each in live),
        current=current,
        revision=text(told, "latestCreatedRevision"),
    )
    latest = _latest(own, newest, current, observed, recent)
    if state is not None and (state.phase == ROLLED_BACK or (latest.status == "True" and state.phase != PROMOTED)):
        latest = replace(rollout_condition(name, state), type=own.type)
    return Seen(tuple(conditions), latest, told, copies)


def rollout_condition(name: str, state: State) -> Condition:
    """Whether what was asked for last has come through its steps. It informs: what ran before answers meanwhile."""
    told: dict[str, Truth] = {PROMOTED: "True", ROLLED_BACK: "False"}
    kind = f"{name.capitalize()}RolloutReady"
    return Condition(kind, told.get(state.phase, "Unknown"), state.phase, state.message, informs=True)


def _newest(planned: Sequence[Document], shares: Sequence[Share]) -> list[Document]:
    """The workloads of what was asked for last. While a canary is promoted, its pods and those that replace the old."""
    latest = {each.digest for each in shares if each.latest}
    return [each for each in planned if not latest or _digest(each) in ("", *latest)]


def _digest(document: Document) -> str:
    return labels_of(document).get(REVISION_LABEL, "")


def _up(planned: Document, observed: Observed, pods: Sequence[Document]) -> bool:
    return rolled_out(planned, observed) and ready("", planned, observed, pods).status == "True"


def _knative(live: Document | None, before: Document) -> dict[str, Any]:
    address = text(live, "status", "address", "url")
    return knative_revisions(live, before) | ({"address": {"url": address}} if address else {})


def _knative_conditions(name: str, live: Document | None) -> list[Condition]:
    return [
        copied(f"{name.capitalize()}{what}Ready", condition_of(live, theirs), informs=True)
        for what, theirs in (("Route", "RoutesReady"), ("Configuration", "ConfigurationsReady"))
    ]


def _latest(
    own: Condition, newest: Sequence[Document], current: bool, observed: Observed, recent: Sequence[Document]
) -> Condition:
    """Whether the last edit has arrived. A component may answer well while its new revision fails."""
    if current and own.status == "True":
        return Condition(own.type, "True", informs=True)
    if own.status != "True":
        return Condition(own.type, own.status, own.reason, own.message, informs=True)
    failed = [each for each in map(state_of, recent) if each.state == FAILED]
    if failed:
        said = f"pod {failed[-1].pod}: {failed[-1].message}"
        return Condition(own.type, "False", failed[-1].reason, said, informs=True)
    for each in newest:
        stuck = condition_of(observed.live(each), "Progressing")
        if text(stuck, "status") == "False":
            return Condition(own.type, "False", text(stuck, "reason"), text(stuck, "message"), informs=True)
    return Condition(own.type, "Unknown", "Progressing", "the new revision is being rolled out", informs=True)


def _replicas(planned: Sequence[Document], live: Sequence[Document], pods: Sequence[Document]) -> dict[str, Any]:
    if not live:
        return {}
    if is_knative(planned[0]):
        up = sum(text(condition_of(each, "Ready"), "status") == "True" for each in pods)
        return {"replicas": len(pods), "readyReplicas": up}
    if kind_of(live[0]) == "RayCluster":
        up = sum(text(each, "status", "state") == "ready" for each in live)
        return {"replicas": len(planned), "readyReplicas": up}
    return {
        "replicas": sum(replicas(each) for each in live),
        "readyReplicas": sum(whole(each, "status", "readyReplicas") or 0 for each in live),
    }


def _accelerator(component: Component) -> dict[str, Any]:
    """What was chosen, and what came of it in the pod."""
    where, pod = ("leader", component.leader) if component.leader else ("pod", component.pod)
    made: dict[str, Any] = {"acceleratorClass": component.accelerator, "reason": component.accelerator_reason}
    chosen = {
        name: value
        for name, value in part(pod, "nodeSelector").items()
        if component.origins.get(f"{where}.nodeSelector.{name}") == "accelerator"
    }
    if chosen:
        made["nodeSelector"] = chosen
    for each in items(pod, "containers"):
        if text(each, "name") == MAIN_CONTAINER and part(each, "resources", "requests"):
            made["resourceRequests"] = dict(part(each, "resources", "requests"))
    return made
