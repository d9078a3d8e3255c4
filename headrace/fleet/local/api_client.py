# SPDX-License-Identifier: Apache-2.0
"""The client of the local fleet: implements `client.contract.Fleet` over the daemon's UNIX socket.

In addition to the contract: `logs`, `scale`, `replicas` and `report_cold_start`, which only the local fleet has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from headrace.core import errors
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, Unavailable
from headrace.fleet.client.contract import Applied, Commands, NodeProgress
from headrace.fleet.documents import (
    DEFAULT_NAMESPACE,
    ClusterFacts,
    FleetSettings,
    cluster_facts,
    namespace_of,
    object_key,
    resource_version,
)
from headrace.fleet.local.settings import SOCKET, state_dir
from headrace.fleet.schema.fields import Kind
from headrace.platforms.kubernetes_client.objects import Document, get_str, kind_of, name_of

_TIMEOUT_SECONDS = 30.0
_POLL_SECONDS = 0.5
_ERROR_CLASSES = {
    error.code.name: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, HeadraceError) and error is not HeadraceError
}


def open_local(folder: str = "") -> LocalFleet:
    """Return the fleet of this machine. Raises FailedPrecondition if none runs."""
    root = state_dir(folder)
    if not (root / SOCKET).exists():
        raise FailedPrecondition(
            "no fleet runs on this machine: start one with `headrace up`, or use --kube for the cluster of your kubeconfig"
        )
    return LocalFleet(root)


class LocalFleet:
    """The fleet of this machine; each call opens a connection."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def place(self) -> str:
        """The daemon's state folder."""
        return str(self._root)

    @property
    def namespace(self) -> str:
        """The default namespace."""
        return DEFAULT_NAMESPACE

    @property
    def commands(self) -> Commands:
        """The commands to suggest to a user."""
        return Commands(
            logs="headrace logs {pod} -n {namespace}",
            controller="headrace up",
            events="headrace describe isvc {service} -n {namespace}",
            forward="",
            flag="",
        )

    async def list(self, kind: Kind, namespace: str = "", selector: str = "") -> Sequence[Document]:
        """Return the documents of a kind."""
        documents: Sequence[Document] = await self._call("list", kind=kind.name, namespace=namespace, selector=selector)
        return documents

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """Return one document; None if there is none."""
        document: Document | None = await self._call("get", kind=kind.name, namespace=namespace, name=name)
        return document

    async def watch(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[tuple[str, Document]]:
        """Yield changes of documents; polls the daemon."""
        seen: dict[tuple[str, str], Document] = {}
        while True:
            current = {object_key(document): document for document in await self.list(kind, namespace, selector)}
            for key in [document for document in seen if document not in current]:
                yield "DELETED", seen.pop(key)
            for key, document in current.items():
                before, seen[key] = seen.get(key), document
                if before is None or resource_version(before) != resource_version(document):
                    yield "ADDED" if before is None else "MODIFIED", document
            await asyncio.sleep(_POLL_SECONDS)

    async def live(self, document: Document) -> Document | None:
        """Return the live document of the same kind and name."""
        live: Document | None = await self._call(
            "get", kind=kind_of(document), namespace=namespace_of(document), name=name_of(document)
        )
        return live

    async def apply(self, document: Document, *, dry_run: bool = False, force: bool = False) -> Applied:
        """Apply a document. There are no other field managers here, so `force` has no effect."""
        answer = await self._call("apply", document=document, dry_run=dry_run)
        return Applied(answer["document"], answer["change"])

    async def patch(self, kind: Kind, namespace: str, name: str, change: Document) -> Document:
        """Change a document by a merge patch."""
        document: Document = await self._call("patch", kind=kind.name, namespace=namespace, name=name, change=change)
        return document

    async def delete(self, live: Document) -> None:
        """Delete a document."""
        await self._call("delete", document=live)

    async def pods(self, service: Document) -> Sequence[Document]:
        """Return the pods of a service or benchmark."""
        documents: Sequence[Document] = await self._call(
            "pods", kind=kind_of(service), namespace=namespace_of(service), name=name_of(service)
        )
        return documents

    async def events(self, objects: Sequence[Document]) -> Sequence[Document]:
        """Return the events about objects."""
        uids = [get_str(document, "metadata", "uid") for document in objects]
        documents: Sequence[Document] = await self._call("events", uids=[uid for uid in uids if uid])
        return documents

    async def progress(self, model: Document) -> Sequence[NodeProgress]:
        """Return the download progress of a model."""
        answer = await self._call("progress", kind=kind_of(model), namespace=namespace_of(model), name=name_of(model))
        return [NodeProgress(**item) for item in answer]

    async def facts(self) -> ClusterFacts:
        """Return what services are planned with."""
        answer = await self._call("facts")
        names = {field_.name for field_ in fields(FleetSettings)}
        settings = {name: value for name, value in answer["settings"].items() if name in names}
        settings["additional_domains"] = tuple(settings.get("additional_domains", ()))
        facts = cluster_facts(answer["documents"], FleetSettings(**settings))
        return ClusterFacts(
            facts.runtimes,
            facts.models,
            facts.weights,
            facts.accelerators,
            frozenset(answer["capabilities"]),
            facts.settings,
        )

    async def close(self) -> None:
        """Do nothing: each call has a connection of its own."""

    async def logs(
        self,
        namespace: str,
        name: str,
        *,
        kind: str = "",
        pod: str = "",
        container: str = "",
        every: bool = False,
        tail: int = 100,
        previous: bool = False,
    ) -> Sequence[tuple[str, str]]:
        """Return the last lines of the pods of a service, of a benchmark, or of a pod by name: (pod, text).

        container: instead of the main one. every: of all containers, which are named pod/container.
        """
        args = {"kind": kind, "pod": pod, "container": container, "every": every, "tail": tail, "previous": previous}
        answer = await self._call("logs", namespace=namespace, name=name, **args)
        return [(item["pod"], item["text"]) for item in answer]

    async def scale(self, namespace: str, name: str, component: str, replicas: int, reason: str = "") -> Document:
        """Set the replicas of a component. Return the requested number, and the one within its autoscaler's bounds.

        `reason`: why, for the events of the service; by default a user's request.
        """
        answer: Document = await self._call(
            "scale", namespace=namespace, name=name, component=component, replicas=replicas, reason=reason
        )
        return answer

    async def replicas(
        self, namespace: str, name: str, component: str, known: Mapping[str, int] | None = None
    ) -> Document:
        """Return `wanted` and `ready` of a component or workload. `known`: waits until they differ, or a timeout."""
        more = {} if known is None else {"known": known}
        answer: Document = await self._call("replicas", namespace=namespace, name=name, component=component, **more)
        return answer

    async def report_cold_start(self, namespace: str, name: str, parts: Mapping[str, float]) -> None:
        """Report a cold start: seconds of each part."""
        await self._call("woken", namespace=namespace, name=name, parts=parts)

    async def _call(self, verb: str, **args: Any) -> Any:
        body = json.dumps(args, default=str).encode()
        head = f"POST /v1/{verb} HTTP/1.1\r\nHost: fleet\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer = None
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(self._root / SOCKET))
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                answer = await reader.read()
        except (FileNotFoundError, ConnectionRefusedError):
            raise FailedPrecondition(
                "no fleet runs on this machine: start one with `headrace up`; services that it started keep running"
            ) from None
        except PermissionError:
            raise FailedPrecondition(
                f"the fleet in {self._root} belongs to another user: set HEADRACE_STATE_DIR to yours"
            ) from None
        except (OSError, TimeoutError):
            raise Unavailable(f"the fleet in {self._root} does not answer: check `headrace up`") from None
        finally:
            if writer is not None:
                writer.close()
        return _parse_answer(answer)


def _parse_answer(answer: bytes) -> Any:
    head, _, body = answer.partition(b"\r\n\r\n")
    parts = head.split(b" ", 2)
    try:
        content = json.loads(body)
        status = int(parts[1])
    except (ValueError, IndexError):
        raise Unavailable("the fleet of this machine sent an incomplete answer: try again") from None
    if status == 200:
        return content
    error_class = _ERROR_CLASSES.get(get_str(content, "code"), Internal)
    raise error_class(get_str(content, "error") or "the fleet of this machine failed: see the log of `headrace up`")
