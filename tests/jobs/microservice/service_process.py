# SPDX-License-Identifier: Apache-2.0
"""A real microservice, asked over HTTP: in a process of its own, or, 20 times quicker to start, in a thread of this one.

with service("--model-path", folder, folder=tmp_path) as running:                  # `headrace microservice`
with service_in_thread("--model-path", folder, folder=tmp_path) as running:        # the same in this process
with local_service(settings_for(folder, tmp_path), clock=clock) as running:        # with a clock or gates of the test's
    running.until("model_loaded")
    answer = running.post("/api/v1/inference", {"prompt": "hello"})
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer

from headrace.cli.microservice import microservice
from headrace.core.clock import SystemClock
from headrace.jobs.microservice.profiles import profile_named
from headrace.jobs.microservice.redaction import RedactingFilter
from headrace.jobs.microservice.service import Microservice
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs import microservice as app
from headrace.programs.microservice import build_site
from support.app_threads import AppThread
from support.programs import Program
from support.serving import Serving, serving
from support.waiting import eventually

COMMAND = (
    sys.executable,
    "-c",
    "import typer; from headrace.cli.microservice import microservice; typer.run(microservice)",
)
LISTENING = re.compile(r"listening on (?:127\.0\.0\.1|0\.0\.0\.0):(\d+)")


@dataclass
class Answer:
    status: int
    fields: dict[str, str]
    body: Any
    text: str


def ask(port: int, method: str, path: str, body: Any = None, fields: dict[str, str] | None = None) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=180)
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, raw, fields or {})
        response = connection.getresponse()
        text = response.read().decode()
        fields = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, fields, json.loads(text) if text else None, text)
    finally:
        connection.close()


class HttpTarget:
    """Something that answers on a port."""

    port = 0

    def get(self, path: str) -> Answer:
        return ask(self.port, "GET", path)

    def raw(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, fields: dict[str, str] | None = None) -> Answer:
        return ask(self.port, "POST", path, body, fields)

    def status(self) -> dict[str, Any]:
        answer = self.get("/api/v1/status")
        assert answer.status == 200
        body: dict[str, Any] = answer.body
        return body

    def until(self, wanted: str | Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Ask until a field is set, or a condition holds; a failure that was not waited for ends it."""
        look = (lambda told: told[wanted]) if isinstance(wanted, str) else wanted

        def reached() -> dict[str, Any] | None:
            status = self.status()
            if look(status):
                return status
            if status["initialization_error"] is not None or status["model_load_error"] is not None:
                raise RuntimeError(status)
            return None

        return dict(eventually(reached, within=240))

    def infer(self, **body: Any) -> dict[str, Any]:
        """The results of an inference request that must succeed."""
        answer = self.post("/api/v1/inference", body)
        assert answer.status == 200, answer.text
        results: dict[str, Any] = answer.body["results"]
        return results

    def refused(self, **body: Any) -> str:
        """Why an inference request is answered 400."""
        answer = self.post("/api/v1/inference", body)
        assert (answer.status, answer.body["status"]) == (400, "error"), answer.text
        return str(answer.body["error"])


class Service(HttpTarget):
    """One that runs; a process, or a thread of this process."""

    def __init__(self, program: Program | AppThread, log: Callable[[], str], port: int) -> None:
        self.program = program
        self._log = log
        self.port = port

    @property
    def log(self) -> str:
        return self._log()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert isinstance(self.program, Program)
        return self.program.process

    @property
    def pid(self) -> int:
        return self.program.pid if isinstance(self.program, Program) else os.getpid()

    def send(self, number: signal.Signals) -> None:
        self.program.send(number)

    def wait(self) -> int:
        return self.program.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.send(number)
        return self.wait()


@contextmanager
def service(*arguments: Any, folder: Path, env: dict[str, str] | None = None, port: int = 0) -> Iterator[Service]:
    """`folder`: for its log, its models and its state file."""
    argv = [*map(str, arguments), "--port", str(port), "--models-dir", str(folder / "service-models")]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(folder / "hf-home")}
    program = Program(
        *argv, command=COMMAND, log=folder / "service.log", env=quiet | (env or {}), cwd=folder, ready=LISTENING
    ).start()
    try:
        yield Service(program, lambda: program.log, int(program.wait_for(LISTENING)[1]))
    finally:
        if program.process.poll() is None:
            program.process.terminate()
        program.wait()


@contextmanager
def service_in_thread(*arguments: Any, folder: Path, env: dict[str, str] | None = None) -> Iterator[Service]:
    """The same in this process."""
    argv = [*map(str, arguments), "--port", "0", "--models-dir", str(folder / "service-models")]
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    logger = logging.getLogger("headrace")
    level = logger.level
    with patch.dict(os.environ, {"HF_HOME": str(folder / "hf-home"), **(env or {})}), chdir(folder):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        settings = settings_of_command(*argv)
        handler.addFilter(RedactingFilter(settings.secrets))
        program = AppThread(lambda: app._run(settings))
        created = partial(Microservice, stop=program.send)  # a process sends itself the signal
        try:
            with patch.object(app, "Microservice", created):
                program.start()
            assert program.is_alive, logged.getvalue()
            best = LISTENING.search(logged.getvalue())
            assert best is not None, logged.getvalue()
            yield Service(program, logged.getvalue, int(best[1]))
        finally:
            if program.is_alive:
                program.send(signal.SIGTERM)
                program.wait()
            logger.removeHandler(handler)
            logger.setLevel(level)


_ONE_AT_A_TIME = threading.Lock()
"""To read a command line changes what all threads of this process see."""


def settings_of_command(*words: str) -> MicroserviceSettings:
    """What `headrace microservice WORDS` would run with. It puts variables into the environment, as the command does."""
    seen: list[MicroserviceSettings] = []
    command = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    command.command()(microservice)
    with (
        _ONE_AT_A_TIME,
        patch("headrace.core.telemetry.logs.configure_logging"),
        patch("headrace.programs.microservice.run_microservice", lambda settings: seen.append(settings) or 0),
        patch("headrace.programs.microservice.end_process"),
    ):
        typer.main.get_command(command).main(args=list(words), standalone_mode=False)
    return seen[0]


class LocalService(HttpTarget):
    """A service in this process, on a loop and a port of its own."""

    def __init__(self, made: Microservice, server: Serving) -> None:
        self.made = made
        self.server = server
        self.port = server.port


@contextmanager
def local_service(settings: MicroserviceSettings, **more: Any) -> Iterator[LocalService]:
    """For flows that need no process: quicker, since what is imported stays. `more` is for `Microservice`."""
    created: list[Microservice] = []

    def build() -> Site:
        created.append(Microservice(settings, **{"clock": SystemClock(), **more}))
        created[0].start()
        return build_site(created[0])

    with serving(build) as server:
        try:
            yield LocalService(created[0], server)
        finally:
            server.call(created[0].close, 5.0)


def settings_for(model: Path, folder: Path, arch: str = "", **more: Any) -> MicroserviceSettings:
    fields = {"folder": folder / "service-models", "network_arch": arch, "profile": profile_named(arch), **more}
    return MicroserviceSettings("job", str(model), Address("127.0.0.1"), **fields)
