# SPDX-License-Identifier: Apache-2.0
"""CPU pinning: the server on one core, the load generator on the others.

The server and all its threads get the first core this process may use, the load generator gets the others, so that
neither takes time from the other and a server with many threads is not helped by a second core.
"""

import os
from pathlib import Path

from bench.cpu import server_processes
from bench.errors import BenchError


def server_core() -> int:
    """The core of a server that is measured on one."""
    return min(os.sched_getaffinity(0))


def client_cores() -> set[int]:
    """The cores that are left to the load generator meanwhile."""
    left = os.sched_getaffinity(0) - {server_core()}
    if not left:
        raise BenchError("a server on one core needs a second core for the load generator: give bench two cores")
    return left


def pinned(command: list[str], cores: set[int]) -> list[str]:
    """The command, started on these cores; all that it starts inherits them."""
    return ["taskset", "--cpu-list", ",".join(map(str, sorted(cores))), *command]


def refuse_unless_pinned(root_pid: int) -> None:
    """Libraries with thread pools may choose cores themselves, against what they inherited: look at every thread."""
    for pid in server_processes(root_pid):
        for thread in _threads(pid):
            try:
                cores = os.sched_getaffinity(thread)
            except ProcessLookupError:
                continue
            if cores != {server_core()}:
                raise BenchError(f"process {pid} of the server has left its core: it may use {sorted(cores)}")


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
