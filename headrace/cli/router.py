# SPDX-License-Identifier: Apache-2.0
"""`headrace router` and `headrace router explain`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.common_options import PORT_FLAGS, LogLevel, LogStyle, print_json, program

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.fleet.router.proxy import RouterProxy
    from headrace.net.sockets import Address
    from headrace.programs.router import RouterAppSettings

_LISTENING, _CHECKS, _RETRIES, _LOGS = "Listening", "Health checks", "Retries and timeouts", "Logs and traces"
_BALANCING, _DISCOVERY, _PREFILL = "Load balancing", "Discovery", "Prefill and decode"
_FAIRNESS = "Fairness between tenants"
_STYLES = {"up": "green", "starting": "yellow", "ejected": "yellow", "down": "red", "asleep": "blue"}
_MAX_BYTES = 1 << 20
_TIMEOUT_SECONDS = 10.0


def router(
    context: typer.Context,
    backends: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="URL[,weight=N][,grpc=HOST:PORT][,role=prefill|decode]",
            help="A backend to send requests to. Repeatable.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="p2c (power_of_two), round-robin, least (least_loaded), weighted, random, cache_aware, prefix_hash, "
            "kv_events or predicted_latency. Default: p2c.",
        ),
    ] = None,
    config: Annotated[
        str, typer.Option(metavar="FILE", help="YAML file with any of these settings; options take precedence.")
    ] = "",
    config_map: Annotated[
        str,
        typer.Option(
            metavar="NAMESPACE/NAME",
            help="Follow the ConfigMap of the cluster that --config is mounted from: changes apply within a second.",
        ),
    ] = "",
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on (default: loopback; 0.0.0.0 accepts other machines).",
            rich_help_panel=_LISTENING,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            *PORT_FLAGS,
            min=0,
            max=65535,
            help="Port to listen on; 0 takes a free one (default: 8070).",
            rich_help_panel=_LISTENING,
        ),
    ] = None,
    tls_certificate: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="PEM file with the certificate; turns TLS on.", rich_help_panel=_LISTENING),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="PEM file with the key of the certificate.", rich_help_panel=_LISTENING),
    ] = None,
    ca_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="CA certificates for https backends.", rich_help_panel=_LISTENING),
    ] = None,
    backend_host: Annotated[
        bool, typer.Option("--backend-host", help="Send backends their own Host header, not the client's.")
    ] = False,
    trust_forwarded: Annotated[
        bool, typer.Option("--trust-forwarded", help="Clients are trusted proxies: keep their X-Forwarded headers.")
    ] = False,
    slow_start: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="Time over which a backend that comes back gets its share gradually."
        ),
    ] = None,
    cache_threshold: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="cache_aware: share of a prompt that a backend must have seen (default: 0.3).",
            rich_help_panel=_BALANCING,
        ),
    ] = None,
    balance_abs_threshold: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="cache_aware: load alone decides if loads differ by more (default: 64).",
            rich_help_panel=_BALANCING,
        ),
    ] = None,
    balance_rel_threshold: Annotated[
        float | None,
        typer.Option(min=1, help="cache_aware: and by this factor (default: 1.5).", rich_help_panel=_BALANCING),
    ] = None,
    eviction_interval: Annotated[
        float | None,
        typer.Option(
            "--eviction-interval",
            "--eviction-interval-secs",
            min=0,
            metavar="SECONDS",
            help="cache_aware: how often full trees are trimmed (default: 60).",
            rich_help_panel=_BALANCING,
        ),
    ] = None,
    max_tree_size: Annotated[
        int | None,
        typer.Option(
            min=1024, help="cache_aware: characters kept per backend (default: 4194304).", rich_help_panel=_BALANCING
        ),
    ] = None,
    sticky_cookie: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Session affinity by a cookie, which the router sets.", rich_help_panel=_BALANCING
        ),
    ] = None,
    sticky_header: Annotated[
        str | None, typer.Option(metavar="NAME", help="Session affinity by a header.", rich_help_panel=_BALANCING)
    ] = None,
    sticky_body: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Session affinity by a key of the JSON body.", rich_help_panel=_BALANCING),
    ] = None,
    max_outstanding: Annotated[
        int | None,
        typer.Option(
            min=0, help="Maximum concurrent requests per backend; more wait (0: unlimited).", rich_help_panel=_BALANCING
        ),
    ] = None,
    keys_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Share the backends fairly between the API keys of this file (see `headrace keys`).",
            rich_help_panel=_FAIRNESS,
        ),
    ] = None,
    tenant_header: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Share them fairly between the values of a header, which a proxy in front sets.",
            rich_help_panel=_FAIRNESS,
        ),
    ] = None,
    discover_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="File with a list of backends, read again when it changes.", rich_help_panel=_DISCOVERY
        ),
    ] = None,
    discover_dns: Annotated[
        str | None,
        typer.Option(metavar="NAME:PORT", help="DNS name; one backend per address.", rich_help_panel=_DISCOVERY),
    ] = None,
    discover_pods: Annotated[
        str | None,
        typer.Option(
            metavar="SELECTOR",
            help="Label selector such as app=chat; one backend per ready pod.",
            rich_help_panel=_DISCOVERY,
        ),
    ] = None,
    discover_prefill_pods: Annotated[
        str | None,
        typer.Option(metavar="SELECTOR", help="Label selector of prefill pods.", rich_help_panel=_DISCOVERY),
    ] = None,
    discover_decode_pods: Annotated[
        str | None,
        typer.Option(metavar="SELECTOR", help="Label selector of decode pods.", rich_help_panel=_DISCOVERY),
    ] = None,
    discover_namespace: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Namespace of the pods (default: the router's).", rich_help_panel=_DISCOVERY),
    ] = None,
    discover_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the pods (default: their first one).", rich_help_panel=_DISCOVERY),
    ] = None,
    endpoint_picker: Annotated[
        bool,
        typer.Option(
            "--epp", help="Be an endpoint picker: Envoy-based gateways ask which backend a request should go to."
        ),
    ] = False,
    handing_least_bytes: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Requests with a shorter body skip the prefill backend (default: 2048).",
            rich_help_panel=_PREFILL,
        ),
    ] = None,
    handing_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.01, metavar="SECONDS", help="Timeout of a prefill backend (default: 30).", rich_help_panel=_PREFILL
        ),
    ] = None,
    handing_key_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File with the fleet's key, or set HEADRACE_HANDING_KEY. Not needed on one machine.",
            rich_help_panel=_PREFILL,
        ),
    ] = None,
    hedge_after: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="SECONDS",
            help="Hedging: send a slow request to a second backend after so long.",
            rich_help_panel=_RETRIES,
        ),
    ] = None,
    health_path: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Path of health checks; '' turns them off (default: /v2/health/ready).",
            rich_help_panel=_CHECKS,
        ),
    ] = None,
    health_interval: Annotated[
        float | None,
        typer.Option(min=0.05, metavar="SECONDS", help="Time between checks (default: 2).", rich_help_panel=_CHECKS),
    ] = None,
    health_timeout: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="SECONDS", help="Timeout of a check (default: 1).", rich_help_panel=_CHECKS),
    ] = None,
    rise: Annotated[
        int | None,
        typer.Option(
            min=1, help="Consecutive healthy checks that bring a backend back (default: 2).", rich_help_panel=_CHECKS
        ),
    ] = None,
    fall: Annotated[
        int | None,
        typer.Option(
            min=1, help="Consecutive failed checks that take a backend out (default: 3).", rich_help_panel=_CHECKS
        ),
    ] = None,
    retry_inference: Annotated[
        bool,
        typer.Option(
            "--retry-inference", help="Retry inference requests when a backend dies.", rich_help_panel=_RETRIES
        ),
    ] = False,
    tries: Annotated[
        int | None,
        typer.Option(min=1, max=10, help="Maximum attempts per request (default: 3).", rich_help_panel=_RETRIES),
    ] = None,
    connect_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.01, metavar="SECONDS", help="To connect to a backend (default: 2).", rich_help_panel=_RETRIES
        ),
    ] = None,
    response_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.05, metavar="SECONDS", help="Until the head of the response (default: 300).", rich_help_panel=_RETRIES
        ),
    ] = None,
    idle_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.05,
            metavar="SECONDS",
            help="Longest pause inside a response (default: 300).",
            rich_help_panel=_RETRIES,
        ),
    ] = None,
    grace_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Time for open requests after SIGTERM (default: 30).",
            rich_help_panel=_RETRIES,
        ),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log one line per request.", rich_help_panel=_LOGS)
    ] = False,
    trace_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send traces of cold starts to this OTLP/HTTP collector.",
            rich_help_panel=_LOGS,
        ),
    ] = None,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Spread requests over several servers: HTTP, server-sent events, WebSockets and gRPC on one port.

    Backends are Headrace servers, or any that speak HTTP/1.1 and answer the health path. A backend that fails gets no
    requests until it is healthy; requests that never reached it, or that may be repeated, go to another one.

    Examples:

        headrace router --backend http://10.0.0.7:8000 --backend http://10.0.0.8:8000

        headrace router --backend http://a:8000,weight=3 --backend http://b:8000 --policy weighted --host 0.0.0.0

        headrace router --backend http://triton:8000,grpc=triton:8001 --backend http://headrace:8000 --retry-inference

        headrace router --config router.yaml --port 8080

        headrace router --discover-dns chat-engine.default.svc:8080 --policy cache_aware

        headrace router --backend http://a:8000,role=prefill --backend http://b:8000,role=decode

        headrace router --backend http://a:8000 --max-outstanding 64 --keys-file keys.yaml

        headrace router --discover-pods app=chat --policy cache_aware --epp --host 0.0.0.0 --port 9002

        curl -s http://127.0.0.1:8070/router/status
    """
    if context.invoked_subcommand is not None:
        return
    from headrace.cli.router_settings import router_settings
    from headrace.core.errors import InvalidArgument
    from headrace.programs.router import run_router

    values: dict[str, Any] = {
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
        "endpoint_picker": endpoint_picker or None,
        "fairness.keys_file": keys_file,
        "fairness.tenant_header": tenant_header,
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
    values = {name: value for name, value in values.items() if value is not None}
    with program(log_level, log_format):
        if config_map and (not config or config_map.count("/") != 1):
            raise InvalidArgument("--config-map is NAMESPACE/NAME, and needs --config: the file that it is mounted as")
        settings = replace(router_settings(values, config), config_map=config_map)
        code = run_router(
            settings,
            lambda proxy, address: _show(settings, proxy, address),
            lambda text: router_settings(values, config, text),
        )
    raise typer.Exit(code)


def _show(settings: RouterAppSettings, proxy: RouterProxy, address: Address) -> None:
    from rich.text import Text

    from headrace.cli.tables import open_console, table

    rows = [
        (backend.name, f"{backend.weight:g}", Text(backend.state, _STYLES[backend.state]), backend.health.reason)
        for backend in proxy.backends.all
    ]
    scheme = "https" if settings.tls is not None else "http"
    console = open_console()
    console.print(f"routing {scheme}://{address} by {settings.router.policy} to", markup=False)
    console.print(table(("BACKEND", "WEIGHT", "STATE", "WHY"), rows, right=("WEIGHT",)))
    console.file.flush()


router_group = typer.Typer(name="router", invoke_without_command=True, no_args_is_help=False)
router_group.callback()(router)


@router_group.command()
def explain(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Path of the request, such as /v1/chat/completions.")],
    url: Annotated[str, typer.Option(metavar="URL", help="Address of the router.")] = "http://127.0.0.1:8070",
    method: Annotated[
        str, typer.Option("--method", "-X", help="Method of the request (default: POST with a body, else GET).")
    ] = "",
    headers: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME:VALUE", help="Header of the request. Repeatable."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            "--data", "-d", metavar="TEXT", help="Body of the request; @FILE reads it from a file, @- from stdin."
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's answer as JSON.")] = False,
) -> None:
    """Show which backend would get a request, and why. Nothing is sent to a backend.

    Examples:

        headrace router explain /v1/chat/completions -d @request.json

        headrace router explain /hello -H 'cookie: session=abc' --url http://127.0.0.1:8070
    """
    from base64 import b64encode

    from headrace.cli.checks import exit_on_error
    from headrace.cli.tables import open_console

    with exit_on_error():
        body = _read_body(data)
        question = {
            "method": method or ("POST" if body else "GET"),
            "path": path,
            "headers": dict(_parse_header(text) for text in headers or ()),
            "body_base64": b64encode(body).decode(),
        }
        explanation = _post_explain(url, question)
    if as_json:
        print_json(explanation)
    else:
        _show_explanation(explanation, open_console())
    if explanation["backend"] is None:
        raise typer.Exit(1)


def _parse_header(text: str) -> tuple[str, str]:
    from headrace.core.errors import InvalidArgument

    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise InvalidArgument(f"--header is NAME:VALUE, not {text!r}")
    return name.strip(), value.strip()


def _read_body(data: str) -> bytes:
    if not data.startswith("@"):
        return data.encode(errors="surrogateescape")
    import sys

    from headrace.core.errors import InvalidArgument

    try:
        if data == "@-":
            content = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with open(data[1:], "rb") as stream:
                content = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"--data {data}: {error.strerror}; name a file that can be read") from None
    if len(content) > _MAX_BYTES:
        raise InvalidArgument(f"--data {data}: over {_MAX_BYTES} bytes; policies do not use longer bodies")
    return content


def _post_explain(url: str, question: dict[str, Any]) -> dict[str, Any]:
    from headrace.core.errors import FailedPrecondition, InvalidArgument, Unavailable
    from headrace.net.http_client import request

    server, body = url if "://" in url else f"http://{url}", json.dumps(question).encode()
    try:
        explanation = request("POST", server, "/router/explain", body, seconds=_TIMEOUT_SECONDS).json()
    except OSError:
        raise Unavailable(f"no router answers at {url}: start one, or give another with --url") from None
    if not isinstance(explanation, dict) or ("backend" not in explanation and "error" not in explanation):
        raise FailedPrecondition(f"the server at {url} is not a router of this version")
    if "error" in explanation:
        raise InvalidArgument(f"the router answered: {explanation['error']}")
    return explanation


def _show_explanation(explanation: dict[str, Any], console: Console) -> None:
    from rich.text import Text

    from headrace.cli.tables import table

    chosen, details = explanation["backend"] or "no backend", explanation["details"]
    console.print(f"{chosen} ({explanation['policy']}, {explanation['why']}): {explanation['because']}", markup=False)
    if "handing" in details:
        console.print(f"{details.get('prefill', 'no prefill')}: {details['handing_because']}", markup=False)
    matched = details.get("matched_characters", {})
    length = details.get("prompt_characters", 0)
    rows = [
        (
            f"{backend['url']} ({backend['role']})" if backend.get("role") else backend["url"],
            Text(backend["state"], _STYLES.get(backend["state"], "")),
            str(backend["outstanding"]),
            f"{matched[backend['url']]} of {length}" if backend["url"] in matched else "",
            backend["reason"],
        )
        for backend in explanation["backends"]
    ]
    console.print(table(("BACKEND", "STATE", "OUTSTANDING", "PROMPT KNOWN", "WHY"), rows, right=("OUTSTANDING",)))
    for name in ("session_order", "order"):
        if details.get(name):
            console.print(f"in this order: {', '.join(details[name])}", markup=False)
