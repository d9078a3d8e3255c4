# SPDX-License-Identifier: Apache-2.0
"""Measure the gateway: a proxied inference, a long list of jobs, many idle services.

    .venv/bin/python bench/scenarios/gateway.py                    # all three
    .venv/bin/python bench/scenarios/gateway.py proxy --requests 4000 --rounds 7
    .venv/bin/python bench/scenarios/gateway.py list --jobs 10000
    .venv/bin/python bench/scenarios/gateway.py idle --services 200 --seconds 60

- `proxy`: a real gateway with a real service (a small ONNX model). The same requests go to the service itself and through
  the gateway, in turns; what is compared is CPU time of the two processes, so a busy machine disturbs little.
- `list`: time until the answer to GET .../jobs is read, the first of a fresh gateway and later ones.
- `idle`: services that are processes of the driver and sleep, taken up by a real gateway: its CPU time while nobody asks.
  The services' own is told beside it. One real service is started too, and what it takes when idle is told.

Ends with 1 if a number is over what is wanted: 80 us of CPU at 8 connections or more, 50 ms, 2 % of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ORG = "measured"
MOST_PROXY_US, MOST_LIST_MS, MOST_IDLE_PERCENT = 80.0, 50.0, 2.0
_READY = re.compile(rb"gateway: http://([^/]+):(\d+)/api/v1")
_PROGRAM = "import typer; from headrace.cli.gateway import gateway; typer.run(gateway)"


def main() -> int:
    """Measure what is named, or all."""
    parser = argparse.ArgumentParser(description="What the gateway costs.")
    parser.add_argument("what", nargs="*", default=["proxy", "list", "idle"], help="of proxy, list, idle")
    parser.add_argument("--requests", type=int, default=3000, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, nargs="*", default=[16, 8, 1])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--services", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0, help="of idleness")
    parser.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fill is not None:
        asyncio.run(_start_sleepers(options.fill, options.services))
        return 0
    works = {"proxy": _proxy, "list": _list, "idle": _idle}
    good = [works[name](options) for name in options.what]
    return 0 if all(good) else 1


# What is measured


def _proxy(options: argparse.Namespace) -> bool:
    good = True
    with _folder() as folder, Gateway(folder) as gateway:
        gateway.prepare(folder)
        job, port, pid = gateway.start_service()
        direct = _request("127.0.0.1", port, "/api/v1/inference", "")
        path = f"{gateway.base}/jobs/{job}/inference_microservice/inference"
        proxied = _request("127.0.0.1", gateway.port, path, gateway.token)
        for connections in options.connections:
            plain = partial(_load, "127.0.0.1", port, direct, connections)
            through = partial(_load, "127.0.0.1", gateway.port, proxied, connections)
            through(500)
            plain(500)
            more: list[float] = []
            own: list[float] = []
            for _ in range(options.rounds):
                _, alone = _cost((pid,), options.requests, partial(plain, options.requests))
                each, both = _cost((gateway.pid, pid), options.requests, partial(through, options.requests))
                own.append(each[0])
                more.append(both - alone)
            added = statistics.median(more)
            print(
                f"proxied inference, {connections} connections: {added:.1f} us of CPU more than the service itself "
                f"({' '.join(f'{x:.0f}' for x in more)}); the gateway's own {statistics.median(own):.1f} us"
            )
            good = good and (connections == 1 or added <= MOST_PROXY_US)
    return good


def _list(options: argparse.Namespace) -> bool:
    with _folder() as folder:
        gateway = Gateway(folder)
        with gateway:
            gateway.prepare(folder)
            asyncio.run(_insert_jobs(gateway.data_dir, gateway.experiment, gateway.parent, options.jobs))
        with gateway:
            gateway.login()
            wall, cpu = [], []
            for _ in range(6):
                began, used = time.perf_counter(), _cpu_seconds(gateway.pid)
                text = gateway.text("GET", f"{gateway.base}/jobs")
                wall.append(1e3 * (time.perf_counter() - began))
                cpu.append(1e3 * (_cpu_seconds(gateway.pid) - used))
                if text.count(b'"num_gpu"') < options.jobs:
                    sys.exit("not all jobs are listed")
    print(
        f"a list of {options.jobs} jobs: first {wall[0]:.1f} ms, then {' '.join(f'{x:.1f}' for x in wall[1:])} ms; "
        f"CPU of the gateway {' '.join(f'{x:.1f}' for x in cpu)} ms"
    )
    return wall[0] < MOST_LIST_MS


def _idle(options: argparse.Namespace) -> bool:
    with _folder() as folder:
        gateway = Gateway(folder)
        with gateway:
            gateway.prepare(folder)
            _, _, pid = gateway.start_service()
            time.sleep(5)
            (real,), _ = _cost((pid,), 1, lambda: time.sleep(options.seconds))
        environ = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent)}
        arguments = [sys.executable, __file__, "--fill", str(gateway.data_dir), "--services", str(options.services)]
        subprocess.run(arguments, check=True, env=environ)
        with gateway:
            gateway.login()
            pids = _sleepers(gateway.data_dir)
            if len(pids) < options.services:
                sys.exit(f"only {len(pids)} services run")
            time.sleep(15)  # they are taken up
            (each, *others), _ = _cost((gateway.pid, *pids), 1, lambda: time.sleep(options.seconds))
    percent = each / options.seconds / 1e4
    theirs, real = sum(others) / options.seconds / 1e4, real / options.seconds / 1e4
    print(
        f"{options.services} idle services: the gateway takes {percent:.2f} % of a core, they themselves {theirs:.2f} %; "
        f"one real service of a small model that nobody asks takes {real:.3f} %"
    )
    together = percent + real * options.services
    print(f"the gateway with {options.services} such services would take {together:.2f} % of a core")
    return bool(together < MOST_IDLE_PERCENT)


# A gateway


class Gateway:
    """A data directory; while it is entered, a gateway runs on it."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder / "data"
        self._log = folder / "gateway.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.key = self.token = self.experiment = self.parent = ""

    def __enter__(self) -> Gateway:
        arguments = [sys.executable, "-c", _PROGRAM, "--data-dir", str(self.data_dir), "--port", "0"]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(arguments, stdout=output, stderr=output)
        while (match := _READY.search(self._log.read_bytes())) is None:
            if self._process.poll() is not None:
                sys.exit(self._log.read_text())
            time.sleep(0.05)
        self.port = int(match[2])
        return self

    def __exit__(self, *_ended: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)

    @property
    def pid(self) -> int:
        """Of the gateway that runs."""
        return self._process.pid if self._process is not None else 0

    @property
    def base(self) -> str:
        """Path of the experiment."""
        return f"/api/v1/orgs/{ORG}/experiments/{self.experiment}"

    def prepare(self, folder: Path) -> None:
        """A user, a model, and a token."""
        _write_model(folder / "model.onnx")
        self.key = self._command("users", "add", "someone", "--org", ORG).strip()
        arguments = ("jobs", "register", str(folder / "model.onnx"), "--org", ORG, "--arch", "tensors", "--json")
        registered = json.loads(self._command(*arguments))
        self.experiment, self.parent = registered["experiment_id"], registered["job_id"]
        self.login()

    def login(self) -> None:
        """Have a token."""
        reply = self.ask("POST", "/api/v1/login", {"ngc_key": self.key, "ngc_org_name": ORG})
        self.token = reply["token"]

    def start_service(self) -> tuple[str, int, int]:
        """Its job, its port and its process."""
        reply = self.ask("POST", f"{self.base}/inference_microservice/start", {"parent_id": self.parent})
        job = str(reply["job_id"])
        while True:
            status = self.ask("GET", f"{self.base}/jobs/{job}/inference_microservice/status")
            if status["model_load_error"] or status["initialization_error"]:
                sys.exit(f"the service has failed: {status}")
            if status["model_loaded"]:
                break
            time.sleep(0.2)
        meta = json.loads((self.data_dir / "launch" / "jobs" / job / "launch.json").read_text())
        return job, int(meta["port"]), int(meta["pid"])

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer."""
        return json.loads(self.text(method, path, body))

    def text(self, method: str, path: str, body: Any = None) -> bytes:
        """An answer as it comes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Authorization": f"Bearer {self.token}"}
            )
            answer = connection.getresponse()
            text = answer.read()
            if answer.status >= 300:
                sys.exit(f"{method} {path}: {answer.status} {text!r}")
            return text
        finally:
            connection.close()

    def _command(self, *arguments: str) -> str:
        program = "from headrace.cli.main import main; main()"
        command = [sys.executable, "-c", program, *arguments, "--data-dir", str(self.data_dir)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder whose services are ended with it."""
    with tempfile.TemporaryDirectory(prefix="headrace-measure-") as text:
        folder = Path(text)
        try:
            yield folder
        finally:
            for pid in _sleepers(folder / "data"):
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.5)


def _sleepers(data_dir: Path) -> list[int]:
    """Services of a data directory that run."""
    processes = []
    for file in (data_dir / "launch" / "jobs").glob("*/launch.json"):
        pid = int(json.loads(file.read_text())["pid"])
        if Path(f"/proc/{pid}").exists():
            processes.append(pid)
    return processes


def _write_model(path: Path) -> None:
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Relu", ["X"], ["Y"])],
        "small",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["batch", 4])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


async def _insert_jobs(data_dir: Path, experiment: str, parent: str, count: int) -> None:
    from sqlalchemy import insert

    from headrace.jobs.service import JobService
    from headrace.jobs.settings import JobSettings
    from headrace.jobs.store.database import jobs

    service = await JobService.open(JobSettings(data_dir))
    try:
        job = await service.get_job(ORG, parent, experiment)
        names = [column.name for column in jobs.columns]
        rows = [
            dict(zip(names, job._replace(id=str(uuid.uuid4()), created_on=float(n)), strict=True)) for n in range(count)
        ]
        await service.store.database.write(lambda connection: connection.execute(insert(jobs), rows).rowcount)
    finally:
        await service.close()


async def _start_sleepers(data_dir: Path, count: int) -> None:
    """Be a gateway that starts services and is gone."""
    from headrace.jobs.service import JobService
    from headrace.jobs.settings import JobSettings

    settings = JobSettings(data_dir, service_target="measure_gateway:sleep", service_args=())
    service = await JobService.open(settings)
    try:
        parent = next(job for job in (await service.list_jobs(ORG)).jobs if job.action == "train")
        for _ in range(count):
            await service.start(ORG, "someone", parent.experiment_id, parent.id, {})
    finally:
        await service.close()


def sleep() -> None:
    """Be a service that does nothing."""
    while True:
        signal.pause()


# Load and CPU time


def _request(host: str, port: int, path: str, token: str) -> bytes:
    body = json.dumps({"inputs": {"X": [[1.0, -2.0, 3.0, -4.0]]}}).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}:{port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def _load(host: str, port: int, request: bytes, connections: int, count: int) -> None:
    """So many requests, one at a time on each connection. Every answer must be 200."""
    left = count
    with selectors.DefaultSelector() as selector:
        for _ in range(connections):
            sock = socket.create_connection((host, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(sock, selectors.EVENT_READ)
            sock.sendall(request)
        under_way = connections
        left -= connections
        while under_way:
            for key, _ in selector.select():
                sock = key.fileobj  # type: ignore[assignment]
                answer = sock.recv(65536)
                if not answer.startswith(b"HTTP/1.1 200"):
                    sys.exit(f"an answer is {answer[:300]!r}")
                head, _, body = answer.partition(b"\r\n\r\n")
                length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
                while len(body) < length:
                    body += sock.recv(65536)
                if left > 0:
                    left -= 1
                    sock.sendall(request)
                else:
                    under_way -= 1
                    selector.unregister(sock)
                    sock.close()


def _cost(pids: tuple[int, ...], count: int, work: Any) -> tuple[list[float], float]:
    """Microseconds of CPU of each process and of all, for each of so many."""
    before = [_cpu_seconds(pid) for pid in pids]
    work()
    used = [1e6 * (_cpu_seconds(pid) - then) / count for pid, then in zip(pids, before, strict=True)]
    return used, sum(used)


def _cpu_seconds(pid: int) -> float:
    """Of all threads, to the nanosecond where the kernel tells."""
    try:
        clock = time.clock_gettime_ns(~pid << 3 | 2)  # CPUCLOCK_SCHED of the whole process
        return clock / 1e9
    except OSError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
