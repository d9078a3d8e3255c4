# SPDX-License-Identifier: Apache-2.0
"""Settings of the inference server, built by `headrace serve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.api.access.settings import AccessSettings
from headrace.api.metrics.settings import MetricsSettings
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.predict.settings import PredictSettings
from headrace.api.v1.status import V1Settings
from headrace.api.v2.settings import V2Settings
from headrace.core.limits import Limits
from headrace.core.nodes import NodeSettings
from headrace.core.telemetry.progress import Progress, RunningTasks, silent
from headrace.engine.engine import EngineSettings
from headrace.engine.traffic.settings import TrafficSettings
from headrace.models.media.settings import MediaSettings
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """How the ports are opened."""

    tls: TlsFiles | None = None
    """Certificate and key for all ports; with a client CA, clients need a certificate, too."""

    grpc_tls: TlsFiles | None = None
    """Certificate and key of the gRPC port, if they differ."""

    reuse_http: bool = False
    """Whether other servers of the same user may listen on the HTTP port, too."""

    reuse_grpc: bool = False

    metrics_optional: bool = False
    """Whether to continue without the metrics port if the default one is taken."""


@dataclass(frozen=True, slots=True)
class StartReport:
    """The URLs of a server and the states of its models, after all models were tried."""

    http: str
    """URLs of the ports; "" for a port that is not open."""
    grpc: str
    metrics: str
    console: str
    documentation: str
    ready: tuple[str, ...]
    failed: Mapping[str, str]
    """The reason of each model that failed to load."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of `headrace serve`."""

    http: Address | None
    """Addresses for HTTP/1.1 and HTTP/2."""

    grpc: Address | None
    """Addresses for gRPC; HTTP works there, too, as gRPC works on the HTTP port."""

    metrics: Address | None = None
    """Addresses for metrics only."""

    listening: ListenSettings = field(default_factory=ListenSettings)

    workers: int = 1
    """Worker processes that share the ports."""

    worker_timeout_seconds: float = 30.0
    """How long a worker may hang before it is killed and restarted; 0 for no limit."""

    grace_seconds: float = 30.0
    """How long a request in flight may take after SIGTERM."""

    access_log: bool = False
    """One log line per request."""

    trace_endpoint: str = ""
    """Export spans of infer requests to this OTLP/HTTP collector; `v2.trace` selects the requests."""

    v1: V1Settings = field(default_factory=V1Settings)
    """The protocol of Triton's first releases."""

    v2: V2Settings = field(default_factory=V2Settings)
    """Triton's current protocol."""

    predict: PredictSettings | None = None
    """`/predict`; None to switch it off."""

    openai: OpenAiSettings | None = None
    """OpenAI's protocol; None to switch it off."""

    media: MediaSettings = field(default_factory=MediaSettings)
    """Limits for images and videos in requests."""

    access: AccessSettings = field(default_factory=AccessSettings)
    """API keys, rate limits and concurrency."""

    traffic: TrafficSettings = field(default_factory=TrafficSettings)
    """Traffic splits at the start."""

    reload_traffic: Callable[[], TrafficSettings] | None = None
    """Reads the splits again from the configuration file `traffic_file`; raises errors. None without a file."""

    traffic_file: str = ""

    allow_admin: bool = True
    """Whether `/admin` is served. False if other machines can connect without API keys."""

    allow_console: bool = True
    """Whether `/console` is served. False if other machines can connect without API keys."""

    console_history_seconds: float = 3600.0
    """Length of the metrics history that the console shows."""

    metrics_settings: MetricsSettings | None = None
    """What `/metrics` reports, here and on the metrics port; None for no metrics."""

    limits: Limits = field(default_factory=Limits)

    nodes: NodeSettings = field(default_factory=NodeSettings)
    """The machines that compute a model together. Node 0 serves; all others only have health routes."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    """Model repositories and how they are watched."""

    progress: Progress = silent
    """Receives progress while models load."""

    on_start: Callable[[StartReport], None] | None = None
    """Called in the first process when all models were tried."""

    running: RunningTasks = field(default_factory=RunningTasks)
    """Downloads while the server runs, for the console."""
