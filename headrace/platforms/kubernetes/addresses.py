# SPDX-License-Identifier: Apache-2.0
"""Where a Service can be reached, from what the API server tells of it. No I/O; called by the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.platforms.kubernetes.settings import KubernetesSettings

Thing = Mapping[str, Any]


def address(service: Thing, pod: Thing | None, settings: KubernetesSettings) -> str | None:
    """Its URL; None as long as the cluster has not given it one."""
    details = service.get("spec") or {}
    port = details["ports"][0]
    if details.get("type") == "LoadBalancer":
        given = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or [{}]
        # Some clouds give an address, others a name.
        return _url(given[0].get("ip") or given[0].get("hostname"), port["port"])
    if details.get("type") == "NodePort":
        node = ((pod or {}).get("status") or {}).get("hostIP")
        return _url(settings.node_host or node, port.get("nodePort"))
    return _url(f"{service['metadata']['name']}.{settings.namespace}.svc", port["port"])


def _url(host: str | None, port: int | None) -> str | None:
    if not host or not port:
        return None
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
