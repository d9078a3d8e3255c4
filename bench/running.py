# SPDX-License-Identifier: Apache-2.0
"""Start a server in a session of its own, wait until it is ready, and stop it with all its processes."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import psutil

from bench.cpu import server_processes
from bench.errors import BenchError
from bench.pinning import pinned, refuse_unless_pinned, server_core
from bench.server import Launch, Ports, Server
from bench.servers import SERVERS

READY_SECONDS = 90
STOP_SECONDS = 15
POLL_SECONDS = 0.1
# Servers finish warming up (workers, thread pools) shortly after they call themselves ready.
SETTLE_SECONDS = 1.0
READY_CALL = "/inference.GRPCInferenceService/ServerReady"


@dataclass(frozen=True)
class Started:
    """A server whose process runs; whether it answers yet is not known."""

    ports: Ports
    process: subprocess.Popen[bytes]
    log: Path
    # By time.monotonic(), right before the process was made.
    at: float


@dataclass(frozen=True)
class RunningServer:
    """A server that answers."""

    server: Server
    ports: Ports
    pid: int
    seconds_to_ready: float
    # The process behind it, where it passes requests on; its CPU is not the server's.
    behind_pid: int | None = None


@contextmanager
def started(server: Server, backend: int = 0) -> Iterator[Started]:
    """Start the server (in front of the one on this port, where it is a proxy); stop all its processes on the way out."""
    ports = replace(_free_ports(), backend=backend)
    launch = server.launch(ports)
    command = pinned(launch.command, {server_core()}) if server.one_core else launch.command
    with tempfile.TemporaryDirectory(prefix=f"headrace-bench-{server.name}-", ignore_cleanup_errors=True) as folder:
        log = Path(folder, "log")
        at = time.monotonic()
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    cwd=folder, env=_environment(launch, folder), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise BenchError(f"{command[0]} cannot be started: {error}") from error
        try:
            yield Started(ports, process, log, at)
        finally:
            _stop(process)


@contextmanager
def running(server: Server) -> Iterator[RunningServer]:
    """Start the server and what it stands in front of, and hand it over once it is ready."""
    with ExitStack() as stack:
        behind = None if server.behind is None else stack.enter_context(running(SERVERS[server.behind]))
        process = stack.enter_context(started(server, behind.ports.http if behind else 0))
        pid = process.process.pid
        _wait_until_ready(server, process)
        took = time.monotonic() - process.at
        time.sleep(SETTLE_SECONDS)
        _refuse_if_exposed(server, pid)
        if server.one_core:
            refuse_unless_pinned(pid)
        yield RunningServer(server, process.ports, pid, took, behind.pid if behind else None)


def refuse_if_ended(target: Started) -> None:
    """A server that gives up at its start has said why."""
    if target.process.poll() is not None:
        raise BenchError(f"it ended with status {target.process.returncode} at start:\n{tail(target.log)}")


def tail(log: Path) -> str:
    """The last lines that a server has written."""
    return log.read_text(errors="replace")[-1500:]


def self_description(target: RunningServer) -> dict[str, str]:
    """Name and version from the v2 server metadata; empty for a server that has none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{target.ports.http}/v2", timeout=5) as answer:
            document = json.load(answer)
    except (OSError, ValueError):
        return {}
    return {key: str(document[key]) for key in ("name", "version") if key in document}


def _environment(launch: Launch, folder: str) -> dict[str, str]:
    # The caller's virtual environment must not leak into a peer's interpreter.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    # Sockets and shared files that a killed server leaves behind go away with the folder.
    return environment | {"TMPDIR": folder} | launch.environment


def _free_ports() -> Ports:
    # All three are held open together so that they differ.
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return Ports(*(sock.getsockname()[1] for sock in sockets))


def _wait_until_ready(server: Server, target: Started) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        refuse_if_ended(target)
        if _is_ready(server, target.ports):
            return
        time.sleep(POLL_SECONDS)
    raise BenchError(f"{server.name} was not ready after {READY_SECONDS} seconds:\n{tail(target.log)}")


def _is_ready(server: Server, ports: Ports) -> bool:
    if server.ready_path is None:
        with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            try:
                # ServerReadyResponse{ready: true} is field 1 with the value 1.
                return bool(channel.unary_unary(READY_CALL)(b"", timeout=1) == b"\x08\x01")
            except grpc.RpcError:
                return False
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{ports.http}{server.ready_path}", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _refuse_if_exposed(server: Server, pid: int) -> None:
    for member in server_processes(pid):
        try:
            connections = psutil.Process(member).net_connections(kind="inet")
        except psutil.Error:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN and not _is_loopback(connection.laddr.ip):
                raise BenchError(f"{server.name} listens on {connection.laddr.ip}, not on 127.0.0.1 only")


def _is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def _stop(process: subprocess.Popen[bytes]) -> None:
    members = []
    for pid in server_processes(process.pid):
        try:
            members.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _signal_group(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    # Whoever is left, in the group or escaped from it, has had its time.
    _signal_group(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([member for member in members if member.pid != process.pid], timeout=1)
    for member in alive:
        member.kill()
    process.wait()
    psutil.wait_procs(alive, timeout=STOP_SECONDS)


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
