# SPDX-License-Identifier: Apache-2.0
"""`headrace router`: a command line, and a file if there is one, to a router's settings; and the table at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headrace.apps.router import RouterAppSettings
    from headrace.router.proxy import RouterProxy
    from headrace.wire.sockets import Address

_LISTENING, _CHECKS, _RETRIES, _LOGS = "Listening", "Health", "Retries and time limits", "Logs"


def router(
    backends: Annotated[
        list[str] | None,
        typer.Option(
            "--backend", metavar="URL[,weight=N][,grpc=HOST:PORT]", help="A server to send requests to. Repeatable."
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="POLICY", help="p2c, round-robin, least or weighted. Default: p2c.")
    ] = None,
    config: Annotated[
        str, typer.Option(metavar="FILE", help="YAML with any of these settings; options count for more.")
    ] = "",
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Loopback unless told; 0.0.0.0 lets others in.", rich_help_panel=_LISTENING
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Default: 8070; 0 takes a free one.", rich_help_panel=_LISTENING),
    ] = None,
    tls_certificate: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file; turns TLS on.", rich_help_panel=_LISTENING)
    ] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its key.", rich_help_panel=_LISTENING)] = None,
    ca_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Who signs the certificates of https backends.", rich_help_panel=_LISTENING),
    ] = None,
    backend_host: Annotated[
        bool, typer.Option("--backend-host", help="Give backends their own Host header, not the client's.")
    ] = False,
    trust_forwarded: Annotated[
        bool, typer.Option("--trust-forwarded", help="Clients are proxies of ours: keep their X-Forwarded headers.")
    ] = False,
    slow_start: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="A backend that comes back gets its share bit by bit."),
    ] = None,
    health_path: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Asked by GET; '' for no checks. /v2/health/ready.", rich_help_panel=_CHECKS),
    ] = None,
    health_interval: Annotated[
        float | None, typer.Option(min=0.05, metavar="SECONDS", help="Default: 2.", rich_help_panel=_CHECKS)
    ] = None,
    health_timeout: Annotated[
        float | None, typer.Option(min=0.01, metavar="SECONDS", help="Default: 1.", rich_help_panel=_CHECKS)
    ] = None,
    rise: Annotated[
        int | None, typer.Option(min=1, help="Good checks that bring a backend back. 2.", rich_help_panel=_CHECKS)
    ] = None,
    fall: Annotated[
        int | None, typer.Option(min=1, help="Bad checks that take a backend out. 3.", rich_help_panel=_CHECKS)
    ] = None,
    retry_inference: Annotated[
        bool,
        typer.Option(
            "--retry-inference", help="Try inference again when a backend dies with it.", rich_help_panel=_RETRIES
        ),
    ] = False,
    tries: Annotated[
        int | None, typer.Option(min=1, max=10, help="Of one request at most. 3.", rich_help_panel=_RETRIES)
    ] = None,
    connect_timeout: Annotated[
        float | None, typer.Option(min=0.01, metavar="SECONDS", help="Default: 2.", rich_help_panel=_RETRIES)
    ] = None,
    response_timeout: Annotated[
        float | None,
        typer.Option(min=0.05, metavar="SECONDS", help="To the head of an answer. 300.", rich_help_panel=_RETRIES),
    ] = None,
    idle_timeout: Annotated[
        float | None,
        typer.Option(min=0.05, metavar="SECONDS", help="Silence inside an answer. 300.", rich_help_panel=_RETRIES),
    ] = None,
    grace_seconds: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="For what is in flight at SIGTERM. 30.", rich_help_panel=_RETRIES),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log one line per request.", rich_help_panel=_LOGS)
    ] = False,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.", rich_help_panel=_LOGS)
    ] = "info",
    log_format: Annotated[
        str, typer.Option(metavar="FORMAT", help="auto, json or text.", rich_help_panel=_LOGS)
    ] = "auto",
) -> None:
    """Spread requests over several servers: HTTP, server-sent events, WebSockets and gRPC on one port.

    Backends are Headrace servers, or any that speak HTTP/1.1 and answer the health path. A backend that fails is left
    out until it is well; requests that never reached it, or that may be repeated, go to another one.

    Examples:

        headrace router --backend http://10.0.0.7:8000 --backend http://10.0.0.8:8000

        headrace router --backend http://a:8000,weight=3 --backend http://b:8000 --policy weighted --host 0.0.0.0

        headrace router --backend http://triton:8000,grpc=triton:8001 --backend http://headrace:8000 --retry-inference

        headrace router --config router.yaml --port 8080

        curl -s http://127.0.0.1:8070/router/status
    """
    given: dict[str, Any] = {
        "backends": backends or None,
        "policy": policy,
        "host": host,
        "port": port,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "ca_file": ca_file,
        "keep_host": False if backend_host else None,
        "trust_forwarded": trust_forwarded or None,
        "slow_start_seconds": slow_start,
        "health.path": health_path,
        "health.interval_seconds": health_interval,
        "health.timeout_seconds": health_timeout,
        "health.rise": rise,
        "health.fall": fall,
        "retries.inference": retry_inference or None,
        "retries.tries": tries,
        "timeouts.connect_seconds": connect_timeout,
        "timeouts.response_seconds": response_timeout,
        "timeouts.idle_seconds": idle_timeout,
        "grace_seconds": grace_seconds,
        "access_log": access_log or None,
    }
    from headrace.cli.checks import or_exit

    with or_exit():
        code = _run({name: value for name, value in given.items() if value is not None}, config, log_level, log_format)
    raise typer.Exit(code)


def _run(given: dict[str, Any], config: str, log_level: str, log_format: str) -> int:
    from typing import cast

    from headrace.apps.router import run_router
    from headrace.cli.router_settings import router_settings
    from headrace.telemetry.logs import LogFormat, configure_logging

    configure_logging(log_level, cast("LogFormat", log_format))
    settings = router_settings(given, config)

    def show(proxy: RouterProxy, address: Address) -> None:
        _show(settings, proxy, address)

    return run_router(settings, show)


def _show(settings: RouterAppSettings, proxy: RouterProxy, address: Address) -> None:
    from rich.text import Text

    from headrace.cli.tables import open_console, table

    styles = {"up": "green", "starting": "yellow", "ejected": "yellow", "down": "red"}
    rows = [
        (each.name, f"{each.weight:g}", Text(each.state, styles[each.state]), each.health.reason)
        for each in proxy.backends.all
    ]
    scheme = "https" if settings.tls is not None else "http"
    console = open_console()
    console.print(f"routing {scheme}://{address} by {settings.router.policy} to", markup=False)
    console.print(table(("BACKEND", "WEIGHT", "STATE", "WHY"), rows, right=("WEIGHT",)))
    console.file.flush()
