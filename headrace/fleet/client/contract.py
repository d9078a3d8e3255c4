# SPDX-License-Identifier: Apache-2.0
"""The `Fleet` protocol that the commands use, whether the fleet runs on Kubernetes or on this machine, and its kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, cast

from headrace.core.errors import InvalidArgument
from headrace.core.names import nearest
from headrace.fleet.documents import ClusterFacts
from headrace.fleet.names import GROUP, SERVICE
from headrace.fleet.schema.fields import Kind
from headrace.fleet.schema.kinds import KINDS, find_kind
from headrace.platforms.kubernetes_client.objects import Document

Change = Literal["created", "configured", "unchanged"]
FIELD_MANAGER = "headrace-cli"
"""The field manager of the commands."""


@dataclass(frozen=True)
class Applied:
    """An applied document as the fleet has it now, and whether it changed."""

    document: Document
    change: Change


@dataclass(frozen=True)
class NodeProgress:
    """Progress of a model on one node."""

    node: str
    state: str
    """`Updating`, `Ready`, `Failed`."""
    done_bytes: int = 0
    total_bytes: int = 0
    phase: str = ""
    reason: str = ""
    """Why the download failed."""


@dataclass(frozen=True)
class Commands:
    """Shell commands of this kind of fleet, for the advice of `describe`."""

    logs: str = "kubectl -n {namespace} logs {pod} -c {container}"
    previous: str = " --previous"
    """Added to `logs` for the previous container."""
    controller: str = "kubectl -n headrace-system get pods"
    """Shows whether the controller runs."""
    events: str = "kubectl -n {namespace} get events"
    forward: str = "kubectl -n {namespace} port-forward service/{service} 8080:{port}"
    """Makes a service reachable from this machine; "" where it already is."""
    flag: str = " --kube"
    """Added to `headrace` commands."""


class Fleet(Protocol):
    """Access to the documents of a fleet."""

    @property
    def place(self) -> str:
        """Where the fleet runs, for messages: `https://10.0.0.1:6443`."""

    @property
    def namespace(self) -> str:
        """Default namespace of documents."""

    @property
    def commands(self) -> Commands:
        """Shell commands for the advice of `describe`."""

    async def list(self, kind: Kind, namespace: str = "", selector: str = "") -> Sequence[Document]:
        """Return the documents of a kind, ordered by namespace and name. `selector`: labels, as in kubectl."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """Return one document; None if there is none."""

    def watch(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[tuple[str, Document]]:
        """Yield existing documents as ADDED, then every change: (ADDED | MODIFIED | DELETED, document). Never ends."""

    async def live(self, document: Document) -> Document | None:
        """Return the live object of a document of any kind; None if there is none."""

    async def apply(self, document: Document, *, dry_run: bool = False, force: bool = False) -> Applied:
        """Apply a document. `force`: take over fields of other managers instead of raising FailedPrecondition."""

    async def patch(self, kind: Kind, namespace: str, name: str, change: Document) -> Document:
        """Send a merge patch (null removes) and return the document."""

    async def delete(self, live: Document) -> None:
        """Delete that object, by its uid, and what it owns. An object that is already gone is not an error."""

    async def pods(self, service: Document) -> Sequence[Document]:
        """Return the pods of a service, or local replicas in the form of pods."""

    async def events(self, objects: Sequence[Document]) -> Sequence[Document]:
        """Return the Events of some objects, the oldest first."""

    async def progress(self, model: Document) -> Sequence[NodeProgress]:
        """Return the progress of a model on each node. Empty if no agent reports."""

    async def facts(self) -> ClusterFacts:
        """Return the resources that services are planned with. Raises PermissionDenied."""

    async def close(self) -> None:
        """Close the connections."""


_KIND_GROUPS = {
    "services": (SERVICE,),
    "runtimes": ("ServingRuntime", "ClusterServingRuntime"),
    "models": ("BaseModel", "ClusterBaseModel"),
    "weights": ("FineTunedWeight",),
    "accelerators": ("AcceleratorClass",),
    "benchmarks": ("BenchmarkJob",),
}
"""Names for kinds that are listed together."""

SHOWN_KINDS = ("isvc", "runtimes", "models", "weights", "accelerators", "benchmarkjobs")
"""Kinds to show in help and messages."""


def find_kinds(word: str) -> tuple[Kind, ...]:
    """Return the kinds of a name such as `isvc`, `models` or `inferenceservices.ome.io`; none if it names no kind."""
    requested = word.lower().removesuffix(f".{GROUP}")
    group = _KIND_GROUPS.get(requested) or _KIND_GROUPS.get(f"{requested}s")
    if group is not None:
        return tuple(kind_named(name) for name in group)
    for kind in KINDS:
        if requested in (kind.plural, kind.name.lower()) or requested.removesuffix("s") in kind.short:
            return (kind,)
    return ()


def kinds_named(word: str) -> tuple[Kind, ...]:
    """Return the kinds of a name (`find_kinds`). Raises InvalidArgument if it names no kind."""
    kinds = find_kinds(word)
    if kinds:
        return kinds
    requested = word.lower().removesuffix(f".{GROUP}")
    names = [*SHOWN_KINDS, *_KIND_GROUPS, *(kind.plural for kind in KINDS)]
    closest = nearest(requested, names, 0.7)
    meant = f"; did you mean {closest}?" if closest else ""
    raise InvalidArgument(f"unknown kind {word[:64]!a}: use one of {', '.join(SHOWN_KINDS)}{meant}")


def kind_named(name: str) -> Kind:
    """Return a kind by its own name. Raises InvalidArgument."""
    kind = find_kind(name)
    if kind is None:
        raise InvalidArgument(f"{name[:64]!a} is not a kind of {GROUP}")
    return kind


def parse_targets(words: list[str], *, named: bool = False) -> tuple[tuple[Kind, ...], list[str]]:
    """Parse `isvc`, `isvc a b` or `isvc/a` into kinds and names. Raises InvalidArgument.

    `named`: a single word that is not a kind is the name of a service. With several words, the first must be a kind: a
    mistyped kind must not delete a service of the other word's name.
    """
    if not words:
        return kinds_named("isvc"), []
    if named and len(words) == 1 and "/" not in words[0] and not find_kinds(words[0]):
        return kinds_named("isvc"), words
    if all("/" in word for word in words):
        pairs = [word.partition("/") for word in words]
        if len({kinds_named(kind) for kind, _, _ in pairs}) > 1:
            raise InvalidArgument("name one kind at a time")
        names = [name for _, _, name in pairs]
        if not all(names):
            raise InvalidArgument("write KIND/NAME, such as isvc/llama")
        return kinds_named(pairs[0][0]), names
    return kinds_named(words[0]), words[1:]


T = TypeVar("T")


async def gather_all(*calls: Awaitable[T]) -> list[T]:
    """Run calls concurrently and wait for all of them, then raise the first error: none may outlive the connections."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return [result for result in done if not isinstance(result, BaseException)]


def closing(items: AsyncIterator[T]) -> aclosing[AsyncGenerator[T, None]]:
    """Return a context manager that closes an asynchronous generator on exit."""
    return aclosing(cast("AsyncGenerator[T, None]", items))
