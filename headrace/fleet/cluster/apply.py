# SPDX-License-Identifier: Apache-2.0
"""Apply the planned objects of one service, and delete those that are no longer planned.

Called by the reconciler. Sends only what differs: an object that was edited by hand is corrected, one that is as planned is
left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from headrace.core.fault_points import fault_point
from headrace.fleet.cluster.diff import differs, digest
from headrace.fleet.cluster.resources import BENCHMARKS, SERVICES, child_resource
from headrace.fleet.cluster.view import ClusterView
from headrace.fleet.documents import Problem
from headrace.fleet.names import NO_ROLLOUT
from headrace.fleet.planning import ScaleUp
from headrace.fleet.planning.context import REVISION_LABEL
from headrace.fleet.status.conditions import group_of
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError
from headrace.platforms.kubernetes_client.objects import (
    Document,
    Resource,
    ServedResource,
    annotations_of,
    controller_uid,
    get_int,
    get_list,
    get_str,
    kind_of,
    labels_of,
    name_of,
)

log = logging.getLogger("headrace.operator")

_MAX_MESSAGE = 400
_MAX_SETTLED = 20_000
_ObjectId = tuple[str, str, str]


class ServerErrors:
    """Distinguishes temporary errors of the API server from persistent ones: only the latter belong in a status.

    An API server also answers 500 where it refuses an object, for example one with a field that it does not know.
    """

    def __init__(self) -> None:
        self._failed: set[tuple[str, str, str]] = set()

    def is_temporary(self, document: Document, error: ApiError) -> bool:
        """Whether a write of an object is to be tried again before its error is reported."""
        if error.code < 500:
            return error.code in (409, 429)
        write = (kind_of(document), get_str(document, "metadata", "namespace"), name_of(document))
        if write in self._failed:
            return False
        if len(self._failed) >= _MAX_SETTLED:
            self._failed.clear()
        self._failed.add(write)
        return True

    def succeeded(self, document: Document) -> None:
        """Clear the last error of an object."""
        self._failed.discard((kind_of(document), get_str(document, "metadata", "namespace"), name_of(document)))


class Applier:
    """Applies objects. Remembers what the API server turned them into if it normalizes values."""

    def __init__(self, api: ApiClient, view: ClusterView) -> None:
        self._api = api
        self._view = view
        self._settled: dict[str, tuple[str, str]] = {}
        """By uid: digests of the applied object and of the object that resulted."""
        self._errors = ServerErrors()

    async def apply(self, service: Document, objects: Sequence[Document]) -> list[Problem]:
        """Apply all objects of a service and delete the others. Return what the API server refused.

        Raises ApiError for an error that may pass, Unreachable.
        """
        live = {_object_id(document): document for document in self._view.owned(service)}
        problems: list[Problem] = []
        for document in objects:
            try:
                problem = await self._one(service, document, live.get(_object_id(document)))
                self._errors.succeeded(document)
            except ApiError as error:
                problem = self._refusal(service, document, error, "apply")
            if problem is not None:
                problems.append(problem)
        if not problems:
            problems = await self._prune(service, live, {_object_id(document) for document in objects})
        return problems

    async def scale_up(self, service: Document, scale_up: ScaleUp) -> Problem | None:
        """Scale up a suspended component before its front router is deleted. Raises ApiError, Unreachable.

        Return what the API server refused.
        """
        resource = child_resource({"apiVersion": scale_up.api_version, "kind": scale_up.kind})
        served = self._view.served(resource) if resource is not None else None
        if served is not None:
            namespace = get_str(service, "metadata", "namespace")
            change = {"spec": {"replicas": scale_up.replicas}}
            try:
                await self._api.patch(served, namespace, scale_up.name, change, "scale")
            except ApiError as error:
                scaled = {"kind": scale_up.kind, "metadata": {"namespace": namespace, "name": scale_up.name}}
                return self._refusal(service, scaled, error, "scale")
        return None

    def _refusal(self, service: Document, document: Document, error: ApiError, verb: str) -> Problem:
        """Return what the API server refused; raise the error if it may pass."""
        if self._errors.is_temporary(document, error):
            raise error
        log.warning("cannot %s %s %s of %s: %s", verb, kind_of(document), name_of(document), name_of(service), error)
        return refusal_problem(document, error, "" if verb == "apply" else f" to {verb}")

    async def _one(self, service: Document, planned: Document, live: Document | None) -> Problem | None:
        resource = child_resource(planned)
        served = self._view.served(resource) if resource is not None else None
        if resource is None or served is None:
            message = f"this cluster has no {kind_of(planned)} of {get_str(planned, 'apiVersion')}"
            return Problem("", message, "install it, or change the service so that it needs none")
        if live is None:
            # An object that has lost its label, or was just created, is not in the cache.
            live = await self._api.get(served, get_str(planned, "metadata", "namespace"), name_of(planned))
            if live is not None and controller_uid(live) != get_str(service, "metadata", "uid"):
                return _name_taken(planned)
        if live is not None and (self._as_wanted(planned, live) or _rollout_disabled(service, planned, live)):
            return None
        await self._send(resource, served, planned)
        return None

    def _as_wanted(self, planned: Document, live: Document) -> bool:
        if self._settled.get(get_str(live, "metadata", "uid")) == (digest(planned), digest(live)):
            return True
        return not differs(planned, live)

    async def _send(self, resource: Resource, served: ServedResource, planned: Document) -> None:
        fault_point("fleet.cluster.apply")
        applied = await self._api.apply(served, planned)
        applied = {"apiVersion": served.api_version, "kind": resource.kind, **applied}
        self._view.put(resource, applied)
        if differs(planned, applied):
            if len(self._settled) >= _MAX_SETTLED:
                self._settled.clear()
            self._settled[get_str(applied, "metadata", "uid")] = digest(planned), digest(applied)

    async def _prune(
        self, service: Document, live: Mapping[_ObjectId, Document], planned: set[_ObjectId]
    ) -> list[Problem]:
        problems = []
        for name, item in live.items():
            resource = child_resource(item)
            served = self._view.served(resource) if resource is not None else None
            if name in planned or served is None or get_str(item, "metadata", "deletionTimestamp"):
                continue
            log.info("deleting %s %s/%s: no longer planned", name[1], get_str(item, "metadata", "namespace"), name[2])
            try:
                await self._api.delete(
                    served, get_str(item, "metadata", "namespace"), name_of(item), get_str(item, "metadata", "uid")
                )
                self._errors.succeeded(item)
            except ApiError as error:
                problems.append(self._refusal(service, item, error, "delete"))
        return problems


def _object_id(document: Document) -> _ObjectId:
    return group_of(document), kind_of(document), name_of(document)


def _rollout_disabled(service: Document, planned: Document, live: Document) -> bool:
    """Whether pods stay as they are: the service disables automatic updates, and it has not changed itself."""
    if annotations_of(service).get(NO_ROLLOUT) != "true":
        return False
    observed, generation = get_int(service, "status", "observedGeneration"), get_int(service, "metadata", "generation")
    old, new = labels_of(live).get(REVISION_LABEL), labels_of(planned).get(REVISION_LABEL)
    return observed == generation and old is not None and old != new


def _name_taken(planned: Document) -> Problem:
    kind, name = kind_of(planned), name_of(planned)
    message = f"a {kind} {name} exists and does not belong to this service"
    return Problem("metadata.name", message, f"give the service another name, or delete that {kind}")


def refusal_problem(document: Document, error: ApiError, action: str = "") -> Problem:
    """Return the problem of a write that the API server refuses, with its reason. action: ` to delete`; "": to apply."""
    value = " ".join(error.message.split())[:_MAX_MESSAGE]
    if error.code == 403 and " cannot " in value:
        fix = "grant the operator that permission: `headrace operator manifests` has the roles it needs"
    elif error.code == 403:
        fix = "change what a quota or policy of the cluster forbids, or have it allowed"
    elif action:
        fix = "see the log of the API server"
    elif error.code >= 500 and _UNKNOWN_FIELD not in value:
        fix = "if it names a field, change it in the service or in its runtime; else see the log of the API server"
    else:
        fix = "change the field named there, in the service or in its runtime"
    return Problem("", f"the API server refuses{action} {kind_of(document)} {name_of(document)}: {value}", fix)


_UNKNOWN_FIELD = "not declared in schema"


OME_FINALIZERS = {SERVICES: "inferenceservice.finalizers", BENCHMARKS: "benchmarkjob.finalizers"}


async def remove_finalizer(api: ApiClient, view: ClusterView, resource: Resource, document: Document) -> None:
    """Remove OME's finalizer from an object that is being deleted: no other controller would. Raises ApiError."""
    finalizers, old = get_list(document, "metadata", "finalizers"), OME_FINALIZERS[resource]
    served = view.served(resource)
    if old not in finalizers or served is None:
        return
    metadata = {
        "finalizers": [finalizer for finalizer in finalizers if finalizer != old],
        "resourceVersion": get_str(document, "metadata", "resourceVersion"),
    }
    try:
        await api.patch(served, get_str(document, "metadata", "namespace"), name_of(document), {"metadata": metadata})
    except ApiError as error:
        if error.code != 404:
            raise
