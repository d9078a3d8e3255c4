# SPDX-License-Identifier: Apache-2.0
"""All that Headrace is installed with, for `headrace operator manifests`: kinds, namespace, the objects of `installing`."""

from __future__ import annotations

from headrace.fleet.cluster.webhooks.settings import OPT_OUT
from headrace.fleet.installing.agent import agent_objects
from headrace.fleet.installing.configuration import config_map
from headrace.fleet.installing.operator import operator_objects
from headrace.fleet.installing.rights import cluster_rules
from headrace.fleet.installing.settings import OPERATOR, ManifestSettings, labels_of
from headrace.fleet.schema.crds import crds
from headrace.fleet.words import Document

__all__ = ["ManifestSettings", "cluster_rules", "manifests"]


def manifests(settings: ManifestSettings) -> list[Document]:
    """All objects, in the order to make them."""
    objects: list[Document] = []
    if settings.has("crds"):
        objects += crds().values()
    if settings.has("namespace"):
        # Whoever repairs the operator must not need it for that.
        labels = {**labels_of(OPERATOR), OPT_OUT: "disabled"}
        if settings.has("agent"):
            # Its folder on the node is more than the Pod Security Standards give to others.
            labels["pod-security.kubernetes.io/enforce"] = "privileged"
        objects.append(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": settings.namespace, "labels": labels}}
        )
    if settings.has("config"):
        objects.append(config_map(settings))
    objects += operator_objects(settings)
    return [*objects, *agent_objects(settings)] if settings.has("agent") else objects
