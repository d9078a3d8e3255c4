# SPDX-License-Identifier: Apache-2.0
"""The ports of a server: held for workers before they are forked, and opened in the right order.

Called by `server`. Knows addresses and sites, not what is served there.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from headrace.core.errors import FailedPrecondition, HeadraceError
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import WireServer
from headrace.net.site import Site
from headrace.net.sockets import Address, reserve_port
from headrace.net.tls import TlsFiles
from headrace.programs.serve.settings import ServerSettings

log = logging.getLogger("headrace.apps")


@dataclass(frozen=True, slots=True)
class _Port:
    """A port to open."""

    address: Address
    tls: TlsFiles | None
    reuse: bool
    optional: bool = False


@contextmanager
def held_ports(settings: ServerSettings) -> Iterator[ServerSettings]:
    """The settings with ports that stay ours while workers come and go, also where the kernel was to choose them."""
    listening = settings.listening
    with ExitStack() as held:
        http = settings.http and _hold(settings.http, listening.reuse_http, held)
        grpc = settings.grpc and _hold(settings.grpc, listening.reuse_grpc, held)
        metrics = settings.metrics
        if metrics is not None:
            try:
                metrics = _hold(metrics, False, held)
            except FailedPrecondition as error:
                _go_without(metrics, error, optional=listening.metrics_optional)
                metrics = None
        yield replace(settings, http=http, grpc=grpc, metrics=metrics)


def _hold(address: Address, reuse: bool, held: ExitStack) -> Address:
    if reuse and address.port:
        return address  # others may listen there already, and may come later
    address, sock = reserve_port(address)
    held.enter_context(sock)
    return address


class Ports:
    """All servers of one process."""

    def __init__(self, settings: ServerSettings, site: Site, metrics_site: Site | None) -> None:
        listening = settings.listening
        shared = settings.workers > 1
        self._optional: WireServer | None = None
        self.servers: list[WireServer] = []
        """The metrics port first: it is what tells of the others."""
        if settings.metrics is not None and metrics_site is not None:
            self._add(metrics_site, _Port(settings.metrics, listening.tls, shared, listening.metrics_optional))
        if settings.http is not None:
            self._add(site, _Port(settings.http, listening.tls, shared or listening.reuse_http))
        if settings.grpc is not None:
            tls = listening.grpc_tls or listening.tls
            self._add(site, _Port(settings.grpc, tls, shared or listening.reuse_grpc))

    def _add(self, site: Site, port: _Port) -> None:
        server = WireServer(site, port.address, partial(NegotiatingProtocol, site), tls=port.tls, reuse_port=port.reuse)
        self.servers.append(server)
        if port.optional:
            self._optional = server

    async def open(self) -> None:
        """Listen on all of them."""
        for server in tuple(self.servers):
            try:
                await server.start()
            except FailedPrecondition as error:
                _go_without(server.address, error, optional=server is self._optional)
                self.servers.remove(server)


def _go_without(address: Address, error: HeadraceError, *, optional: bool) -> None:
    if not optional:
        raise error
    log.warning(
        "port %d is taken, so metrics have no port of their own: they are at /metrics of the HTTP port; --metrics-port "
        "chooses another",
        address.port,
    )


def tell_who_can_connect(addresses: Sequence[Address | None], *, needs_keys: bool) -> None:
    """Triton listens on every interface; who comes from there should not have to guess."""
    hosts = [address.host for address in addresses if address is not None and address.host]
    if hosts and all(_is_loopback(host) for host in hosts):
        log.info("only this machine can connect: --http-address 0.0.0.0 and --grpc-address 0.0.0.0 let others in")
    elif hosts and not needs_keys:
        log.warning(
            "others can connect, and no key is asked of them: everybody who reaches this machine can use its models; "
            "--api-keys-file FILE asks for keys (headrace keys create), --host 127.0.0.1 keeps others out"
        )


def only_this_machine(addresses: Iterable[Address | None]) -> bool:
    """Whether nobody else can connect to any of these."""
    return all(address is None or address.path or _is_loopback(address.host) for address in addresses)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
