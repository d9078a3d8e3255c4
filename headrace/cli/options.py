# SPDX-License-Identifier: Apache-2.0
"""The options of `headrace serve`, by topic: names, aliases, defaults, help. Read by `serve` and `serve_settings`.

Names are Triton's where Triton has the option; aliases are those of its first releases. Options that are there for a key of
the configuration are made from the table of keys; `keys` is that table with the other options added.
"""

from __future__ import annotations

from typing import cast

from headrace.cli.flags import Flag, Kind
from headrace.programs.configuration.keys import Key
from headrace.programs.configuration.table import KEYS, OPTIONS, OWN_FLAGS

CONFIGURATION, ONE_MODEL, SAFEGUARDS = "Configuration", "One model without a folder of models", "Safeguards"
MODELS, LISTENING, PROTOCOLS = "Models", "Listening", "Protocols"
APART = "Prefill and decode apart"
METRICS, LIMITS, LOGS = "Metrics", "Workers and limits", "Logs and traces"

_PORT = 65535
_MIB = 1024 * 1024

CONFIG = "config"

_CONFIGURATION = (
    Flag(
        CONFIG,
        CONFIGURATION,
        "Read this YAML file; the environment (INFERENCE_*) and options come before it.",
        metavar="FILE",
    ),
)

_OTHERS: tuple[Flag, ...] = (
    Flag("model-repository", MODELS, "The same as MODELS.", metavar="FOLDER", aliases=("model-store",), many=True),
    Flag(
        "model-control-mode",
        MODELS,
        "none: load all once. poll: follow the folders. explicit: load what is asked for.",
        default="poll",
        choices=("none", "poll", "explicit"),
    ),
    Flag(
        "repository-poll-secs",
        MODELS,
        "From one look at the folders to the next; 0 for none.",
        "number",
        15.0,
        metavar="SECONDS",
        aliases=("file-system-poll-secs",),
        least=0,
    ),
    Flag(
        "allow-poll-model-repository",
        MODELS,
        "false: the same as --model-control-mode none.",
        "truth",
        aliases=("allow-model-load-unload",),
        old=True,
    ),
    Flag("allow-model-control", MODELS, "true: the same as --model-control-mode explicit.", "truth", old=True),
    Flag("load-model", MODELS, "With explicit: load this at the start; * for all.", metavar="MODEL", many=True),
    Flag(
        "strict-model-config",
        MODELS,
        "Refuse models whose configuration leaves something to their files.",
        "truth",
        False,
        aliases=("disable-auto-complete-config",),
    ),
    Flag(
        "strict-readiness",
        MODELS,
        "Ready only when every model is; false: as soon as the server answers.",
        "truth",
        True,
    ),
    Flag("exit-on-error", MODELS, "Exit if a model fails at the start.", "truth", False),
    Flag(
        "model-load-thread-count", MODELS, "Versions that are loaded at the same time.", "whole", 4, least=1, most=256
    ),
    Flag(
        "response-cache-byte-size",
        MODELS,
        "Memory for answers of models with response_cache; 0 for none.",
        "whole",
        64 * _MIB,
        metavar="BYTES",
        least=0,
    ),
    Flag(
        "cache-config",
        MODELS,
        "local,size=BYTES is the same as --response-cache-byte-size.",
        metavar="CACHE,SETTING=VALUE",
        many=True,
    ),
    Flag("rate-limit", MODELS, "Rate limits of models apply where they have any.", choices=("execution_count", "off")),
    Flag(
        "rate-limit-resource",
        MODELS,
        "How much there is of a rate_limiter's resource.",
        metavar="NAME:COUNT",
        many=True,
    ),
    Flag("host", LISTENING, "Address of all ports. Loopback unless told.", default="127.0.0.1", metavar="ADDRESS"),
    Flag("http-port", LISTENING, "HTTP port; 0 takes a free one.", "whole", 8000, "PORT", least=0, most=_PORT),
    Flag("grpc-port", LISTENING, "gRPC port; 0 takes a free one.", "whole", 8001, "PORT", least=0, most=_PORT),
    Flag(
        "metrics-port",
        LISTENING,
        "Port for metrics alone: 8002, or none with --http-port 0. They are at /metrics of the HTTP port too.",
        "whole",
        metavar="PORT",
        least=0,
        most=_PORT,
    ),
    Flag("http-address", LISTENING, "Address of the HTTP port; 0.0.0.0 for every interface.", metavar="ADDRESS"),
    Flag("grpc-address", LISTENING, "Address of the gRPC port.", metavar="ADDRESS"),
    Flag("metrics-address", LISTENING, "Address of the metrics port; that of HTTP unless given.", metavar="ADDRESS"),
    Flag("http-socket", LISTENING, "Serve HTTP on this UNIX socket instead of a port.", metavar="PATH"),
    Flag("grpc-socket", LISTENING, "Serve gRPC on this UNIX socket instead of a port.", metavar="PATH"),
    Flag("allow-http", LISTENING, "Open the HTTP port.", "truth", True),
    Flag("allow-grpc", LISTENING, "Open the gRPC port.", "truth", True),
    Flag("reuse-http-port", LISTENING, "Let other servers listen on the same HTTP port.", "truth", False),
    Flag("reuse-grpc-port", LISTENING, "Let other servers listen on the same gRPC port.", "truth", False),
    Flag("tls-certificate", LISTENING, "PEM file with the certificate chain; turns TLS on.", metavar="FILE"),
    Flag("tls-key", LISTENING, "PEM file with the certificate's key.", metavar="FILE"),
    Flag("tls-client-ca", LISTENING, "PEM file: clients must show a certificate it signed.", metavar="FILE"),
    Flag("grpc-use-ssl", LISTENING, "TLS on the gRPC port alone.", "truth", False),
    Flag("grpc-use-ssl-mutual", LISTENING, "The same, and clients need a certificate.", "truth", False),
    Flag("grpc-server-cert", LISTENING, "PEM file for --grpc-use-ssl: the certificate.", metavar="FILE"),
    Flag("grpc-server-key", LISTENING, "PEM file for --grpc-use-ssl: its key.", metavar="FILE"),
    Flag("grpc-root-cert", LISTENING, "PEM file for --grpc-use-ssl-mutual: who signs clients.", metavar="FILE"),
    Flag("id", PROTOCOLS, "What the server calls itself.", metavar="NAME"),
    Flag(
        "http-header-forward-pattern",
        PROTOCOLS,
        "Give header fields that match to the model, as parameters.",
        metavar="REGEX",
    ),
    Flag(
        "grpc-header-forward-pattern",
        PROTOCOLS,
        "Give metadata that matches to the model, as parameters.",
        metavar="REGEX",
    ),
    Flag(
        "http-restricted-api",
        PROTOCOLS,
        "Serve these only to requests with a header field.",
        metavar="APIS:KEY=VALUE",
        many=True,
    ),
    Flag(
        "grpc-restricted-protocol",
        PROTOCOLS,
        "Serve these only to calls with triton-grpc-protocol-KEY.",
        metavar="APIS:KEY=VALUE",
        many=True,
    ),
    Flag("allow-client-shm", PROTOCOLS, "Let clients register shared memory of this machine.", "truth", False),
    Flag(
        "console",
        PROTOCOLS,
        "Serve the console at /console. Unless told: if only this machine can connect, or clients need an API key.",
        "truth",
        aliases=("allow-console",),
    ),
    Flag("allow-profiling", PROTOCOLS, "Answer requests to profile with success.", "truth", False),
    Flag(
        "role",
        APART,
        "prefill: compute prompts for others. decode: go on from what another has computed.",
        choices=("prefill", "decode"),
    ),
    Flag(
        "handing-address",
        APART,
        "Where a prefill gives pages to decoders of other machines; a port of 0 takes a free one.",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
    ),
    Flag(
        "handing-key-file",
        APART,
        "The key that all servers and routers of a fleet share; or HEADRACE_HANDING_KEY. One machine needs none.",
        metavar="FILE",
    ),
    Flag(
        "handing-bytes",
        APART,
        "Pages that a prefill keeps until they are taken, in shared memory.",
        "whole",
        1024 * _MIB,
        metavar="BYTES",
        least=0,
    ),
    Flag(
        "handing-seconds",
        APART,
        "How long it keeps what nobody takes.",
        "number",
        30.0,
        metavar="SECONDS",
        least=0.1,
    ),
    Flag("allow-metrics", METRICS, "Serve metrics.", "truth", True),
    Flag("allow-gpu-metrics", METRICS, "Metrics of the GPUs, where there are some.", "truth", True),
    Flag("allow-cpu-metrics", METRICS, "Metrics of the machine's processors and memory.", "truth", True),
    Flag(
        "metrics-interval-ms",
        METRICS,
        "From one look at the machine to the next.",
        "number",
        2000.0,
        metavar="MILLISECONDS",
        least=1,
    ),
    Flag("metrics-config", METRICS, "Such as summary_latencies=true.", metavar="SETTING=VALUE", many=True),
    Flag("workers", LIMITS, "Processes that share the ports.", "whole", 1, aliases=("processes",), least=1, most=256),
    Flag(
        "worker-timeout-seconds",
        LIMITS,
        "How long one of several processes may hang before another takes its place; 0: for ever.",
        "number",
        30.0,
        metavar="SECONDS",
        least=0,
    ),
    Flag(
        "max-body-bytes",
        LIMITS,
        "Largest HTTP body and gRPC message.",
        "whole",
        64 * _MIB,
        metavar="BYTES",
        least=1,
    ),
    Flag("http-max-input-size", LIMITS, "Largest HTTP body.", "whole", metavar="BYTES", least=1),
    Flag(
        "grace-seconds",
        LIMITS,
        "Time for requests in flight after SIGTERM.",
        "number",
        30.0,
        metavar="SECONDS",
        aliases=("exit-timeout-secs",),
        least=0,
    ),
    Flag("log-level", LOGS, "debug, info, warning or error.", default="info", metavar="LEVEL"),
    Flag(
        "log-format",
        LOGS,
        "auto, json or text; auto is text on a terminal. Triton's default and ISO8601 are text.",
        default="auto",
        metavar="FORMAT",
    ),
    Flag("log-file", LOGS, "Write the log to this file.", metavar="FILE"),
    Flag("log-verbose", LOGS, "1 or more: the same as --log-level debug.", "whole", 0, metavar="LEVEL", least=0),
    Flag("log-info", LOGS, "false: only warnings and errors.", "truth", True),
    Flag("log-warning", LOGS, "false: no warnings.", "truth", True),
    Flag("log-error", LOGS, "false: no errors.", "truth", True),
    Flag("access-log", LOGS, "Log one line per request.", "truth", False),
    Flag("trace-endpoint", LOGS, "Send OpenTelemetry spans to this OTLP/HTTP collector.", metavar="URL"),
    Flag(
        "trace-config",
        LOGS,
        "Such as mode=opentelemetry, level=TIMESTAMPS, rate=1, opentelemetry,url=URL.",
        metavar="[MODE,]SETTING=VALUE",
        many=True,
    ),
    Flag("trace-file", LOGS, "The same as --trace-config triton,file=FILE.", metavar="FILE", old=True),
    Flag("trace-level", LOGS, "The same as --trace-config level=LEVEL.", metavar="LEVEL", many=True, old=True),
    Flag("trace-rate", LOGS, "The same as --trace-config rate=COUNT.", "whole", old=True),
    Flag("trace-count", LOGS, "The same as --trace-config count=COUNT.", "whole", old=True),
    Flag("trace-log-frequency", LOGS, "The same as --trace-config triton,log-frequency=COUNT.", "whole", old=True),
)

_PANELS = {"model": ONE_MODEL, "performance": ONE_MODEL, "cache": ONE_MODEL, "predict": PROTOCOLS, "openai": PROTOCOLS}


def _flag_of(key: Key) -> Flag:
    section = key.path.partition(".")[0]
    return Flag(
        key.flag,
        _PANELS.get(section, SAFEGUARDS),
        key.help,
        cast("Kind", key.kind),  # rows and trees have no flag
        key.default,
        metavar=key.metavar,
        many=key.many,
        least=key.least,
        most=key.most,
        choices=key.choices,
    )


def _key_of(flag: Flag) -> Key:
    return Key(
        f"{OPTIONS}.{flag.name}",
        flag.help,
        flag.kind,
        flag.default,
        flag.name,
        metavar=flag.metavar,
        many=flag.many,
        least=flag.least,
        most=flag.most,
        choices=flag.choices,
        secret="restricted" in flag.name,
    )


def _all_flags() -> tuple[Flag, ...]:
    """In the order of the help: by topic."""
    flags = [*_CONFIGURATION, *_OTHERS, *(_flag_of(key) for key in KEYS if key.flag in OWN_FLAGS)]
    panels = [CONFIGURATION, MODELS, ONE_MODEL, LISTENING, PROTOCOLS, SAFEGUARDS, APART, METRICS, LIMITS, LOGS]
    return tuple(sorted(flags, key=lambda flag: panels.index(flag.panel)))


FLAGS = _all_flags()

BY_NAME = {flag.name: flag for flag in FLAGS}


def keys() -> tuple[Key, ...]:
    """Every key of the configuration: those of the table, and each option that none of them stands for."""
    taken = {key.flag for key in KEYS} | {CONFIG}
    return (*KEYS, *(_key_of(flag) for flag in FLAGS if flag.name not in taken))
