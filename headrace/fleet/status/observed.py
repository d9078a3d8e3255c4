# SPDX-License-Identifier: Apache-2.0
"""What was seen of a service: its objects and its pods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from headrace.fleet.names import COMPONENT_LABEL
from headrace.fleet.words import Document, items, kind_of, labels_of, name_of, text

KNATIVE = "serving.knative.dev"


@dataclass(frozen=True, eq=False)
class Observed:
    """The live objects that a plan asked for, and the pods that came of them."""

    objects: tuple[Document, ...] = ()
    """Of this service, as the API server has them."""
    pods: tuple[Document, ...] = ()
    """Of this service, all components; those that are being deleted do not count."""

    def live(self, planned: Document) -> Document | None:
        """The object that a planned one has become."""
        return self._objects.get(_key(planned))

    def pods_of(self, component: str) -> list[Document]:
        """The pods of a component, oldest first."""
        return self._pods.get(component, [])

    @cached_property
    def _objects(self) -> dict[tuple[str, str, str], Document]:
        return {_key(each): each for each in self.objects}

    @cached_property
    def _pods(self) -> dict[str, list[Document]]:
        found: dict[str, list[Document]] = {}
        for pod in sorted(self.pods, key=lambda pod: (text(pod, "metadata", "creationTimestamp"), name_of(pod))):
            if not text(pod, "metadata", "deletionTimestamp"):
                found.setdefault(labels_of(pod).get(COMPONENT_LABEL, ""), []).append(pod)
        return found


def group_of(document: Document) -> str:
    """`apps` of `apps/v1`; "" for the core."""
    group, slash, _ = text(document, "apiVersion").partition("/")
    return group if slash else ""


def condition_of(document: Document | None, kind: str) -> Document | None:
    """One condition of an object's status."""
    return next((each for each in records(document, "status", "conditions") if text(each, "type") == kind), None)


def records(document: Document | None, *path: str) -> list[Document]:
    """The mappings in a list."""
    return [each for each in items(document, *path) if isinstance(each, Mapping)]


def named(objects: Iterable[Document], *kinds: str) -> list[Document]:
    """The objects of some kinds; `Service` is that of the core."""
    return [each for each in objects if kind_of(each) in kinds and not (kind_of(each) == "Service" and group_of(each))]


def _key(document: Document) -> tuple[str, str, str]:
    return group_of(document), kind_of(document), name_of(document)
