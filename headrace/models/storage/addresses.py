# SPDX-License-Identifier: Apache-2.0
"""Which hosts and addresses may be fetched from. Called by `fetching` for every hop, on the addresses it will connect to.

A URL from a client must not reach what only this machine can: itself, its neighbours, its cloud's metadata. Addresses are
judged, not names, and every address of a name: a name that has a public and a private one is refused.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Named although `is_global` knows most of them: what it knows has changed between patch releases of Python.
_REFUSED: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "168.63.129.16/32",  # Azure's own services, at an address that looks public
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/96",  # unspecified, loopback, and IPv4 in the form that was given up
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",  # Teredo and other machinery
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "5f00::/16",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
)
_METADATA: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in ("169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128", "168.63.129.16/32", "100.100.100.200/32")
)
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def meant(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for (mapped, or through NAT64), or the address itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            address = ipaddress.IPv6Address(int(address))
        if address in _MAPPED or address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def is_public(address: Address) -> bool:
    """Whether everyone can reach this address, so that our reaching it gives nothing away."""
    address = meant(address)
    return address.is_global and not any(address in network for network in _REFUSED)


def tells_secrets(address: Address) -> bool:
    """Whether a cloud gives its machines their credentials at this address: no store is there, whatever a user says."""
    address = meant(address)
    return any(address in network for network in _METADATA)


def is_listed(host: str, names: Sequence[str]) -> bool:
    """Whether a host is among names, of which `*.domain` stands for every host below a domain."""
    host = host.rstrip(".").lower()
    wanted = [name.rstrip(".").lower() for name in names]
    return any(host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in wanted)


def may_reach(host: str, address: Address, private_hosts: Sequence[str]) -> bool:
    """Whether to connect to this address for this host: it is public, or the operator named the host or its network."""
    if is_public(address) or is_listed(host, private_hosts):
        return True
    inner = meant(address)
    return any(inner in network for network in map(_network, private_hosts) if network is not None)


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
