# SPDX-License-Identifier: Apache-2.0
"""The status document, put together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from headrace.fleet.names import DEPLOYMENT_MODE, VIRTUAL
from headrace.fleet.status.components import seen_of
from headrace.fleet.status.conditions import (
    INGRESS_READY,
    LATEST_DEPLOYMENT_READY,
    READY,
    ROUTES_READY,
    Condition,
    overall,
    written,
)
from headrace.fleet.status.failures import status_of_problems
from headrace.fleet.status.ingress import ingress_ready
from headrace.fleet.status.models import model_status
from headrace.fleet.status.observed import Observed
from headrace.fleet.words import Document, annotations_of, kind_of, name_of, part, text, whole

if TYPE_CHECKING:
    from headrace.fleet.planning import Plan


def status(service: Document, plan: Plan, observed: Observed, now: datetime) -> Document:
    """The status of a service, given what was planned for it and what was seen. Its old status is in the service."""
    if plan.problems:
        failure = plan.selection.failure if plan.selection is not None else ""
        return status_of_problems(service, plan.problems, now, failure=failure)
    if annotations_of(service).get(DEPLOYMENT_MODE) == VIRTUAL:
        return _virtual(service, plan, now)
    seen = {name: seen_of(service, plan, each, observed) for name, each in plan.components.items()}
    ingress = ingress_ready(service, plan.objects, observed)
    own = [each.conditions[0] for each in seen.values()]
    others = [condition for each in seen.values() for condition in each.conditions[1:]]
    latest = overall([each.latest for each in seen.values()], LATEST_DEPLOYMENT_READY, informs=True)
    conditions = [overall([ingress, *own]), ingress, *own, *others, latest]
    routes = [each for each in others if each.type.endswith("RouteReady")]
    if routes:
        conditions.append(overall(routes, ROUTES_READY, informs=True))
    made = _head(service, plan, conditions, now)
    if ingress.status == "True" or text(service, "status", "url") == plan.urls.url:
        made |= _where(plan)
    made["components"] = {name: each.told for name, each in seen.items()}
    made["modelStatus"] = model_status({name: each.copies for name, each in seen.items()}, plan.model)
    return made


def _head(service: Document, plan: Plan, conditions: Sequence[Condition], now: datetime) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if whole(service, "metadata", "generation") is not None:
        made["observedGeneration"] = whole(service, "metadata", "generation")
    made["conditions"] = written(conditions, service, now)
    if part(service, "status", "annotations"):
        made["annotations"] = part(service, "status", "annotations")
    chosen = plan.selection
    if chosen is not None and chosen.runtime is not None:
        made["runtime"] = {"name": name_of(chosen.runtime), "kind": kind_of(chosen.runtime), "reason": chosen.reason}
    if plan.model is not None:
        made["model"] = {"name": name_of(plan.model), "kind": kind_of(plan.model)}
        path = text(plan.model, "spec", "storage", "path")
        made["model"] |= {"path": path} if path else {}
    return made


def _where(plan: Plan) -> dict[str, Any]:
    made: dict[str, Any] = {"url": plan.urls.url} if plan.urls.url else {}
    return made | ({"address": {"url": plan.urls.address}} if plan.urls.address else {})


def _virtual(service: Document, plan: Plan, now: datetime) -> Document:
    conditions = [Condition(READY, "True", VIRTUAL), Condition(INGRESS_READY, "True", VIRTUAL)]
    made = _head(service, plan, conditions, now) | _where(plan)
    # The name that OME writes, and that those who run such services elsewhere read.
    return {**made, "components": {"predictor": {"url": plan.urls.url}}} if plan.urls.url else made
