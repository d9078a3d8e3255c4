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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.testing import CliRunner

from headrace.cli.jobs import jobs
from headrace.cli.users import users
from support.ports import free_port, service_ports
from support.programs import Program
from support.waiting import eventually

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
class GatewayAnswer:
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
        self.program: Program | None = None
        # Not one that the kernel chooses: a gateway that is started again must find it free.
        self.port = free_port()

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def start(self, *more: str, wait: bool = True) -> None:
        """Start a process; not to `wait` is for those that refuse to start."""
        program = PROGRAM.replace("PORTS", repr(service_ports()))
        port = () if "--port" in more else ("--port", str(self.port))
        self.program = Program(
            "--data-dir",
            self.data_dir,
            *port,
            *more,
            command=(sys.executable, "-c", program),
            log=self.log_file,
            env={"HEADRACE_DATABASE_URL": self.database_url},
        ).start()
        if wait:
            self.port = int(self.program.wait_for(READY)[3])

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        return self.program.process if self.program is not None else None

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.program is not None
        self.program.send(signal.Signals(number))
        return self.program.wait()

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

    def ask(self, method: str, path: str, body: Any = None, token: str = "") -> GatewayAnswer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, raw, {"Authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            return GatewayAnswer(answer.status, answer.read())
        finally:
            connection.close()

    def login(self, key: str, org: str) -> str:
        got = self.ask("POST", "/api/v1/login", {"ngc_key": key, "ngc_org_name": org})
        assert got.status == 200, got.body
        return str(got.json["token"])

    def until_loaded(self, path: str, token: str) -> dict[str, Any]:
        """Ask for a service's status until its model is loaded, and return it."""

        def loaded() -> dict[str, Any] | None:
            got = self.ask("GET", path, token=token)
            reported: dict[str, Any] = got.json
            if (
                got.status != 200
                or reported["initialization_error"] is not None
                or reported["model_load_error"] is not None
            ):
                raise RuntimeError(got.body)
            return reported if reported["model_loaded"] else None

        return dict(eventually(loaded))

    def slow_to_load(self) -> AbstractContextManager[None]:
        """While it lasts, no service comes to load its model. A process is slow enough by itself."""
        return nullcontext()

    def processes(self) -> list[int]:
        """Services of this data directory that run; one whose words the kernel is about to give it by where it began."""
        results = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    arguments = (entry / "cmdline").read_bytes()
                    place = b"" if arguments else os.fsencode((entry / "cwd").readlink())
                except OSError:
                    continue
                is_child = b"headrace.platforms.process_stubs" in arguments or not arguments
                if is_child and str(self.data_dir).encode() in (arguments or place):
                    results.append(int(entry.name))
        return results


@contextmanager
def gateway(folder: Path, *more: str) -> Iterator[Gateway]:
    """Nothing of it is left at the end."""
    gateway = Gateway(folder)
    gateway.start(*more)
    try:
        yield gateway
    finally:
        if gateway.program is not None:
            gateway.program.kill()
        for pid in gateway.processes():
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
