# SPDX-License-Identifier: Apache-2.0
"""The options by which programs of ours find their cluster: those of the operator and of the model agent."""

from __future__ import annotations

from typing import Annotated

import typer

CLUSTER = "Cluster"
OWN_NAMESPACE = "headrace-system"

Namespace = Annotated[
    str, typer.Option("--namespace", "-n", metavar="NAME", help="The operator's own.", rich_help_panel=CLUSTER)
]
Kubeconfig = Annotated[
    str,
    typer.Option(
        "--kubeconfig",
        envvar="KUBECONFIG",
        metavar="FILE",
        help="In a pod its service account, else ~/.kube/config.",
        rich_help_panel=CLUSTER,
    ),
]
Context = Annotated[
    str, typer.Option("--context", metavar="NAME", help="The kubeconfig's own unless told.", rich_help_panel=CLUSTER)
]
