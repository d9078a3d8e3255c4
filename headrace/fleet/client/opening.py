# SPDX-License-Identifier: Apache-2.0
"""Which fleet is meant: a cluster, or this machine. The one place where the verbs are given theirs."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.fleet.client.contract import Fleet


@dataclass(frozen=True)
class Where:
    """What the user said of it."""

    kube: bool = False
    kubeconfig: str = ""
    """A file; who names one means a cluster."""
    context: str = ""
    """The same."""


def open_fleet(where: Where) -> Fleet:
    """The fleet. Raises FailedPrecondition where there is none."""
    if where.kube or where.kubeconfig or where.context:
        from headrace.fleet.client.kubernetes import open_cluster

        return open_cluster(where.kubeconfig, where.context)
    from headrace.fleet.local.client import open_local

    return open_local()
