# SPDX-License-Identifier: Apache-2.0
"""What a replica runs and how Ray Serve scales it: `ReplicaSpec`, and the options of its Ray Serve deployment. Pure.

A replica is one server, or a group of servers that compute one model together: a leader, which answers, and workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from headrace.core.errors import FailedPrecondition
from headrace.core.kv_transfer import KEY_VARIABLE
from headrace.fleet.local.container_command import LEADER_ADDRESS
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
class WorkerSpec:
    """The servers of a group besides the leader."""

    size: int
    """How many there are."""
    pod: Document
    """Metadata and spec of a worker's pod."""
    cpus: float
    gpus: int
    memory: int


@dataclass(frozen=True)
class GroupMember:
    """The place of one server in its group."""

    size: int
    """Servers of the group, with the leader."""
    index: int
    """0 for the leader."""
    leader_address: str
    """IP address of the leader's node."""
    key: str = field(repr=False)
    """The servers prove to each other that they have it."""
    leader_ports: Mapping[int, int] = field(default_factory=dict)
    """For a worker: the container ports of the leader, and the ports of its node in their place."""

    def environment(self) -> dict[str, str]:
        """Return what LeaderWorkerSet sets in a pod, and the key."""
        return {
            LEADER_ADDRESS: self.leader_address,
            "LWS_GROUP_SIZE": str(self.size),
            "LWS_WORKER_INDEX": str(self.index),
            KEY_VARIABLE: self.key,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "leader_ports": {str(port): number for port, number in self.leader_ports.items()}}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the member of `as_json`."""
        ports = {int(port): int(number) for port, number in content["leader_ports"].items()}
        return cls(**{**content, "leader_ports": ports})

    def worker(self, index: int, leader_ports: Mapping[int, int]) -> GroupMember:
        """Return the place of a worker, once the leader has its ports."""
        return replace(self, index=index, leader_ports=dict(leader_ports))


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
    worker: WorkerSpec | None = None
    """None: the replica is one server."""
    version: str = __version__
    """Version of Headrace that wrote this."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the spec of `as_json`. Raises TypeError if a field is missing or unknown."""
        worker = content.get("worker")
        return cls(**{**content, "worker": None if worker is None else WorkerSpec(**worker)})

    def of_worker(self) -> Self:
        """Return what a worker of the group runs."""
        if self.worker is None:
            return self
        worker = self.worker
        return replace(self, pod=worker.pod, cpus=worker.cpus, gpus=worker.gpus, memory=worker.memory, worker=None)

    @property
    def scales(self) -> bool:
        """Whether Ray Serve changes the number of replicas."""
        return self.min_replicas != self.max_replicas


def parse_spec(content: Mapping[str, Any]) -> ReplicaSpec:
    """Return the spec of a replica. Raises FailedPrecondition if another version of Headrace wrote it."""
    version = content.get("version")
    if version != __version__:
        raise FailedPrecondition(
            f"the service was deployed by Headrace {version}, and this node has {__version__}: install the same on all nodes"
        )
    return ReplicaSpec.from_json(content)


def bundle(spec: ReplicaSpec | WorkerSpec) -> dict[str, float]:
    """Return the resources of a server as Ray names them; Ray refuses resources of zero."""
    resources = {"CPU": spec.cpus, "GPU": float(spec.gpus), "memory": float(spec.memory)}
    return {name: amount for name, amount in resources.items() if amount > 0}


def bundles(spec: ReplicaSpec) -> list[dict[str, float]]:
    """Return the resources of a replica: those of its server or leader first, then those of each worker."""
    workers = [] if spec.worker is None else [bundle(spec.worker)] * spec.worker.size
    return [bundle(spec), *workers]


def actor_options(spec: ReplicaSpec | WorkerSpec) -> dict[str, Any]:
    """Return the resources of the actor that starts a server: it holds those of the whole bundle."""
    actor: dict[str, Any] = {"num_cpus": spec.cpus}
    if spec.gpus:
        actor["num_gpus"] = spec.gpus
    if spec.memory:
        actor["memory"] = spec.memory
    return actor


def deployment_options(spec: ReplicaSpec) -> dict[str, Any]:
    """Return the arguments of `ray.serve.deployment`.

    A replica is an actor in a placement group, which has all resources or does not start: one bundle on one node, or a
    bundle for each server of a group, on different nodes where there are enough. The servers are children of actors, so the
    actors hold the resources, and Ray sets CUDA_VISIBLE_DEVICES for both.
    """
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "placement_group_bundles": bundles(spec),
        "placement_group_strategy": "STRICT_PACK" if spec.worker is None else "SPREAD",
        "ray_actor_options": actor_options(spec),
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
