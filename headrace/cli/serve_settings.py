# SPDX-License-Identifier: Apache-2.0
"""Turn the options of `headrace serve` into the settings of a server."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from headrace.api.metrics.settings import MetricsSettings, metrics_settings
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.predict.settings import PredictSettings
from headrace.api.v1.status import V1Settings
from headrace.api.v2.settings import Restriction, TraceDefaults, V2Settings
from headrace.cli.checks import address_of, tls_of
from headrace.cli.repositories import engine_settings
from headrace.core.errors import InvalidArgument
from headrace.core.files import cache_folder
from headrace.core.fleet_key import machine_key, user_folder
from headrace.core.kv_transfer import KEY_VARIABLE, MIN_KEY_BYTES, KvTransferSettings, Role
from headrace.core.limits import Limits
from headrace.core.nodes import DEFAULT_PORT, NodeSettings, node_environment
from headrace.core.telemetry.logs import LogFormat
from headrace.core.telemetry.progress import Progress, RunningTasks
from headrace.engine.traffic.settings import SplitSettings, TrafficSettings
from headrace.models.staging import Staging, staged
from headrace.models.storage.fetch import fetch_location
from headrace.models.storage.locations import HubLocation
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles
from headrace.programs.configuration.resolution import OptionValues
from headrace.programs.configuration.sections import (
    access_settings,
    media_settings,
    predict_settings,
    single_models,
    traffic_settings,
)
from headrace.programs.doctor.folders import state_folder
from headrace.programs.serve.server import only_this_machine
from headrace.programs.serve.settings import ListenSettings, ServerSettings
from headrace.version import __version__

log = logging.getLogger("headrace.cli")

_FORMATS: dict[str, LogFormat] = {
    "auto": "auto",
    "json": "json",
    "text": "text",
    # Triton's: its own format, and the same with ISO timestamps.
    "default": "text",
    "ISO8601": "text",
}
_COLLECTOR = "http://localhost:4318/v1/traces"
_MODES = ("triton", "opentelemetry")
_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Destination, level and format of the log."""

    level: str
    format: LogFormat
    file: str = ""


def log_settings(values: OptionValues) -> LogSettings:
    """Return the log settings of the options: Triton's switches disable levels, verbose enables all."""
    level = values.str("log-level")
    if values.int("log-verbose") > 0:
        level = "debug"
    elif not values.bool("log-info"):
        level = "warning" if values.bool("log-warning") else "error" if values.bool("log-error") else "critical"
    form = values.str("log-format")
    if form not in _FORMATS:
        raise InvalidArgument(f"--log-format must be auto, json or text, not {form!r}")
    return LogSettings(level, _FORMATS[form], values.str("log-file"))


@contextmanager
def open_log(path: str) -> Iterator[TextIO | None]:
    """Yield the log file; None for standard error."""
    if not path:
        yield None
        return
    with ExitStack() as opened:
        try:
            stream = opened.enter_context(open(path, "a", buffering=1, encoding="utf-8"))
        except OSError as error:
            raise InvalidArgument(f"--log-file {path}: {error.strerror}; choose a file that can be written") from None
        yield stream


def warn(lines: Iterable[str]) -> None:
    """Log warnings about the options."""
    for line in lines:
        log.warning("%s", line)


def trace_settings(values: OptionValues) -> tuple[str, TraceDefaults | None]:
    """Return the OpenTelemetry collector for spans ("" for none), and Triton's initial trace settings."""
    common = _entries(values, "")
    endpoint = values.str("trace-endpoint")
    if not (common or _entries(values, "triton") or _entries(values, "opentelemetry")):
        return endpoint, None
    mode = common.get("mode", ["triton"])[-1]
    if mode not in _MODES:
        raise InvalidArgument(f"--trace-config mode must be triton or opentelemetry, not {mode!r}")
    trace = TraceDefaults(
        level=_levels(common.get("level", [])),
        rate=_count("rate", common.get("rate", ["1000"])[-1], 1),
        count=_count("count", common.get("count", ["-1"])[-1], -1),
        log_frequency=_count("log-frequency", _entries(values, "triton").get("log-frequency", ["0"])[-1], 0),
        mode=mode,
        file=_entries(values, "triton").get("file", [""])[-1],
    )
    if mode == "opentelemetry":
        endpoint = endpoint or _entries(values, mode).get("url", [_COLLECTOR])[-1]
    elif trace.level != ("OFF",) and not endpoint:
        warn(["--trace-config writes no trace files: add mode=opentelemetry and opentelemetry,url=URL for spans"])
    return endpoint, trace


def _entries(values: OptionValues, mode: str) -> dict[str, list[str]]:
    """Return the trace settings of one mode, or ("") of all modes."""
    settings: dict[str, list[str]] = {}
    for text in (*_old_entries(values), *values.strings("trace-config")):
        front, equals, value = text.partition("=")
        of_mode, comma, setting = front.rpartition(",")
        if not equals or not setting or (comma and of_mode not in _MODES):
            raise InvalidArgument(
                f"--trace-config must be SETTING=VALUE, triton,SETTING=VALUE or opentelemetry,SETTING=VALUE, not {text!r}"
            )
        if of_mode == mode:
            settings.setdefault(setting, []).append(value)
    return settings


def _old_entries(values: OptionValues) -> Iterator[str]:
    """Yield the older trace options in the form of `--trace-config`."""
    yield from (f"level={level}" for level in values.strings("trace-level"))
    for option, setting in (
        ("trace-file", "triton,file"),
        ("trace-rate", "rate"),
        ("trace-count", "count"),
        ("trace-log-frequency", "triton,log-frequency"),
    ):
        if values.has(option):
            yield f"{setting}={values.get(option)}"


def _levels(texts: list[str]) -> tuple[str, ...]:
    levels = [level.upper() for level in texts]
    for level in levels:
        if level not in _LEVELS:
            raise InvalidArgument(f"--trace-config level must be {', '.join(_LEVELS)}, not {level!r}")
    return tuple(level for level in _LEVELS[1:] if level in levels) or _LEVELS[:1]


def _count(setting: str, text: str, minimum: int) -> int:
    digits = text.removeprefix("-")
    number = int(text) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None
    if number is None or number < minimum:
        raise InvalidArgument(f"--trace-config {setting} must be a whole number from {minimum}, not {text!r}")
    return number


_METRICS_PORT = 8002


@dataclass(frozen=True, slots=True)
class Ports:
    """Addresses of HTTP, gRPC and metrics; None for a port that stays closed."""

    http: Address | None
    grpc: Address | None
    metrics: Address | None
    listening: ListenSettings


def ports_of(values: OptionValues) -> Ports:
    """Return the ports of the options."""
    if not (values.bool("allow-http") or values.bool("allow-grpc")):
        raise InvalidArgument("--allow-http=false and --allow-grpc=false leave nothing to serve: allow one of them")
    host = values.str("host")
    http_host, grpc_host = values.str("http-address") or host, values.str("grpc-address") or host
    http = address_of(http_host, values.int("http-port"), values.str("http-socket"))
    grpc = address_of(grpc_host, values.int("grpc-port"), values.str("grpc-socket"))
    ports = Ports(
        http if values.bool("allow-http") else None,
        grpc if values.bool("allow-grpc") else None,
        _metrics_address(values, http_host, http),
        ListenSettings(
            tls_of(values.str("tls-certificate"), values.str("tls-key"), values.str("tls-client-ca")),
            _grpc_tls(values),
            reuse_http=values.bool("reuse-http-port"),
            reuse_grpc=values.bool("reuse-grpc-port"),
            metrics_optional=not values.has("metrics-port"),
        ),
    )
    _check_different(ports)
    return ports


def _metrics_address(values: OptionValues, host: str, http: Address) -> Address | None:
    if not values.bool("allow-metrics"):
        return None
    if values.has("metrics-port"):
        number = values.int("metrics-port")
    elif http.port:
        number = _METRICS_PORT
    else:
        # With a free port or a socket, a fixed metrics port would be a surprise; the HTTP port serves /metrics too.
        return None
    return address_of(values.str("metrics-address") or host, number, "")


def _grpc_tls(values: OptionValues) -> TlsFiles | None:
    """Return TLS for the gRPC port only, as Triton's options define it."""
    mutual = values.bool("grpc-use-ssl-mutual")
    if not (mutual or values.bool("grpc-use-ssl")):
        return None
    certificate, key, root = (values.str(f"grpc-{option}") for option in ("server-cert", "server-key", "root-cert"))
    if not (certificate and key):
        raise InvalidArgument("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
    if mutual and not root:
        raise InvalidArgument("--grpc-use-ssl-mutual needs --grpc-root-cert: the CA of client certificates")
    return TlsFiles(certificate, key, root if mutual else None)


def _check_different(ports: Ports) -> None:
    chosen = (ports.http, ports.grpc, None if ports.listening.metrics_optional else ports.metrics)
    numbers = [address.port for address in chosen if address is not None and address.port]
    twice = {number for number in numbers if numbers.count(number) > 1}
    if twice:
        raise InvalidArgument(f"port {min(twice)} is used twice: give HTTP, gRPC and metrics different ports")


_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}
_MOST_KEY_BYTES = 4096
_ADDRESS = "--handing-address must be HOST:PORT, such as 10.0.0.7:8003: an address that the decode servers can reach"


def kv_transfer_settings(values: OptionValues, environment: Mapping[str, str] | None = None) -> KvTransferSettings:
    """Return the KV transfer settings of the options. Raise InvalidArgument."""
    role = _ROLES.get(values.str("role"))
    if role is None:
        several_nodes = values.has("nnodes") or node_environment(os.environ if environment is None else environment)
        for name in ("handing-address", "handing-key-file"):
            if values.has(name) and not (name == "handing-key-file" and several_nodes):
                raise InvalidArgument(f"--{name} needs a role: add --role prefill or --role decode")
        return KvTransferSettings()
    if values.int("workers") > 1:
        raise InvalidArgument("--role needs a single process, which holds the KV cache: leave out --workers")
    host, port = _address(values.str("handing-address"))
    key = transfer_key(values.str("handing-key-file"), environment)
    if not key and not _is_loopback(host):
        raise InvalidArgument(
            f"KV-cache pages leave this machine at {host}, so the servers must share a key: give each the same "
            f"--handing-key-file, or {KEY_VARIABLE}"
        )
    return KvTransferSettings(
        role,
        key,
        host,
        port,
        keep_seconds=values.float("handing-seconds"),
        keep_bytes=values.int("handing-bytes"),
    )


def transfer_key(path: str, environment: Mapping[str, str] | None = None) -> bytes:
    """Return the key that servers and routers share; empty if there is none. Raise InvalidArgument."""
    if path:
        try:
            with Path(path).open("rb") as stream:
                key = stream.read(_MOST_KEY_BYTES).strip()
        except OSError as error:
            raise InvalidArgument(f"the key file {path[:200]!a} cannot be read: {error.strerror}") from None
        source = path
    else:
        key = (os.environ if environment is None else environment).get(KEY_VARIABLE, "").strip().encode()
        source = KEY_VARIABLE
    if (path or key) and len(key) < MIN_KEY_BYTES:
        raise InvalidArgument(
            f"the key in {source} has {len(key)} bytes: generate a random one of at least {MIN_KEY_BYTES}"
        )
    return key


def node_settings(values: OptionValues, environment: Mapping[str, str] | None = None) -> NodeSettings:
    """Return the machines that compute a model together, by the options or the environment. Raise InvalidArgument."""
    environment = os.environ if environment is None else environment
    detected = None if values.has("nnodes") else node_environment(environment)
    count = detected.count if detected is not None else values.int("nnodes") if values.has("nnodes") else 1
    if count == 1:
        # A LeaderWorkerSet without workers starts its leader with the options for a group.
        alone = not values.has("nnodes") and environment.get("LWS_GROUP_SIZE") == "1"
        for name in () if alone else ("node-rank", "master-addr", "master-port"):
            if values.has(name) and values.get(name):
                raise InvalidArgument(f"--{name} is for a model on several machines: add --nnodes")
        return NodeSettings()
    rank = values.int("node-rank") if values.has("node-rank") else detected.rank if detected is not None else None
    host, port = _master(values.str("master-addr"), values.int("master-port") if values.has("master-port") else None)
    host, port = (
        host or (detected.host if detected else ""),
        port or (detected.port if detected else None) or DEFAULT_PORT,
    )
    if rank is None or not host:
        raise InvalidArgument(
            f"--nnodes is {count}: say which machine this is by --node-rank (0 serves), and where machine 0 is by "
            "--master-addr"
        )
    if rank >= count:
        raise InvalidArgument(f"--node-rank is {rank}, and --nnodes {count}: ranks are from 0 to {count - 1}")
    if values.int("workers") > 1:
        raise InvalidArgument("--nnodes needs a single process, which has the ranks of a model: leave out --workers")
    if values.str("role"):
        raise InvalidArgument("--nnodes does not work with --role: KV pages of several processes are not transferred")
    if values.has("trial-load") and values.str("trial-load") != "never":
        raise InvalidArgument("--trial-load tries models on one machine, and --nnodes has several: leave it out")
    key = transfer_key(values.str("handing-key-file"), environment)
    if not key:
        if not _is_loopback(host):
            raise InvalidArgument(
                f"{count} machines compute a model together, so they must share a key: give each the same "
                f"--handing-key-file, or {KEY_VARIABLE}"
                + (
                    f"; or --nnodes 1, to serve alone although {detected.source} has started several"
                    if detected
                    else ""
                )
            )
        key = machine_key(user_folder())
    if detected is not None:
        log.info("Node %d of %d, as %s has set; --nnodes 1 is for a server on its own.", rank, count, detected.source)
    return NodeSettings(count, rank, host, port, key, values.float("node-join-seconds"))


def _master(text: str, port: int | None) -> tuple[str, int | None]:
    """Split HOST[:PORT], where an IPv6 address with a port has brackets."""
    host, colon, number = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        return text.strip("[]"), port
    if text.endswith("]"):
        return text.strip("[]"), port
    if not host or not number.isdecimal() or not 0 < int(number) < 65536:
        raise InvalidArgument(
            f"--master-addr must be HOST or HOST:PORT, such as 10.0.0.7 or 10.0.0.7:29500, not {text!r}"
        )
    return host.strip("[]"), port or int(number)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not colon or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(_ADDRESS)
    if host in ("0.0.0.0", "::"):  # noqa: S104  rejected here
        raise InvalidArgument(f"{_ADDRESS}; clients cannot connect to {host}")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_settings(values: OptionValues, progress: Progress, stagings: Sequence[Staging] = ()) -> ServerSettings:
    """Return the server settings. `stagings` are models that are served directly from their paths."""
    running = RunningTasks(progress)
    ports, engine = ports_of(values), engine_settings(values, stagings, running)
    metrics = _metrics(values)
    endpoint, trace = trace_settings(values)
    access = access_settings(values)
    trusted_clients_only = access.keys_file is not None or only_this_machine((ports.http, ports.grpc))
    nodes = node_settings(values)
    if nodes.count > 1:
        # A trial would load the whole model on one machine, without the others.
        engine = replace(engine, repository=replace(engine.repository, trial_load="never"))
    return ServerSettings(
        nodes=nodes,
        http=ports.http,
        grpc=ports.grpc,
        metrics=ports.metrics,
        listening=ports.listening,
        workers=values.int("workers"),
        worker_timeout_seconds=values.float("worker-timeout-seconds"),
        grace_seconds=values.float("grace-seconds"),
        access_log=values.bool("access-log"),
        trace_endpoint=endpoint,
        v1=_v1(values),
        v2=_v2(values, trace),
        predict=_predict(values, stagings),
        openai=_openai(values, ports.http) if values.bool("allow-openai") else None,
        media=media_settings(values),
        access=access,
        allow_admin=trusted_clients_only,
        allow_console=values.bool("console") if values.has("console") else trusted_clients_only,
        console_history_seconds=values.int("console-history-secs"),
        traffic=_traffic(values, stagings),
        reload_traffic=(lambda: _traffic(values.reload(), stagings)) if values.file else None,
        traffic_file=values.file,
        metrics_settings=metrics,
        limits=_limits(values),
        engine=replace(
            engine,
            summary_quantiles=metrics.engine_quantiles if metrics else (),
            kv_transfer=kv_transfer_settings(values),
        ),
        progress=progress,
        running=running,
    )


@contextmanager
def open_settings(values: OptionValues, progress: Progress) -> Iterator[ServerSettings]:
    """Yield the server settings; models served directly from their paths are staged in folders meanwhile."""

    def download(location: HubLocation) -> Path:
        return fetch_location(location, cache_folder() / "models", progress=progress)

    with ExitStack() as opened:
        singles = single_models(values, traffic_settings(values).splits, download)
        yield server_settings(values, progress, [opened.enter_context(staged(single)) for single in singles])


def _predict(values: OptionValues, stagings: Sequence[Staging]) -> PredictSettings | None:
    settings = predict_settings(values)
    if settings is None or settings.model or len(stagings) != 1:
        return settings
    return replace(settings, model=stagings[0].name)


def _openai(values: OptionValues, address: Address | None) -> OpenAiSettings:
    folder = _openai_state_folder(values.str("openai-state-dir"))
    batches = None
    if values.bool("allow-openai-batches") and folder is not None:
        # Servers of one user share the default folder: each computes its own batches, with its own models.
        own = "batches" if values.str("openai-state-dir") else f"batches-{address.port if address is not None else 0}"
        batches = folder / own
    return OpenAiSettings(
        continuation_key=transfer_key(values.str("handing-key-file")),
        state_folder=folder,
        stored_responses_bytes=values.int("openai-stored-responses-bytes"),
        stored_responses_seconds=values.float("openai-stored-responses-days") * 86_400,
        batch_folder=batches,
        batch_lines=values.int("openai-batch-lines"),
    )


def _openai_state_folder(folder: str) -> Path | None:
    """Return the state directory of OpenAI's protocol; None if none is given and the user has no home."""
    try:
        return Path(folder).expanduser() if folder else state_folder(os.environ) / "openai"
    except RuntimeError:
        return None


def _traffic(values: OptionValues, stagings: Sequence[Staging]) -> TrafficSettings:
    settings = traffic_settings(values)
    preferred = {
        staging.name: SplitSettings({staging.preferred: 1.0})
        for staging in stagings
        if staging.name not in settings.splits and staging.preferred
    }
    return TrafficSettings({**settings.splits, **preferred}) if preferred else settings


def _metrics(values: OptionValues) -> MetricsSettings | None:
    settings = metrics_settings(
        values.strings("metrics-config"),
        interval_ms=math.ceil(values.float("metrics-interval-ms")),
        gpu=values.bool("allow-gpu-metrics"),
        cpu=values.bool("allow-cpu-metrics"),
        namespaces=values.bool("model-namespacing"),
    )
    return settings if values.bool("allow-metrics") else None


def _limits(values: OptionValues) -> Limits:
    max_body_bytes = values.int("max-body-bytes")
    http = values.int("http-max-input-size") if values.has("http-max-input-size") else max_body_bytes
    return Limits(body_bytes=http, message_bytes=max_body_bytes)


def _v1(values: OptionValues) -> V1Settings:
    settings = V1Settings(version=__version__, allow_profiling=values.bool("allow-profiling"))
    return replace(settings, server_id=values.str("id")) if values.has("id") else settings


def _v2(values: OptionValues, trace: TraceDefaults | None) -> V2Settings:
    settings = V2Settings(
        allow_client_shm=values.bool("allow-client-shm"),
        http_header_forward_pattern=values.str("http-header-forward-pattern"),
        grpc_header_forward_pattern=values.str("grpc-header-forward-pattern"),
        http_restrictions=tuple(map(Restriction.parse, values.strings("http-restricted-api"))),
        grpc_restrictions=tuple(map(Restriction.parse, values.strings("grpc-restricted-protocol"))),
        trace=trace,
    )
    return replace(settings, server_id=values.str("id")) if values.has("id") else settings
