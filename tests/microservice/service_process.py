# SPDX-License-Identifier: Apache-2.0
"""A real microservice in a process of its own, asked over HTTP.

with service("--model-path", folder, folder=tmp_path) as running:
    running.until("model_loaded")
    answer = running.post("/api/v1/inference", {"prompt": "hello"})
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
from typing import Any

from support.serving import Serving, serving

from headrace.core.clock import SystemClock
from headrace.microservice.app import build_site
from headrace.microservice.profiles import profile_named
from headrace.microservice.service import Microservice
from headrace.microservice.settings import MicroserviceSettings
from headrace.wire.site import Site
from headrace.wire.sockets import Address

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


class Asked:
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
        found: dict[str, Any] = answer.body
        return found

    def until(self, wanted: str | Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Poll until a field is set, or a condition holds; a failure that was not waited for ends it."""
        look = (lambda told: told[wanted]) if isinstance(wanted, str) else wanted
        while True:  # the test's own time-out is the limit
            told = self.status()
            if look(told):
                return told
            assert told["initialization_error"] is None, told["initialization_error"]
            assert told["model_load_error"] is None, told["model_load_error"]
            time.sleep(0.02)

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


class Service(Asked):
    """A running process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(180)


@contextmanager
def service(*arguments: Any, folder: Path, env: dict[str, str] | None = None, port: int = 0) -> Iterator[Service]:
    """`folder`: for its log, its models and its state file."""
    log = folder / "service.log"
    words = [*COMMAND, *map(str, arguments), "--port", str(port), "--models-dir", str(folder / "service-models")]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(folder / "hf-home")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=os.environ | quiet | (env or {}), cwd=folder
        )
    running = Service(process, log)
    try:
        ended = False
        while (found := LISTENING.search(running.log)) is None:
            assert not ended, running.log
            ended = process.poll() is not None  # then its log is read once more: it may have come and gone meanwhile
            time.sleep(0.02)
        running.port = int(found[1])
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


class LocalService(Asked):
    """A service in this process, on a loop and a port of its own."""

    def __init__(self, made: Microservice, server: Serving) -> None:
        self.made = made
        self.server = server
        self.port = server.port


@contextmanager
def local_service(settings: MicroserviceSettings, **more: Any) -> Iterator[LocalService]:
    """For flows that need no process: quicker, since what is imported stays. `more` is for `Microservice`."""
    made: list[Microservice] = []

    def build() -> Site:
        made.append(Microservice(settings, **{"clock": SystemClock(), **more}))
        made[0].start()
        return build_site(made[0])

    with serving(build) as server:
        try:
            yield LocalService(made[0], server)
        finally:
            server.call(made[0].close, 5.0)


def settings_for(model: Path, folder: Path, arch: str = "", **more: Any) -> MicroserviceSettings:
    fields = {"folder": folder / "service-models", "network_arch": arch, "profile": profile_named(arch), **more}
    return MicroserviceSettings("job", str(model), Address("127.0.0.1"), **fields)
