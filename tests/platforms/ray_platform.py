# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster for tests, with Ray in an environment of its own: `make test-ray`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.platforms.processes import command_line, read_stat

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "ray" / "bin" / "python"
_COMMAND_SECONDS = 600
_TRIES = 4


@dataclass
class RayCluster:
    """A running cluster of two nodes with a CPU each."""

    address: str
    nodes: subprocess.Popen[str]
    environment: dict[str, str]

    def tell(self, word: str) -> None:
        """Kill the second node, or add one: see `ray_nodes`."""
        assert self.nodes.stdin is not None and self.nodes.stdout is not None
        self.nodes.stdin.write(f"{word}\n")
        self.nodes.stdin.flush()
        assert self.nodes.stdout.readline() == "done\n"

    def headrace(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command of Headrace where Ray is installed."""
        return self.python("from headrace.cli.main import main; main()", *words)

    def python(self, program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program where Ray is installed."""
        return subprocess.run(
            [PYTHON, "-P", "-c", program, *map(str, words)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
        )


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Start a cluster; skip where Ray is not installed."""
    if not PYTHON.exists():
        pytest.skip("needs Ray: make test-ray")
    folder = tempfile.mkdtemp(
        prefix="hr-ray-", dir="/tmp"
    )  # short: it has sockets, whose paths may have 107 characters
    environment = {
        **os.environ,
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's own are for a machine that does nothing else.
        "RAY_worker_niceness": "0",  # of 15, so that everything else on the machine comes first
        "RAY_raylet_start_wait_time_s": "600",
        "RAY_agent_register_timeout_ms": "600000",
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_gcs_server_request_timeout_seconds": "600",
        "RAY_health_check_timeout_ms": "60000",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }
    environment.pop("RAY_ADDRESS", None)
    nodes = _start(folder, environment)
    assert nodes.stdin is not None and nodes.stdout is not None
    try:
        yield RayCluster(environment["RAY_ADDRESS"], nodes, environment)
    finally:
        nodes.stdin.close()
        nodes.wait(120)
        nodes.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start the nodes; again, if the first does not start in time."""
    for _ in range(_TRIES):
        with open(f"{folder}/nodes.log", "a") as log:
            nodes = subprocess.Popen(
                [PYTHON, Path(__file__).with_name("ray_nodes.py")],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert nodes.stdin is not None and nodes.stdout is not None
        environment["RAY_ADDRESS"] = nodes.stdout.readline().strip()
        if environment["RAY_ADDRESS"]:
            return nodes
        del environment["RAY_ADDRESS"]
        nodes.stdin.close()
        nodes.stdout.close()
        nodes.wait(120)
    raise AssertionError(Path(folder, "nodes.log").read_text())


def servers(service: str) -> dict[int, int]:
    """The servers of a service by their process ids, and the process id of the replica of each."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and f"--model-name={service}" in command_line(int(name)):
            stat = read_stat(int(name))
            if stat is not None and stat.is_alive and stat.session == stat.pid:
                found[stat.pid] = _parent(stat.pid)
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0
