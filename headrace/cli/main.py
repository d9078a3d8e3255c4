# SPDX-License-Identifier: Apache-2.0
"""The `headrace` command and its verbs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.version import __version__

app = typer.Typer(
    name="headrace",
    help="Serve machine-learning models: from a folder on a laptop to a fleet on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """Entry point of the console script."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__} (Python {sys.version.split()[0]})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve machine-learning models: from a folder on a laptop to a fleet on Kubernetes."""


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on. Loopback unless told.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 takes a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 takes a free one.")] = 8001,
    http_socket: Annotated[str, typer.Option(help="Serve HTTP on this UNIX socket instead of a port.")] = "",
    grpc_socket: Annotated[str, typer.Option(help="Serve gRPC on this UNIX socket instead of a port.")] = "",
    tls_certificate: Annotated[str, typer.Option(help="PEM file with the certificate chain; turns TLS on.")] = "",
    tls_key: Annotated[str, typer.Option(help="PEM file with the certificate's key.")] = "",
    tls_client_ca: Annotated[str, typer.Option(help="PEM file: clients must show a certificate it signed.")] = "",
    processes: Annotated[int, typer.Option(min=1, max=256, help="Processes that share the ports.")] = 1,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest HTTP body and gRPC message.")] = 64 * 1024 * 1024,
    grace_seconds: Annotated[float, typer.Option(min=0, help="Time for requests in flight after SIGTERM.")] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="auto, json or text; auto is text on a terminal.")] = "auto",
    trace_endpoint: Annotated[str, typer.Option(help="Send OpenTelemetry spans to this OTLP/HTTP collector.")] = "",
    access_log: Annotated[bool, typer.Option("--access-log", help="Log one line per request.")] = False,
) -> None:
    """Serve models over HTTP and gRPC.

    At this stage the built-in models `identity` and `first1000` are served.

    Examples:

        headrace serve

        curl -i localhost:8000/v2/health/live

        headrace serve --processes 2 --access-log

        headrace serve --tls-certificate server.pem --tls-key server.key
    """
    from headrace.apps.server import ServerSettings, run_server
    from headrace.cli.checks import address_of, log_format_of, or_exit, tls_of
    from headrace.core.limits import Limits
    from headrace.telemetry.logs import configure_logging

    with or_exit():
        configure_logging(log_level, log_format_of(log_format))
        settings = ServerSettings(
            http=address_of(host, http_port, http_socket),
            grpc=address_of(host, grpc_port, grpc_socket),
            tls=tls_of(tls_certificate, tls_key, tls_client_ca),
            processes=processes,
            grace_seconds=grace_seconds,
            access_log=access_log,
            trace_endpoint=trace_endpoint,
            limits=Limits(body_bytes=max_body_bytes, message_bytes=max_body_bytes),
        )
        code = run_server(settings)
    raise typer.Exit(code)
