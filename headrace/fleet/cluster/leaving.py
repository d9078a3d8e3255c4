# SPDX-License-Identifier: Apache-2.0
"""What is being deleted, and has a finalizer that OME left: nobody but us would take it away, and it could never go."""

from __future__ import annotations

from headrace.fleet.cluster.api import Api, Refused
from headrace.fleet.cluster.resources import BENCHMARKS, SERVICES, Resource
from headrace.fleet.cluster.view import View
from headrace.fleet.words import Document, items, name_of, text

OLD_FINALIZERS = {SERVICES: "inferenceservice.finalizers", BENCHMARKS: "benchmarkjob.finalizers"}


async def let_go(api: Api, view: View, resource: Resource, document: Document) -> None:
    """Take OME's finalizer away, if it is there. Raises what the API says."""
    left, old = items(document, "metadata", "finalizers"), OLD_FINALIZERS[resource]
    where = view.where(resource)
    if old not in left or where is None:
        return
    metadata = {
        "finalizers": [each for each in left if each != old],
        "resourceVersion": text(document, "metadata", "resourceVersion"),
    }
    try:
        await api.patch(where, text(document, "metadata", "namespace"), name_of(document), {"metadata": metadata})
    except Refused as refused:
        if refused.code != 404:
            raise
