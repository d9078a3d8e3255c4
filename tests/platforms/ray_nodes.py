# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine, as a program: run by Ray's own Python, see `ray_platform`.

Prints the address when the nodes run. Lines of standard input: `kill` ends the second node by SIGKILL, `add` adds one, each
answered by a line; the end of the input ends the cluster.
"""

import sys

from ray.cluster_utils import Cluster

OPTIONS = {"num_cpus": 1, "include_dashboard": False}


def add_node(cluster: Cluster) -> object:
    """A raylet gives its agent 15 seconds to start, which a busy machine may exceed: then it ends."""
    for _ in range(3):
        try:
            return cluster.add_node(**OPTIONS)
        except Exception as error:
            print(error, file=sys.stderr)
    return cluster.add_node(**OPTIONS)


def main() -> None:
    cluster = Cluster()
    cluster.add_node(**OPTIONS)  # the first one is the head
    node = cluster.add_node(**OPTIONS)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(node, allow_graceful=False)
        if line.strip() == "add":
            node = add_node(cluster)
        print("done", flush=True)
    cluster.shutdown()


main()
