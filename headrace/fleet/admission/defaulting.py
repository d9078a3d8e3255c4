# SPDX-License-Identifier: Apache-2.0
"""What a document means where it says nothing: the defaults of the table, and those that follow from its shape.

Called by the mutating webhook and by who has a file in place of a cluster, so that both see the same service.
"""

from __future__ import annotations

from typing import Any

from headrace.fleet import schema
from headrace.fleet.admission.migrating import migrated
from headrace.fleet.names import DEPLOYMENT_MODE, MULTI_NODE, PD_DISAGGREGATED, RAW
from headrace.fleet.words import ClusterFacts, Document, annotations_of, kind_of, part, whole

MIN_REPLICAS = 1
MAX_REPLICAS = {"engine": 3, "decoder": 3, "router": 2}


def defaulted(service: Document, facts: ClusterFacts) -> Document:
    """The document as it is after admission. Kinds other than InferenceService get the defaults of their table alone."""
    document = schema.defaulted(service)
    if kind_of(document) != "InferenceService":
        return document
    if facts.settings.migrate_predictor:
        document = migrated(document, facts)
    return _with_mode(_with_replicas(document), facts)


def _with_replicas(service: Document) -> Document:
    changed: dict[str, Any] = {}
    for name, most in MAX_REPLICAS.items():
        component = part(service, "spec").get(name)
        if not isinstance(component, dict) or ("minReplicas" in component and "maxReplicas" in component):
            continue
        least = component.get("minReplicas", MIN_REPLICAS)
        # Who asks for five at least does not mean three at most.
        enough = max(most, least) if isinstance(least, int) else most
        changed[name] = {**component, "minReplicas": least, "maxReplicas": component.get("maxReplicas", enough)}
    return {**service, "spec": {**service["spec"], **changed}} if changed else service


def _with_mode(service: Document, facts: ClusterFacts) -> Document:
    if DEPLOYMENT_MODE in part(service, "metadata", "annotations"):
        return service
    mode = _mode(part(service, "spec"), facts)
    if not mode:
        return service
    metadata = part(service, "metadata")
    annotations = {**annotations_of(service), DEPLOYMENT_MODE: mode}
    return {**service, "metadata": {**metadata, "annotations": annotations}}


def _mode(spec: Document, facts: ClusterFacts) -> str:
    engine = part(spec, "engine")
    if "engine" in spec and "decoder" in spec:
        return PD_DISAGGREGATED
    if (whole(engine, "worker", "size") or 0) > 0:
        return MULTI_NODE
    # OME writes RawDeployment here even where the engine then becomes Serverless, and reads the wrong conditions for it.
    if whole(engine, "minReplicas") == 0:
        return ""
    return RAW if facts.settings.default_mode == RAW else ""
