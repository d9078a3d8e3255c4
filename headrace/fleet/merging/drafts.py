# SPDX-License-Identifier: Apache-2.0
"""A pod spec in the making: the merged pod, to which the model, the accelerator and the platform add.

Used by `models`, `accelerating` and `components`. Copies what it changes, so that runtimes and services stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from headrace.fleet.words import Document, items, part, text


class PodDraft:
    """One pod. `main` is the container that serves."""

    def __init__(self, pod: Document, main_name: str, service: Document) -> None:
        self.pod: dict[str, Any] = dict(pod)
        containers = [each for each in items(pod, "containers") if isinstance(each, dict)]
        place = next((number for number, each in enumerate(containers) if each.get("name") == main_name), 0)
        self.main: dict[str, Any] | None = None
        if containers:
            self.main = containers[place] = dict(containers[place])
        self.pod["containers"] = containers
        self.service = service
        """What the service itself says of this pod."""
        mine = [each for each in items(service, "containers") if text(each, "name") == main_name]
        self.service_main: Document = mine[0] if mine else {}
        self.accelerated: list[str] = []
        """Fields that an accelerator class decided."""

    @property
    def main_path(self) -> str:
        """Where the main container's fields are found among origins."""
        return f"containers[{text(self.main, 'name')}]"

    def says(self, *path: str) -> bool:
        """Whether the service itself says something of a field of the pod."""
        return bool(part(self.service, *path[:-1]).get(path[-1]))

    def variable(self, name: str) -> Document | None:
        """A variable of the main container."""
        return next((each for each in items(self.main, "env") if text(each, "name") == name), None)

    def service_variables(self) -> Collection[str]:
        """Names of the variables that the service itself sets."""
        return {text(each, "name") for each in items(self.service_main, "env")}

    def set_variable(self, name: str, value: str, *, keep: bool) -> bool:
        """Give the main container a variable; with `keep`, only if it has none of that name. Whether it was set."""
        if self.main is None or (keep and self.variable(name) is not None):
            return False
        made, env = {"name": name, "value": value}, items(self.main, "env")
        places = [number for number, each in enumerate(env) if text(each, "name") == name]
        if places:
            env[places[0]] = made
        else:
            env.append(made)
        self.main["env"] = env
        return True

    def add_volume(self, volume: Document) -> None:
        """Add a volume, unless one of its name is there."""
        volumes = items(self.pod, "volumes")
        if all(text(each, "name") != volume["name"] for each in volumes):
            self.pod["volumes"] = [*volumes, volume]

    def add_mount(self, mount: Document) -> None:
        """Mount a volume in the main container, unless something is mounted there."""
        if self.main is None:
            return
        mounts = items(self.main, "volumeMounts")
        if all(text(each, "mountPath") != mount["mountPath"] for each in mounts):
            self.main["volumeMounts"] = [*mounts, mount]

    def select_nodes(self, labels: Document) -> None:
        """Ask for labels of nodes, over what is asked for already."""
        if labels:
            self.pod["nodeSelector"] = {**part(self.pod, "nodeSelector"), **labels}

    def prefer_nodes(self, key: str, value: str) -> None:
        """Rather go to nodes with a label."""
        term = {
            "weight": 100,
            "preference": {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]},
        }
        affinity, node = part(self.pod, "affinity"), part(self.pod, "affinity", "nodeAffinity")
        field = "preferredDuringSchedulingIgnoredDuringExecution"
        self.pod["affinity"] = {**affinity, "nodeAffinity": {**node, field: [*items(node, field), term]}}

    def accelerators(self, names: Collection[str]) -> int:
        """How many accelerators the main container asks for."""
        resources = part(self.main, "resources")
        most = 0
        for name in names:
            for said in (part(resources, "limits").get(name), part(resources, "requests").get(name)):
                if isinstance(said, str | int) and not isinstance(said, bool) and str(said).isascii():
                    most = max(most, int(said) if str(said).isdigit() else 0)
        return most
