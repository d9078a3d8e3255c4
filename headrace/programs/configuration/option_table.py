# SPDX-License-Identifier: Apache-2.0
"""The table of options of `headrace serve`, by panel of the help.

Command-line names are Triton's if Triton has the option; aliases are those of its first releases. The command line, the
environment, the configuration file, `headrace config show` and the pages in `docs/guides` all follow from this table.
"""

from __future__ import annotations

from headrace.core.limits import MIB
from headrace.core.nodes import DEFAULT_PORT, MAX_NODES
from headrace.programs.configuration.option import OPTIONS, Option

CONFIG = "config"

_PORT = 65535
_DEVICE = r"cpu|auto|(?:cuda|gpu)(?::[0-9]{1,3})?"
_LEVEL = r"(?i:debug|info|warn(?:ing)?|error|critical|fatal|notset)"
_LEVELS = "debug, info, warning or error"
_DTYPE = r"(?:TYPE_)?[A-Za-z]+[0-9]{0,2}"

_TENSOR = (
    Option("name", "", "Name of the tensor in requests."),
    Option(
        "dtype",
        "",
        "Data type: FP32, INT64, STRING, ...",
        default="FP32",
        pattern=_DTYPE,
        pattern_text="a type such as FP32",
    ),
    Option("shape", "", "Shape without the batch dimension; -1 for any size.", "int", many=True, min=-1, max=1 << 40),
)

_LIMIT = (
    Option("requests", "", "Number of requests.", "int", min=1, max=1_000_000_000),
    Option("seconds", "", "Time window.", "float", 60.0, min=0.001, max=86_400 * 366),
    Option("by", "", "What identifies a client.", default="address", choices=("key", "user", "address")),
    Option("burst", "", "Burst size (0: same as requests).", "int", 0, min=0, max=1_000_000_000),
)

_CONFIGURATION = (
    Option(
        "",
        CONFIG,
        "YAML configuration file; the environment (INFERENCE_*) and options take precedence.",
        metavar="FILE",
    ),
)

_MODELS = (
    Option(
        "models",
        "model-repository",
        "Folder of models; same as MODELS.",
        metavar="FOLDER",
        aliases=("model-store",),
        many=True,
    ),
    Option(
        "repository.mode",
        "model-control-mode",
        "none: load all models once. poll: reload changed models. explicit: load models on request. on-demand: load a "
        "model at the first request that names it, and evict the least recently used to make room.",
        default="poll",
        choices=("none", "poll", "explicit", "on-demand"),
    ),
    Option(
        "repository.poll_s",
        "repository-poll-secs",
        "Time between polls of the model repository; 0: no polling.",
        "float",
        15.0,
        "SECONDS",
        aliases=("file-system-poll-secs",),
        min=0,
    ),
    Option(
        "",
        "allow-poll-model-repository",
        "false: same as --model-control-mode none.",
        "bool",
        aliases=("allow-model-load-unload",),
        deprecated=True,
    ),
    Option(
        "repository.namespaces",
        "model-namespacing",
        "Give the metrics of a model the label namespace, the folder of its repository.",
        "bool",
        default=False,
    ),
    Option("", "allow-model-control", "true: same as --model-control-mode explicit.", "bool", deprecated=True),
    Option(
        "repository.load",
        "load-model",
        "With explicit or on-demand: model to load at startup; * for all (explicit).",
        metavar="MODEL",
        many=True,
    ),
    Option(
        "repository.pinned",
        "pin-model",
        "With on-demand: model to load at startup and never to evict.",
        metavar="MODEL",
        many=True,
    ),
    Option(
        "repository.host_memory_mb",
        "host-memory-limit",
        "Host memory for models that load on demand; 0: four fifths of what is free at startup.",
        "float",
        0.0,
        "BYTES",
        min=0,
        scale=MIB,
    ),
    Option(
        "repository.gpu_memory_mb",
        "gpu-memory-limit",
        "Memory of each GPU for models that load on demand; 0: four fifths of what is free at startup.",
        "float",
        0.0,
        "BYTES",
        min=0,
        scale=MIB,
    ),
    Option(
        "repository.wait_s",
        "model-wait-seconds",
        "How long a request waits for a model that loads on demand; then it gets 503, and the load goes on.",
        "float",
        120.0,
        "SECONDS",
        min=0.001,
        max=86_400,
    ),
    Option(
        "repository.sizes_dir",
        "model-sizes-dir",
        "Folder where measured sizes of models are remembered (default: ~/.cache/headrace/model-sizes).",
        metavar="FOLDER",
    ),
    Option(
        "",
        "strict-model-config",
        "Reject models with an incomplete configuration.",
        "bool",
        False,
        aliases=("disable-auto-complete-config",),
    ),
    Option(
        "repository.strict_readiness",
        "strict-readiness",
        "Report ready only when all models are ready; false: as soon as the server answers.",
        "bool",
        True,
    ),
    Option("repository.exit_on_error", "exit-on-error", "Exit if a model fails to load at startup.", "bool", False),
    Option("", "model-load-thread-count", "Model versions loaded concurrently.", "int", 4, min=1, max=256),
    Option(
        "repository.load_timeout_s",
        "model-load-timeout",
        "Abandon a load that takes longer; 0: no limit.",
        "float",
        3600.0,
        "SECONDS",
        min=0,
    ),
    Option(
        "repository.trial_load",
        "trial-load",
        "Models that a child process loads first, so that a damaged file cannot crash the server. fetched: those from an "
        "object store, the Hugging Face Hub or a load request.",
        default="fetched",
        choices=("fetched", "always", "never"),
    ),
    Option(
        "repository.trial_load_mb",
        "trial-load-bytes",
        "Memory that a trial load may allocate; 0: nine tenths of what is free.",
        "float",
        0.0,
        "BYTES",
        min=0,
        scale=MIB,
    ),
    Option(
        "cache.enabled",
        "",
        "Cache responses of the model of `model.path`; other models enable it in their configuration.",
        "bool",
        False,
    ),
    Option(
        "cache.size_mb",
        "response-cache-byte-size",
        "Memory for cached responses of models with response_cache; 0: none.",
        "float",
        64.0,
        "BYTES",
        min=0,
        scale=MIB,
    ),
    Option(
        "",
        "cache-config",
        "local,size=BYTES: same as --response-cache-byte-size.",
        metavar="CACHE,SETTING=VALUE",
        many=True,
    ),
    Option(
        "",
        "rate-limit",
        "Accepted for Triton; a model's rate_limiter always applies.",
        choices=("execution_count", "off"),
    ),
    Option("", "rate-limit-resource", "Amount of a rate_limiter resource.", metavar="NAME:COUNT", many=True),
    Option("traffic", "", "Traffic splits between versions, by model.", "tree"),
)

_ONE_MODEL = (
    Option(
        "model.path",
        "model-path",
        "Serve the model in this file or folder; the folder may have one for each version.",
        metavar="PATH",
        env="MODEL_PATH",
    ),
    Option(
        "model.version",
        "model-version",
        "Version of --model-path to serve: latest, or a folder name.",
        default="latest",
        metavar="VERSION",
        env="MODEL_VERSION",
    ),
    Option("model.name", "model-name", "Name of the model of --model-path.", metavar="NAME"),
    Option(
        "model.device",
        "device",
        "Device for the model of --model-path: cpu, cuda, cuda:0, or auto (a GPU if there is one).",
        default="auto",
        pattern=_DEVICE,
        pattern_text="cpu, cuda, cuda:NUMBER or auto",
    ),
    Option(
        "model.precision",
        "precision",
        "Precision of the model of --model-path; fp16 and bf16 convert its weights (PyTorch).",
        default="fp32",
        choices=("fp32", "fp16", "bf16"),
    ),
    Option(
        "model.tensor_parallel",
        "tensor-parallel-size",
        "Ranks of the language model of --model-path, each on a GPU of its own or all on the CPU.",
        "int",
        aliases=("tensor-parallel",),
        min=1,
        max=64,
    ),
    Option("model.serve_all_versions", "", "Serve all versions, not only `version`.", "bool", False),
    Option("model.inputs", "", "Inputs, if the model file does not declare them.", "rows", fields=_TENSOR),
    Option("model.outputs", "", "Outputs, if the model file does not declare them.", "rows", fields=_TENSOR),
    Option("model.parameters", "", "Parameters for the backend, by name.", "tree"),
    Option(
        "performance.max_batch_size",
        "max-batch-size",
        "Maximum batch size of the model of --model-path (0: no batching; default: what its file allows, or 32).",
        "int",
        env="MAX_BATCH_SIZE",
        min=0,
        max=1_000_000,
    ),
    Option(
        "performance.batch_timeout_ms",
        "batch-timeout-ms",
        "How long a request may wait to be batched with others.",
        "float",
        0.0,
        "MILLISECONDS",
        min=0,
        max=60_000,
    ),
    Option(
        "performance.inference_timeout_s",
        "inference-timeout-s",
        "Time limit for an answer of /predict (0: none).",
        "float",
        30.0,
        "SECONDS",
        env="TIMEOUT_SECONDS",
        min=0,
        max=86_400,
    ),
    Option("performance.queue_timeout_ms", "", "Time limit for waiting in the queue (0: none).", "float", 0.0, min=0),
    Option(
        "performance.max_queue_size",
        "",
        "Maximum queue length; further requests are refused (0: unlimited).",
        "int",
        0,
        min=0,
    ),
    Option(
        "performance.instances", "instances", "Instances of the model that run in parallel.", "int", 1, min=1, max=256
    ),
    Option(
        "cache.ttl_s", "cache-ttl-s", "Maximum age of a cached response (0: unlimited).", "float", 0.0, "SECONDS", min=0
    ),
)

_LISTENING = (
    Option("server.host", "host", "Address of all ports.", default="127.0.0.1", metavar="ADDRESS", env="HOST"),
    Option(
        "server.port",
        "http-port",
        "HTTP port; 0 takes a free one.",
        "int",
        8000,
        "PORT",
        "PORT",
        aliases=("port",),
        min=0,
        max=_PORT,
    ),
    Option("server.grpc_port", "grpc-port", "gRPC port; 0 takes a free one.", "int", 8001, "PORT", min=0, max=_PORT),
    Option(
        "server.metrics_port",
        "metrics-port",
        "Separate metrics port: 8002, or none with --http-port 0. The HTTP port also serves /metrics.",
        "int",
        metavar="PORT",
        min=0,
        max=_PORT,
    ),
    Option("", "http-address", "Address of the HTTP port; 0.0.0.0 for every interface.", metavar="ADDRESS"),
    Option("", "grpc-address", "Address of the gRPC port.", metavar="ADDRESS"),
    Option("", "metrics-address", "Address of the metrics port; that of HTTP by default.", metavar="ADDRESS"),
    Option("", "http-socket", "Serve HTTP on this UNIX socket instead of a port.", metavar="PATH"),
    Option("", "grpc-socket", "Serve gRPC on this UNIX socket instead of a port.", metavar="PATH"),
    Option("", "allow-http", "Open the HTTP port.", "bool", True),
    Option("", "allow-grpc", "Open the gRPC port.", "bool", True),
    Option("", "reuse-http-port", "Share the HTTP port with other servers (SO_REUSEPORT).", "bool", False),
    Option("", "reuse-grpc-port", "Share the gRPC port with other servers (SO_REUSEPORT).", "bool", False),
    Option(
        "server.tls_certificate",
        "tls-certificate",
        "PEM file with the certificate chain; turns TLS on.",
        metavar="FILE",
    ),
    Option("server.tls_key", "tls-key", "PEM file with the certificate's key.", metavar="FILE"),
    Option(
        "server.tls_client_ca",
        "tls-client-ca",
        "PEM file with the CA that signs client certificates (mTLS).",
        metavar="FILE",
    ),
    Option("", "grpc-use-ssl", "Use TLS on the gRPC port only.", "bool", False),
    Option("", "grpc-use-ssl-mutual", "Same, and require client certificates.", "bool", False),
    Option("", "grpc-server-cert", "PEM file for --grpc-use-ssl: the certificate.", metavar="FILE"),
    Option("", "grpc-server-key", "PEM file for --grpc-use-ssl: the key.", metavar="FILE"),
    Option("", "grpc-root-cert", "PEM file for --grpc-use-ssl-mutual: the CA of clients.", metavar="FILE"),
)

_PROTOCOLS = (
    Option("", "id", "Server name in responses.", metavar="NAME"),
    Option("", "http-header-forward-pattern", "Pass matching headers to the model, as parameters.", metavar="REGEX"),
    Option("", "grpc-header-forward-pattern", "Pass matching metadata to the model, as parameters.", metavar="REGEX"),
    Option(
        "",
        "http-restricted-api",
        "Serve these APIs only to requests with this header.",
        metavar="APIS:KEY=VALUE",
        many=True,
        secret=True,
    ),
    Option(
        "",
        "grpc-restricted-protocol",
        "Serve these APIs only to calls with the metadata triton-grpc-protocol-KEY.",
        metavar="APIS:KEY=VALUE",
        many=True,
        secret=True,
    ),
    Option("", "allow-client-shm", "Let clients register shared memory of this machine.", "bool", False),
    Option(
        "",
        "console",
        "Serve the web console at /console. On by default if only this machine can connect, or clients need an API key.",
        "bool",
        aliases=("allow-console",),
    ),
    Option(
        "",
        "console-history-secs",
        "Length of the metrics history that the console keeps in memory: 3 KB a chart line for an hour.",
        "int",
        3600,
        "SECONDS",
        min=60,
        max=86_400,
    ),
    Option("", "allow-profiling", "Accept profiling requests (without effect).", "bool", False),
    Option("predict.enabled", "allow-predict", "Serve /predict.", "bool", True),
    Option(
        "predict.model",
        "predict-model",
        "Model of /predict requests that name none (default: the only model).",
        metavar="MODEL",
    ),
    Option("openai.enabled", "allow-openai", "Serve OpenAI's protocol under /v1.", "bool", True),
    Option(
        "openai.state_dir",
        "openai-state-dir",
        "State directory of OpenAI's protocol, made at first use (default: ~/.local/state/headrace/openai).",
        metavar="FOLDER",
    ),
    Option("openai.batches", "allow-openai-batches", "Serve /v1/files and /v1/batches.", "bool", True),
    Option(
        "openai.batch_lines",
        "openai-batch-lines",
        "Lines of batches that one worker computes concurrently.",
        "int",
        16,
        min=1,
        max=1024,
    ),
    Option(
        "openai.stored_responses_mb",
        "openai-stored-responses-bytes",
        "Maximum size of all stored responses of /v1/responses; 0: store none.",
        "float",
        1024.0,
        "BYTES",
        min=0,
        scale=MIB,
    ),
    Option(
        "openai.stored_responses_days",
        "openai-stored-responses-days",
        "How long a stored response is kept after it was last used.",
        "float",
        30.0,
        "DAYS",
        min=0.001,
        max=36_500,
    ),
    Option(
        "stream.idle_timeout_s",
        "",
        "Idle time after which a WebSocket is closed.",
        "float",
        60.0,
        min=0.001,
        max=86_400,
    ),
    Option(
        "stream.messages_per_second",
        "",
        "Maximum messages per second of one WebSocket (0: unlimited).",
        "float",
        100.0,
        min=0,
    ),
    Option("stream.binary", "", "Accept binary messages on WebSockets.", "bool", True),
)

_SAFEGUARDS = (
    Option("safeguards.rate_limit.enabled", "", "Enable the rate limit (default: if a limit is set).", "bool"),
    Option(
        "safeguards.rate_limit.requests_per_minute",
        "rate-limit-per-minute",
        "Requests per minute and client (0: no limit; 1000 if only `enabled` is set).",
        "int",
        env="RATE_LIMIT_PER_MINUTE",
        min=0,
        max=1_000_000_000,
    ),
    Option(
        "safeguards.rate_limit.by",
        "rate-limit-by",
        "What identifies a client: its API key, a user header, or its address.",
        default="address",
        choices=("key", "user", "address"),
    ),
    Option(
        "safeguards.rate_limit.burst",
        "",
        "Burst size (0: the requests of one minute).",
        "int",
        0,
        min=0,
        max=1_000_000_000,
    ),
    Option("safeguards.rate_limit.user_header", "", "Header field with the user's name.", default="x-user-id"),
    Option(
        "safeguards.rate_limit.redis_url",
        "rate-limit-redis-url",
        "Redis URL to share the counts with other servers.",
        metavar="URL",
        secret=True,
    ),
    Option(
        "safeguards.rate_limit.trusted_proxies", "", "Networks of proxies whose x-forwarded-for is trusted.", many=True
    ),
    Option("safeguards.rate_limit.limits", "", "More limits; a request must pass all of them.", "rows", fields=_LIMIT),
    Option(
        "safeguards.input_validation.enabled", "", "Validate inputs of /predict before the model runs.", "bool", True
    ),
    Option(
        "safeguards.input_validation.max_sequence_length",
        "",
        "Maximum size of a dimension (0: unlimited).",
        "int",
        0,
        min=0,
    ),
    Option(
        "safeguards.input_validation.max_inputs",
        "",
        "Maximum values in one prediction (0: unlimited).",
        "int",
        10_000,
        min=0,
    ),
    Option(
        "safeguards.input_validation.max_rows",
        "",
        "Maximum predictions in one batch (0: unlimited).",
        "int",
        1_000,
        min=0,
    ),
    Option("safeguards.input_validation.min", "", "Minimum input value.", "float"),
    Option("safeguards.input_validation.max", "", "Maximum input value.", "float"),
    Option("safeguards.input_validation.allow_nan", "", "Accept NaN and infinities.", "bool", False),
    Option(
        "safeguards.concurrency.max_in_flight",
        "max-in-flight",
        "Maximum requests in flight; others get 429 (0: unlimited).",
        "int",
        0,
        min=0,
        max=1_000_000_000,
    ),
    Option(
        "safeguards.api_keys_file",
        "api-keys-file",
        "File of hashed API keys; requests need one of them.",
        metavar="FILE",
    ),
    Option(
        "media.allow_hosts",
        "media-host",
        "Hosts that images and videos may be fetched from, or *.domain (default: any public host).",
        metavar="HOST",
        many=True,
    ),
    Option(
        "media.private_hosts",
        "media-private-host",
        "Hosts or networks (10.1.0.0/16) at private addresses that media may be fetched from.",
        metavar="HOST",
        many=True,
    ),
    Option(
        "media.folders",
        "media-folder",
        "Local folders whose images and videos a client may name.",
        metavar="FOLDER",
        many=True,
    ),
    Option("media.max_image_mb", "", "Largest image, in MiB.", "float", 20.0, min=0.001, max=1024),
    Option("media.max_video_mb", "", "Largest video, in MiB.", "float", 512.0, min=0.001, max=65536),
    Option("media.max_frames", "", "Maximum frames taken from one video.", "int", 768, min=1, max=100_000),
    Option("media.fetch_timeout_s", "", "Time limit for fetching an image or video.", "float", 60.0, min=0.1, max=3600),
)

_NODES = (
    Option(
        "nodes.count",
        "nnodes",
        "Number of machines that compute one model together; start a server on each. Default: what LeaderWorkerSet, "
        "torchrun or Slurm has set in the environment, or 1.",
        "int",
        min=1,
        max=MAX_NODES,
    ),
    Option(
        "nodes.rank",
        "node-rank",
        "Number of this machine: 0 serves, the others compute with it.",
        "int",
        min=0,
        max=MAX_NODES - 1,
    ),
    Option(
        "nodes.master_addr",
        "master-addr",
        "Address of machine 0, which the others must be able to reach.",
        metavar="HOST[:PORT]",
    ),
    Option(
        "nodes.master_port",
        "master-port",
        f"Port at which machine 0 waits for the others (default: {DEFAULT_PORT}).",
        "int",
        metavar="PORT",
        min=1,
        max=_PORT,
    ),
    Option(
        "nodes.join_s",
        "node-join-seconds",
        "How long a machine other than 0 tries to reach machine 0, at the start and after an interruption; then it exits.",
        "float",
        600.0,
        "SECONDS",
        min=1,
        max=86_400 * 366,
    ),
)

_PREFILL_DECODE = (
    Option(
        "",
        "role",
        "prefill: compute the KV cache of prompts for decode servers. decode: receive it and generate tokens.",
        choices=("prefill", "decode"),
    ),
    Option(
        "",
        "handing-address",
        "Address at which a prefill server sends KV-cache pages to other machines; port 0 takes a free one.",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
    ),
    Option(
        "",
        "handing-key-file",
        "Key file shared by servers and routers of a fleet, or set HEADRACE_HANDING_KEY. Not needed on one machine.",
        metavar="FILE",
    ),
    Option(
        "",
        "handing-bytes",
        "Shared memory for KV-cache pages that wait for transfer.",
        "int",
        1024 * MIB,
        "BYTES",
        min=0,
    ),
    Option(
        "",
        "handing-seconds",
        "Time after which pages that were not transferred are dropped.",
        "float",
        30.0,
        "SECONDS",
        min=0.1,
    ),
)

_METRICS = (
    Option("", "allow-metrics", "Serve metrics.", "bool", True),
    Option("", "allow-gpu-metrics", "Serve GPU metrics.", "bool", True),
    Option("", "allow-cpu-metrics", "Serve CPU and memory metrics of the machine.", "bool", True),
    Option(
        "", "metrics-interval-ms", "Time between samples of machine metrics.", "float", 2000.0, "MILLISECONDS", min=1
    ),
    Option(
        "", "metrics-config", "Metrics setting, such as summary_latencies=true.", metavar="SETTING=VALUE", many=True
    ),
)

_LIMITS = (
    Option(
        "server.workers",
        "workers",
        "Worker processes that share the ports.",
        "int",
        1,
        env="WORKERS",
        aliases=("processes",),
        min=1,
        max=256,
    ),
    Option(
        "server.worker_timeout_s",
        "worker-timeout-seconds",
        "Replace a worker process that hangs for so long; 0: never.",
        "float",
        30.0,
        "SECONDS",
        min=0,
    ),
    Option(
        "safeguards.max_request_size_mb",
        "max-body-bytes",
        "Maximum HTTP body and gRPC message size.",
        "float",
        64.0,
        "BYTES",
        env="MAX_REQUEST_SIZE_MB",
        min=0.001,
        max=1 << 20,
        scale=MIB,
    ),
    Option("", "http-max-input-size", "Maximum HTTP body size.", "int", metavar="BYTES", min=1),
    Option(
        "server.grace_s",
        "grace-seconds",
        "Time for open requests after SIGTERM.",
        "float",
        30.0,
        "SECONDS",
        aliases=("exit-timeout-secs",),
        min=0,
    ),
)

_LOGS = (
    Option(
        "logging.level",
        "log-level",
        "debug, info, warning or error.",
        default="info",
        metavar="LEVEL",
        pattern=_LEVEL,
        pattern_text=_LEVELS,
    ),
    Option(
        "logging.format",
        "log-format",
        "auto, json or text; auto is text on a terminal. Triton's default and ISO8601 are text.",
        default="auto",
        metavar="FORMAT",
    ),
    Option("logging.file", "log-file", "Write the log to this file.", metavar="FILE"),
    Option("", "log-verbose", "1 or more: same as --log-level debug.", "int", 0, "LEVEL", min=0),
    Option("", "log-info", "false: only warnings and errors.", "bool", True),
    Option("", "log-warning", "false: no warnings.", "bool", True),
    Option("", "log-error", "false: no errors.", "bool", True),
    Option("logging.access", "access-log", "Log one line per request.", "bool", False),
    Option("", "trace-endpoint", "Send OpenTelemetry spans to this OTLP/HTTP collector.", metavar="URL"),
    Option(
        "",
        "trace-config",
        "Trace setting, such as mode=opentelemetry, level=TIMESTAMPS, rate=1, opentelemetry,url=URL.",
        metavar="[MODE,]SETTING=VALUE",
        many=True,
    ),
    Option("", "trace-file", "Same as --trace-config triton,file=FILE.", metavar="FILE", deprecated=True),
    Option("", "trace-level", "Same as --trace-config level=LEVEL.", metavar="LEVEL", many=True, deprecated=True),
    Option("", "trace-rate", "Same as --trace-config rate=COUNT.", "int", deprecated=True),
    Option("", "trace-count", "Same as --trace-config count=COUNT.", "int", deprecated=True),
    Option("", "trace-log-frequency", "Same as --trace-config triton,log-frequency=COUNT.", "int", deprecated=True),
)

PANELS: dict[str, tuple[Option, ...]] = {
    "Configuration": _CONFIGURATION,
    "Models": _MODELS,
    "One model without a model repository": _ONE_MODEL,
    "Listening": _LISTENING,
    "Protocols": _PROTOCOLS,
    "Safeguards": _SAFEGUARDS,
    "Several machines": _NODES,
    "Prefill and decode": _PREFILL_DECODE,
    "Metrics": _METRICS,
    "Workers and limits": _LIMITS,
    "Logs and traces": _LOGS,
}
"""All options, by panel of the help."""

FLAGS = {option.flag: option for options in PANELS.values() for option in options if option.flag}
"""The options of the command line, by name."""

_SECTIONS = (
    *("server", "model", "performance", "safeguards", "cache", "predict", "openai", "media", "stream", "traffic"),
    *("models", "repository", "nodes", "logging", OPTIONS),
)

KEYS = {
    option.key: option
    for option in sorted(
        (option for options in PANELS.values() for option in options if option.flag != CONFIG),
        key=lambda option: _SECTIONS.index(option.section),
    )
}
"""The options of the file and the environment, by key, in the order of `headrace config show`."""
