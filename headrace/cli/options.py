# SPDX-License-Identifier: Apache-2.0
"""The table of options of `headrace serve`: names, aliases, defaults and help.

Names are Triton's if Triton has the option; aliases are those of its first releases. Options for a configuration key
are generated from the table of keys; `keys` is that table plus the other options.
"""

from __future__ import annotations

from typing import cast

from headrace.cli.flags import Flag, Kind
from headrace.programs.configuration.keys import KEYS, OPTIONS, OWN_FLAGS, Key

CONFIGURATION, ONE_MODEL, SAFEGUARDS = "Configuration", "One model without a model repository", "Safeguards"
MODELS, LISTENING, PROTOCOLS = "Models", "Listening", "Protocols"
PREFILL_DECODE = "Prefill and decode"
METRICS, LIMITS, LOGS = "Metrics", "Workers and limits", "Logs and traces"

_PORT = 65535
_MIB = 1024 * 1024

CONFIG = "config"

_CONFIGURATION = (
    Flag(
        CONFIG,
        CONFIGURATION,
        "YAML configuration file; the environment (INFERENCE_*) and options take precedence.",
        metavar="FILE",
    ),
)

_OTHERS: tuple[Flag, ...] = (
    Flag("model-repository", MODELS, "Same as MODELS.", metavar="FOLDER", aliases=("model-store",), many=True),
    Flag(
        "model-control-mode",
        MODELS,
        "none: load all models once. poll: reload changed models. explicit: load models on request.",
        default="poll",
        choices=("none", "poll", "explicit"),
    ),
    Flag(
        "repository-poll-secs",
        MODELS,
        "Time between polls of the model repository; 0: no polling.",
        "number",
        15.0,
        metavar="SECONDS",
        aliases=("file-system-poll-secs",),
        least=0,
    ),
    Flag(
        "allow-poll-model-repository",
        MODELS,
        "false: same as --model-control-mode none.",
        "truth",
        aliases=("allow-model-load-unload",),
        old=True,
    ),
    Flag("allow-model-control", MODELS, "true: same as --model-control-mode explicit.", "truth", old=True),
    Flag("load-model", MODELS, "With explicit: model to load at startup; * for all.", metavar="MODEL", many=True),
    Flag(
        "strict-model-config",
        MODELS,
        "Reject models with an incomplete configuration.",
        "truth",
        False,
        aliases=("disable-auto-complete-config",),
    ),
    Flag(
        "strict-readiness",
        MODELS,
        "Report ready only when all models are ready; false: as soon as the server answers.",
        "truth",
        True,
    ),
    Flag("exit-on-error", MODELS, "Exit if a model fails to load at startup.", "truth", False),
    Flag("model-load-thread-count", MODELS, "Model versions loaded concurrently.", "whole", 4, least=1, most=256),
    Flag(
        "response-cache-byte-size",
        MODELS,
        "Memory for cached responses of models with response_cache; 0: none.",
        "whole",
        64 * _MIB,
        metavar="BYTES",
        least=0,
    ),
    Flag(
        "cache-config",
        MODELS,
        "local,size=BYTES: same as --response-cache-byte-size.",
        metavar="CACHE,SETTING=VALUE",
        many=True,
    ),
    Flag(
        "rate-limit",
        MODELS,
        "Accepted for Triton; a model's rate_limiter always applies.",
        choices=("execution_count", "off"),
    ),
    Flag(
        "rate-limit-resource",
        MODELS,
        "Amount of a rate_limiter resource.",
        metavar="NAME:COUNT",
        many=True,
    ),
    Flag("host", LISTENING, "Address of all ports.", default="127.0.0.1", metavar="ADDRESS"),
    Flag("http-port", LISTENING, "HTTP port; 0 takes a free one.", "whole", 8000, "PORT", least=0, most=_PORT),
    Flag("grpc-port", LISTENING, "gRPC port; 0 takes a free one.", "whole", 8001, "PORT", least=0, most=_PORT),
    Flag(
        "metrics-port",
        LISTENING,
        "Separate metrics port: 8002, or none with --http-port 0. The HTTP port also serves /metrics.",
        "whole",
        metavar="PORT",
        least=0,
        most=_PORT,
    ),
    Flag("http-address", LISTENING, "Address of the HTTP port; 0.0.0.0 for every interface.", metavar="ADDRESS"),
    Flag("grpc-address", LISTENING, "Address of the gRPC port.", metavar="ADDRESS"),
    Flag("metrics-address", LISTENING, "Address of the metrics port; that of HTTP by default.", metavar="ADDRESS"),
    Flag("http-socket", LISTENING, "Serve HTTP on this UNIX socket instead of a port.", metavar="PATH"),
    Flag("grpc-socket", LISTENING, "Serve gRPC on this UNIX socket instead of a port.", metavar="PATH"),
    Flag("allow-http", LISTENING, "Open the HTTP port.", "truth", True),
    Flag("allow-grpc", LISTENING, "Open the gRPC port.", "truth", True),
    Flag("reuse-http-port", LISTENING, "Share the HTTP port with other servers (SO_REUSEPORT).", "truth", False),
    Flag("reuse-grpc-port", LISTENING, "Share the gRPC port with other servers (SO_REUSEPORT).", "truth", False),
    Flag("tls-certificate", LISTENING, "PEM file with the certificate chain; turns TLS on.", metavar="FILE"),
    Flag("tls-key", LISTENING, "PEM file with the certificate's key.", metavar="FILE"),
    Flag("tls-client-ca", LISTENING, "PEM file with the CA that signs client certificates (mTLS).", metavar="FILE"),
    Flag("grpc-use-ssl", LISTENING, "Use TLS on the gRPC port only.", "truth", False),
    Flag("grpc-use-ssl-mutual", LISTENING, "Same, and require client certificates.", "truth", False),
    Flag("grpc-server-cert", LISTENING, "PEM file for --grpc-use-ssl: the certificate.", metavar="FILE"),
    Flag("grpc-server-key", LISTENING, "PEM file for --grpc-use-ssl: the key.", metavar="FILE"),
    Flag("grpc-root-cert", LISTENING, "PEM file for --grpc-use-ssl-mutual: the CA of clients.", metavar="FILE"),
    Flag("id", PROTOCOLS, "Server name in responses.", metavar="NAME"),
    Flag(
        "http-header-forward-pattern",
        PROTOCOLS,
        "Pass matching headers to the model, as parameters.",
        metavar="REGEX",
    ),
    Flag(
        "grpc-header-forward-pattern",
        PROTOCOLS,
        "Pass matching metadata to the model, as parameters.",
        metavar="REGEX",
    ),
    Flag(
        "http-restricted-api",
        PROTOCOLS,
        "Serve these APIs only to requests with this header.",
        metavar="APIS:KEY=VALUE",
        many=True,
    ),
    Flag(
        "grpc-restricted-protocol",
        PROTOCOLS,
        "Serve these APIs only to calls with the metadata triton-grpc-protocol-KEY.",
        metavar="APIS:KEY=VALUE",
        many=True,
    ),
    Flag("allow-client-shm", PROTOCOLS, "Let clients register shared memory of this machine.", "truth", False),
    Flag(
        "console",
        PROTOCOLS,
        "Serve the web console at /console. On by default if only this machine can connect, or clients need an API key.",
        "truth",
        aliases=("allow-console",),
    ),
    Flag("allow-profiling", PROTOCOLS, "Accept profiling requests (without effect).", "truth", False),
    Flag(
        "role",
        PREFILL_DECODE,
        "prefill: compute the KV cache of prompts for decode servers. decode: receive it and generate tokens.",
        choices=("prefill", "decode"),
    ),
    Flag(
        "handing-address",
        PREFILL_DECODE,
        "Address at which a prefill server sends KV-cache pages to other machines; port 0 takes a free one.",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
    ),
    Flag(
        "handing-key-file",
        PREFILL_DECODE,
        "Key file shared by servers and routers of a fleet, or set HEADRACE_HANDING_KEY. Not needed on one machine.",
        metavar="FILE",
    ),
    Flag(
        "handing-bytes",
        PREFILL_DECODE,
        "Shared memory for KV-cache pages that wait for transfer.",
        "whole",
        1024 * _MIB,
        metavar="BYTES",
        least=0,
    ),
    Flag(
        "handing-seconds",
        PREFILL_DECODE,
        "Time after which pages that were not transferred are dropped.",
        "number",
        30.0,
        metavar="SECONDS",
        least=0.1,
    ),
    Flag("allow-metrics", METRICS, "Serve metrics.", "truth", True),
    Flag("allow-gpu-metrics", METRICS, "Serve GPU metrics.", "truth", True),
    Flag("allow-cpu-metrics", METRICS, "Serve CPU and memory metrics of the machine.", "truth", True),
    Flag(
        "metrics-interval-ms",
        METRICS,
        "Time between samples of machine metrics.",
        "number",
        2000.0,
        metavar="MILLISECONDS",
        least=1,
    ),
    Flag(
        "metrics-config",
        METRICS,
        "Metrics setting, such as summary_latencies=true.",
        metavar="SETTING=VALUE",
        many=True,
    ),
    Flag(
        "workers",
        LIMITS,
        "Worker processes that share the ports.",
        "whole",
        1,
        aliases=("processes",),
        least=1,
        most=256,
    ),
    Flag(
        "worker-timeout-seconds",
        LIMITS,
        "Replace a worker process that hangs for so long; 0: never.",
        "number",
        30.0,
        metavar="SECONDS",
        least=0,
    ),
    Flag(
        "max-body-bytes",
        LIMITS,
        "Maximum HTTP body and gRPC message size.",
        "whole",
        64 * _MIB,
        metavar="BYTES",
        least=1,
    ),
    Flag("http-max-input-size", LIMITS, "Maximum HTTP body size.", "whole", metavar="BYTES", least=1),
    Flag(
        "grace-seconds",
        LIMITS,
        "Time for open requests after SIGTERM.",
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
    Flag("log-verbose", LOGS, "1 or more: same as --log-level debug.", "whole", 0, metavar="LEVEL", least=0),
    Flag("log-info", LOGS, "false: only warnings and errors.", "truth", True),
    Flag("log-warning", LOGS, "false: no warnings.", "truth", True),
    Flag("log-error", LOGS, "false: no errors.", "truth", True),
    Flag("access-log", LOGS, "Log one line per request.", "truth", False),
    Flag("trace-endpoint", LOGS, "Send OpenTelemetry spans to this OTLP/HTTP collector.", metavar="URL"),
    Flag(
        "trace-config",
        LOGS,
        "Trace setting, such as mode=opentelemetry, level=TIMESTAMPS, rate=1, opentelemetry,url=URL.",
        metavar="[MODE,]SETTING=VALUE",
        many=True,
    ),
    Flag("trace-file", LOGS, "Same as --trace-config triton,file=FILE.", metavar="FILE", old=True),
    Flag("trace-level", LOGS, "Same as --trace-config level=LEVEL.", metavar="LEVEL", many=True, old=True),
    Flag("trace-rate", LOGS, "Same as --trace-config rate=COUNT.", "whole", old=True),
    Flag("trace-count", LOGS, "Same as --trace-config count=COUNT.", "whole", old=True),
    Flag("trace-log-frequency", LOGS, "Same as --trace-config triton,log-frequency=COUNT.", "whole", old=True),
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
    """Return all options in the order of the help, by topic."""
    flags = [*_CONFIGURATION, *_OTHERS, *(_flag_of(key) for key in KEYS if key.flag in OWN_FLAGS)]
    panels = [CONFIGURATION, MODELS, ONE_MODEL, LISTENING, PROTOCOLS, SAFEGUARDS, PREFILL_DECODE, METRICS, LIMITS, LOGS]
    return tuple(sorted(flags, key=lambda flag: panels.index(flag.panel)))


FLAGS = _all_flags()

BY_NAME = {flag.name: flag for flag in FLAGS}


def keys() -> tuple[Key, ...]:
    """Return every configuration key: those of the table, and one per remaining option."""
    taken = {key.flag for key in KEYS} | {CONFIG}
    return (*KEYS, *(_key_of(flag) for flag in FLAGS if flag.name not in taken))
