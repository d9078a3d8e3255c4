# SPDX-License-Identifier: Apache-2.0
"""Every key of the configuration, in the order people read them.

Read by everything else here, by `headrace.cli.options`, which makes options of those with an own flag, and by the page of
`docs/guides/configuration.md`. Names of the sections `server` to `safeguards` are those of the page this server was written
for; some of its flat variables (`INFERENCE_PORT`) are short names here.
"""

from __future__ import annotations

from headrace.programs.configuration.keys import Key

MIB = 1024 * 1024
_PORT = 65535
_DEVICE = r"cpu|auto|(?:cuda|gpu)(?::[0-9]{1,3})?"
_DEVICES = "cpu, cuda, cuda:NUMBER or auto"
_LEVEL = r"(?i:debug|info|warn(?:ing)?|error|critical|fatal|notset)"
_LEVELS = "debug, info, warning or error"
_TYPE = r"(?:TYPE_)?[A-Za-z]+[0-9]{0,2}"

_TENSOR = (
    Key("name", "What requests call it."),
    Key("dtype", "FP32, INT64, STRING and so on.", default="FP32", pattern=_TYPE, metavar="a type such as FP32"),
    Key("shape", "Sizes without the batch; -1 for any.", "whole", many=True, least=-1, most=1 << 40),
)

_SERVER = (
    Key(
        "server.host", "Address of all ports. Loopback unless told.", default="127.0.0.1", flag="host", names=("HOST",)
    ),
    Key(
        "server.port",
        "HTTP port; 0 takes a free one.",
        "whole",
        8000,
        "http-port",
        names=("PORT",),
        least=0,
        most=_PORT,
    ),
    Key("server.workers", "Processes.", "whole", 1, "workers", names=("WORKERS",), least=1, most=256),
    Key(
        "server.worker_timeout_s",
        "How long one of several processes may hang before another takes its place; 0: for ever.",
        "number",
        30.0,
        "worker-timeout-seconds",
        least=0,
    ),
    Key("server.grpc_port", "gRPC port; 0 takes a free one.", "whole", 8001, "grpc-port", least=0, most=_PORT),
    Key("server.metrics_port", "Port for metrics alone.", "whole", flag="metrics-port", least=0, most=_PORT),
    Key("server.grace_s", "Time for requests in flight after SIGTERM.", "number", 30.0, "grace-seconds", least=0),
    Key("server.tls_certificate", "PEM file; turns TLS on.", flag="tls-certificate"),
    Key("server.tls_key", "PEM file with the certificate's key.", flag="tls-key"),
    Key("server.tls_client_ca", "PEM file: clients must show a certificate it signed.", flag="tls-client-ca"),
)

_MODEL = (
    Key(
        "model.path",
        "Serve the model in this file or folder; the folder may have one for each version.",
        flag="model-path",
        names=("MODEL_PATH",),
        metavar="PATH",
    ),
    Key(
        "model.version",
        "The version of --model-path to serve: latest, or the name of a folder.",
        default="latest",
        flag="model-version",
        names=("MODEL_VERSION",),
        metavar="VERSION",
    ),
    Key("model.name", "What the model of --model-path is called.", flag="model-name", metavar="NAME"),
    Key(
        "model.device",
        "Where the model of --model-path computes: cpu, cuda, cuda:0, or auto for a GPU where there is one.",
        default="auto",
        flag="device",
        pattern=_DEVICE,
        metavar=_DEVICES,
    ),
    Key(
        "model.precision",
        "Of the model of --model-path; fp16 and bf16 convert its weights (PyTorch).",
        default="fp32",
        flag="precision",
        choices=("fp32", "fp16", "bf16"),
    ),
    Key("model.serve_all_versions", "Serve every version that is there, not only `version`.", "truth", False),
    Key("model.inputs", "Where the file does not tell its inputs.", "rows", fields=_TENSOR),
    Key("model.outputs", "Where the file does not tell its outputs.", "rows", fields=_TENSOR),
    Key("model.parameters", "Parameters for the backend, by name.", "tree"),
)

_PERFORMANCE = (
    Key(
        "performance.max_batch_size",
        "Requests of the model of --model-path that are computed together; 0 for none. What its file allows, or 32.",
        "whole",
        flag="max-batch-size",
        names=("MAX_BATCH_SIZE",),
        least=0,
        most=1_000_000,
    ),
    Key(
        "performance.batch_timeout_ms",
        "How long a request may wait for others to be computed with.",
        "number",
        0.0,
        "batch-timeout-ms",
        metavar="MILLISECONDS",
        least=0,
        most=60_000,
    ),
    Key(
        "performance.inference_timeout_s",
        "Longest time for an answer of /predict; 0 for no end.",
        "number",
        30.0,
        "inference-timeout-s",
        names=("TIMEOUT_SECONDS",),
        metavar="SECONDS",
        least=0,
        most=86_400,
    ),
    Key(
        "performance.queue_timeout_ms",
        "Then a request that still waits is refused; 0 for never.",
        "number",
        0.0,
        least=0,
    ),
    Key("performance.max_queue_size", "Requests that may wait; others are refused. 0 for any.", "whole", 0, least=0),
    Key(
        "performance.instances",
        "Copies of the model that compute side by side.",
        "whole",
        1,
        "instances",
        least=1,
        most=256,
    ),
)

_LIMIT = (
    Key("requests", "How many.", "whole", least=1, most=1_000_000_000),
    Key("seconds", "In which time.", "number", 60.0, least=0.001, most=86_400 * 366),
    Key("by", "Whom it counts.", default="address", choices=("key", "user", "address")),
    Key("burst", "How many at once; 0 for all of them.", "whole", 0, least=0, most=1_000_000_000),
)

_SAFEGUARDS = (
    Key(
        "safeguards.max_request_size_mb",
        "Largest HTTP body and gRPC message, in MiB.",
        "number",
        64.0,
        "max-body-bytes",
        scale=MIB,
        names=("MAX_REQUEST_SIZE_MB",),
        least=0.001,
        most=1 << 20,
    ),
    Key("safeguards.rate_limit.enabled", "Whether to limit at all; unless said, if a limit is given.", "truth"),
    Key(
        "safeguards.rate_limit.requests_per_minute",
        "Requests a minute for each client; 0 for no limit. 1000 where the limit is only enabled.",
        "whole",
        flag="rate-limit-per-minute",
        names=("RATE_LIMIT_PER_MINUTE",),
        least=0,
        most=1_000_000_000,
    ),
    Key(
        "safeguards.rate_limit.by",
        "Who is one client: the API key, the user's header field, or the address.",
        default="address",
        flag="rate-limit-by",
        choices=("key", "user", "address"),
    ),
    Key("safeguards.rate_limit.burst", "How many at once; 0 for a minute's.", "whole", 0, least=0, most=1_000_000_000),
    Key("safeguards.rate_limit.user_header", "The field that names the user.", default="x-user-id"),
    Key(
        "safeguards.rate_limit.redis_url",
        "Count in this Redis, together with other servers.",
        flag="rate-limit-redis-url",
        metavar="URL",
        secret=True,
    ),
    Key("safeguards.rate_limit.trusted_proxies", "Networks whose x-forwarded-for is believed.", many=True),
    Key("safeguards.rate_limit.limits", "More limits, all of which a request must pass.", "rows", fields=_LIMIT),
    Key("safeguards.input_validation.enabled", "Look at inputs of /predict before a model does.", "truth", True),
    Key(
        "safeguards.input_validation.max_sequence_length",
        "Largest size of any dimension; 0 for any.",
        "whole",
        0,
        least=0,
    ),
    Key("safeguards.input_validation.max_inputs", "Numbers in one prediction; 0 for any.", "whole", 10_000, least=0),
    Key("safeguards.input_validation.max_rows", "Predictions in one batch; 0 for any.", "whole", 1_000, least=0),
    Key("safeguards.input_validation.min", "Smallest number that is taken.", "number"),
    Key("safeguards.input_validation.max", "Largest number that is taken.", "number"),
    Key("safeguards.input_validation.allow_nan", "Take NaN and infinities.", "truth", False),
    Key(
        "safeguards.concurrency.max_in_flight",
        "Requests that are taken on at the same time; others get 429 at once. 0 for any number.",
        "whole",
        0,
        "max-in-flight",
        least=0,
        most=1_000_000_000,
    ),
    Key(
        "safeguards.api_keys_file",
        "File of hashed API keys: only who has one is served.",
        flag="api-keys-file",
        metavar="FILE",
    ),
)

_MORE = (
    Key(
        "cache.enabled",
        "Keep answers of the model of `model.path`; others say it in their configuration.",
        "truth",
        False,
    ),
    Key(
        "cache.size_mb",
        "Memory for kept answers, in MiB.",
        "number",
        64.0,
        "response-cache-byte-size",
        scale=MIB,
        least=0,
    ),
    Key(
        "cache.ttl_s",
        "How old a kept answer may be; 0 for any age.",
        "number",
        0.0,
        "cache-ttl-s",
        metavar="SECONDS",
        least=0,
    ),
    Key("predict.enabled", "Serve /predict.", "truth", True, "allow-predict"),
    Key(
        "predict.model",
        "The model of /predict without a name; unless said, the only one.",
        flag="predict-model",
        metavar="MODEL",
    ),
    Key("openai.enabled", "Serve OpenAI's protocol under /v1.", "truth", True, "allow-openai"),
    Key(
        "media.allow_hosts",
        "Hosts that images and videos may be fetched from, *.domain for all below one; any public one unless told.",
        flag="media-host",
        many=True,
        metavar="HOST",
    ),
    Key(
        "media.private_hosts",
        "Hosts or networks (10.1.0.0/16) at private addresses that media may be fetched from all the same.",
        flag="media-private-host",
        many=True,
        metavar="HOST",
    ),
    Key(
        "media.folders",
        "Folders of this machine whose images and videos a client may name.",
        flag="media-folder",
        many=True,
        metavar="FOLDER",
    ),
    Key("media.max_image_mb", "Largest image, in MiB.", "number", 20.0, least=0.001, most=1024),
    Key("media.max_video_mb", "Largest video, in MiB.", "number", 512.0, least=0.001, most=65536),
    Key("media.max_frames", "Frames taken from one video.", "whole", 768, least=1, most=100_000),
    Key("media.fetch_timeout_s", "Longest time to fetch an image or a video.", "number", 60.0, least=0.1, most=3600),
    Key(
        "stream.idle_timeout_s",
        "A WebSocket without a message is closed after this.",
        "number",
        60.0,
        least=0.001,
        most=86_400,
    ),
    Key("stream.messages_per_second", "Of one WebSocket; 0 for any number.", "number", 100.0, least=0),
    Key("stream.binary", "Take binary messages on WebSockets.", "truth", True),
    Key("traffic", "How versions share the traffic, by model.", "tree"),
    Key("models", "Folders of models.", flag="model-repository", many=True),
    Key(
        "repository.mode",
        "none, poll or explicit.",
        default="poll",
        flag="model-control-mode",
        choices=("none", "poll", "explicit"),
    ),
    Key(
        "repository.poll_s",
        "From one look at the folders to the next; 0 for none.",
        "number",
        15.0,
        "repository-poll-secs",
        least=0,
    ),
    Key("repository.load", "With explicit: load these at the start.", flag="load-model", many=True),
    Key("repository.exit_on_error", "Exit if a model fails at the start.", "truth", False, "exit-on-error"),
    Key("repository.strict_readiness", "Ready only when every model is.", "truth", True, "strict-readiness"),
    Key(
        "logging.level",
        "From which on lines are logged.",
        default="info",
        flag="log-level",
        pattern=_LEVEL,
        metavar=_LEVELS,
    ),
    Key("logging.format", "auto, json or text.", default="auto", flag="log-format"),
    Key("logging.file", "Write the log to this file.", flag="log-file"),
    Key("logging.access", "Log one line per request.", "truth", False, "access-log"),
)

KEYS: tuple[Key, ...] = (*_SERVER, *_MODEL, *_PERFORMANCE, *_SAFEGUARDS, *_MORE)

OWN_FLAGS = frozenset(
    {
        *("model-path", "model-version", "model-name", "device", "precision", "instances"),
        *("max-batch-size", "batch-timeout-ms", "inference-timeout-s", "rate-limit-per-minute", "rate-limit-by"),
        *("rate-limit-redis-url", "max-in-flight", "api-keys-file", "cache-ttl-s", "allow-predict", "predict-model"),
        *("allow-openai", "media-host", "media-private-host", "media-folder"),
    }
)
"""Flags that are there for their keys; the others were there before."""

OPTIONS = "options"
"""The section for flags by their own names."""
