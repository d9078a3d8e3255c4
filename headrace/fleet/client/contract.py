# SPDX-License-Identifier: Apache-2.0
"""What the verbs need of a fleet, wherever it runs. Documents go in and come out as JSON has them.

Every call raises errors of `headrace.core.errors`, each one line that says what to do. Names and namespaces are checked by
the fleet itself. A fleet belongs to the event loop that it is first used in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headrace.fleet.schema.fields import Kind
from headrace.fleet.words import ClusterFacts, Document

Change = Literal["created", "configured", "unchanged"]
MANAGER = "headrace-cli"
"""Whose the fields are that somebody wrote with a verb of ours."""


@dataclass(frozen=True)
class Applied:
    """A document as the fleet has it now, and whether that is new."""

    document: Document
    change: Change


@dataclass(frozen=True)
class NodeProgress:
    """How far a model is on one node."""

    node: str
    state: str
    """`Updating`, `Ready`, `Failed`."""
    done_bytes: int = 0
    total_bytes: int = 0
    phase: str = ""


@dataclass(frozen=True)
class Commands:
    """What to type at this fleet for what the verbs have no word for: the advice of `describe` is made of these."""

    logs: str = "kubectl -n {namespace} logs {pod} -c {container}"
    previous: str = " --previous"
    """Added to `logs`, for the run before."""
    controller: str = "kubectl -n headrace-system get pods"
    """Shows whether somebody looks at services."""
    events: str = "kubectl -n {namespace} get events"
    forward: str = "kubectl -n {namespace} port-forward service/{service} 8080:{port}"
    """Makes a service answer on this machine; "" where it does."""
    flag: str = " --kube"
    """Added to our own verbs."""


class Fleet(Protocol):
    """Services, and what they are made with."""

    @property
    def place(self) -> str:
        """Where it runs, for messages: `https://10.0.0.1:6443`."""

    @property
    def namespace(self) -> str:
        """Where documents belong that name no namespace."""

    @property
    def commands(self) -> Commands:
        """What to type for the rest."""

    async def list(self, kind: Kind, namespace: str = "", selector: str = "") -> Sequence[Document]:
        """All of a kind, by namespace and name. Without a namespace, of all. `selector`: labels, as kubectl takes them."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """One of them; None if there is none."""

    def watch(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[tuple[str, Document]]:
        """Those that are there, as ADDED, and then every change: (ADDED | MODIFIED | DELETED, document). Does not end."""

    async def live(self, document: Document) -> Document | None:
        """What a document of a file has become, of any kind that the fleet takes; None if there is none."""

    async def apply(self, document: Document, *, dry_run: bool = False, force: bool = False) -> Applied:
        """Make it so. `force`: take over fields that somebody else has set otherwise, in place of FailedPrecondition."""

    async def patch(self, kind: Kind, namespace: str, name: str, change: Document) -> Document:
        """A merge patch: null removes."""

    async def delete(self, live: Document) -> None:
        """Ask for the end of that very object, and of all that was made for it; that it is gone is fine."""

    async def pods(self, service: Document) -> Sequence[Document]:
        """The pods of a service, or what stands for them here: with a pod's metadata, spec.nodeName and status."""

    async def events(self, objects: Sequence[Document]) -> Sequence[Document]:
        """What was told about some objects, the oldest first."""

    async def progress(self, model: Document) -> Sequence[NodeProgress]:
        """Where a model is, and how far its download. Empty where nobody tells."""

    async def facts(self) -> ClusterFacts:
        """What services are planned with. Raises PermissionDenied where the user may not see all of it."""

    async def close(self) -> None:
        """Let go of it."""
