# SPDX-License-Identifier: Apache-2.0
"""Where the gateway listens: whether that is safe, and how the services on this machine reach it.

Services report to the gateway on loopback. Where its own port has TLS, or is not on loopback, a second one is opened for
them; its number is kept in the data directory, since services outlive the gateway that started them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path

from headrace.core.errors import FailedPrecondition
from headrace.net.sockets import Address, reserve_port
from headrace.programs.gateway.settings import GatewaySettings

_FILE = "callback-port"
_LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # looked for, not listened on


def check_safe(settings: GatewaySettings) -> None:
    """Refuse to send keys and tokens over a network that others can read."""
    if settings.tls is None and not settings.insecure and not is_private(settings.address):
        raise FailedPrecondition(
            f"{settings.address} can be reached by others, and without TLS they can read keys and tokens: give "
            "--tls-certificate and --tls-key, or --host 127.0.0.1, or --insecure if something before it does TLS"
        )


def is_private(address: Address) -> bool:
    """Whether nobody but this machine can connect. Not asked of `apps`, which would bring the whole engine along."""
    try:
        return bool(address.path) or ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


class HeldPorts:
    """Ports that stay ours until servers listen on them, also where the kernel was to choose."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._held: list[socket.socket] = []
        self._addresses: set[Address] = set()
        self.address = self._hold(settings.address)
        """The gateway's own."""
        self.callback: Address | None = None
        """The second one; None if there is none."""
        address = self.address
        if settings.tls is None and (address.host in _EVERYWHERE or is_private(address)) and not address.path:
            host = _LOOPBACK if address.host in (*_EVERYWHERE, "localhost") else address.host
            self.callback_url = f"http://{Address(host, address.port)}"
            return
        self.callback = self._hold_callback(settings.data_dir / _FILE)
        self.callback_url = f"http://{self.callback}"

    def holds(self, address: Address) -> bool:
        """Whether a socket of ours is on it, which the server has to share it with."""
        return address in self._addresses

    def release(self) -> None:
        """Servers listen."""
        for each in self._held:
            each.close()
        self._held.clear()

    def _hold(self, address: Address) -> Address:
        if address.path or address.port:
            return address
        return self._keep(*reserve_port(address))

    def _keep(self, address: Address, sock: socket.socket) -> Address:
        self._held.append(sock)
        self._addresses.add(address)
        return address

    def _hold_callback(self, file: Path) -> Address:
        kept = 0
        with contextlib.suppress(OSError, ValueError):
            kept = int(file.read_text())
        try:
            address = self._keep(*reserve_port(Address(_LOOPBACK, kept if 0 < kept < 65536 else 0)))
        except FailedPrecondition:
            address = self._keep(*reserve_port(Address(_LOOPBACK, 0)))
        file.write_text(f"{address.port}\n")
        return address
