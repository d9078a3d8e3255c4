# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, the frame of a command that runs a program, and JSON output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from headrace.core.telemetry.logs import LogFormat

LISTENING, _LOGS = "Listening", "Logs"

LogLevel = Annotated[
    str, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.", rich_help_panel=_LOGS)
]
LogStyle = Annotated[
    str, typer.Option("--log-format", metavar="FORMAT", help="auto, json or text.", rich_help_panel=_LOGS)
]
AccessLog = Annotated[bool, typer.Option("--access-log", help="Log one line per request.", rich_help_panel=_LOGS)]
PORT_FLAGS = ("--port", "--http-port")
"""Both names of the HTTP port: Triton's, and that of most servers. Every command that listens takes both."""
Port = Annotated[
    int,
    typer.Option(
        *PORT_FLAGS, min=0, max=65535, help="Port to listen on; 0 takes a free one.", rich_help_panel=LISTENING
    ),
]
GraceSeconds = Annotated[
    float,
    typer.Option(min=0, metavar="SECONDS", help="Time for open requests after SIGTERM.", rich_help_panel=LISTENING),
]
MetricsAddress = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Address for /metrics and /healthz (default: none).")
]


@contextmanager
def program(log_level: str, log_format: str) -> Iterator[None]:
    """Configure the logs of a program that runs until SIGTERM; report an error in its options and exit with code 2."""
    from headrace.cli.checks import exit_on_error
    from headrace.core.telemetry.logs import configure_logging

    with exit_on_error():
        configure_logging(log_level, cast("LogFormat", log_format))
        yield


SERVER_URL = "http://127.0.0.1:8000"

ServerUrl = Annotated[str, typer.Option(metavar="URL", help="Address of the server's HTTP port.")]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]
ModelTask = Annotated[
    str,
    typer.Option(
        metavar="KIND",
        help="Task, if the files do not say: language, vision_language, classifier, detector, embedding, tensors.",
        rich_help_panel="Model",
    ),
]
Headers = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME:VALUE", help="Send this header field. Repeatable.")
]
CaFile = Annotated[str, typer.Option(metavar="FILE", help="PEM file with the CA of the server.")]
CertFile = Annotated[str, typer.Option(metavar="FILE", help="PEM file with the client certificate.")]
KeyFile = Annotated[str, typer.Option(metavar="FILE", help="PEM file with the client key.")]
RequestTimeout = Annotated[float, typer.Option(metavar="SECONDS", help="Timeout of each request.")]
RequestRows = Annotated[int, typer.Option(metavar="N", min=1, help="Rows in each request.")]
InputShapes = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME:SIZES", help="Shape of an input with dynamic dimensions. Repeatable."),
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
