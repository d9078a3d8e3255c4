# SPDX-License-Identifier: Apache-2.0
"""A real gateway in a process of its own, and its commands.

with gateway(tmp_path) as running:
    key = running.command("users", "add", "alice", "--org", "acme").strip()
    token = running.login(key, "acme")
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer
from support.ports import free_port, service_ports
from typer.testing import CliRunner

from headrace.cli.jobs import jobs
from headrace.cli.users import users

PROGRAM = """
import typer
from headrace.cli.gateway import gateway
from headrace.jobs import service
# Its services have ports that nobody gives away who tests beside us.
Driver = service.ProcessDriver
service.ProcessDriver = lambda root, **more: Driver(root, **(more | {"ports": PORTS}))
typer.run(gateway)
"""
READY = re.compile(r"gateway: (https?)://([^/]+):(\d+)/api/v1")


@dataclass
class Got:
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Gateway:
    """A data directory and, while one runs, its gateway."""

    new_database: ClassVar[Callable[[], str]] = staticmethod(lambda: "")
    """Of each gateway; "" is SQLite in the data directory. `conftest` sets it."""

    def __init__(self, folder: Path) -> None:
        self.database_url = Gateway.new_database()
        self.folder = folder
        self.data_dir = folder / "data"
        self.log_file = folder / "gateway.log"
        self.process: subprocess.Popen[bytes] | None = None
        # Not one that the kernel chooses: a gateway that is started again must find it free.
        self.port = free_port()

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def start(self, *more: str, wait: bool = True) -> None:
        words = [
            sys.executable,
            "-c",
            PROGRAM.replace("PORTS", repr(service_ports())),
            "--data-dir",
            str(self.data_dir),
        ]
        words += [*(() if "--port" in more else ("--port", str(self.port))), *more]
        begun = len(self.log) if self.log_file.exists() else 0
        more_variables = {"OMP_NUM_THREADS": "1", "HEADRACE_DATABASE_URL": self.database_url}
        with self.log_file.open("ab") as output:
            self.process = subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, env=os.environ | more_variables
            )
        while wait and (found := READY.search(self.log, begun)) is None:
            assert self.process.poll() is None, self.log
            time.sleep(0.02)  # the test's own time-out is the limit
        if wait and found is not None:
            self.port = int(found[3])

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(180)

    def command(self, *words: str, code: int = 0) -> str:
        """What a command prints. In this process: to start one for each would take most of the test's time."""
        app = typer.Typer(pretty_exceptions_enable=False)
        app.add_typer(jobs)
        app.add_typer(users)
        where = ["--data-dir", str(self.data_dir)]
        if self.database_url:
            where += ["--database-url", self.database_url]
        run = CliRunner().invoke(app, [*words, *where], catch_exceptions=False)
        assert run.exit_code == code, run.output
        return run.stdout if code == 0 else run.stderr

    def ask(self, method: str, path: str, body: Any = None, token: str = "") -> Got:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, raw, {"Authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            return Got(answer.status, answer.read())
        finally:
            connection.close()

    def login(self, key: str, org: str) -> str:
        got = self.ask("POST", "/api/v1/login", {"ngc_key": key, "ngc_org_name": org})
        assert got.status == 200, got.body
        return str(got.json["token"])

    def until_loaded(self, path: str, token: str) -> dict[str, Any]:
        """Poll a service's status; the test's own time-out is the limit."""
        while True:
            got = self.ask("GET", path, token=token)
            assert got.status == 200, got.body
            told: dict[str, Any] = got.json
            assert told["initialization_error"] is None, told
            assert told["model_load_error"] is None, told
            if told["model_loaded"]:
                return told
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """Services of this data directory that run; one whose words the kernel is about to give it by where it began."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes()
                    place = b"" if words else os.fsencode((entry / "cwd").readlink())
                except OSError:
                    continue
                is_child = b"headrace.launch.child" in words or not words
                if is_child and str(self.data_dir).encode() in (words or place):
                    found.append(int(entry.name))
        return found


@contextmanager
def gateway(folder: Path, *more: str) -> Iterator[Gateway]:
    """Nothing of it is left at the end."""
    made = Gateway(folder)
    made.start(*more)
    try:
        yield made
    finally:
        if made.process is not None and made.process.poll() is None:
            made.process.kill()
            made.process.wait(180)
        for pid in made.processes():
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
