# SPDX-License-Identifier: Apache-2.0
"""Where a router finds backends: the section `discovery` of its file. Part of `router.settings.RouterSettings`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """See the module. What is found counts beside the backends that are named."""

    file: str = ""
    """JSON or YAML: a list of addresses, or of `{url, weight, grpc, role}`."""
    dns: str = ""
    """`name:port`: one backend for each address of the name."""
    pods: str = ""
    """A selector such as `app=chat-engine`: one backend for each ready pod."""
    prefill_pods: str = ""
    """A selector of pods that have the role prefill, ..."""
    decode_pods: str = ""
    """... and of those that have the role decode."""
    namespace: str = ""
    """Of the pods; the router's own unless given."""
    port: int = 0
    """Of the pods; the first port of their first container unless given."""
    interval_seconds: float = 2.0
    """How often all are looked at; a file more often."""

    @property
    def wanted(self) -> bool:
        """Whether anything is to be found."""
        return bool(self.file or self.dns or self.pods or self.prefill_pods or self.decode_pods)
