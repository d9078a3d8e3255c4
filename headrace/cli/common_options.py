# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share: logs, the Kubernetes cluster, `--json`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

_PANEL = "Logs"

LogLevel = Annotated[
    str, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.", rich_help_panel=_PANEL)
]
LogStyle = Annotated[
    str, typer.Option("--log-format", metavar="FORMAT", help="auto, json or text.", rich_help_panel=_PANEL)
]


CLUSTER = "Cluster"
OWN_NAMESPACE = "headrace-system"

Namespace = Annotated[
    str,
    typer.Option("--namespace", "-n", metavar="NAME", help="Namespace of the operator.", rich_help_panel=CLUSTER),
]
Kubeconfig = Annotated[
    str,
    typer.Option(
        "--kubeconfig",
        envvar="KUBECONFIG",
        metavar="FILE",
        help="Kubeconfig file (default: the pod's service account, else ~/.kube/config).",
        rich_help_panel=CLUSTER,
    ),
]
Context = Annotated[
    str,
    typer.Option(
        "--context",
        metavar="NAME",
        help="Context of the kubeconfig (default: its current context).",
        rich_help_panel=CLUSTER,
    ),
]


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of lines and tables.")]


def print_json(value: Any) -> None:
    """Print a result as indented JSON. Non-ASCII characters are escaped, so that any terminal can show them."""
    typer.echo(json.dumps(value, indent=2))


def print_json_line(value: Any) -> None:
    """Print one record as one line of JSON."""
    typer.echo(json.dumps(value))


def print_result(value: Any, text: str, as_json: bool) -> None:
    """Print a result: as JSON, or as one line of text."""
    if as_json:
        print_json(value)
    else:
        typer.echo(text)
