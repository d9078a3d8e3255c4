# SPDX-License-Identifier: Apache-2.0
"""What the inference server can be told. Filled by `headrace serve`, read by `server` and what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.api.access.settings import AccessSettings
from headrace.api.metrics.settings import MetricsSettings
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.predict.settings import PredictSettings
from headrace.api.v1.accounts import V1Settings
from headrace.api.v2.settings import V2Settings
from headrace.core.limits import Limits
from headrace.core.telemetry.progress import Progress, Running, silent
from headrace.engine.engine import EngineSettings
from headrace.engine.traffic.settings import TrafficSettings
from headrace.models.media.settings import MediaSettings
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """How the ports are opened."""

    tls: TlsFiles | None = None
    """Certificate and key for all ports; with a client CA, clients must have a certificate too."""

    grpc_tls: TlsFiles | None = None
    """The same for the gRPC port, if it is to have others."""

    reuse_http: bool = False
    """Whether other servers of the same user may listen on the HTTP port too."""

    reuse_grpc: bool = False

    metrics_optional: bool = False
    """Whether to go on without the metrics port when it is taken: nobody chose it."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What `headrace serve` can be told."""

    http: Address | None
    """Where HTTP/1.1 and HTTP/2 are spoken."""

    grpc: Address | None
    """Where gRPC is spoken; HTTP works there too, as gRPC works on the HTTP port."""

    metrics: Address | None = None
    """Where metrics are served, and nothing else."""

    listening: ListenSettings = field(default_factory=ListenSettings)

    workers: int = 1
    """Processes that share the ports."""

    worker_timeout_seconds: float = 30.0
    """How long one of several processes may hang before it is killed and another started; 0 for as long as it likes."""

    grace_seconds: float = 30.0
    """How long a request in flight may take after SIGTERM."""

    access_log: bool = False
    """One log line per request."""

    trace_endpoint: str = ""
    """Send spans of infer requests to this OTLP/HTTP collector; which requests, `v2.trace` says."""

    v1: V1Settings = field(default_factory=V1Settings)
    """The protocol of Triton's first releases."""

    v2: V2Settings = field(default_factory=V2Settings)
    """Today's protocol."""

    predict: PredictSettings | None = None
    """`/predict`; None for none."""

    openai: OpenAiSettings | None = None
    """OpenAI's protocol; None for none."""

    media: MediaSettings = field(default_factory=MediaSettings)
    """Images and videos that its requests name."""

    access: AccessSettings = field(default_factory=AccessSettings)
    """Who may ask, and how much."""

    traffic: TrafficSettings = field(default_factory=TrafficSettings)
    """How versions share the traffic of their models, at the start."""

    traffic_again: Callable[[], TrafficSettings] | None = None
    """Reads that anew from the configuration file `traffic_file`; raises what is wrong with it. None without a file."""

    traffic_file: str = ""

    allow_admin: bool = True
    """Whether `/admin` is served: not to strangers who need no API key."""

    allow_console: bool = True
    """Whether `/console` is served: not to strangers who need no API key."""

    measuring: MetricsSettings | None = None
    """What `/metrics` tells, here and on the metrics port; None for no metrics at all."""

    limits: Limits = field(default_factory=Limits)

    engine: EngineSettings = field(default_factory=EngineSettings)
    """Which models, and how they are kept."""

    progress: Progress = silent
    """Who looks on while models load."""

    running: Running = field(default_factory=Running)
    """What is brought from elsewhere while the server runs, for the console."""
