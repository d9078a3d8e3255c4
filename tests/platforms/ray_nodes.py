# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine, as a program: run by Ray's own Python, see `ray_platform`.

Prints the address when the nodes run. Lines of standard input: `kill` ends the second node by SIGKILL, `add` adds one, each
answered by a line; the end of the input ends the cluster.
"""

import inspect
import socket
import sys
from contextlib import ExitStack
from typing import Any

from ray._private import services
from ray._raylet import persist_port
from ray.cluster_utils import Cluster

OPTIONS = {"num_cpus": 1, "include_dashboard": False}
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
_start_raylet = services.start_raylet


def start_raylet(*arguments: Any, **named: Any) -> Any:
    """Start a raylet that knows the ports of its agents.

    A raylet waits 15 seconds for its agents to write their ports to files, then it crashes; no setting changes that. A busy
    machine takes longer to import what an agent needs. So the files are written first, with the ports that agents are given.
    """
    given = inspect.signature(_start_raylet).bind(*arguments, **named).arguments
    for name in AGENT_PORTS:
        persist_port(given["session_dir"], given["node_id"], name, given[name])
    return _start_raylet(*arguments, **named)


services.start_raylet = start_raylet


def add_node(cluster: Cluster) -> object:
    """Add a node; its agents have ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in AGENT_PORTS]
        ports = [each.getsockname()[1] for each in sockets]
    return cluster.add_node(**OPTIONS, **dict(zip(AGENT_PORTS, ports, strict=True)))


def main() -> None:
    cluster = Cluster()
    add_node(cluster)  # the first one is the head
    node = add_node(cluster)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(node, allow_graceful=False)
        if line.strip() == "add":
            node = add_node(cluster)
        print("done", flush=True)
    cluster.shutdown()


main()
