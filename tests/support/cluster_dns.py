# SPDX-License-Identifier: Apache-2.0
"""A cluster's DNS in place of CoreDNS, which Debian lacks: names of Services, and of the pods behind headless ones.

    python cluster_dns.py KUBECONFIG ADDRESS     answers on port 53 (UDP) until it is ended

It answers A and SRV as https://github.com/kubernetes/dns/blob/master/docs/specification.md says, knows nothing outside of
cluster.local, and truncates nothing: a test's Services have few pods.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

A, AAAA, SRV = 1, 28, 33
NAME_ERROR = 3
ZONE = ("svc", "cluster", "local")
SECONDS_TO_LIVE = 5


class ClusterNames:
    """The Services and Endpoints of a cluster, watched, and what a name stands for."""

    def __init__(self, client: Any, kinds: Mapping[str, Any]) -> None:
        self._objects: dict[str, dict[tuple[str, str], Any]] = {name: {} for name in kinds}
        for name, kind in kinds.items():
            threading.Thread(target=self._watch, args=(client, kind, self._objects[name]), daemon=True).start()

    @staticmethod
    def _watch(client: Any, kind: Any, held: dict[tuple[str, str], Any]) -> None:
        while True:
            try:
                seen = {
                    (each.metadata.name, each.metadata.namespace): each for each in client.list(kind, namespace="*")
                }
                for key in held.keys() - seen.keys():
                    held.pop(key, None)
                held.update(seen)
                for event, each in client.watch(kind, namespace="*", server_timeout=30):
                    key = (each.metadata.name, each.metadata.namespace)
                    if event == "DELETED":
                        held.pop(key, None)
                    else:
                        held[key] = each
            except Exception as error:  # the API server may be away for a while
                print(f"watch failed: {error}", flush=True)
                time.sleep(0.5)

    def addresses(self, labels: tuple[str, ...]) -> list[str] | None:
        """IPv4 addresses of a name; None: there is no such name."""
        if labels[-3:] != ZONE or len(labels) not in (5, 6):
            return None
        service_name, namespace = labels[-5], labels[-4]
        service = self._objects["services"].get((service_name, namespace))
        if service is None:
            return None
        if service.spec.type == "ExternalName":
            return self.addresses(tuple(service.spec.externalName.rstrip(".").split(".")))
        headless = service.spec.clusterIP in (None, "None")
        if not headless:
            return [service.spec.clusterIP] if len(labels) == 5 else None
        endpoints = self._objects["endpoints"].get((service_name, namespace))
        found = []
        for subset in (endpoints.subsets if endpoints is not None else None) or ():
            ready = list(subset.addresses or ())
            for address in ready:
                if len(labels) == 5 or labels[0] in (address.hostname, address.ip.replace(".", "-")):
                    found.append(address.ip)
        return found if found or len(labels) == 5 else None

    def port(self, labels: tuple[str, ...]) -> int | None:
        """The port that `_http._tcp.NAME` asks for."""
        service = self._objects["services"].get((labels[2], labels[3]))
        for port in (service.spec.ports or ()) if service is not None else ():
            if (f"_{port.name}", f"_{(port.protocol or 'TCP').lower()}") == labels[:2]:
                return int(port.port)
        return None


def _encoded(labels: tuple[str, ...]) -> bytes:
    return b"".join(bytes((len(label),)) + label.encode() for label in labels) + b"\0"


def answer(message: bytes, names: ClusterNames) -> bytes:
    """The answer to a query with one question."""
    labels, at = [], 12
    while message[at]:
        labels.append(message[at + 1 : at + 1 + message[at]].decode("ascii", "replace").lower())
        at += message[at] + 1
    kind = struct.unpack_from("!H", message, at + 1)[0]
    question = message[12 : at + 5]
    name = tuple(labels)
    service_port = names.port(name) if len(name) == 7 and name[0][:1] == "_" else None
    target = name[2:] if service_port is not None else name
    found = names.addresses(target)
    records = []
    if found is not None and kind == A and service_port is None:
        records = [(A, ipaddress.IPv4Address(each).packed) for each in found]
    elif found is not None and kind == SRV and service_port is not None:
        records = [(SRV, struct.pack("!HHH", 0, 100, service_port) + _encoded(target))]
    flags = 0x8180 | 0x0400 | (0 if found is not None else NAME_ERROR)
    head = message[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0)
    body = b"".join(
        b"\xc0\x0c" + struct.pack("!HHIH", record, 1, SECONDS_TO_LIVE, len(data)) + data for record, data in records
    )
    return head + question + body


def main() -> None:
    """Answer until the process is ended."""
    from lightkube import Client, KubeConfig
    from lightkube.resources import core_v1

    kubeconfig, address = sys.argv[1:]
    client = Client(KubeConfig.from_file(kubeconfig), field_manager="dns")
    for kind in (core_v1.Service, core_v1.Endpoints):
        list(client.list(kind, namespace="default"))  # msgspec learns kinds one at a time
    names = ClusterNames(client, {"services": core_v1.Service, "endpoints": core_v1.Endpoints})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        print(f"answering on {address}", flush=True)
        while True:
            message, client_address = server.recvfrom(4096)
            try:
                server.sendto(answer(message, names), client_address)
            except (OSError, ValueError, LookupError, struct.error) as error:
                print(f"bad query from {client_address}: {error}", flush=True)


if __name__ == "__main__":
    main()
