# SPDX-License-Identifier: Apache-2.0
"""Settings of a router: one dataclass per section of its configuration file. The field names are the keys of the file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import inf
from urllib.parse import urlsplit

from headrace.core.errors import InvalidArgument
from headrace.core.kv_transfer import ROLES
from headrace.core.limits import KIB, MIB
from headrace.fleet.autoscaling.autoscaler import CONCURRENCY, RPS, AutoscalerSpec

POLICIES = (
    "p2c",
    "round-robin",
    "least",
    "weighted",
    "random",
    "cache_aware",
    "prefix_hash",
    "kv_events",
    "predicted_latency",
)
ALIASES = {"power_of_two": "p2c", "round_robin": "round-robin", "least_loaded": "least"}
"""Names of the same policies in other routers, and in `router.config` of a service."""
METRICS = (CONCURRENCY, RPS)
_FORM = "write http://host:port[,weight=N][,grpc=host:port][,revision=NAME][,role=prefill|decode][,events=PORT][,replay=PORT]"
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOST = re.compile(r"[A-Za-z0-9.:_-]+")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_PORTS = {"http": 80, "https": 443}
_MAX_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """Address of a backend, and its share of the load."""

    url: str
    """`scheme://host:port`, as it is shown."""
    scheme: str
    host: str
    port: int
    weight: float = 1.0
    grpc_host: str = ""
    """Host of the gRPC port; by default the HTTP host and port (one port of Headrace serves both)."""
    grpc_port: int = 0
    revision: str = ""
    """Revision that the backend is a replica of: requests are also counted by revision."""
    role: str = ""
    """`prefill` or `decode`; "" for both. See `core.kv_transfer`."""
    events_port: int = 0
    """Port of its KV events; 0: that of the section `kv_events`."""
    replay_port: int = 0
    """Port of KV events that were missed; 0: that of the section `kv_events`."""

    @classmethod
    def parse(cls, text: str) -> BackendAddress:
        """Parse `http://host:8000,weight=2,grpc=host:8001`."""
        if "@" in text:
            # Before any message that repeats the text: the part before the @ may be a password.
            raise InvalidArgument(f"a backend's address takes no user and no password; {_FORM}")
        if not text.isprintable():
            raise InvalidArgument(f"backend {text!r} has no host; {_FORM}")
        url, *options = text.strip().split(",")
        scheme, host, port = _split_url(url if "://" in url else f"http://{url}", text)
        weight, grpc, revision, role = 1.0, (host, port), "", ""
        ports = {"events": 0, "replay": 0}
        for option in options:
            name, _, value = option.strip().partition("=")
            if name == "weight":
                weight = _parse_weight(value, text)
            elif name == "role" and value in ROLES:
                role = value
            elif name in ports and value.isdecimal() and 0 < int(value) < 65536:
                ports[name] = int(value)
            elif name == "grpc":
                grpc = _split_url(f"{scheme}://{value}", text)[1:]
            elif name == "revision" and _REVISION.fullmatch(value):
                revision = value
            elif name == "revision":
                raise InvalidArgument(f"backend {text!r}: a revision is up to 63 letters, digits, '.', '_' and '-'")
            else:
                raise InvalidArgument(f"backend {text!r}: there is no option {name!r}; {_FORM}")
        shown_host = f"[{host}]" if ":" in host else host
        return cls(
            f"{scheme}://{shown_host}:{port}", scheme, host, port, weight, *grpc, revision, role, *ports.values()
        )


def _split_url(url: str, text: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidArgument(f"backend {text!r}: the port is not a number from 1 to 65535; {_FORM}") from None
    if parts.scheme not in _PORTS:
        raise InvalidArgument(f"backend {text!r}: only http and https are supported; {_FORM}")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise InvalidArgument(f"backend {text!r}: a path or a query is not allowed; {_FORM}")
    if not parts.hostname or not _HOST.fullmatch(parts.hostname) or port == 0:
        raise InvalidArgument(f"backend {text!r} has no host; {_FORM}")
    return parts.scheme, parts.hostname, port or _PORTS[parts.scheme]


def _parse_weight(value: str, text: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= _MAX_WEIGHT:
        raise InvalidArgument(f"backend {text!r}: a weight is a number over 0, at most {_MAX_WEIGHT:g}")
    return weight


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Active health checks."""

    path: str = "/v2/health/ready"
    """Path of the GET request; a status from 200 to 299 is healthy. Empty: no checks, every backend counts as up."""
    interval_seconds: float = 2.0
    timeout_seconds: float = 1.0
    rise: int = 2
    """Consecutive healthy checks that bring a backend back."""
    fall: int = 3
    """Consecutive failed checks that take a backend out."""
    inference_path: str = ""
    """Path of a real inference request, such as `/v1/completions`: it is a part of the checks. Empty: none."""
    inference_body: str = ""
    """Its JSON body, such as `{"model": "chat", "prompt": "a", "max_tokens": 1}`."""
    inference_key_file: str = ""
    """File with the API key to send with it."""
    inference_interval_seconds: float = 30.0
    """Time since the last good answer to a client after which a backend gets such a check."""
    inference_timeout_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class OutlierSettings:
    """Outlier detection: a backend that fails requests is ejected for a while."""

    consecutive_failures: int = 5
    """Consecutive failures that eject a backend; 0: never."""
    error_rate: float = 0.5
    """Share of failures in a window that ejects a backend; 0: never."""
    least_requests: int = 20
    """Minimum requests in a window for `error_rate` to count."""
    window_seconds: float = 10.0
    ejection_seconds: float = 5.0
    """Duration of the first ejection; each further one is longer by this, and time without failures takes it back."""
    longest_ejection_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """Which requests are retried, and how often."""

    tries: int = 3
    """Attempts per request, including the first."""
    budget: float = 0.2
    """Retries per request, over time: more would make an overload worse."""
    reserve: int = 100
    """Retries that are possible at once after a time without any."""
    inference: bool = False
    """Also retry inference requests that may have reached a backend: they change nothing there."""


@dataclass(frozen=True, slots=True)
class TimeoutSettings:
    """Timeouts of requests to backends."""

    connect_seconds: float = 2.0
    response_seconds: float = 300.0
    """From the end of the request to the head of the response: inference may take long."""
    idle_seconds: float = 300.0
    """Longest pause inside a response, or in a WebSocket."""
    keep_alive_seconds: float = 60.0
    """Idle connections are closed after so long; it should be less than the keep-alive timeout of the backends."""


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """The policy `cache_aware`. The names are those of other routers for language models."""

    cache_threshold: float = 0.3
    """Share of a prompt that a backend must have seen to get the request for this reason."""
    balance_abs_threshold: int = 64
    """Load alone decides if one backend has so many requests more than the least busy one, and more by the factor below."""
    balance_rel_threshold: float = 1.5
    eviction_interval_seconds: float = 60.0
    """How often a full tree is trimmed by an eighth, so that requests seldom have to; 0: never."""
    max_tree_size: int = 1 << 22
    """Characters that are kept per backend. Every tree node counts as 64 more."""


@dataclass(frozen=True, slots=True)
class PrefixHashSettings:
    """The policy `prefix_hash`."""

    characters: int = 256
    """Number of leading characters to hash: prompts with the same beginning go to the same backend."""
    load_factor: float = 1.25
    """A backend with more than so many times its share of all requests is skipped."""


@dataclass(frozen=True, slots=True)
class KVEventSettings:
    """The policy `kv_events`."""

    port: int = 0
    """Port at which backends publish KV events, unless an address says `events=PORT`; 0: none."""
    replay_port: int = 0
    """Port at which they send missed events again, unless an address says `replay=PORT`; 0: none."""
    topic: str = ""
    """Beginning of the topics to subscribe to."""
    max_blocks: int = 1_000_000
    """Maximum blocks of all backends that are remembered: about 300 bytes each."""
    least_bytes: int = 1024
    """Requests with a shorter body are not tokenized: little of them could be cached."""
    tokenize_seconds: float = 1.0
    """Timeout of tokenizing a prompt; after it `prefix_hash` chooses."""


@dataclass(frozen=True, slots=True)
class PredictedLatencySettings:
    """The policy `predicted_latency`. The targets are for requests that name none; 0: no target."""

    ttft_seconds: float = 0.0
    """Target for the time to the first token (`x-slo-ttft-ms`)."""
    tpot_seconds: float = 0.0
    """Target for the time for each further token (`x-slo-tpot-ms`)."""
    refuse: bool = False
    """Refuse requests whose target no backend is expected to keep (`x-slo-refuse`)."""


@dataclass(frozen=True, slots=True)
class SessionAffinitySettings:
    """Session affinity, by one of the three keys; without a key there is none."""

    cookie: str = ""
    """Name of a cookie; the router sets it for clients without it."""
    header: str = ""
    body: str = ""
    """Key in the JSON body, with dots for nested keys: `user`, `parameters.sequence_id`."""

    @property
    def is_enabled(self) -> bool:
        """Whether there is session affinity."""
        return bool(self.cookie or self.header or self.body)


@dataclass(frozen=True, slots=True)
class HedgingSettings:
    """Hedging: send a slow request to a second backend. Off unless there is a time or a percentile."""

    after_seconds: float = 0.0
    """Send the second request after so long."""
    percentile: float = 0.0
    """Or after this percentile of recent response times, such as 0.95; never sooner than `after_seconds`."""
    inference: bool = False
    """Also hedge inference requests, which change nothing; otherwise only GET and HEAD."""
    budget: float = 0.05
    """Second requests per request, over time."""

    @property
    def is_enabled(self) -> bool:
        """Whether there is hedging."""
        return self.after_seconds > 0 or self.percentile > 0


@dataclass(frozen=True, slots=True)
class ContinuationSettings:
    """Continuation of streams at another backend when theirs dies."""

    enabled: bool = True
    """Whether streams are continued. Backends must be Headrace servers with the router's key."""
    tries: int = 10
    """How often one stream may be continued."""
    fruitless_tries: int = 3
    """How often in a row without progress: the request itself may crash backends."""
    wait_seconds: float = 10.0
    """How long a stream waits for a backend that can continue it."""
    body_bytes: int = 4 * MIB
    """Longer requests are passed on as they arrive, and cannot be continued."""
    stream_bytes: int = 1 * MIB
    """Maximum memory for the records of one stream: about 20 bytes per event and five per token."""
    total_bytes: int = 256 * MIB
    """Maximum memory for the records of all streams."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The queue of requests that wait while every backend has `max_outstanding` requests."""

    requests: int = 1000
    """Maximum length; further requests are refused."""
    wait_seconds: float = 30.0
    """Longest wait."""


@dataclass(frozen=True, slots=True)
class FairnessSettings:
    """Fairness between tenants, of requests that wait while every backend has `max_outstanding` requests."""

    keys_file: str = ""
    """Keys file: the holder of a key is a tenant, with the share, the priority and the limits that the file sets."""
    tenant_header: str = ""
    """Header with the tenant's name. A proxy in front must set it, because the router trusts it. All shares are equal."""
    priorities: str = ""
    """Priorities of tenants that the header names, `interactive=10,batch=-10`; those of others are 0."""
    output_weight: float = 2.0
    """How many tokens of a prompt one generated token counts for, when the tenants take turns."""
    ageing_seconds: float = 10.0
    """Waiting time after which a request gains one level of priority, up to the highest among waiting requests."""
    prompt_tokens_per_minute: int = 0
    """Limit for each tenant whose key sets none; 0: unlimited."""
    output_tokens_per_minute: int = 0

    @property
    def is_enabled(self) -> bool:
        """Whether there is fairness between tenants."""
        return bool(self.keys_file or self.tenant_header)


@dataclass(frozen=True, slots=True)
class PrefillDecodeSettings:
    """Prefill and decode on separate backends."""

    enabled: bool = False
    """Whether discovered backends may have roles although no configured backend has one."""
    least_bytes: int = 2048
    """Requests with a shorter body go to a decode backend at once: the KV transfer would take longer than the prefill."""
    prefill_seconds: float = 30.0
    """Timeout of a prefill backend; after it a decode backend computes the prompt."""
    key_file: str = ""
    """File with the fleet's key, which prefill backends on other machines require. Or set HEADRACE_HANDING_KEY."""


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """Discovery of backends. Discovered backends are added to the configured ones."""

    file: str = ""
    """JSON or YAML file: a list of addresses, or of `{url, weight, grpc, role}`."""
    dns: str = ""
    """`name:port`: one backend per address of the name."""
    pods: str = ""
    """Label selector such as `app=chat-engine`: one backend per ready pod."""
    prefill_pods: str = ""
    """Label selector of pods with the role prefill."""
    decode_pods: str = ""
    """Label selector of pods with the role decode."""
    namespace: str = ""
    """Namespace of the pods; default: that of the router."""
    port: int = 0
    """Port of the pods; default: the first port of their first container."""
    interval_seconds: float = 2.0
    """How often sources are polled; a file is polled more often."""

    @property
    def is_enabled(self) -> bool:
        """Whether there is a source."""
        return bool(self.file or self.dns or self.pods or self.prefill_pods or self.decode_pods)


@dataclass(frozen=True, slots=True)
class TargetScale:
    """Scaling of a target above one replica."""

    metric: str
    """What is measured: concurrent requests, or requests per second."""
    target: float
    """Target value per replica."""
    max_replicas: int

    @property
    def spec(self) -> AutoscalerSpec:
        """The same for `decide_replicas`."""
        return AutoscalerSpec(self.target, self.max_replicas)


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """A workload that is scaled to zero: on Kubernetes one with a `scale` subresource."""

    name: str
    namespace: str = "default"
    kind: str = "Deployment"
    api_version: str = "apps/v1"
    scale: TargetScale | None = None
    """None: another autoscaler sets the replicas above one."""

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class LocalService:
    """A service of the local fleet, whose workloads are the targets."""

    folder: str
    """State directory of `headrace up`."""
    service: str
    """Name of the InferenceService."""


@dataclass(frozen=True, slots=True)
class ActivationSettings:
    """Scale to zero and activation by requests."""

    targets: tuple[ScaleTarget, ...]
    """A held request waits for all of them."""
    idle_seconds: float = 300.0
    """Without any request for so long, the targets are scaled to zero."""
    wait_seconds: float = 900.0
    """Maximum time that a request is held."""
    held_requests: int = 1000
    """Maximum requests that are held."""
    held_bytes: int = 256 << 20
    """Maximum bytes of their bodies."""
    local: LocalService | None = None
    """None: the targets are in a Kubernetes cluster."""
    shared: bool = False
    """Whether another router, a cluster's shared activator, starts these targets as well and holds requests for them."""
    sleep_level: int = 0
    """In the local fleet: put the models of the last replicas to sleep at this level instead of scaling the targets to zero;
    0: scale them to zero."""


def without_scaling(settings: ActivationSettings) -> ActivationSettings:
    """Return settings that never scale down or up, for a router whose activation was removed while requests are held."""
    targets = tuple(replace(target, scale=None) for target in settings.targets)
    return replace(settings, targets=targets, idle_seconds=inf)


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """All settings of a router but the address it listens on."""

    backends: tuple[BackendAddress, ...]
    policy: str = "p2c"
    health: HealthSettings = field(default_factory=HealthSettings)
    outliers: OutlierSettings = field(default_factory=OutlierSettings)
    retries: RetrySettings = field(default_factory=RetrySettings)
    timeouts: TimeoutSettings = field(default_factory=TimeoutSettings)
    slow_start_seconds: float = 0.0
    """Duration of the slow start of a backend that came back."""
    keep_host: bool = True
    """Send the client's Host to backends; otherwise their own."""
    trust_forwarded: bool = False
    """Clients are trusted proxies: keep their X-Forwarded-Proto, X-Forwarded-Host and Forwarded fields."""
    idle_connections: int = 256
    """Maximum idle connections per backend."""
    whole_bytes: int = 64 * 1024
    """Bodies up to this size are passed on in one piece; longer ones are streamed."""
    answer_head_bytes: int = 64 * 1024
    """Maximum size of a response head."""
    ca_file: str = ""
    """CA certificates for https backends; default: those of the system."""
    measure_streams: bool = False
    """Measure the time to first token and per further token of streams, for an autoscaler."""
    endpoint_picker: bool = False
    """Serve Envoy's external processing too: gateways ask which backend a request should go to."""
    activation: ActivationSettings | None = None
    """Scale to zero, if any."""
    cache_aware: CacheAwareSettings = field(default_factory=CacheAwareSettings)
    prefix_hash: PrefixHashSettings = field(default_factory=PrefixHashSettings)
    kv_events: KVEventSettings = field(default_factory=KVEventSettings)
    predicted_latency: PredictedLatencySettings = field(default_factory=PredictedLatencySettings)
    sticky: SessionAffinitySettings = field(default_factory=SessionAffinitySettings)
    hedging: HedgingSettings = field(default_factory=HedgingSettings)
    max_outstanding: int = 0
    """Maximum concurrent requests per backend; 0: unlimited. More requests wait in the queue."""
    queue: QueueSettings = field(default_factory=QueueSettings)
    fairness: FairnessSettings = field(default_factory=FairnessSettings)
    continuation: ContinuationSettings = field(default_factory=ContinuationSettings)
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    pairing: PrefillDecodeSettings = field(default_factory=PrefillDecodeSettings)
    transfer_key: bytes = field(default=b"", repr=False)
    """The key for prefill backends and for those that continue streams: the content of `pairing.key_file`."""

    @property
    def paired(self) -> bool:
        """Whether backends may have roles."""
        selectors = self.discovery.prefill_pods or self.discovery.decode_pods
        return self.pairing.enabled or bool(selectors) or any(address.role for address in self.backends)


@dataclass(frozen=True, slots=True)
class GrpcProxySettings:
    """Settings of the gRPC proxy. They have no keys in the configuration file."""

    connections: int = 4
    """Maximum connections per backend. Several reach the several workers behind one port."""
    spread_calls: int = 32
    """Calls per connection from which on another connection is opened."""
    waiting_calls: int = 4096
    """Maximum calls that wait for one backend: for a connection, or for its limit of concurrent streams."""
    replay_bytes: int = 256 * KIB
    """Bytes of a request that are kept until its response starts, to send it again to another backend."""
    stream_window_bytes: int = 1 * MIB
    """Flow-control window of one response."""
    connection_window_bytes: int = 256 * MIB
    """Flow-control window of all calls on a connection: large, so that clients which do not read do not block others."""
    header_bytes: int = 64 * KIB
    """Maximum size of one decoded header block."""


def check_settings(settings: RouterSettings) -> None:
    """Check the values that types do not check. Raises InvalidArgument."""
    cache, prefix, sticky, hedging = settings.cache_aware, settings.prefix_hash, settings.sticky, settings.hedging
    if not 0 <= cache.cache_threshold <= 1:
        raise InvalidArgument(f"cache_aware.cache_threshold is a share from 0 to 1, not {cache.cache_threshold:g}")
    if prefix.characters < 1 or prefix.load_factor < 1:
        raise InvalidArgument("prefix_hash.characters and prefix_hash.load_factor must be at least 1")
    if not 0 <= hedging.percentile < 1 or not 0 <= hedging.budget <= 1:
        raise InvalidArgument("hedging.percentile is a share below 1, such as 0.95, and hedging.budget one up to 1")
    if sum(map(bool, (sticky.cookie, sticky.header, sticky.body))) > 1:
        raise InvalidArgument("sticky takes one of cookie, header and body, not several")
    for name, value in (("cookie", sticky.cookie), ("header", sticky.header)):
        if value and not _TOKEN.fullmatch(value):
            raise InvalidArgument(f"sticky.{name} is a name without spaces, not {value!r}")
    health = settings.health
    for name, path in (("path", health.path), ("inference_path", health.inference_path)):
        if path and (not path.startswith("/") or not path.isprintable() or " " in path):
            raise InvalidArgument(f"health.{name} starts with / and has no spaces, unlike {path!r}")
    if health.inference_path and not health.path:
        raise InvalidArgument("health.inference_path is a part of the checks: set health.path too")
    fairness = settings.fairness
    if fairness.keys_file and fairness.tenant_header:
        raise InvalidArgument("fairness takes a keys_file or a tenant_header, not both")
    if fairness.tenant_header and not _TOKEN.fullmatch(fairness.tenant_header):
        raise InvalidArgument(f"fairness.tenant_header is the name of a header, not {fairness.tenant_header!r}")
    if fairness.priorities and not fairness.tenant_header:
        raise InvalidArgument("fairness.priorities are of the tenants that fairness.tenant_header names: set both")
    if fairness.is_enabled and not settings.max_outstanding:
        raise InvalidArgument("fairness needs max_outstanding: without it no request waits at the router")
    if fairness.ageing_seconds <= 0 or fairness.output_weight <= 0:
        raise InvalidArgument("fairness.ageing_seconds and fairness.output_weight are numbers over 0")
    if settings.endpoint_picker and (settings.paired or hedging.is_enabled):
        raise InvalidArgument("endpoint_picker cannot be combined with hedging or backend roles: remove one of them")
    events = settings.kv_events
    if settings.policy in ("kv_events", "predicted_latency") and (settings.paired or hedging.is_enabled):
        raise InvalidArgument(
            f"policy {settings.policy} cannot be combined with hedging or backend roles: remove one of them"
        )
    if max(events.port, events.replay_port) > 65535 or events.max_blocks < 1 or events.tokenize_seconds <= 0:
        raise InvalidArgument("kv_events has ports up to 65535, max_blocks from 1 and tokenize_seconds over 0")
    if settings.paired and hedging.is_enabled:
        raise InvalidArgument("hedging and backend roles cannot be combined: remove one of them")
    if settings.pairing.prefill_seconds <= 0:
        raise InvalidArgument("pairing.prefill_seconds is a number over 0")
    if settings.discovery.port > 65535:
        raise InvalidArgument("discovery.port is a port, up to 65535")
