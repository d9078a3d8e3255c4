# SPDX-License-Identifier: Apache-2.0
"""What a router can be told, by topic. Made by `cli.router`, read by every module of the room."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headrace.core.errors import InvalidArgument
from headrace.core.handing import ROLES
from headrace.fleet.router.choosing.settings import (
    CacheAwareSettings,
    HedgingSettings,
    PrefixHashSettings,
    QueueSettings,
    StickySettings,
)
from headrace.fleet.router.discovery.settings import DiscoverySettings
from headrace.fleet.router.pairing.settings import PairingSettings
from headrace.fleet.router.waking.settings import ActivationSettings

POLICIES = ("p2c", "round-robin", "least", "weighted", "random", "cache_aware", "prefix_hash")
ALIASES = {"power_of_two": "p2c", "round_robin": "round-robin", "least_loaded": "least"}
"""What other routers, and `router.config` of a service, call the same policies."""
_FORM = "write http://host:port[,weight=N][,grpc=host:port][,revision=NAME][,role=prefill|decode]"
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOST = re.compile(r"[A-Za-z0-9.:_-]+")
_PORTS = {"http": 80, "https": 443}
_MOST_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class BackendAddress:
    """Where a server is, and how much of the work it should get."""

    url: str
    """`scheme://host:port`, as it is shown."""
    scheme: str
    host: str
    port: int
    weight: float = 1.0
    grpc_host: str = ""
    """Where its gRPC port is; the same host and port as for HTTP unless told (one port of Headrace speaks both)."""
    grpc_port: int = 0
    revision: str = ""
    """What it is a replica of: requests are also counted by this."""
    role: str = ""
    """`prefill` or `decode`, where they are apart; "" for all of it. See `core.handing`."""

    @classmethod
    def parse(cls, text: str) -> BackendAddress:
        """Read `http://host:8000,weight=2,grpc=host:8001`."""
        if "@" in text:
            # Before anything that repeats the text: what stands before the @ may be a password.
            raise InvalidArgument(f"a backend's address takes no user and no password; {_FORM}")
        if not text.isprintable():
            raise InvalidArgument(f"backend {text!r} has no host; {_FORM}")
        where, *options = text.strip().split(",")
        scheme, host, port = _split_url(where if "://" in where else f"http://{where}", text)
        weight, grpc, revision, role = 1.0, (host, port), "", ""
        for option in options:
            name, _, value = option.strip().partition("=")
            if name == "weight":
                weight = _weight(value, text)
            elif name == "role" and value in ROLES:
                role = value
            elif name == "grpc":
                grpc = _split_url(f"{scheme}://{value}", text)[1:]
            elif name == "revision" and _REVISION.fullmatch(value):
                revision = value
            elif name == "revision":
                raise InvalidArgument(f"backend {text!r}: a revision is up to 63 letters, digits, '.', '_' and '-'")
            else:
                raise InvalidArgument(f"backend {text!r}: there is no option {name!r}; {_FORM}")
        shown = f"[{host}]" if ":" in host else host
        return cls(f"{scheme}://{shown}:{port}", scheme, host, port, weight, *grpc, revision, role)


def _split_url(url: str, text: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidArgument(f"backend {text!r}: the port is no number from 1 to 65535; {_FORM}") from None
    if parts.scheme not in _PORTS:
        raise InvalidArgument(f"backend {text!r}: only http and https are spoken; {_FORM}")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise InvalidArgument(f"backend {text!r}: a path or a query has no place here; {_FORM}")
    if not parts.hostname or not _HOST.fullmatch(parts.hostname) or port == 0:
        raise InvalidArgument(f"backend {text!r} has no host; {_FORM}")
    return parts.scheme, parts.hostname, port or _PORTS[parts.scheme]


def _weight(value: str, text: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= _MOST_WEIGHT:
        raise InvalidArgument(f"backend {text!r}: a weight is a number over 0, at most {_MOST_WEIGHT:g}")
    return weight


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Active checks: the router asks each backend now and then."""

    path: str = "/v2/health/ready"
    """Asked by GET; any status from 200 to 299 is health. Empty: no checks, every backend counts as up."""
    interval_seconds: float = 2.0
    timeout_seconds: float = 1.0
    rise: int = 2
    """Good answers in a row that bring a backend back."""
    fall: int = 3
    """Bad answers in a row that take a backend out."""


@dataclass(frozen=True, slots=True)
class OutlierSettings:
    """Passive checks: a backend that fails the requests it is given gets none for a while."""

    consecutive_failures: int = 5
    """Failures in a row that eject a backend; 0 for never."""
    error_rate: float = 0.5
    """Share of failures in a window that ejects a backend; 0 for never."""
    least_requests: int = 20
    """A window with fewer requests says nothing."""
    window_seconds: float = 10.0
    ejection_seconds: float = 5.0
    """The first ejection; each further one is longer by this, and time without any takes it back."""
    longest_ejection_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """What is tried again, and how often."""

    tries: int = 3
    """Of one request, the first among them."""
    budget: float = 0.2
    """Retries per request, over time: more would make a collapse worse."""
    reserve: int = 100
    """Retries that may come at once, after a time without any."""
    inference: bool = False
    """Also try inference requests again that may have reached a backend: they change nothing there."""


@dataclass(frozen=True, slots=True)
class TimeoutSettings:
    """How long a backend may take."""

    connect_seconds: float = 2.0
    response_seconds: float = 300.0
    """From the end of the request to the head of the answer: inference may take long."""
    idle_seconds: float = 300.0
    """The longest silence inside an answer, or in a WebSocket."""
    keep_alive_seconds: float = 60.0
    """A connection without work is closed after so long; it should be less than what the backends do."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """A router, apart from where it listens."""

    backends: tuple[BackendAddress, ...]
    policy: str = "p2c"
    health: HealthSettings = field(default_factory=HealthSettings)
    outliers: OutlierSettings = field(default_factory=OutlierSettings)
    retries: RetrySettings = field(default_factory=RetrySettings)
    timeouts: TimeoutSettings = field(default_factory=TimeoutSettings)
    slow_start_seconds: float = 0.0
    """A backend that came back gets its share of the work little by little, over so long."""
    keep_host: bool = True
    """Give backends the Host that the client asked for; else their own."""
    trust_forwarded: bool = False
    """Clients are proxies of ours: keep what they say in X-Forwarded-Proto, X-Forwarded-Host and Forwarded."""
    idle_connections: int = 256
    """Connections without work that are kept for each backend."""
    whole_bytes: int = 64 * 1024
    """Bodies up to this size are passed on in one piece; longer ones piece by piece."""
    answer_head_bytes: int = 64 * 1024
    """The longest head of an answer."""
    ca_file: str = ""
    """Who signs the certificates of https backends; the system's authorities unless given."""
    activation: ActivationSettings | None = None
    """What sleeps behind the backends, if anything does."""
    cache_aware: CacheAwareSettings = field(default_factory=CacheAwareSettings)
    prefix_hash: PrefixHashSettings = field(default_factory=PrefixHashSettings)
    sticky: StickySettings = field(default_factory=StickySettings)
    hedging: HedgingSettings = field(default_factory=HedgingSettings)
    max_outstanding: int = 0
    """Requests that a backend may have at once; 0 for any number. More wait, as `queue` says."""
    queue: QueueSettings = field(default_factory=QueueSettings)
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    """Where backends are found beside those that are named."""
    pairing: PairingSettings = field(default_factory=PairingSettings)
    """How prompts are handed from prefills to decoders, where backends have such roles."""
    handing_key: bytes = field(default=b"", repr=False)
    """What prefills of other machines want to see: what stands in `pairing.key_file`."""

    @property
    def paired(self) -> bool:
        """Whether backends may have roles."""
        found = self.discovery.prefill_pods or self.discovery.decode_pods
        return self.pairing.enabled or bool(found) or any(address.role for address in self.backends)
