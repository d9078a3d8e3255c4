# SPDX-License-Identifier: Apache-2.0
"""`headrace router`: a command line, and a file if there is one, to a router's settings; and the table at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.log_options import LogLevel, LogStyle

if TYPE_CHECKING:
    from headrace.fleet.router.proxy import RouterProxy
    from headrace.net.sockets import Address
    from headrace.programs.router import RouterAppSettings

_LISTENING, _CHECKS, _RETRIES, _LOGS = "Listening", "Health", "Retries and time limits", "Logs and traces"
_CHOICES, _FINDING, _APART = "Choice of a backend", "Finding backends", "Prefill and decode apart"


def router(
    context: typer.Context,
    backends: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="URL[,weight=N][,grpc=HOST:PORT][,role=prefill|decode]",
            help="A server to send requests to. Repeatable.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="p2c (power_of_two), round-robin, least (least_loaded), weighted, random, cache_aware or prefix_hash. "
            "Default: p2c.",
        ),
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
    cache_threshold: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="cache_aware: share of a prompt that must be known. 0.3.", rich_help_panel=_CHOICES
        ),
    ] = None,
    balance_abs_threshold: Annotated[
        int | None,
        typer.Option(
            min=0, help="cache_aware: load alone decides when loads differ by more. 64.", rich_help_panel=_CHOICES
        ),
    ] = None,
    balance_rel_threshold: Annotated[
        float | None, typer.Option(min=1, help="cache_aware: and by this factor. 1.5.", rich_help_panel=_CHOICES)
    ] = None,
    eviction_interval: Annotated[
        float | None,
        typer.Option(
            "--eviction-interval",
            "--eviction-interval-secs",
            min=0,
            metavar="SECONDS",
            help="cache_aware: how often full trees are cut. 60.",
            rich_help_panel=_CHOICES,
        ),
    ] = None,
    max_tree_size: Annotated[
        int | None,
        typer.Option(
            min=1024, help="cache_aware: characters remembered for each backend. 4194304.", rich_help_panel=_CHOICES
        ),
    ] = None,
    sticky_cookie: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Sessions by a cookie, which clients are given.", rich_help_panel=_CHOICES),
    ] = None,
    sticky_header: Annotated[
        str | None, typer.Option(metavar="NAME", help="Sessions by a header.", rich_help_panel=_CHOICES)
    ] = None,
    sticky_body: Annotated[
        str | None, typer.Option(metavar="KEY", help="Sessions by a key of a JSON body.", rich_help_panel=_CHOICES)
    ] = None,
    max_outstanding: Annotated[
        int | None,
        typer.Option(min=0, help="Requests a backend may have at once; more wait. 0: any.", rich_help_panel=_CHOICES),
    ] = None,
    discover_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A list of backends, followed as it changes.", rich_help_panel=_FINDING),
    ] = None,
    discover_dns: Annotated[
        str | None,
        typer.Option(metavar="NAME:PORT", help="A backend for each address of a name.", rich_help_panel=_FINDING),
    ] = None,
    discover_pods: Annotated[
        str | None,
        typer.Option(
            metavar="SELECTOR", help="A backend for each ready pod, such as app=chat.", rich_help_panel=_FINDING
        ),
    ] = None,
    discover_prefill_pods: Annotated[
        str | None,
        typer.Option(metavar="SELECTOR", help="The same for those that prefill.", rich_help_panel=_FINDING),
    ] = None,
    discover_decode_pods: Annotated[
        str | None,
        typer.Option(metavar="SELECTOR", help="The same for those that decode.", rich_help_panel=_FINDING),
    ] = None,
    discover_namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the pods. The router's own.", rich_help_panel=_FINDING)
    ] = None,
    discover_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Of the pods. Their first one.", rich_help_panel=_FINDING),
    ] = None,
    handing_least_bytes: Annotated[
        int | None,
        typer.Option(min=0, help="Shorter requests are not handed to a prefill. 2048.", rich_help_panel=_APART),
    ] = None,
    handing_timeout: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="SECONDS", help="For a prefill. 30.", rich_help_panel=_APART),
    ] = None,
    handing_key_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The key of the fleet; or HEADRACE_HANDING_KEY. One machine needs none.",
            rich_help_panel=_APART,
        ),
    ] = None,
    hedge_after: Annotated[
        float | None,
        typer.Option(
            min=0.001, metavar="SECONDS", help="Ask a second backend after so long.", rich_help_panel=_RETRIES
        ),
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
    trace_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send the cold starts of what sleeps, in parts, to this OTLP/HTTP collector.",
            rich_help_panel=_LOGS,
        ),
    ] = None,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Spread requests over several servers: HTTP, server-sent events, WebSockets and gRPC on one port.

    Backends are Headrace servers, or any that speak HTTP/1.1 and answer the health path. A backend that fails is left
    out until it is well; requests that never reached it, or that may be repeated, go to another one.

    Examples:

        headrace router --backend http://10.0.0.7:8000 --backend http://10.0.0.8:8000

        headrace router --backend http://a:8000,weight=3 --backend http://b:8000 --policy weighted --host 0.0.0.0

        headrace router --backend http://triton:8000,grpc=triton:8001 --backend http://headrace:8000 --retry-inference

        headrace router --config router.yaml --port 8080

        headrace router --discover-dns chat-engine.default.svc:8080 --policy cache_aware

        headrace router --backend http://a:8000,role=prefill --backend http://b:8000,role=decode

        curl -s http://127.0.0.1:8070/router/status
    """
    if context.invoked_subcommand is not None:
        return
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
        "cache_aware.cache_threshold": cache_threshold,
        "cache_aware.balance_abs_threshold": balance_abs_threshold,
        "cache_aware.balance_rel_threshold": balance_rel_threshold,
        "cache_aware.eviction_interval_seconds": eviction_interval,
        "cache_aware.max_tree_size": max_tree_size,
        "sticky.cookie": sticky_cookie,
        "sticky.header": sticky_header,
        "sticky.body": sticky_body,
        "max_outstanding": max_outstanding,
        "hedging.after_seconds": hedge_after,
        "discovery.file": discover_file,
        "discovery.dns": discover_dns,
        "discovery.pods": discover_pods,
        "discovery.prefill_pods": discover_prefill_pods,
        "discovery.decode_pods": discover_decode_pods,
        "discovery.namespace": discover_namespace,
        "discovery.port": discover_port,
        "pairing.least_bytes": handing_least_bytes,
        "pairing.prefill_seconds": handing_timeout,
        "pairing.key_file": handing_key_file,
        "access_log": access_log or None,
        "trace_endpoint": trace_endpoint,
    }
    from headrace.cli.checks import or_exit

    with or_exit():
        code = _run({name: value for name, value in given.items() if value is not None}, config, log_level, log_format)
    raise typer.Exit(code)


def _run(given: dict[str, Any], config: str, log_level: str, log_format: str) -> int:
    from typing import cast

    from headrace.cli.router_settings import router_settings
    from headrace.core.telemetry.logs import LogFormat, configure_logging
    from headrace.programs.router import run_router

    configure_logging(log_level, cast("LogFormat", log_format))
    settings = router_settings(given, config)

    def show(proxy: RouterProxy, address: Address) -> None:
        _show(settings, proxy, address)

    return run_router(settings, show, lambda: router_settings(given, config))


def _show(settings: RouterAppSettings, proxy: RouterProxy, address: Address) -> None:
    from rich.text import Text

    from headrace.cli.tables import open_console, table

    styles = {"up": "green", "starting": "yellow", "ejected": "yellow", "down": "red", "asleep": "blue"}
    rows = [
        (each.name, f"{each.weight:g}", Text(each.state, styles[each.state]), each.health.reason)
        for each in proxy.backends.all
    ]
    scheme = "https" if settings.tls is not None else "http"
    console = open_console()
    console.print(f"routing {scheme}://{address} by {settings.router.policy} to", markup=False)
    console.print(table(("BACKEND", "WEIGHT", "STATE", "WHY"), rows, right=("WEIGHT",)))
    console.file.flush()
