# SPDX-License-Identifier: Apache-2.0
"""Kubernetes objects as plain JSON: accessors for their fields, and the resource types an API server serves.

The accessors never raise: an object may come from a user and have any shape until its schema was checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Document = Mapping[str, Any]
"""An object, or a part of one, as decoded JSON."""

Key = tuple[str, str]
"""Namespace and name of an object; the namespace is "" for cluster-scoped objects."""

EMPTY: Document = {}
"""An empty part of a document. Never write into it."""


def get_mapping(document: Any, *path: str) -> Document:
    """Return the mapping at a path of field names; an empty one if there is none."""
    # Nearly all are dicts, and isinstance(..., Mapping) costs ten times as much.
    for name in path:
        document = document.get(name) if type(document) is dict or isinstance(document, Mapping) else None
    return document if type(document) is dict or isinstance(document, Mapping) else EMPTY


def get_str(document: Any, *path: str, default: str = "") -> str:
    """Return the string at a path of field names; `default` if there is none, or a value of another type."""
    value = get_mapping(document, *path[:-1]).get(path[-1])
    return value if isinstance(value, str) else default


def get_int(document: Any, *path: str) -> int | None:
    """Return the integer at a path of field names, if there is one."""
    value = get_mapping(document, *path[:-1]).get(path[-1])
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def get_list(document: Any, *path: str) -> list[Any]:
    """Return a copy of the list at a path of field names; an empty one if there is none."""
    value = get_mapping(document, *path[:-1]).get(path[-1])
    return list(value) if isinstance(value, list | tuple) else []


def kind_of(document: Document) -> str:
    """Return the kind: `InferenceService`, `Pod`."""
    return get_str(document, "kind")


def name_of(document: Document) -> str:
    """Return the object's name; "" if it has none."""
    return get_str(document, "metadata", "name")


def annotations_of(document: Document) -> dict[str, str]:
    """Return the annotations whose values are strings."""
    annotations = get_mapping(document, "metadata", "annotations")
    return {name: value for name, value in annotations.items() if isinstance(value, str)}


def labels_of(document: Document) -> dict[str, str]:
    """Return the labels whose values are strings."""
    labels = get_mapping(document, "metadata", "labels")
    return {name: value for name, value in labels.items() if isinstance(value, str)}


def controller_uid(document: Document) -> str:
    """Return the uid of the object that controls this one: its owner reference with `controller: true`."""
    for owner in get_list(document, "metadata", "ownerReferences"):
        if get_mapping(owner).get("controller") is True:
            return get_str(owner, "uid")
    return ""


def without_managed_fields(document: Document) -> Document:
    """Return the object without `metadata.managedFields`, which are longer than everything else in it."""
    metadata = get_mapping(document, "metadata")
    if "managedFields" not in metadata:
        return document
    return {**document, "metadata": {name: value for name, value in metadata.items() if name != "managedFields"}}


@dataclass(frozen=True)
class Resource:
    """A resource type, in any of the versions that we can read and write."""

    group: str
    """"" for the core group."""
    versions: tuple[str, ...]
    """Versions that have the fields we use, the preferred one first."""
    kind: str
    plural: str
    namespaced: bool = True
    capability: str = ""
    """The optional feature that a cluster has if it serves this type, such as `knative`."""
    selector: str = ""
    """Label selector of the objects to watch; "" for the watcher's default."""


@dataclass(frozen=True)
class ServedResource:
    """A resource type in a version that the API server serves."""

    resource: Resource
    version: str

    @property
    def api_version(self) -> str:
        """`apps/v1`, `v1`."""
        return f"{self.resource.group}/{self.version}" if self.resource.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the URL path of all objects, of those in one namespace, or of one object."""
        root = f"/apis/{self.resource.group}/{self.version}" if self.resource.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace and self.resource.namespaced else ""
        return "/".join(step for step in (f"{root}{scope}/{self.resource.plural}", name, subresource) if step)


PODS = Resource("", ("v1",), "Pod", "pods")
CONFIG_MAPS = ServedResource(Resource("", ("v1",), "ConfigMap", "configmaps"), "v1")
EVENTS = ServedResource(Resource("", ("v1",), "Event", "events"), "v1")
LEASES = ServedResource(Resource("coordination.k8s.io", ("v1",), "Lease", "leases"), "v1")


def served_resources(
    resources: Iterable[Resource], plurals: Mapping[str, frozenset[str]]
) -> dict[Resource, ServedResource]:
    """Choose the preferred served version of each resource type. Types that are not served are left out.

    plurals: the plural names that the server has under each API version, as `ApiClient.discover` returns them.
    """
    served: dict[Resource, ServedResource] = {}
    for resource in resources:
        for version in resource.versions:
            candidate = ServedResource(resource, version)
            if resource.plural in plurals.get(candidate.api_version, ()):
                served[resource] = candidate
                break
    return served
