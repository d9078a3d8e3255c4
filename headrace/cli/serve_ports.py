# SPDX-License-Identifier: Apache-2.0
"""From the options about listening to the ports of a server. What does not go together is refused here, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.cli.checks import address_of, tls_of
from headrace.cli.flags import Given
from headrace.core.errors import InvalidArgument
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles
from headrace.programs.serve.settings import ListenSettings

_METRICS_PORT = 8002


@dataclass(frozen=True, slots=True)
class Ports:
    """Where HTTP, gRPC and metrics are served; None for a port that stays closed."""

    http: Address | None
    grpc: Address | None
    metrics: Address | None
    listening: ListenSettings


def ports_of(given: Given) -> Ports:
    """The ports that the options ask for."""
    if not (given.truth("allow-http") or given.truth("allow-grpc")):
        raise InvalidArgument("--allow-http=false and --allow-grpc=false leave nothing to serve: allow one of them")
    host = given.text("host")
    http_host, grpc_host = given.text("http-address") or host, given.text("grpc-address") or host
    http = address_of(http_host, given.whole("http-port"), given.text("http-socket"))
    grpc = address_of(grpc_host, given.whole("grpc-port"), given.text("grpc-socket"))
    ports = Ports(
        http if given.truth("allow-http") else None,
        grpc if given.truth("allow-grpc") else None,
        _metrics_address(given, http_host, http),
        ListenSettings(
            tls_of(given.text("tls-certificate"), given.text("tls-key"), given.text("tls-client-ca")),
            _grpc_tls(given),
            reuse_http=given.truth("reuse-http-port"),
            reuse_grpc=given.truth("reuse-grpc-port"),
            metrics_optional=not given.has("metrics-port"),
        ),
    )
    _check_different(ports)
    return ports


def _metrics_address(given: Given, host: str, http: Address) -> Address | None:
    if not given.truth("allow-metrics"):
        return None
    if given.has("metrics-port"):
        number = given.whole("metrics-port")
    elif http.port:
        number = _METRICS_PORT
    else:
        # Who takes any port, or none, has no use for a fixed one beside it; /metrics is on the HTTP port too.
        return None
    return address_of(given.text("metrics-address") or host, number, "")


def _grpc_tls(given: Given) -> TlsFiles | None:
    """TLS for the gRPC port alone, as Triton's options ask for it."""
    mutual = given.truth("grpc-use-ssl-mutual")
    if not (mutual or given.truth("grpc-use-ssl")):
        return None
    certificate, key, root = (given.text(f"grpc-{what}") for what in ("server-cert", "server-key", "root-cert"))
    if not (certificate and key):
        raise InvalidArgument("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
    if mutual and not root:
        raise InvalidArgument("--grpc-use-ssl-mutual needs --grpc-root-cert: who signs the certificates of clients")
    return TlsFiles(certificate, key, root if mutual else None)


def _check_different(ports: Ports) -> None:
    chosen = (ports.http, ports.grpc, None if ports.listening.metrics_optional else ports.metrics)
    numbers = [address.port for address in chosen if address is not None and address.port]
    twice = {number for number in numbers if numbers.count(number) > 1}
    if twice:
        raise InvalidArgument(f"port {min(twice)} is given twice: HTTP, gRPC and metrics need ports of their own")
