# SPDX-License-Identifier: Apache-2.0
"""The user's side of a fleet, for `headrace get`, `describe`, `apply`, `delete` and `rollout`.

`contract` is the protocol that the commands need; `kubernetes` implements it with an API server, `headrace.fleet.local` on
this machine. `tables`, `describe`, `rollouts` and `manifests` read and check documents. `cli` prints.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.fleet.client.contract import Fleet


@dataclass(frozen=True)
class FleetTarget:
    """The fleet that the user chose. A kubeconfig or a context implies Kubernetes."""

    kube: bool = False
    kubeconfig: str = ""
    context: str = ""


def open_fleet(target: FleetTarget) -> Fleet:
    """Open the fleet on Kubernetes or on this machine. Raises FailedPrecondition if there is none."""
    if target.kube or target.kubeconfig or target.context:
        from headrace.fleet.client.kubernetes import open_cluster

        return open_cluster(target.kubeconfig, target.context)
    from headrace.fleet.local.api_client import open_local

    return open_local()
