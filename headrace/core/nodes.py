# SPDX-License-Identifier: Apache-2.0
"""The nodes of a server that runs one model on several machines: how many, which one this is, and where node 0 is. No I/O.

Options say it, or the environment of LeaderWorkerSet, Slurm or torchrun:

    LeaderWorkerSet   LWS_GROUP_SIZE, LWS_WORKER_INDEX, LWS_LEADER_ADDRESS
    torchrun          NNODES or GROUP_WORLD_SIZE, NODE_RANK or GROUP_RANK, MASTER_ADDR, MASTER_PORT
    Slurm (srun)      SLURM_STEP_NUM_NODES, SLURM_NODEID, SLURM_STEP_NODELIST; MASTER_ADDR and MASTER_PORT if they are set
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.core.errors import InvalidArgument

MAX_NODES = 64
DEFAULT_PORT = 29500
"""That of torch.distributed."""
_FIRST_HOST = re.compile(r"([A-Za-z0-9_.-]*)(?:\[([0-9]+)[^\]]*\])?([A-Za-z0-9_.-]*)")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The nodes of a server. With one node there is nothing to connect."""

    count: int = 1
    rank: int = 0
    """Node 0 serves; the others compute with it."""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """Where node 0 waits for the others."""
    key: bytes = field(default=b"", repr=False)
    """All nodes prove to each other that they have it."""
    join_seconds: float = 600.0
    """How long a node other than 0 tries to reach node 0 before it ends."""


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """The nodes according to the environment. None or "": it does not say."""

    count: int
    rank: int | None = None
    host: str = ""
    port: int | None = None
    source: str = ""


def node_environment(environment: Mapping[str, str]) -> NodeEnvironment | None:
    """Return the nodes that LeaderWorkerSet, torchrun or Slurm has set; None for a process that is alone.

    Raises InvalidArgument for more than one process on a node: one server starts all ranks of its node.
    """
    for nodes in (_leader_worker_set(environment), _torchrun(environment), _slurm(environment)):
        if nodes is not None and nodes.count > 1:
            return nodes
    return None


def _leader_worker_set(environment: Mapping[str, str]) -> NodeEnvironment | None:
    count = _number(environment, "LWS_GROUP_SIZE")
    if count is None or not environment.get("LWS_LEADER_ADDRESS"):
        return None
    rank = _number(environment, "LWS_WORKER_INDEX")
    return NodeEnvironment(count, rank, environment["LWS_LEADER_ADDRESS"], source="LeaderWorkerSet")


def _torchrun(environment: Mapping[str, str]) -> NodeEnvironment | None:
    """Return what torchrun sets (GROUP_*), or those that start a process for each node themselves (NNODES, NODE_RANK)."""
    from_torchrun = "GROUP_WORLD_SIZE" in environment
    names = ("GROUP_WORLD_SIZE", "GROUP_RANK") if from_torchrun else ("NNODES", "NODE_RANK")
    count, rank = (_number(environment, name) for name in names)
    if count is None or rank is None or not environment.get("MASTER_ADDR"):
        return None
    if from_torchrun and count > 1 and (_number(environment, "LOCAL_WORLD_SIZE") or 1) > 1:
        raise InvalidArgument(
            "torchrun has started several servers on this node, and one starts all ranks of its node: use --nproc-per-node 1"
        )
    port = _number(environment, "MASTER_PORT")
    if port is not None and environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        port += 1  # torchrun itself listens at MASTER_PORT
    return NodeEnvironment(count, rank, environment["MASTER_ADDR"], port, "torchrun")


def _slurm(environment: Mapping[str, str]) -> NodeEnvironment | None:
    """Return the nodes of a job step. A batch script without srun runs on one node of its job, alone."""
    count, rank = _number(environment, "SLURM_STEP_NUM_NODES"), _number(environment, "SLURM_NODEID")
    if count is None or rank is None or count < 2:
        return None
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    if tasks is not None and tasks != count:
        raise InvalidArgument(
            f"Slurm has started {tasks} servers on {count} nodes, and one starts all ranks of its node: use "
            "srun --ntasks-per-node=1, or --nnodes 1 for servers that are alone"
        )
    host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", ""))
    return NodeEnvironment(count, rank, host, _number(environment, "MASTER_PORT"), "Slurm")


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list of nodes: `gpu01` of `gpu[01-04,07],big1`."""
    match = _FIRST_HOST.match(nodes)
    return "".join(part or "" for part in match.groups()) if match is not None else ""


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
