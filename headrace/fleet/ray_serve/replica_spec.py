# SPDX-License-Identifier: Apache-2.0
"""What a replica runs and how Ray Serve scales it: `ReplicaSpec`, and the options of its Ray Serve deployment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from headrace.platforms.kubernetes_client.objects import Document
from headrace.version import __version__

DEPLOYMENT = "headrace"
"""Name of the only deployment of each application. Our commands identify our applications by it."""
MIN_CHECK_SECONDS = 10.0
"""Time limit of a health check, at least: Ray replaces a replica after three that failed."""
_CONSTRUCTOR_TRIES = 3
"""Ray's default of 20 hides for minutes that a model is missing."""
_DRAIN_POLL_SECONDS = 0.5
_STOP_SECONDS = 10.0
"""Added to the grace period of requests: time for the server to exit after them."""


@dataclass(frozen=True)
class ReplicaSpec:
    """One service. It travels to the replicas as JSON values."""

    name: str
    namespace: str
    pod: Document
    """Metadata and spec of the engine's pod."""
    model: Document | None
    """The BaseModel or ClusterBaseModel."""
    min_replicas: int
    max_replicas: int
    target_requests: int
    """Target of Ray Serve's autoscaling: requests in flight per replica."""
    max_requests: int
    """Maximum requests in flight per replica; more wait in Ray Serve's proxies."""
    idle_seconds: float | None
    """Time without requests after which the service scales to zero; None: Ray's default."""
    cpus: float
    gpus: int
    memory: int
    """Bytes; 0: none reserved."""
    request_seconds: float
    """Maximum duration of a request; 0: unlimited."""
    grace_seconds: float
    """Grace period for open requests after a replica gets the stop signal."""
    health_seconds: float
    """Between two health checks."""
    version: str = __version__
    """Version of Headrace that wrote this."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the spec of `as_json`. Raises TypeError if a field is missing or unknown."""
        return cls(**content)

    @property
    def scales(self) -> bool:
        """Whether Ray Serve changes the number of replicas."""
        return self.min_replicas != self.max_replicas


def bundle(spec: ReplicaSpec) -> dict[str, float]:
    """Return the resources of a replica as Ray names them; Ray refuses resources of zero."""
    resources = {"CPU": spec.cpus, "GPU": float(spec.gpus), "memory": float(spec.memory)}
    return {name: amount for name, amount in resources.items() if amount > 0}


def deployment_options(spec: ReplicaSpec) -> dict[str, Any]:
    """Return the arguments of `ray.serve.deployment`.

    A replica is an actor in a placement group of one bundle, which is on one node: it has all resources or does not start.
    The server is a child of the actor, so the actor itself holds them, and Ray sets CUDA_VISIBLE_DEVICES for both.
    """
    actor: dict[str, Any] = {"num_cpus": spec.cpus}
    if spec.gpus:
        actor["num_gpus"] = spec.gpus
    if spec.memory:
        actor["memory"] = spec.memory
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "placement_group_bundles": [bundle(spec)],
        "placement_group_strategy": "STRICT_PACK",
        "ray_actor_options": actor,
        "max_ongoing_requests": spec.max_requests,
        "graceful_shutdown_wait_loop_s": _DRAIN_POLL_SECONDS,
        "graceful_shutdown_timeout_s": spec.grace_seconds + _STOP_SECONDS,
        "health_check_period_s": spec.health_seconds,
        "health_check_timeout_s": max(MIN_CHECK_SECONDS, 2 * spec.health_seconds),
        "max_constructor_retry_count": _CONSTRUCTOR_TRIES,
    }
    if spec.scales:
        scaling: dict[str, Any] = {
            "min_replicas": spec.min_replicas,
            # One replica shows that the service can start, also if it may scale to zero afterwards.
            "initial_replicas": max(1, spec.min_replicas),
            "max_replicas": spec.max_replicas,
            "target_ongoing_requests": spec.target_requests,
        }
        if not spec.min_replicas and spec.idle_seconds is not None:
            scaling["downscale_to_zero_delay_s"] = spec.idle_seconds
        options["autoscaling_config"] = scaling
    else:
        options["num_replicas"] = spec.min_replicas
    return options
