# SPDX-License-Identifier: Apache-2.0
"""A fleet on Kubernetes: the `Fleet` of the commands, with the permissions of the kubeconfig's user."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headrace.core.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from headrace.fleet.agent.model_keys import STATUS_LABEL
from headrace.fleet.client.contract import FIELD_MANAGER, Applied, Commands, NodeProgress, closing, gather_all
from headrace.fleet.cluster.configuration import CONFIG_MAP, settings_from
from headrace.fleet.cluster.diff import digest
from headrace.fleet.cluster.resources import CHILDREN, FACTS
from headrace.fleet.documents import (
    DEFAULT_NAMESPACE,
    ClusterFacts,
    FleetSettings,
    namespace_of,
    object_key,
    resource_version,
)
from headrace.fleet.names import API_VERSION, GROUP, NAMESPACE, SERVICE_LABEL, VERSION, model_status_key, trunc63
from headrace.fleet.schema.fields import Kind
from headrace.fleet.schema.kinds import find_kind
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable, connect
from headrace.platforms.kubernetes_client.objects import (
    CONFIG_MAPS,
    EVENTS,
    PODS,
    Document,
    Resource,
    ServedResource,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    name_of,
)

_EXPIRED = 410


def open_cluster(kubeconfig: str = "", context: str = "") -> KubernetesFleet:
    """Open the fleet of a kubeconfig, without calling it yet. Raises FailedPrecondition."""
    return KubernetesFleet(connect_user(kubeconfig, context))


class KubernetesFleet:
    """The `Fleet` of an API server."""

    def __init__(self, api: UserApiClient) -> None:
        self._api = api
        self._namespace = api.namespace or DEFAULT_NAMESPACE
        self._kinds: dict[tuple[str, str], ServedResource] = {}

    @property
    def place(self) -> str:
        """URL of the API server."""
        return self._api.server

    @property
    def namespace(self) -> str:
        """Namespace of the kubeconfig's context."""
        return self._namespace

    @property
    def commands(self) -> Commands:
        """The commands of kubectl."""
        return Commands()

    async def list(self, kind: Kind, namespace: str = "", selector: str = "") -> Sequence[Document]:
        """Return the documents of a kind."""
        with self._explained(f"listing {kind.plural}"):
            documents, _ = await self._api.list(_served(kind), selector, namespace)
        return sorted(documents, key=object_key)

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """Return one document; None if there is none."""
        with self._explained(f"reading {kind.name} {name}"):
            return await self._api.find(_served(kind), namespace, name)

    async def watch(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[tuple[str, Document]]:
        """Yield existing documents, then every change."""
        resource, known = _served(kind), dict[tuple[str, str], Document]()
        while True:
            with self._explained(f"watching {kind.plural}"):
                documents, version = await self._api.list(resource, selector, namespace)
            listed = {object_key(document): document for document in documents}
            for key in [key for key in known if key not in listed]:
                yield "DELETED", known.pop(key)
            for key, item in sorted(listed.items()):
                old, known[key] = known.get(key), item
                if old is None or resource_version(old) != resource_version(item):
                    yield "ADDED" if old is None else "MODIFIED", item
            async with closing(self._changes(kind, version, selector, namespace)) as changes:
                async for change, document in changes:
                    if change == "DELETED":
                        known.pop(object_key(document), None)
                    else:
                        known[object_key(document)] = document
                    yield change, document

    async def _changes(
        self, kind: Kind, version: str, selector: str, namespace: str
    ) -> AsyncIterator[tuple[str, Document]]:
        """Yield changes since a version, until it has expired on the API server."""
        while True:
            try:
                async with closing(self._api.watch(_served(kind), version, selector, namespace)) as changes:
                    async for change, document in changes:
                        version = resource_version(document) or version
                        if change != "BOOKMARK":
                            yield change, {"apiVersion": API_VERSION, "kind": kind.name, **document}
            except ApiError as error:
                if error.code == _EXPIRED:
                    return
                raise explain_error(error, f"watching {kind.plural}", self.place) from None
            except Unreachable as error:
                raise explain_error(error, f"watching {kind.plural}", self.place) from None

    async def live(self, document: Document) -> Document | None:
        """Return the live object of a document."""
        with self._explained(_action_text("reading", document)):
            resource = await self._resource(document)
            return await self._api.find(resource, self._namespace_for(resource, document), name_of(document))

    async def apply(self, document: Document, *, dry_run: bool = False, force: bool = False) -> Applied:
        """Send a server-side apply."""
        with self._explained(_action_text("applying", document)):
            resource = await self._resource(document)
            namespace = self._namespace_for(resource, document)
            metadata = {**get_mapping(document, "metadata"), **({"namespace": namespace} if namespace else {})}
            sent = {**document, "metadata": metadata}
            before = await self._api.find(resource, namespace, name_of(document))
            try:
                applied = await self._api.send(resource, sent, dry_run=dry_run, force=force)
            except ApiError as error:
                if not conflicts_with_us(error):
                    raise
                applied = await self._api.send(resource, sent, dry_run=dry_run, force=True)
        if before is None:
            return Applied(applied, "created")
        # Not the resourceVersion: managedFields have a time, and a dry run has no new version.
        return Applied(applied, "unchanged" if digest(before) == digest(applied) else "configured")

    async def patch(self, kind: Kind, namespace: str, name: str, change: Document) -> Document:
        """Send a merge patch."""
        with self._explained(f"changing {kind.name} {name}"):
            return await self._api.patch(_served(kind), namespace, name, change)

    async def delete(self, live: Document) -> None:
        """Delete an object; Kubernetes deletes what it owns."""
        with self._explained(_action_text("deleting", live)):
            resource = await self._resource(live)
            await self._api.delete(
                resource, self._namespace_for(resource, live), name_of(live), get_str(live, "metadata", "uid")
            )

    async def pods(self, service: Document) -> Sequence[Document]:
        """Return the pods of a service, the oldest first."""
        selector = f"{SERVICE_LABEL}={trunc63(name_of(service))}"
        with self._explained(f"listing the pods of {name_of(service)}"):
            pods, _ = await self._api.list(ServedResource(PODS, "v1"), selector, namespace_of(service))
        return sorted(pods, key=lambda pod: (get_str(pod, "metadata", "creationTimestamp"), name_of(pod)))

    async def events(self, objects: Sequence[Document]) -> Sequence[Document]:
        """Return the Events of some objects, the oldest first."""
        keys = [(get_str(item, "metadata", "namespace"), get_str(item, "metadata", "uid")) for item in objects]
        with self._explained("listing events"):
            lists = await gather_all(
                *(self._api.list(EVENTS, "", space, f"involvedObject.uid={uid}") for space, uid in keys)
            )
        return sorted((event for events, _ in lists for event in events), key=_time)

    async def progress(self, model: Document) -> Sequence[NodeProgress]:
        """Return the progress of a model on each node; empty without permission for the agents' ConfigMaps."""
        key = model_status_key(name_of(model), namespace_of(model))
        try:
            config_maps, _ = await self._api.list(CONFIG_MAPS, f"{STATUS_LABEL}=true")
        except (ApiError, Unreachable):
            return []
        entries = {
            name_of(config_map): _entry(get_str(config_map, "data", key))
            for config_map in config_maps
            if key in get_mapping(config_map, "data")
        }
        return [
            NodeProgress(
                node,
                get_str(entry, "status"),
                get_int(entry, "progress", "completedBytes") or 0,
                get_int(entry, "progress", "totalBytes") or 0,
                get_str(entry, "progress", "phase"),
                get_str(entry, "reason"),
            )
            for node, entry in sorted(entries.items())
        ]

    async def facts(self) -> ClusterFacts:
        """Return the resources that services are planned with."""
        with self._explained("reading models and runtimes"):
            lists = await gather_all(*(self._api.list(ServedResource(resource, VERSION)) for resource in FACTS))
            groups = await self._api.groups()
        runtimes, cluster_runtimes, models, cluster_models, weights, accelerators = (
            tuple(documents) for documents, _ in lists
        )
        return ClusterFacts(
            runtimes=runtimes + cluster_runtimes,
            models=models + cluster_models,
            weights=weights,
            accelerators=accelerators,
            capabilities=frozenset(
                resource.capability for resource in CHILDREN if resource.capability and resource.group in groups
            ),
            settings=await self._settings(),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def _settings(self) -> FleetSettings:
        """Return the operator's settings if the user may read them, else the defaults."""
        try:
            return settings_from(FleetSettings(), await self._api.get(CONFIG_MAPS, NAMESPACE, CONFIG_MAP))
        except (ApiError, Unreachable):
            return FleetSettings()

    async def _resource(self, document: Document) -> ServedResource:
        kind = find_kind(kind_of(document)) if get_str(document, "apiVersion") == API_VERSION else None
        if kind is not None:
            return _served(kind)
        key = get_str(document, "apiVersion"), kind_of(document)
        if key not in self._kinds:
            self._kinds[key] = await self._api.kind(document)
        return self._kinds[key]

    def _namespace_for(self, resource: ServedResource, document: Document) -> str:
        return get_str(document, "metadata", "namespace") or self._namespace if resource.resource.namespaced else ""

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (ApiError, Unreachable) as error:
            raise explain_error(error, doing, self.place) from None


def _served(kind: Kind) -> ServedResource:
    return ServedResource(Resource(GROUP, (VERSION,), kind.name, kind.plural, kind.namespaced), VERSION)


def _action_text(action: str, document: Document) -> str:
    return f"{action} {kind_of(document)} {name_of(document)}"


def _time(event: Document) -> str:
    return (
        get_str(event, "lastTimestamp")
        or get_str(event, "eventTime")
        or get_str(event, "metadata", "creationTimestamp")
    )


def _entry(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return {}


_APPLY_PATCH = "application/apply-patch+yaml"
_TIMEOUT_SECONDS = 15.0
"""Shorter than the operator's timeout: a user is waiting."""


class UserApiClient(ApiClient):
    """Calls that only users make: with another field manager, and without force."""

    async def find(self, resource: ServedResource, namespace: str, name: str) -> Document | None:
        """Return one object; None if there is none. Unlike `get`, raises ApiError for an unknown kind."""
        try:
            found_object = await self._call("GET", resource.path(namespace, name))
        except ApiError as error:
            if error.code == 404 and error.reason == "NotFound":
                return None
            raise
        return {"apiVersion": resource.api_version, "kind": resource.resource.kind, **found_object}

    async def send(self, resource: ServedResource, document: Document, *, dry_run: bool, force: bool) -> Document:
        """Send a server-side apply."""
        path = resource.path(get_str(document, "metadata", "namespace"), name_of(document))
        query = {
            "fieldManager": self._field_manager,
            "force": "true" if force else "",
            "dryRun": "All" if dry_run else "",
        }
        return await self._call("PATCH", path, query, document, _APPLY_PATCH)

    async def groups(self) -> frozenset[str]:
        """Return the names of all API groups."""
        return frozenset(get_str(group, "name") for group in get_list(await self._call("GET", "/apis"), "groups"))

    async def kind(self, document: Document) -> ServedResource:
        """Return the resource type of a document of any kind. Raises ApiError 404 for an unknown kind."""
        group, _, version = get_str(document, "apiVersion").rpartition("/")
        listed = await self._call("GET", f"/apis/{group}/{version}" if group else f"/api/{version}")
        for item in get_list(listed, "resources"):
            if get_str(item, "kind") == kind_of(document) and "/" not in get_str(item, "name"):
                namespaced = get_mapping(item).get("namespaced") is True
                resource = Resource(group, (version,), kind_of(document), get_str(item, "name"), namespaced)
                return ServedResource(resource, version)
        raise ApiError(404, "", f"no kind {kind_of(document)}")


def connect_user(kubeconfig: str, context: str) -> UserApiClient:
    """Connect to the API server of a kubeconfig. Raises FailedPrecondition."""
    client = connect(kubeconfig, context, timeout=_TIMEOUT_SECONDS)
    return UserApiClient(client._client, client.server, client.namespace, field_manager=FIELD_MANAGER)


INSTALL = "headrace operator manifests | kubectl apply -f -"
_MAX_MESSAGE = 600
_CONFLICT = re.compile(r'conflicts? with "([^"]*)"')


def explain_error(error: ApiError | Unreachable, doing: str, server: str) -> HeadraceError:
    """Return the error for the user, with what to do. `doing`: `listing InferenceServices`."""
    if isinstance(error, Unreachable):
        return Unavailable(
            f"the API server {server} does not answer ({error}): check that it runs and that `kubectl cluster-info` gets"
            " through, or name another --context"
        )
    text = " ".join(error.message.split())[:_MAX_MESSAGE]
    if error.code == 401:
        return Unauthenticated(f"the API server {server} does not know you: log in to the cluster again")
    if error.code == 403 and " cannot " in text:
        return PermissionDenied(f"you may not do that ({text}): ask for that permission, or name another --context")
    if is_unknown_kind(error):
        return FailedPrecondition(f"{doing}: the cluster {server} does not have that kind; run `{INSTALL}`")
    if error.code == 404 and text.startswith("namespaces "):
        return FailedPrecondition(f"{doing}: {text}; create it first, or name another with -n")
    if error.code == 409 and is_conflict(error):
        return FailedPrecondition(
            f"{doing}: {text}; change the file to what is there, or take the fields over with --force-conflicts"
        )
    if error.code == 409:
        return Unavailable(f"{doing}: it was changed at the same time; try again")
    if error.code == 429 or error.code >= 500:
        return Unavailable(f"{doing}: the API server cannot do it now ({text or error.code}); try again later")
    if error.code == 403:
        return FailedPrecondition(f"{doing}: a policy of the cluster forbids it ({text}); change what is named there")
    return InvalidArgument(f"{doing}: the API server rejects it: {text}")


def is_unknown_kind(error: ApiError) -> bool:
    """Whether a 404 is about the kind, not about an object: then its reason is not NotFound."""
    return error.code == 404 and error.reason != "NotFound"


def is_conflict(error: ApiError) -> bool:
    """Whether an apply failed because other managers own the fields."""
    return error.code == 409 and bool(_CONFLICT.findall(error.message))


def conflicts_with_us(error: ApiError) -> bool:
    """Whether the only other manager is this command line: `rollout` changes what `apply` wrote."""
    return is_conflict(error) and set(_CONFLICT.findall(error.message)) == {FIELD_MANAGER}
