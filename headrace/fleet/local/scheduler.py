# SPDX-License-Identifier: Apache-2.0
"""The scheduler of one node: assigns cores, memory, GPUs and ports of this machine to pods.

Cores are shared over time: a pod fits if the machine has as many as it requests. Memory is not shared: all requests together
must fit. A GPU belongs to one pod. Pods store their placements on disk, which say what is taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import ResourceExhausted
from headrace.fleet.local.container_command import container_ports, is_port_configurable
from headrace.fleet.local.pod_status import containers_with_roles
from headrace.fleet.selection.model_match import parse_quantity
from headrace.platforms.kubernetes_client.objects import Document, get_mapping
from headrace.platforms.node_resources import DEVICES, GPU_VARIABLE, PortAllocator, visible_gpus

_GIBIBYTE = 1 << 30


@dataclass(frozen=True)
class Placement:
    """The resources that were assigned to a pod. The field names are part of the file format of pods."""

    ports: Mapping[int, int] = field(default_factory=dict)
    """Ports of this machine, by container port. The first is the one that it serves on."""
    gpus: tuple[str, ...] = ()
    memory: float = 0.0


@dataclass(frozen=True)
class ResourceRequests:
    """The resource requests of a pod."""

    cores: float
    memory: float
    gpus: int


class Scheduler:
    """Assigns the resources of this machine to pods."""

    def __init__(
        self,
        ports: PortAllocator,
        *,
        environ: Mapping[str, str] = os.environ,
        devices: Path = DEVICES,
        cores: int | None = None,
        memory: int | None = None,
    ) -> None:
        self._ports = ports
        self._gpus = visible_gpus(environ, devices)
        self.cores = cores if cores is not None else len(os.sched_getaffinity(0))
        self.memory = memory if memory is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def place(
        self, uid: str, pod: Document, others: Iterable[Placement], known: Iterable[str], serves: bool
    ) -> Placement:
        """Return a placement for a pod, given the placements of others. Raises ResourceExhausted with what is missing."""
        requests, taken = pod_requests(pod), list(others)
        if requests.cores > self.cores:
            raise ResourceExhausted(
                f"it requests {requests.cores:g} cores, and this machine has {self.cores}: lower resources.requests.cpu"
            )
        used = sum(placement.memory for placement in taken)
        if used + requests.memory > self.memory:
            raise ResourceExhausted(
                f"it requests {requests.memory / _GIBIBYTE:.1f} GiB of memory; of {self.memory / _GIBIBYTE:.1f} GiB here "
                f"other pods have requested {used / _GIBIBYTE:.1f}: lower resources.requests.memory, or use fewer replicas"
            )
        held = {gpu for placement in taken for gpu in placement.gpus}
        free = [gpu for gpu in self._gpus if gpu not in held]
        if len(free) < requests.gpus:
            raise ResourceExhausted(
                f"it requests {requests.gpus} GPU(s), and of {len(self._gpus)} on this machine {len(free)} are free: choose "
                "a runtime without GPUs, or delete the services that use them"
            )
        return Placement(self._claim_ports(uid, pod, set(known), serves), tuple(free[: requests.gpus]), requests.memory)

    def release(self, uid: str) -> None:
        """Release the ports of a pod."""
        self._ports.release(uid)

    def _claim_ports(self, uid: str, pod: Document, known: set[str], serves: bool) -> dict[int, int]:
        claimed: dict[int, int] = {}
        port, is_configurable = 0, True
        try:
            for index, port in enumerate(container_ports(pod, serves=serves)):
                is_configurable = is_port_configurable(pod, port)
                if not is_configurable and index:
                    claimed[port] = port  # a secondary port, which may never be opened
                    continue
                claimed[port] = self._ports.claim(uid, lambda owner: owner in known, None if is_configurable else port)
        except ResourceExhausted:
            self._ports.release(uid)
            if is_configurable:
                raise
            raise ResourceExhausted(
                f"port {port} is in use on this machine, and the command sets no port that could be replaced: add "
                f"--port={port} or a variable PORT to it, or use one replica"
            ) from None
        except OSError as error:
            self._ports.release(uid)
            raise ResourceExhausted(f"a port cannot be claimed: {os.strerror(error.errno or 0)}; make room") from None
        return claimed


def gpu_environment(placement: Placement) -> dict[str, str]:
    """Return the variables that make the GPUs of a pod visible to it, and no others."""
    return {GPU_VARIABLE: ",".join(placement.gpus)} if placement.gpus else {}


def pod_requests(pod: Document) -> ResourceRequests:
    """Return the requests of a pod: those of its containers together, or more if an init container requests more.

    A limit counts as the request if there is none, as in Kubernetes.
    """
    cores = memory = gpus = 0.0
    largest = [0.0, 0.0, 0.0]
    for container, role in containers_with_roles(get_mapping(pod, "spec")):
        requests = _container_requests(container)
        if role == "init":
            so_far = (cores, memory, gpus)
            largest = [
                max(maximum, running + requested)
                for maximum, running, requested in zip(largest, so_far, requests, strict=True)
            ]
        else:
            cores, memory, gpus = cores + requests[0], memory + requests[1], gpus + requests[2]
    return ResourceRequests(max(cores, largest[0]), max(memory, largest[1]), int(max(gpus, largest[2])))


def _container_requests(container: Document) -> tuple[float, float, float]:
    quantities = {**get_mapping(container, "resources", "limits"), **get_mapping(container, "resources", "requests")}
    gpus = sum(int(parse_quantity(value) or 0) for name, value in quantities.items() if name.endswith("/gpu"))
    return parse_quantity(quantities.get("cpu")) or 0.0, parse_quantity(quantities.get("memory")) or 0.0, float(gpus)
