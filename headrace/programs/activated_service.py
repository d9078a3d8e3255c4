# SPDX-License-Identifier: Apache-2.0
"""One service of the shared activator: its port, its proxies, and the handover to its front router.

`programs.activator` makes one for each service that scales to zero, and closes it when the service is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.fleet.planning.context import CLUSTER_DOMAIN
from headrace.fleet.router.grpc.proxy import GrpcProxy
from headrace.fleet.router.proxy import RouterProxy
from headrace.fleet.router.scale_targets import Scaler
from headrace.fleet.router.settings import (
    ActivationSettings,
    BackendAddress,
    HealthSettings,
    RouterSettings,
    ScaleTarget,
    TimeoutSettings,
)
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer
from headrace.net.site import Connection
from headrace.net.sockets import Address
from headrace.platforms.kubernetes_client.objects import Key, get_int, get_list, get_str
from headrace.programs.router import RouterAppSettings, build_router_site

HANDOVER_SECONDS = 5.0
"""Delay between the readiness of a front router and closing connections here: by then kube-proxy sends new ones there."""

HostOf = Callable[[str, str], str]
"""Returns the host name of a Service, from its namespace and name."""


def cluster_host(namespace: str, service: str) -> str:
    """Return the name of a Service in the cluster's DNS."""
    return f"{service}.{namespace}.{CLUSTER_DOMAIN}"


class ActivatedService:
    """The proxies of one service, on a port of their own. Used from the loop's thread only."""

    def __init__(
        self, key: Key, activation: Mapping[str, Any], scaler: Scaler, host: str, host_of: HostOf = cluster_host
    ) -> None:
        """key: namespace and name of the front router's Deployment. activation: its annotation."""
        self.key = key
        self.activation = activation
        self._host_of = host_of
        settings = proxy_settings(key[0], activation, host_of)
        address = Address(host=host, port=activation["port"])
        self.proxy = RouterProxy(settings, scaler)
        self._grpc = GrpcProxy(self.proxy.backends, settings, budget=self.proxy.budget)
        self._grpc.activator = self.proxy.activator
        self.proxy.on_update.append(self._grpc.update_settings)
        site = build_router_site(self.proxy, self._grpc, RouterAppSettings(settings, address))
        self.server = HttpServer(site, address, partial(NegotiatingProtocol, site))
        self._served_since: float | None = None
        """When the front router became ready; None while it is not."""
        self._drained: set[Connection] = set()

    @property
    def port(self) -> int:
        """Port of the service."""
        port: int = self.activation["port"]
        return port

    @property
    def held(self) -> int:
        """Number of requests that wait for replicas."""
        return len(self.proxy.activator.held) if self.proxy.activator is not None else 0

    @property
    def wakes(self) -> int:
        """Number of activations: how often requests waited for replicas to start."""
        return self.proxy.activator.activations if self.proxy.activator is not None else 0

    async def start(self) -> None:
        """Observe the replicas and listen. Raises HeadraceError if the port cannot be opened."""
        await self.proxy.start()
        self._grpc.start()
        await self.server.start()

    async def update(self, activation: Mapping[str, Any]) -> None:
        """Apply a changed annotation with the same port. Raises InvalidArgument."""
        await self.proxy.update_settings(proxy_settings(self.key[0], activation, self._host_of))
        self.activation = activation

    def front_changed(self, serves: bool) -> None:
        """Record whether the front router serves."""
        if not serves:
            self._served_since = None
            self._drained.clear()
        elif self._served_since is None:
            self._served_since = asyncio.get_running_loop().time()

    def hand_over(self) -> None:
        """Close connections after their requests, once the front router is ready: clients reach it when they reconnect.

        Otherwise a client with a persistent connection would stay here, and the front router would consider the service
        idle. New connections are served as long as kube-proxy sends them.
        """
        now, connections = asyncio.get_running_loop().time(), self.server.site.connections
        self._drained.intersection_update(connections)
        if self._served_since is None or now - self._served_since < HANDOVER_SECONDS:
            return
        for connection in tuple(connections):
            if connection not in self._drained:
                self._drained.add(connection)
                connection.drain()

    def drain(self, grace_seconds: float) -> None:
        """Refuse held requests early enough for a stop within some seconds."""
        self.proxy.drain(grace_seconds)

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Stop; open requests have a grace period."""
        await self.server.drain(grace_seconds)
        await self.release()

    async def release(self) -> None:
        """Close the proxies; the server is drained already."""
        await self._grpc.close()
        await self.proxy.close()


_NUMBERS = {"wait_seconds": "waitSeconds", "held_requests": "heldRequests", "held_bytes": "heldBytes"}


def proxy_settings(namespace: str, activation: Mapping[str, Any], host_of: HostOf = cluster_host) -> RouterSettings:
    """Return the settings of a service's proxies. Raises InvalidArgument.

    Only objects of the service's namespace can be named: the author of the annotation may have no permissions elsewhere.
    """
    backends = tuple(_backend(namespace, entry, host_of) for entry in get_list(activation, "backends"))
    targets = tuple(
        ScaleTarget(get_str(entry, "name"), namespace, get_str(entry, "kind"), get_str(entry, "apiVersion"))
        for entry in get_list(activation, "targets")
    )
    if not targets or not all(target.name and target.kind and target.api_version for target in targets):
        raise InvalidArgument("it names no workloads to scale")
    seconds = get_int(activation, "timeoutSeconds")
    numbers: dict[str, Any] = {name: number for name, key in _NUMBERS.items() if (number := get_int(activation, key))}
    return RouterSettings(
        backends,
        policy="weighted",
        # No health checks: a Service only routes to ready pods.
        health=HealthSettings(path=""),
        timeouts=TimeoutSettings(response_seconds=seconds, idle_seconds=seconds) if seconds else TimeoutSettings(),
        activation=ActivationSettings(
            targets,
            # Only the front router scales to zero: it sees all requests of an active service.
            idle_seconds=inf,
            shared=True,
            **numbers,
        ),
    )


def _backend(namespace: str, entry: Any, host_of: HostOf) -> BackendAddress:
    name, port, weight = get_str(entry, "service"), get_int(entry, "port"), get_int(entry, "weight")
    if not name.replace("-", "").isalnum() or port is None:
        raise InvalidArgument("a backend is a Service of its namespace, with a port")
    return BackendAddress.parse(f"http://{host_of(namespace, name)}:{port},weight={weight or 1}")
