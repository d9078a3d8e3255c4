# SPDX-License-Identifier: Apache-2.0
"""Load for slow models, where one request more or less changes the rate by some per cent.

wrk stops at the end of its time and forgets the requests in flight. Here each connection ends with an answer, and its rate
is answers by the time they took. A connection is a thread of bench itself, on the cores of the load generator: it
sleeps while the server computes. The framework's own call (peers/own-call) is asked to call itself for as long.
"""

import json
import os
import socket
import threading
import time
import urllib.request
from dataclasses import dataclass, field

import numpy as np

from bench.dialects import OWN_CALL, Request
from bench.errors import BenchError
from bench.load import GRACE_SECONDS, LATENCY_PERCENTILES, LoadFigures
from bench.verify import check_numbers
from bench.workloads import Workload

RECEIVE_BYTES = 1 << 20
HEAD_END = b"\r\n\r\n"


def put_steady_load(
    workload: Workload, request: Request, port: int, seconds: int, cores: set[int] | None, dialect: str
) -> LoadFigures:
    """As load.put_load, for workloads that count whole requests."""
    if dialect == OWN_CALL:
        return _own_calls(workload, request, port, seconds)
    connections = [_Connection(request, port, cores) for _ in range(workload.connections)]
    end = time.perf_counter() + seconds
    threads = [threading.Thread(target=connection.ask_until, args=(end,)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for connection in connections:
        if connection.failure is not None:
            raise BenchError(f"a connection failed under load: {connection.failure!r}") from connection.failure
    took = [seconds for connection in connections for seconds in connection.took]
    return _figures(
        took,
        rate=sum(len(connection.took) / sum(connection.took) for connection in connections),
        errors=sum(connection.errors for connection in connections),
        size=sum(connection.received for connection in connections) / len(took),
        cpu=sum(connection.cpu_seconds for connection in connections),
    )


def told(port: int, path: str, body: bytes, seconds: float, workload: Workload) -> list[float]:
    """Have peers/own-call do something repeatedly; how long each took. The last answer's numbers must be right."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            document = json.load(reply)
    except (OSError, ValueError) as error:
        raise BenchError(f"no answer to {path}: {error}") from error
    check_numbers(workload, np.array(document["answer"], dtype=np.float32))
    return [float(seconds) for seconds in document["took"]]


def _own_calls(workload: Workload, request: Request, port: int, seconds: int) -> LoadFigures:
    took = told(port, f"/calls/{seconds}", request.body, seconds + GRACE_SECONDS, workload)
    return _figures(took, rate=len(took) / sum(took), errors=0, size=workload.expected().size * 4, cpu=0.0)


def _figures(took: list[float], rate: float, errors: int, size: float, cpu: float) -> LoadFigures:
    ordered = sorted(took)
    p50_ms, p99_ms = (ordered[int(len(ordered) * share)] * 1e3 for share in LATENCY_PERCENTILES)
    return LoadFigures(
        requests=len(took),
        requests_per_second=rate,
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        errors=errors,
        bytes_per_response=size,
        client_cpu_seconds=cpu,
    )


@dataclass
class _Connection:
    """HTTP/1.1 as far as needed: every answer has a Content-Length."""

    request: Request
    port: int
    cores: set[int] | None
    took: list[float] = field(default_factory=list)
    errors: int = 0
    received: int = 0
    cpu_seconds: float = 0.0
    failure: Exception | None = None

    def ask_until(self, end: float) -> None:
        try:
            if self.cores is not None:
                # Of this thread alone.
                os.sched_setaffinity(0, self.cores)
            with socket.create_connection(("127.0.0.1", self.port), timeout=GRACE_SECONDS) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ask(connection, end)
        except (OSError, ValueError, LookupError) as error:
            self.failure = error
        self.cpu_seconds = time.thread_time()

    def _ask(self, connection: socket.socket, end: float) -> None:
        lines = [f"POST {self.request.path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}"]
        lines += [f"{name}: {value}" for name, value in self.request.headers.items()]
        lines += [f"Content-Length: {len(self.request.body)}", "", ""]
        message = "\r\n".join(lines).encode() + self.request.body
        now = time.perf_counter()
        # One at least, however slow.
        while not self.took or now < end:
            before = now
            connection.sendall(message)
            status, size = _answer(connection)
            now = time.perf_counter()
            self.took.append(now - before)
            self.received += size
            self.errors += status != 200


def _answer(connection: socket.socket) -> tuple[int, int]:
    """Read one answer; its status, and the size of its body."""
    data = b""
    while HEAD_END not in data:
        data += _received(connection)
    head, _, body = data.partition(HEAD_END)
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(":") for line in lines)}
    size = int(headers["content-length"])
    left = size - len(body)
    while left > 0:
        left -= len(_received(connection))
    return int(status_line.split()[1]), size


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(RECEIVE_BYTES)
    if not data:
        raise ConnectionError("the server closed the connection")
    return data
