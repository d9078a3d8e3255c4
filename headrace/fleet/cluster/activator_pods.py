# SPDX-License-Identifier: Apache-2.0
"""The shared activator as the operator sees it: the addresses of its ready pods, and a port for each service.

Used by the operator's cache. Ports are kept where the activator reads them, in an annotation of front routers' Deployments;
those that are given but not written yet are remembered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.fleet.names import ACTIVATOR, APP_NAME_LABEL
from headrace.fleet.planning.shared_activator import FIRST_PORT, LAST_PORT, SharedActivator, activation_of
from headrace.fleet.status.conditions import condition_of
from headrace.platforms.kubernetes_client.api import ApiClient
from headrace.platforms.kubernetes_client.informer import Informer
from headrace.platforms.kubernetes_client.objects import (
    PODS,
    Document,
    Key,
    ServedResource,
    get_list,
    get_str,
)

OwnFronts = Callable[[], Iterable[tuple[Key, Document]]]
"""Returns the Deployments of all front routers, by the namespace and name of their service."""


class ActivatorPods:
    """Watches the activator's pods, in the operator's namespace only: pods elsewhere may have the same labels."""

    def __init__(self, api: ApiClient, namespace: str, on_change: Callable[[bool], None]) -> None:
        """on_change: called with True if the first ready pod appeared or the last one disappeared."""
        self._namespace = namespace
        self._on_change = on_change
        self._reserved: dict[Key, int] = {}
        served = ServedResource(PODS, PODS.versions[0])
        self.informer = Informer(api, served, self._changed, selector=f"{APP_NAME_LABEL}={ACTIVATOR}")
        self.addresses: tuple[str, ...] = ()
        """IP addresses of the ready pods, sorted."""

    def for_service(self, key: Key, fronts: OwnFronts) -> SharedActivator | None:
        """Return the activator for a service; None while no pod of it is ready, or no port is free."""
        if not self.addresses:
            return None
        port = self._port(key, fronts)
        return SharedActivator(self._namespace, ACTIVATOR, self.addresses, port) if port is not None else None

    def forget(self, key: Key) -> None:
        """Give back the port of a service that is gone."""
        self._reserved.pop(key, None)

    def _port(self, key: Key, fronts: OwnFronts) -> int | None:
        owners: dict[int, Key] = {}
        # Of two with the same port, as after a restored backup, the older one keeps it.
        for owner, front in sorted(fronts(), key=lambda item: get_str(item[1], "metadata", "creationTimestamp")):
            activation = activation_of(front)
            if activation is not None:
                owners.setdefault(activation["port"], owner)
        for port, owner in owners.items():
            if owner == key:
                self._reserved[key] = port
                return port
        reserved = self._reserved.get(key)
        if reserved is not None and reserved not in owners:
            return reserved
        taken = {*owners, *(port for owner, port in self._reserved.items() if owner != key)}
        free = next((port for port in range(FIRST_PORT, LAST_PORT + 1) if port not in taken), None)
        if free is not None:
            self._reserved[key] = free
        return free

    def _changed(self, before: Document | None, after: Document | None) -> None:
        addresses = tuple(sorted(get_str(pod, "status", "podIP") for pod in self.informer.all() if self._serves(pod)))
        if addresses != self.addresses:
            flips = bool(addresses) != bool(self.addresses)
            self.addresses = addresses
            self._on_change(flips)

    def _serves(self, pod: Document) -> bool:
        return (
            get_str(pod, "metadata", "namespace") == self._namespace
            and get_str(condition_of(pod, "Ready"), "status") == "True"
            and bool(get_str(pod, "status", "podIP"))
            and not get_str(pod, "metadata", "deletionTimestamp")
        )


def front_owner(front: Document) -> Key:
    """Return the namespace and name of the service that a front router belongs to."""
    owners = get_list(front, "metadata", "ownerReferences")
    name = next((get_str(owner, "name") for owner in owners if get_str(owner, "kind") == "InferenceService"), "")
    return get_str(front, "metadata", "namespace"), name
