# SPDX-License-Identifier: Apache-2.0
"""Every key of the configuration file of `headrace serve`: name, type, default, environment variable, option."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.core.errors import InvalidArgument
from headrace.models.config.problems import Problem

MOST = 50
"""Maximum number of problems in an error."""

ENVIRONMENT = "environment"


class SettingsError(InvalidArgument):
    """Raised when a configuration has mistakes; one line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems[:MOST])
        count = len(problems)
        head = "" if count == 1 else f"the configuration has {count} mistakes:\n"
        super().__init__(head + "\n".join(str(problem) for problem in self.problems))


Kind = Literal["text", "whole", "number", "truth", "rows", "tree"]
"""rows: a list of mappings with `fields`. tree: anything, checked by its own reader."""

PREFIX = "INFERENCE_"


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration."""

    path: str
    """Path in the file: `safeguards.rate_limit.enabled`."""
    help: str
    kind: Kind = "text"
    default: Any = None
    """None if leaving it out differs from any value."""
    flag: str = ""
    """The option of `headrace serve`, without dashes; "" for none."""
    scale: int = 1
    """Factor from the file's unit to the option's: the option may count bytes, the file megabytes."""
    names: tuple[str, ...] = ()
    """Short names of environment variables, without the prefix."""
    metavar: str = ""
    many: bool = False
    """Whether it is a list."""
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    pattern: str = ""
    """Pattern of a text; `metavar` describes it."""
    fields: tuple[Key, ...] = ()
    """Fields of each row."""
    secret: bool = False
    """Whether it may contain a password."""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.path.upper().replace(".", "_").replace("-", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        """All its environment variables, the short ones first."""
        return (*(PREFIX + name for name in self.names), self.variable)

    @property
    def takes(self) -> str:
        """Return a description of valid values."""
        if self.choices:
            return " or ".join(self.choices)
        if self.pattern:
            return self.metavar
        if self.kind == "truth":
            return "true or false"
        if self.kind in ("rows", "tree"):
            return "a list of mappings" if self.kind == "rows" else "a mapping"
        if self.kind == "text":
            return "a list of texts" if self.many else "a text"
        noun = "a whole number" if self.kind == "whole" else "a number"
        if math.isfinite(self.most):
            return f"{noun} from {self.least:.15g} to {self.most:.15g}"
        return f"{noun} of {self.least:.15g} or more" if math.isfinite(self.least) else noun


MIB = 1024 * 1024
_PORT = 65535
_DEVICE = r"cpu|auto|(?:cuda|gpu)(?::[0-9]{1,3})?"
_DEVICES = "cpu, cuda, cuda:NUMBER or auto"
_LEVEL = r"(?i:debug|info|warn(?:ing)?|error|critical|fatal|notset)"
_LEVELS = "debug, info, warning or error"
_TYPE = r"(?:TYPE_)?[A-Za-z]+[0-9]{0,2}"

_TENSOR = (
    Key("name", "What requests call it."),
    Key("dtype", "Data type: FP32, INT64, STRING, ...", default="FP32", pattern=_TYPE, metavar="a type such as FP32"),
    Key("shape", "Shape without the batch dimension; -1 for any size.", "whole", many=True, least=-1, most=1 << 40),
)

_SERVER = (
    Key("server.host", "Address of all ports (default: loopback).", default="127.0.0.1", flag="host", names=("HOST",)),
    Key(
        "server.port",
        "HTTP port (0: any free port).",
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
        "How long a worker may hang before it is restarted (0: no limit).",
        "number",
        30.0,
        "worker-timeout-seconds",
        least=0,
    ),
    Key("server.grpc_port", "gRPC port; 0 takes a free one.", "whole", 8001, "grpc-port", least=0, most=_PORT),
    Key("server.metrics_port", "Port that serves only metrics.", "whole", flag="metrics-port", least=0, most=_PORT),
    Key("server.grace_s", "Time for requests in flight after SIGTERM.", "number", 30.0, "grace-seconds", least=0),
    Key("server.tls_certificate", "PEM file with the certificate; enables TLS.", flag="tls-certificate"),
    Key("server.tls_key", "PEM file with the certificate's private key.", flag="tls-key"),
    Key("server.tls_client_ca", "PEM file of a CA; clients need a certificate signed by it.", flag="tls-client-ca"),
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
        "Version of --model-path to serve: latest, or a folder name.",
        default="latest",
        flag="model-version",
        names=("MODEL_VERSION",),
        metavar="VERSION",
    ),
    Key("model.name", "Name of the model of --model-path.", flag="model-name", metavar="NAME"),
    Key(
        "model.device",
        "Device for the model of --model-path: cpu, cuda, cuda:0, or auto (a GPU if there is one).",
        default="auto",
        flag="device",
        pattern=_DEVICE,
        metavar=_DEVICES,
    ),
    Key(
        "model.precision",
        "Precision of the model of --model-path; fp16 and bf16 convert its weights (PyTorch).",
        default="fp32",
        flag="precision",
        choices=("fp32", "fp16", "bf16"),
    ),
    Key("model.serve_all_versions", "Serve all versions, not only `version`.", "truth", False),
    Key("model.inputs", "Inputs, if the model file does not declare them.", "rows", fields=_TENSOR),
    Key("model.outputs", "Outputs, if the model file does not declare them.", "rows", fields=_TENSOR),
    Key("model.parameters", "Parameters for the backend, by name.", "tree"),
)

_PERFORMANCE = (
    Key(
        "performance.max_batch_size",
        "Maximum batch size of the model of --model-path (0: no batching; default: what its file allows, or 32).",
        "whole",
        flag="max-batch-size",
        names=("MAX_BATCH_SIZE",),
        least=0,
        most=1_000_000,
    ),
    Key(
        "performance.batch_timeout_ms",
        "How long a request may wait to be batched with others.",
        "number",
        0.0,
        "batch-timeout-ms",
        metavar="MILLISECONDS",
        least=0,
        most=60_000,
    ),
    Key(
        "performance.inference_timeout_s",
        "Time limit for an answer of /predict (0: none).",
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
        "Time limit for waiting in the queue (0: none).",
        "number",
        0.0,
        least=0,
    ),
    Key(
        "performance.max_queue_size",
        "Maximum queue length; further requests are refused (0: unlimited).",
        "whole",
        0,
        least=0,
    ),
    Key(
        "performance.instances",
        "Instances of the model that run in parallel.",
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
    Key("burst", "How many in parallel (0: all).", "whole", 0, least=0, most=1_000_000_000),
)

_SAFEGUARDS = (
    Key(
        "safeguards.max_request_size_mb",
        "Maximum size of an HTTP body or gRPC message, in MiB.",
        "number",
        64.0,
        "max-body-bytes",
        scale=MIB,
        names=("MAX_REQUEST_SIZE_MB",),
        least=0.001,
        most=1 << 20,
    ),
    Key("safeguards.rate_limit.enabled", "Enable the rate limit (default: if a limit is set).", "truth"),
    Key(
        "safeguards.rate_limit.requests_per_minute",
        "Requests per minute and client (0: no limit; 1000 if only `enabled` is set).",
        "whole",
        flag="rate-limit-per-minute",
        names=("RATE_LIMIT_PER_MINUTE",),
        least=0,
        most=1_000_000_000,
    ),
    Key(
        "safeguards.rate_limit.by",
        "What identifies a client: its API key, a user header, or its address.",
        default="address",
        flag="rate-limit-by",
        choices=("key", "user", "address"),
    ),
    Key(
        "safeguards.rate_limit.burst",
        "Burst size (0: the requests of one minute).",
        "whole",
        0,
        least=0,
        most=1_000_000_000,
    ),
    Key("safeguards.rate_limit.user_header", "Header field with the user's name.", default="x-user-id"),
    Key(
        "safeguards.rate_limit.redis_url",
        "Redis URL to share the counts with other servers.",
        flag="rate-limit-redis-url",
        metavar="URL",
        secret=True,
    ),
    Key("safeguards.rate_limit.trusted_proxies", "Networks of proxies whose x-forwarded-for is trusted.", many=True),
    Key("safeguards.rate_limit.limits", "More limits; a request must pass all of them.", "rows", fields=_LIMIT),
    Key("safeguards.input_validation.enabled", "Validate inputs of /predict before the model runs.", "truth", True),
    Key(
        "safeguards.input_validation.max_sequence_length",
        "Maximum size of a dimension (0: unlimited).",
        "whole",
        0,
        least=0,
    ),
    Key(
        "safeguards.input_validation.max_inputs",
        "Maximum values in one prediction (0: unlimited).",
        "whole",
        10_000,
        least=0,
    ),
    Key(
        "safeguards.input_validation.max_rows",
        "Maximum predictions in one batch (0: unlimited).",
        "whole",
        1_000,
        least=0,
    ),
    Key("safeguards.input_validation.min", "Minimum input value.", "number"),
    Key("safeguards.input_validation.max", "Maximum input value.", "number"),
    Key("safeguards.input_validation.allow_nan", "Accept NaN and infinities.", "truth", False),
    Key(
        "safeguards.concurrency.max_in_flight",
        "Maximum requests in flight; others get 429 (0: unlimited).",
        "whole",
        0,
        "max-in-flight",
        least=0,
        most=1_000_000_000,
    ),
    Key(
        "safeguards.api_keys_file",
        "File of hashed API keys; requests need one of them.",
        flag="api-keys-file",
        metavar="FILE",
    ),
)

_MORE = (
    Key(
        "cache.enabled",
        "Cache responses of the model of `model.path`; other models enable it in their configuration.",
        "truth",
        False,
    ),
    Key(
        "cache.size_mb",
        "Size of the response cache, in MiB.",
        "number",
        64.0,
        "response-cache-byte-size",
        scale=MIB,
        least=0,
    ),
    Key(
        "cache.ttl_s",
        "Maximum age of a cached response (0: unlimited).",
        "number",
        0.0,
        "cache-ttl-s",
        metavar="SECONDS",
        least=0,
    ),
    Key("predict.enabled", "Serve /predict.", "truth", True, "allow-predict"),
    Key(
        "predict.model",
        "Model of /predict requests that name none (default: the only model).",
        flag="predict-model",
        metavar="MODEL",
    ),
    Key("openai.enabled", "Serve OpenAI's protocol under /v1.", "truth", True, "allow-openai"),
    Key(
        "media.allow_hosts",
        "Hosts that images and videos may be fetched from, or *.domain (default: any public host).",
        flag="media-host",
        many=True,
        metavar="HOST",
    ),
    Key(
        "media.private_hosts",
        "Hosts or networks (10.1.0.0/16) at private addresses that media may be fetched from.",
        flag="media-private-host",
        many=True,
        metavar="HOST",
    ),
    Key(
        "media.folders",
        "Local folders whose images and videos a client may name.",
        flag="media-folder",
        many=True,
        metavar="FOLDER",
    ),
    Key("media.max_image_mb", "Largest image, in MiB.", "number", 20.0, least=0.001, most=1024),
    Key("media.max_video_mb", "Largest video, in MiB.", "number", 512.0, least=0.001, most=65536),
    Key("media.max_frames", "Maximum frames taken from one video.", "whole", 768, least=1, most=100_000),
    Key("media.fetch_timeout_s", "Time limit for fetching an image or video.", "number", 60.0, least=0.1, most=3600),
    Key(
        "stream.idle_timeout_s",
        "Idle time after which a WebSocket is closed.",
        "number",
        60.0,
        least=0.001,
        most=86_400,
    ),
    Key(
        "stream.messages_per_second",
        "Maximum messages per second of one WebSocket (0: unlimited).",
        "number",
        100.0,
        least=0,
    ),
    Key("stream.binary", "Accept binary messages on WebSockets.", "truth", True),
    Key("traffic", "Traffic splits between versions, by model.", "tree"),
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
        "Interval for polling the model repository (0: never).",
        "number",
        15.0,
        "repository-poll-secs",
        least=0,
    ),
    Key("repository.load", "Models to load at the start, with `explicit`.", flag="load-model", many=True),
    Key("repository.exit_on_error", "Exit if a model fails to load at the start.", "truth", False, "exit-on-error"),
    Key(
        "repository.strict_readiness", "Report ready only when every model is ready.", "truth", True, "strict-readiness"
    ),
    Key(
        "logging.level",
        "Minimum log level.",
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
"""Options that exist because of their keys; the others are older."""

OPTIONS = "options"
"""The section for options by their own names."""
