# SPDX-License-Identifier: Apache-2.0
"""The deployment mode of a component, and the rule that chose it.

Called by `components` with components that are merged already: a runtime may bring workers, or the annotation.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.fleet.names import (
    DECODER,
    DEPLOYMENT_MODE,
    ENGINE,
    MULTI_NODE,
    MULTI_NODE_RAY,
    RAW,
    SERVERLESS,
    VIRTUAL,
)
from headrace.fleet.words import ClusterFacts, Document, annotations_of, part, text, whole

_SAID = (SERVERLESS, RAW, MULTI_NODE_RAY, MULTI_NODE, VIRTUAL)
"""What an engine's annotation may ask for."""


class Mode(NamedTuple):
    """A mode and why."""

    mode: str
    rule: str


def mode_of(name: str, component: Document, service: Document, facts: ClusterFacts) -> Mode:
    """The mode of one component."""
    if annotations_of(service).get(DEPLOYMENT_MODE) == VIRTUAL:
        return Mode(VIRTUAL, f"the service's annotation {DEPLOYMENT_MODE} is {VIRTUAL}")
    if name == DECODER:
        return _grouped(component) or Mode(RAW, "a decoder without leader and worker is a Deployment")
    if name != ENGINE:
        return _scaled(name, component, service, facts)
    found = _engine(component, service, facts)
    if found.mode == SERVERLESS and "decoder" in part(service, "spec"):
        return Mode(RAW, f"{found.rule}, but with a decoder there is no {SERVERLESS}")
    return found


def _engine(component: Document, service: Document, facts: ClusterFacts) -> Mode:
    said = text(component, "annotations", DEPLOYMENT_MODE)
    if said in _SAID:
        return Mode(said, f"the engine's annotation {DEPLOYMENT_MODE} is {said}")
    asked = annotations_of(service).get(DEPLOYMENT_MODE, "")
    if not facts.settings.upstream_selection and asked == MULTI_NODE_RAY:
        # Admission writes the other modes itself, by the same rules as below; these two somebody wrote.
        return Mode(asked, f"the service's annotation {DEPLOYMENT_MODE} is {asked}")
    return _grouped(component) or _scaled("engine", component, service, facts)


def _grouped(component: Document) -> Mode | None:
    for field in ("leader", "worker"):
        if isinstance(component.get(field), dict):
            return Mode(MULTI_NODE, f"it has a {field}")
    return None


def _scaled(name: str, component: Document, service: Document, facts: ClusterFacts) -> Mode:
    """Serverless or not. OME asks for nothing but minReplicas."""
    upstream = facts.settings.upstream_selection
    zero = whole(component, "minReplicas") == 0
    asked = annotations_of(service).get(DEPLOYMENT_MODE, "")
    # With an engine that goes to zero admission writes no mode: somebody wants it without Knative.
    if zero and not upstream and asked == RAW and whole(service, "spec", "engine", "minReplicas") == 0:
        said = f"minReplicas is 0 and the service's annotation {DEPLOYMENT_MODE} is {RAW}"
        return Mode(RAW, f"{said}: a Deployment that our router wakes")
    if zero and (upstream or "knative" in facts.capabilities):
        return Mode(SERVERLESS, "minReplicas is 0")
    if zero:
        return Mode(RAW, "minReplicas is 0 and the cluster has no Knative: a Deployment that our router wakes")
    if upstream:
        return Mode(RAW, "nothing asks for another")
    if asked == SERVERLESS:
        return Mode(SERVERLESS, f"the service's annotation {DEPLOYMENT_MODE} is {SERVERLESS}")
    if not asked and facts.settings.default_mode == SERVERLESS:
        return Mode(SERVERLESS, f"the operator's default is {SERVERLESS}")
    return Mode(RAW, "nothing asks for another" if name == ENGINE else f"a {name} is a Deployment")
