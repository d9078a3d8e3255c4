# SPDX-License-Identifier: Apache-2.0
"""The fleet of this machine as the verbs see it: `client.contract.Fleet` over the daemon's UNIX socket.

Opened by `fleet.client.opening`. Beside the contract: `logs`, `scale` and `replicas`, which only this fleet has so far.
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
from headrace.fleet.local.settings import SOCKET, state_dir
from headrace.fleet.schema.fields import Kind
from headrace.fleet.words import (
    DEFAULT_NAMESPACE,
    ClusterFacts,
    Document,
    FleetSettings,
    cluster_facts,
    kind_of,
    name_of,
    namespace_of,
    text,
)

_SECONDS = 30.0
_LOOK_SECONDS = 0.5
_CLASSES = {
    each.code.name: each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, HeadraceError) and each is not HeadraceError
}


def open_local(folder: str = "") -> LocalFleet:
    """The fleet of this machine. Raises FailedPrecondition where none runs."""
    root = state_dir(folder)
    if not (root / SOCKET).exists():
        raise FailedPrecondition(
            "no fleet runs on this machine: start one by `headrace up`, or give --kube for the cluster of your kubeconfig"
        )
    return LocalFleet(root)


class LocalFleet:
    """See `contract.Fleet`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def place(self) -> str:
        """The daemon's folder."""
        return str(self._root)

    @property
    def namespace(self) -> str:
        """Always the same."""
        return DEFAULT_NAMESPACE

    @property
    def commands(self) -> Commands:
        """See `Fleet.commands`."""
        return Commands(
            logs="headrace logs {pod} -n {namespace}",
            controller="headrace up",
            events="headrace describe isvc {service} -n {namespace}",
            forward="",
            flag="",
        )

    async def list(self, kind: Kind, namespace: str = "", selector: str = "") -> Sequence[Document]:
        """See `Fleet.list`."""
        found: Sequence[Document] = await self._ask("list", kind=kind.name, namespace=namespace, selector=selector)
        return found

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """See `Fleet.get`."""
        found: Document | None = await self._ask("get", kind=kind.name, namespace=namespace, name=name)
        return found

    async def watch(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[tuple[str, Document]]:
        """See `Fleet.watch`: looks again and again."""
        seen: dict[tuple[str, str], Document] = {}
        while True:
            found = {_key(each): each for each in await self.list(kind, namespace, selector)}
            for key in [each for each in seen if each not in found]:
                yield "DELETED", seen.pop(key)
            for key, each in found.items():
                before, seen[key] = seen.get(key), each
                if before is None or _version(before) != _version(each):
                    yield "ADDED" if before is None else "MODIFIED", each
            await asyncio.sleep(_LOOK_SECONDS)

    async def live(self, document: Document) -> Document | None:
        """See `Fleet.live`."""
        found: Document | None = await self._ask(
            "get", kind=kind_of(document), namespace=namespace_of(document), name=name_of(document)
        )
        return found

    async def apply(self, document: Document, *, dry_run: bool = False, force: bool = False) -> Applied:
        """See `Fleet.apply`. Nobody else writes here, so that there is nothing to take over."""
        told = await self._ask("apply", document=document, dry_run=dry_run)
        return Applied(told["document"], told["change"])

    async def patch(self, kind: Kind, namespace: str, name: str, change: Document) -> Document:
        """See `Fleet.patch`."""
        made: Document = await self._ask("patch", kind=kind.name, namespace=namespace, name=name, change=change)
        return made

    async def delete(self, live: Document) -> None:
        """See `Fleet.delete`."""
        await self._ask("delete", document=live)

    async def pods(self, service: Document) -> Sequence[Document]:
        """See `Fleet.pods`."""
        found: Sequence[Document] = await self._ask(
            "pods", kind=kind_of(service), namespace=namespace_of(service), name=name_of(service)
        )
        return found

    async def events(self, objects: Sequence[Document]) -> Sequence[Document]:
        """See `Fleet.events`."""
        uids = [text(each, "metadata", "uid") for each in objects]
        found: Sequence[Document] = await self._ask("events", uids=[each for each in uids if each])
        return found

    async def progress(self, model: Document) -> Sequence[NodeProgress]:
        """See `Fleet.progress`."""
        told = await self._ask("progress", kind=kind_of(model), namespace=namespace_of(model), name=name_of(model))
        return [NodeProgress(**each) for each in told]

    async def facts(self) -> ClusterFacts:
        """See `Fleet.facts`."""
        told = await self._ask("facts")
        names = {each.name for each in fields(FleetSettings)}
        said = {name: value for name, value in told["settings"].items() if name in names}
        said["additional_domains"] = tuple(said.get("additional_domains", ()))
        made = cluster_facts(told["documents"], FleetSettings(**said))
        return ClusterFacts(
            made.runtimes, made.models, made.weights, made.accelerators, frozenset(told["capabilities"]), made.settings
        )

    async def close(self) -> None:
        """See `Fleet.close`: each call has a connection of its own."""

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
        """The last lines of the pods of a service, of a benchmark, or of a pod by its name: (pod, text).

        container: not of the main one, but of this. every: of all of them; then they are called pod/container.
        """
        asked = {"kind": kind, "pod": pod, "container": container, "every": every, "tail": tail, "previous": previous}
        told = await self._ask("logs", namespace=namespace, name=name, **asked)
        return [(each["pod"], each["text"]) for each in told]

    async def scale(self, namespace: str, name: str, component: str, replicas: int) -> Document:
        """Another number of replicas of a component. What was asked for, and what it is within its autoscaler's bounds."""
        told: Document = await self._ask(
            "scale", namespace=namespace, name=name, component=component, replicas=replicas
        )
        return told

    async def replicas(
        self, namespace: str, name: str, component: str, known: Mapping[str, int] | None = None
    ) -> Document:
        """`wanted` and `ready` of a component or workload. `known`: when they are others, or a while is over."""
        more = {} if known is None else {"known": known}
        told: Document = await self._ask("replicas", namespace=namespace, name=name, component=component, **more)
        return told

    async def woken(self, namespace: str, name: str, parts: Mapping[str, float]) -> None:
        """Tell of a cold start: seconds of each part."""
        await self._ask("woken", namespace=namespace, name=name, parts=parts)

    async def _ask(self, verb: str, **asked: Any) -> Any:
        body = json.dumps(asked, default=str).encode()
        head = f"POST /v1/{verb} HTTP/1.1\r\nHost: fleet\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer = None
        try:
            async with asyncio.timeout(_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(self._root / SOCKET))
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                answer = await reader.read()
        except (FileNotFoundError, ConnectionRefusedError):
            raise FailedPrecondition(
                "no fleet runs on this machine: start one by `headrace up`; what it had started before goes on meanwhile"
            ) from None
        except PermissionError:
            raise FailedPrecondition(
                f"the fleet in {self._root} is another user's: name yours by HEADRACE_STATE_DIR"
            ) from None
        except (OSError, TimeoutError):
            raise Unavailable(f"the fleet in {self._root} does not answer: look at `headrace up`") from None
        finally:
            if writer is not None:
                writer.close()
        return _told(answer)


def _told(answer: bytes) -> Any:
    top, _, body = answer.partition(b"\r\n\r\n")
    words = top.split(b" ", 2)
    try:
        told = json.loads(body)
        status = int(words[1])
    except (ValueError, IndexError):
        raise Unavailable("the fleet of this machine gave half an answer: try again") from None
    if status == 200:
        return told
    kind = _CLASSES.get(text(told, "code"), Internal)
    raise kind(text(told, "error") or "the fleet of this machine failed: look at the log of `headrace up`")


def _key(document: Document) -> tuple[str, str]:
    return text(document, "metadata", "namespace"), name_of(document)


def _version(document: Document) -> str:
    return text(document, "metadata", "resourceVersion")
