# SPDX-License-Identifier: Apache-2.0
"""A fleet on Kubernetes: the `Fleet` of the verbs, from an API server, with the rights of whoever has the kubeconfig."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headrace.fleet.agent.marks import STATUS_LABEL
from headrace.fleet.client.contract import Applied, Commands, NodeProgress
from headrace.fleet.client.faults import conflicts_with_us, fault
from headrace.fleet.client.tasks import closing, together
from headrace.fleet.client.user_api import UserApi, connect_user
from headrace.fleet.cluster.api import Refused, Unreachable
from headrace.fleet.cluster.configuration import CONFIG_MAP, configured
from headrace.fleet.cluster.differing import digest
from headrace.fleet.cluster.resources import CHILDREN, EVENTS, FACTS, PODS, SETTINGS, Resource, Served
from headrace.fleet.names import API_VERSION, GROUP, NAMESPACE, SERVICE_LABEL, VERSION, model_status_key, trunc63
from headrace.fleet.schema.fields import Kind
from headrace.fleet.schema.kinds import find_kind
from headrace.fleet.words import (
    DEFAULT_NAMESPACE,
    ClusterFacts,
    Document,
    FleetSettings,
    kind_of,
    name_of,
    namespace_of,
    part,
    text,
    whole,
)

_EXPIRED = 410


def open_cluster(kubeconfig: str = "", context: str = "") -> KubernetesFleet:
    """The fleet of a kubeconfig. Raises FailedPrecondition; asks nothing of the cluster yet."""
    return KubernetesFleet(connect_user(kubeconfig, context))


class KubernetesFleet:
    """See `contract.Fleet`."""

    def __init__(self, api: UserApi) -> None:
        self._api = api
        self._namespace = api.namespace or DEFAULT_NAMESPACE
        self._kinds: dict[tuple[str, str], Served] = {}

    @property
    def place(self) -> str:
        """The API server's URL."""
        return self._api.server

    @property
    def namespace(self) -> str:
        """Of the kubeconfig's context."""
        return self._namespace

    @property
    def commands(self) -> Commands:
        """Those of kubectl."""
        return Commands()

    async def list(self, kind: Kind, namespace: str = "", selector: str = "") -> Sequence[Document]:
        """See `Fleet.list`."""
        with self._told(f"listing {kind.plural}"):
            found, _ = await self._api.list(_served(kind), selector, namespace)
        return sorted(found, key=lambda each: (text(each, "metadata", "namespace"), name_of(each)))

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """See `Fleet.get`."""
        with self._told(f"looking at {kind.name} {name}"):
            return await self._api.found(_served(kind), namespace, name)

    async def watch(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[tuple[str, Document]]:
        """See `Fleet.watch`."""
        where, seen = _served(kind), dict[tuple[str, str], Document]()
        while True:
            with self._told(f"watching {kind.plural}"):
                found, version = await self._api.list(where, selector, namespace)
            listed = {_key(each): each for each in found}
            for key in [each for each in seen if each not in listed]:
                yield "DELETED", seen.pop(key)
            for key, each in sorted(listed.items()):
                old, seen[key] = seen.get(key), each
                if old is None or _version(old) != _version(each):
                    yield "ADDED" if old is None else "MODIFIED", each
            async with closing(self._changes(kind, version, selector, namespace)) as changes:
                async for change, each in changes:
                    if change == "DELETED":
                        seen.pop(_key(each), None)
                    else:
                        seen[_key(each)] = each
                    yield change, each

    async def _changes(
        self, kind: Kind, version: str, selector: str, namespace: str
    ) -> AsyncIterator[tuple[str, Document]]:
        """Changes since a version, until the API server has forgotten what came before it."""
        while True:
            try:
                async with closing(self._api.watch(_served(kind), version, selector, namespace)) as changes:
                    async for change, each in changes:
                        version = _version(each) or version
                        if change != "BOOKMARK":
                            yield change, {"apiVersion": API_VERSION, "kind": kind.name, **each}
            except Refused as refused:
                if refused.code == _EXPIRED:
                    return
                raise fault(refused, f"watching {kind.plural}", self.place) from None
            except Unreachable as error:
                raise fault(error, f"watching {kind.plural}", self.place) from None

    async def live(self, document: Document) -> Document | None:
        """See `Fleet.live`."""
        with self._told(_doing("looking at", document)):
            where = await self._where(document)
            return await self._api.found(where, self._space(where, document), name_of(document))

    async def apply(self, document: Document, *, dry_run: bool = False, force: bool = False) -> Applied:
        """See `Fleet.apply`: server-side apply."""
        with self._told(_doing("applying", document)):
            where = await self._where(document)
            space = self._space(where, document)
            metadata = {**part(document, "metadata"), **({"namespace": space} if space else {})}
            sent = {**document, "metadata": metadata}
            before = await self._api.found(where, space, name_of(document))
            try:
                made = await self._api.send(where, sent, dry_run=dry_run, force=force)
            except Refused as refused:
                if not conflicts_with_us(refused):
                    raise
                made = await self._api.send(where, sent, dry_run=dry_run, force=True)
        if before is None:
            return Applied(made, "created")
        # Its version tells less: who set a field is noted with a time, and a dry run makes no new one.
        return Applied(made, "unchanged" if digest(before) == digest(made) else "configured")

    async def patch(self, kind: Kind, namespace: str, name: str, change: Document) -> Document:
        """See `Fleet.patch`."""
        with self._told(f"changing {kind.name} {name}"):
            return await self._api.change(_served(kind), namespace, name, change)

    async def delete(self, live: Document) -> None:
        """See `Fleet.delete`. What it owns is removed by Kubernetes."""
        with self._told(_doing("deleting", live)):
            where = await self._where(live)
            await self._api.delete(where, self._space(where, live), name_of(live), text(live, "metadata", "uid"))

    async def pods(self, service: Document) -> Sequence[Document]:
        """See `Fleet.pods`."""
        selector = f"{SERVICE_LABEL}={trunc63(name_of(service))}"
        with self._told(f"listing the pods of {name_of(service)}"):
            found, _ = await self._api.list(Served(PODS, "v1"), selector, namespace_of(service))
        return sorted(found, key=lambda each: (text(each, "metadata", "creationTimestamp"), name_of(each)))

    async def events(self, objects: Sequence[Document]) -> Sequence[Document]:
        """See `Fleet.events`."""
        asked = [(text(each, "metadata", "namespace"), text(each, "metadata", "uid")) for each in objects]
        with self._told("listing events"):
            found = await together(
                *(self._api.list(EVENTS, "", space, f"involvedObject.uid={uid}") for space, uid in asked)
            )
        return sorted((each for some, _ in found for each in some), key=_time)

    async def progress(self, model: Document) -> Sequence[NodeProgress]:
        """See `Fleet.progress`. Who may not read the agents' ConfigMaps is told nothing."""
        key = model_status_key(name_of(model), namespace_of(model))
        try:
            found, _ = await self._api.list(Served(SETTINGS, "v1"), f"{STATUS_LABEL}=true")
        except (Refused, Unreachable):
            return []
        told = [(name_of(each), _entry(text(each, "data", key))) for each in found if key in part(each, "data")]
        return [
            NodeProgress(
                node,
                text(entry, "status"),
                whole(entry, "progress", "completedBytes") or 0,
                whole(entry, "progress", "totalBytes") or 0,
                text(entry, "progress", "phase"),
            )
            for node, entry in sorted(told, key=lambda each: each[0])
        ]

    async def facts(self) -> ClusterFacts:
        """See `Fleet.facts`."""
        with self._told("reading models and runtimes"):
            listed = await together(*(self._api.list(Served(each, VERSION)) for each in FACTS))
            groups = await self._api.groups()
        runtimes, cluster_runtimes, models, cluster_models, weights, accelerators = (
            tuple(found) for found, _ in listed
        )
        return ClusterFacts(
            runtimes=runtimes + cluster_runtimes,
            models=models + cluster_models,
            weights=weights,
            accelerators=accelerators,
            capabilities=frozenset(each.capability for each in CHILDREN if each.capability and each.group in groups),
            settings=await self._settings(),
        )

    async def close(self) -> None:
        """See `Fleet.close`."""
        await self._api.close()

    async def _settings(self) -> FleetSettings:
        """What the operator was told, where the user may read it."""
        try:
            return configured(FleetSettings(), await self._api.get(Served(SETTINGS, "v1"), NAMESPACE, CONFIG_MAP))
        except (Refused, Unreachable):
            return FleetSettings()

    async def _where(self, document: Document) -> Served:
        kind = find_kind(kind_of(document)) if text(document, "apiVersion") == API_VERSION else None
        if kind is not None:
            return _served(kind)
        key = text(document, "apiVersion"), kind_of(document)
        if key not in self._kinds:
            self._kinds[key] = await self._api.kind(document)
        return self._kinds[key]

    def _space(self, where: Served, document: Document) -> str:
        return text(document, "metadata", "namespace") or self._namespace if where.resource.namespaced else ""

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (Refused, Unreachable) as error:
            raise fault(error, doing, self.place) from None


def _served(kind: Kind) -> Served:
    return Served(Resource(GROUP, (VERSION,), kind.name, kind.plural, kind.namespaced), VERSION)


def _doing(deed: str, document: Document) -> str:
    return f"{deed} {kind_of(document)} {name_of(document)}"


def _key(document: Document) -> tuple[str, str]:
    return text(document, "metadata", "namespace"), name_of(document)


def _version(document: Document) -> str:
    return text(document, "metadata", "resourceVersion")


def _time(event: Document) -> str:
    return text(event, "lastTimestamp") or text(event, "eventTime") or text(event, "metadata", "creationTimestamp")


def _entry(said: str) -> Any:
    try:
        return json.loads(said)
    except ValueError:
        return {}
