# SPDX-License-Identifier: Apache-2.0
"""Makes the objects of one service as they were planned, and removes those that no longer are.

Called by `reconciling`. Sends what differs and nothing else: an object that was edited by hand is put right, one that is as
it should be is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from headrace.fleet.cluster.api import Api, Refused
from headrace.fleet.cluster.differing import differs, digest
from headrace.fleet.cluster.resources import Resource, Served, child_of
from headrace.fleet.cluster.view import View, owner_uid
from headrace.fleet.names import NO_ROLLOUT
from headrace.fleet.planning import Rise
from headrace.fleet.planning.site import REVISION_LABEL
from headrace.fleet.status.observed import group_of
from headrace.fleet.words import Document, Problem, annotations_of, kind_of, labels_of, name_of, text, whole

log = logging.getLogger("headrace.operator")

_LONGEST = 400
_MOST = 20_000
_Name = tuple[str, str, str]


class Applier:
    """Writes objects. Remembers what the API server made of them, where it has its own way to write a value."""

    def __init__(self, api: Api, view: View) -> None:
        self._api = api
        self._view = view
        self._settled: dict[str, tuple[str, str]] = {}
        """By uid: digests of what was sent, and of what came of it."""

    async def apply(self, service: Document, objects: Sequence[Document]) -> list[Problem]:
        """All objects of a service, and the end of the others. What the API server refused, if anything."""
        live = {_name(each): each for each in self._view.owned(service)}
        problems: list[Problem] = []
        for each in objects:
            try:
                problem = await self._one(service, each, live.get(_name(each)))
            except Refused as refused:
                if refused.code in (409, 429) or refused.code >= 500:
                    raise  # not our object's fault, and over soon
                log.warning("%s %s of %s is refused: %s", kind_of(each), name_of(each), name_of(service), refused)
                problem = _refusal(each, refused)
            if problem is not None:
                problems.append(problem)
        if not problems:
            await self._prune(live, {_name(each) for each in objects})
        return problems

    async def rise(self, service: Document, rise: Rise) -> None:
        """Wake what may not sleep any more. Before its front goes: it is known by that. Raises Refused, Unreachable."""
        resource = child_of({"apiVersion": rise.api_version, "kind": rise.kind})
        where = self._view.where(resource) if resource is not None else None
        if where is not None:
            namespace = text(service, "metadata", "namespace")
            await self._api.patch(where, namespace, rise.name, {"spec": {"replicas": rise.replicas}}, "scale")

    async def _one(self, service: Document, wanted: Document, live: Document | None) -> Problem | None:
        resource = child_of(wanted)
        where = self._view.where(resource) if resource is not None else None
        if resource is None or where is None:
            said = f"this cluster has no {kind_of(wanted)} of {text(wanted, 'apiVersion')}"
            return Problem("", said, "install what brings it, or change the service so that it needs none")
        if live is None:
            # What has lost its label, or was made a moment ago, is not among those that are followed.
            live = await self._api.get(where, text(wanted, "metadata", "namespace"), name_of(wanted))
            if live is not None and owner_uid(live) != text(service, "metadata", "uid"):
                return _taken(wanted)
        if live is not None and (self._as_wanted(wanted, live) or _kept(service, wanted, live)):
            return None
        await self._send(resource, where, wanted)
        return None

    def _as_wanted(self, wanted: Document, live: Document) -> bool:
        if self._settled.get(text(live, "metadata", "uid")) == (digest(wanted), digest(live)):
            return True
        return not differs(wanted, live)

    async def _send(self, resource: Resource, where: Served, wanted: Document) -> None:
        made = await self._api.apply(where, wanted)
        made = {"apiVersion": where.api_version, "kind": resource.kind, **made}
        self._view.put(resource, made)
        if differs(wanted, made):
            if len(self._settled) >= _MOST:
                self._settled.clear()
            self._settled[text(made, "metadata", "uid")] = digest(wanted), digest(made)

    async def _prune(self, live: Mapping[_Name, Document], wanted: set[_Name]) -> None:
        for name, each in live.items():
            resource = child_of(each)
            where = self._view.where(resource) if resource is not None else None
            if name in wanted or where is None or text(each, "metadata", "deletionTimestamp"):
                continue
            log.info("removing %s %s/%s: no longer planned", name[1], text(each, "metadata", "namespace"), name[2])
            await self._api.delete(
                where, text(each, "metadata", "namespace"), name_of(each), text(each, "metadata", "uid")
            )


def _name(document: Document) -> _Name:
    return group_of(document), kind_of(document), name_of(document)


def _kept(service: Document, wanted: Document, live: Document) -> bool:
    """Whether pods stay as they are because the user asked for that, and the service itself has not changed."""
    if annotations_of(service).get(NO_ROLLOUT) != "true":
        return False
    seen, generation = whole(service, "status", "observedGeneration"), whole(service, "metadata", "generation")
    old, new = labels_of(live).get(REVISION_LABEL), labels_of(wanted).get(REVISION_LABEL)
    return seen == generation and old is not None and old != new


def _taken(wanted: Document) -> Problem:
    kind, name = kind_of(wanted), name_of(wanted)
    said = f"there is a {kind} {name} already, and it is not this service's"
    return Problem("metadata.name", said, f"give the service another name, or delete that {kind}")


def _refusal(document: Document, refused: Refused) -> Problem:
    said = " ".join(refused.said.split())[:_LONGEST]
    if refused.code == 403 and " cannot " in said:
        fix = "give the operator that right: `headrace operator manifests` has the roles it needs"
    elif refused.code == 403:
        fix = "change what a quota or a rule of the cluster forbids, or have it allowed"
    else:
        fix = "change the field named there, in the service or in its runtime"
    return Problem("", f"the API server refuses {kind_of(document)} {name_of(document)}: {said}", fix)
