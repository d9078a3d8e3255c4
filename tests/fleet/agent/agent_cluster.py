# SPDX-License-Identifier: Apache-2.0
"""An API server in memory, as far as the agent asks one: get, list, watch, merge patch, create. Writes are noted.

A stand-in for quick tests; `test_agent_platform.py` has the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.objects import Document, ServedResource

NODE = "worker-1"


class Cluster(ApiClient):
    """Objects by plural, namespace and name."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.wrote: list[tuple[str, Any]] = []
        self.down = False
        self.refused = 0
        """Calls while it was down."""
        self._version = 0
        self._watches: list[tuple[str, asyncio.Queue[tuple[str, Document]]]] = []
        self.set("nodes", {"metadata": {"name": NODE, "labels": {"zone": "a"}}})

    # For tests

    def set(self, plural: str, document: dict[str, Any]) -> None:
        self._version += 1
        metadata = {"uid": f"uid-{document['metadata']['name']}", **document["metadata"]}
        metadata["resourceVersion"] = str(self._version)
        key = (plural, metadata.get("namespace", ""), metadata["name"])
        kind = "MODIFIED" if key in self.objects else "ADDED"
        self.objects[key] = {**document, "metadata": metadata}
        self._notify(plural, kind, self.objects[key])

    def remove(self, plural: str, name: str, namespace: str = "") -> None:
        self._notify(plural, "DELETED", self.objects.pop((plural, namespace, name)))

    def model(self, name: str, uri: str, path: str, **storage: Any) -> None:
        spec = {"storage": {"storageUri": uri, "path": path, **storage}}
        self.set("clusterbasemodels", {"kind": "ClusterBaseModel", "metadata": {"name": name}, "spec": spec})

    def labels(self) -> dict[str, str]:
        result: dict[str, str] = self.objects["nodes", "", NODE]["metadata"].get("labels", {})
        return {name: value for name, value in result.items() if name.startswith("models.ome.io/")}

    def label(self, name: str) -> str:
        return self.labels().get(f"models.ome.io/clusterbasemodel.{name}", "")

    def entries(self) -> dict[str, Any]:
        import json

        result = self.objects.get(("configmaps", "headrace-system", NODE), {}).get("data", {})
        return {name.removeprefix("clusterbasemodel."): json.loads(value) for name, value in result.items()}

    # For the agent

    async def list(
        self, where: ServedResource, selector: str = "", namespace: str = "", fields: str = ""
    ) -> tuple[list[Document], str]:
        self._up()
        return [item for key, item in self.objects.items() if key[0] == where.resource.plural], str(self._version)

    async def watch(
        self, where: ServedResource, version: str, selector: str = "", namespace: str = ""
    ) -> AsyncIterator[tuple[str, Document]]:
        queue: asyncio.Queue[tuple[str, Document]] = asyncio.Queue()
        self._watches.append((where.resource.plural, queue))
        while True:
            yield await queue.get()

    async def get(self, where: ServedResource, namespace: str, name: str) -> Document | None:
        self._up()
        return self.objects.get((where.resource.plural, namespace, name))

    async def patch(
        self, where: ServedResource, namespace: str, name: str, change: Document, part: str = ""
    ) -> Document:
        self._up()
        self.wrote.append((where.resource.plural, change))
        key = (where.resource.plural, namespace, name)
        if key not in self.objects:
            raise ApiError(404, "NotFound", "it is not there")
        self.set(where.resource.plural, _merged(self.objects[key], change))
        return self.objects[key]

    async def create(self, where: ServedResource, namespace: str, document: Document) -> Document:
        self._up()
        self.wrote.append((where.resource.plural, document))
        self.set(where.resource.plural, dict(document))
        return self.objects[where.resource.plural, namespace, document["metadata"]["name"]]

    def _up(self) -> None:
        if self.down:
            self.refused += 1
            raise Unreachable("the test has cut the wire")

    def _notify(self, plural: str, kind: str, document: Document) -> None:
        for wanted, queue in self._watches:
            if wanted == plural:
                queue.put_nowait((kind, document))


def _merged(document: Any, change: Any) -> Any:
    if not isinstance(change, dict):
        return change
    created = dict(document) if isinstance(document, dict) else {}
    for name, value in change.items():
        if value is None:
            created.pop(name, None)
        else:
            created[name] = _merged(created.get(name), value)
    return created
