# SPDX-License-Identifier: Apache-2.0
"""What a pod needs of this machine: cores, memory, GPUs, ports. A scheduler for one node.

Cores are shared by time: a pod fits if the machine has as many as it asks for. Memory is not: all that was asked for
together must be there. GPUs are given to one pod each. Whose they are, the placements say, which pods keep on disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import ResourceExhausted
from headrace.fleet.local.commands import ports_of, tells
from headrace.fleet.local.sight import roles_of
from headrace.fleet.selection.measures import quantity
from headrace.fleet.words import Document, part
from headrace.platforms.gpus import DEVICES, VARIABLE, gpus_here
from headrace.platforms.ports import Ports

_GIBIBYTE = 1 << 30


@dataclass(frozen=True)
class Placement:
    """What a pod got."""

    ports: Mapping[int, int] = field(default_factory=dict)
    """Of its containers, by their numbers there. The first is where it serves."""
    gpus: tuple[str, ...] = ()
    memory: float = 0.0


@dataclass(frozen=True)
class Asked:
    """What a pod asks for."""

    cores: float
    memory: float
    gpus: int


class Machine:
    """This machine."""

    def __init__(
        self,
        ports: Ports,
        *,
        environ: Mapping[str, str] = os.environ,
        devices: Path = DEVICES,
        cores: int | None = None,
        memory: int | None = None,
    ) -> None:
        self._ports = ports
        self._gpus = gpus_here(environ, devices)
        self.cores = cores if cores is not None else len(os.sched_getaffinity(0))
        self.memory = memory if memory is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def place(
        self, uid: str, pod: Document, others: Iterable[Placement], known: Iterable[str], serves: bool
    ) -> Placement:
        """Room for a pod beside the others. Raises ResourceExhausted that says what is missing."""
        asked, taken = asked_by(pod), list(others)
        if asked.cores > self.cores:
            raise ResourceExhausted(
                f"it asks for {asked.cores:g} cores, and this machine has {self.cores}: lower resources.requests.cpu"
            )
        used = sum(each.memory for each in taken)
        if used + asked.memory > self.memory:
            raise ResourceExhausted(
                f"it asks for {asked.memory / _GIBIBYTE:.1f} GiB of memory; of {self.memory / _GIBIBYTE:.1f} GiB here other "
                f"pods have asked for {used / _GIBIBYTE:.1f}: lower resources.requests.memory, or have fewer replicas"
            )
        held = {gpu for each in taken for gpu in each.gpus}
        free = [gpu for gpu in self._gpus if gpu not in held]
        if len(free) < asked.gpus:
            raise ResourceExhausted(
                f"it asks for {asked.gpus} GPU(s), and of {len(self._gpus)} on this machine {len(free)} are free: choose a "
                "runtime without GPUs, or delete who has them"
            )
        return Placement(self._claimed(uid, pod, set(known), serves), tuple(free[: asked.gpus]), asked.memory)

    def release(self, uid: str) -> None:
        """Give back the ports of a pod."""
        self._ports.release(uid)

    def _claimed(self, uid: str, pod: Document, known: set[str], serves: bool) -> dict[int, int]:
        made: dict[int, int] = {}
        port, told = 0, True
        try:
            for index, port in enumerate(ports_of(pod, serves=serves)):
                told = tells(pod, port)
                if not told and index:
                    made[port] = port  # not where it serves: whether it is opened at all, nobody says
                    continue
                made[port] = self._ports.claim(uid, lambda each: each in known, None if told else port)
        except ResourceExhausted:
            self._ports.release(uid)
            if told:
                raise
            raise ResourceExhausted(
                f"port {port} is in use on this machine, and the command names no port that could be changed: add "
                f"--port={port} or a variable PORT to it, or have one replica"
            ) from None
        except OSError as error:
            self._ports.release(uid)
            raise ResourceExhausted(
                f"no port could be noted as taken: {os.strerror(error.errno or 0)}; make room"
            ) from None
        return made


def visible(placement: Placement) -> dict[str, str]:
    """The variables that give a pod its GPUs, and no others."""
    return {VARIABLE: ",".join(placement.gpus)} if placement.gpus else {}


def asked_by(pod: Document) -> Asked:
    """What a pod asks for: its containers together, or more where one that comes first does.

    A limit counts where there is no request, as in Kubernetes.
    """
    cores = memory = gpus = 0.0
    most = [0.0, 0.0, 0.0]
    for each, role in roles_of(part(pod, "spec")):
        asked = _asked(each)
        if role == "init":
            so_far = (cores, memory, gpus)
            most = [max(best, ours + its) for best, ours, its in zip(most, so_far, asked, strict=True)]
        else:
            cores, memory, gpus = cores + asked[0], memory + asked[1], gpus + asked[2]
    return Asked(max(cores, most[0]), max(memory, most[1]), int(max(gpus, most[2])))


def _asked(container: Document) -> tuple[float, float, float]:
    asked = {**part(container, "resources", "limits"), **part(container, "resources", "requests")}
    gpus = sum(int(quantity(value) or 0) for name, value in asked.items() if name.endswith("/gpu"))
    return quantity(asked.get("cpu")) or 0.0, quantity(asked.get("memory")) or 0.0, float(gpus)
