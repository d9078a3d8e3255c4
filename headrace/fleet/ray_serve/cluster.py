# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster: connect to it; deploy services to its Ray Serve, list and delete them. Blocking."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from headrace.core.extras import MissingExtra
from headrace.fleet.ray_serve.replica_spec import DEPLOYMENT, ReplicaSpec, bundles

log = logging.getLogger("headrace.ray")

ADDRESS_VARIABLE = "RAY_ADDRESS"
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.2
_OUR_ERROR = re.compile(r"headrace\.core\.errors\.\w+: (.*?)(?=\n\S*Error|\n\(|\Z)", re.DOTALL)
"""An error of ours in the traceback that Ray Serve reports for a replica."""
_MAX_MESSAGE = 2000

Progress = Callable[[str], None]


@dataclass(frozen=True)
class HttpEndpoint:
    """Where Ray Serve's proxies listen, on every node that has replicas."""

    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True)
class ServiceStatus:
    """A deployed service."""

    name: str
    state: str
    """Ray Serve's word: DEPLOYING, RUNNING, UNHEALTHY, DEPLOY_FAILED, DELETING."""
    replicas: Mapping[str, int]
    """Replicas by state."""
    message: str

    @property
    def is_ready(self) -> bool:
        """Whether all desired replicas are ready."""
        return self.state == "RUNNING"

    @property
    def has_failed(self) -> bool:
        """Whether Ray Serve has given up to start it."""
        return self.state == "DEPLOY_FAILED"


@contextlib.contextmanager
def connected(address: str = "") -> Iterator[Cluster]:
    """Connect to a cluster: `HOST:6379` from one of its nodes, `ray://HOST:10001` from elsewhere, or "": see `RAY_ADDRESS`.

    Raises Unavailable without a cluster there, MissingExtra without the package `ray`.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("a Ray cluster", "ray") from None
    target = address or os.environ.get(ADDRESS_VARIABLE, "") or "auto"
    _check_address(target)
    # Our own log lines, or the logs of the cluster, have the same information.
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        ray.init(address=target, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        log.debug("ray.init(%r) failed", target, exc_info=error)
        raise Unavailable(_connect_message(target, ray.__version__)) from None
    try:
        yield Cluster()
    finally:
        ray.shutdown()


class Cluster:
    """The cluster that this process is connected to."""

    def deploy(
        self, spec: ReplicaSpec, route: str, endpoint: HttpEndpoint, seconds: float, progress: Progress = lambda _: None
    ) -> str:
        """Deploy or update a service, and wait until it is ready. Return its URL; "" if Ray Serve was running already.

        A new service that cannot start is removed again. Raises FailedPrecondition if it cannot start,
        DeadlineExceeded if it takes longer than `seconds`.
        """
        import ray
        from ray import serve

        from headrace.fleet.ray_serve.application import application

        before = self.find(spec.name)
        if before is None and spec.name in serve.status().applications:
            raise FailedPrecondition(f"application {spec.name} was not deployed by Headrace: rename the service")
        if problem := _missing_resources(spec):
            progress(problem)
        is_ours = not serve.status().proxies
        serve.start(http_options={"host": endpoint.host, "port": endpoint.port})
        target = serve.RunTarget(application(spec), name=spec.name, route_prefix=route)
        try:
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        except (ray.exceptions.RayError, serve.exceptions.RayServeException) as error:
            log.debug("Ray Serve refused %s", spec.name, exc_info=error)
            raise FailedPrecondition(
                f"Ray Serve refuses {spec.name}: if another application has the path {route}, choose one by --route-prefix"
            ) from None
        status = self._wait(spec, seconds, progress)
        if status.has_failed:
            if before is None:
                with contextlib.suppress(DeadlineExceeded, NotFound):
                    self.delete(spec.name, seconds)
            raise FailedPrecondition(f"{spec.name} cannot start: {status.message}")
        return f"http://{endpoint.host}:{endpoint.port}{route.rstrip('/')}" if is_ours else ""

    def services(self) -> list[ServiceStatus]:
        """Return the services that Headrace has deployed, by name."""
        from ray import serve

        applications = serve.status().applications
        return [
            _service_status(name, applications[name])
            for name in sorted(applications)
            if DEPLOYMENT in applications[name].deployments
        ]

    def find(self, name: str) -> ServiceStatus | None:
        """Return one service, if there is one."""
        return next((service for service in self.services() if service.name == name), None)

    def delete(self, name: str, seconds: float) -> None:
        """Delete a service; open requests are answered first.

        Raises NotFound, and DeadlineExceeded if that takes longer than `seconds`.
        """
        from ray import serve

        if self.find(name) is None:
            names = ", ".join(service.name for service in self.services()) or "none"
            raise NotFound(f"Headrace has deployed no service {name} to this cluster; its services: {names}")
        # Not by waiting in `serve.delete`, which fails after a minute: open requests may take longer.
        serve.delete(name, _blocking=False)
        ends = time.monotonic() + seconds
        while self.find(name) is not None:
            if time.monotonic() >= ends:
                raise DeadlineExceeded(
                    f"{name} is not deleted after {seconds:g} seconds, and Ray Serve goes on deleting it: open requests "
                    "are answered first, and a replica that waits for resources gets the same time"
                )
            time.sleep(_POLL_SECONDS)

    def _wait(self, spec: ReplicaSpec, seconds: float, progress: Progress) -> ServiceStatus:
        ends, last_message = time.monotonic() + seconds, ""
        while True:
            status = self.find(spec.name)
            if status is not None and (status.is_ready or status.has_failed):
                return status
            line = _progress_line(spec, status)
            if line != last_message:
                progress(line)
                last_message = line
            if time.monotonic() >= ends:
                reason = _missing_resources(spec) or "see `ray status` and the logs of the replicas in Ray's dashboard"
                raise DeadlineExceeded(
                    f"{spec.name} is not ready after {seconds:g} seconds, and Ray Serve goes on trying: {reason}"
                )
            time.sleep(_POLL_SECONDS)


def _check_address(address: str) -> None:
    """Validate the address of a cluster, and check that something listens there: Ray itself would try for a minute."""
    if address in ("auto", "local"):
        if address == "local":
            raise InvalidArgument("--address local would start a cluster of its own: run `ray start --head` first")
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if "/" in host or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(
            f"{address[:200]!a} is not the address of a Ray cluster: write HOST:6379 or ray://HOST:10001"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            pass
    except OSError:
        raise Unavailable(f"nothing listens at {address}: is the cluster running, and the address right?") from None


def _connect_message(address: str, version: str) -> str:
    if address == "auto":
        return (
            f"no Ray cluster runs on this machine: start one with `ray start --head`, or name its address by --address or "
            f"{ADDRESS_VARIABLE}"
        )
    return (
        f"cannot join the Ray cluster at {address}: it needs Ray {version} and this version of Python on all nodes, and "
        "HOST:PORT works on a node of the cluster only; elsewhere write ray://HOST:10001"
    )


def _service_status(name: str, application: Any) -> ServiceStatus:
    deployment = application.deployments[DEPLOYMENT]
    replicas = {_word(state): count for state, count in deployment.replica_states.items() if count}
    return ServiceStatus(
        name, _word(application.status), replicas, shown_message(deployment.message or application.message)
    )


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def shown_message(message: str) -> str:
    """Return the Headrace error in a traceback, else the last part of the whole message."""
    own_errors = _OUR_ERROR.findall(message)
    return (own_errors[-1].strip() if own_errors else message)[-_MAX_MESSAGE:]


def _progress_line(spec: ReplicaSpec, status: ServiceStatus | None) -> str:
    replicas = status.replicas if status is not None else {}
    states = ", ".join(f"{count} {state.lower()}" for state, count in sorted(replicas.items())) or "none yet"
    return f"{spec.name}: waiting for its replicas: {states}"


def _missing_resources(spec: ReplicaSpec) -> str:
    """Return why the nodes can never take a replica, as far as the cluster is now; "" if they can."""
    import ray

    free = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    for number, wanted in enumerate(bundles(spec)):
        node = next((node for node in free if _fits(wanted, node)), None)
        if node is None:
            words = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
            if not number:
                who = f"no node of the cluster has what a replica of {spec.name} needs"
            else:
                who = f"the cluster has no room for worker {number} of a replica of {spec.name}, which needs"
            return f"{who} ({words}), unless Ray's autoscaler adds one"
        for name, amount in wanted.items():
            node[name] -= amount
    return ""


def _fits(wanted: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in wanted.items())
