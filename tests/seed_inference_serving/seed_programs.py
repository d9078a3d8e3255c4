# SPDX-License-Identifier: Apache-2.0
"""`headrace` for the seed's examples: commands and servers inside this process, or (`serve_process`) as a process."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support import programs
from support.programs import Program
from support.servers import ThreadServer, serve_in_thread
from support.waiting import eventually

ROW = [1.0, 2.0, 3.0, 4.0]


def run(*arguments: str | Path, folder: Path | None = None, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command to its end: its status, and all that it wrote."""
    done = programs.run(*arguments, cwd=folder, env={"COLUMNS": "200", **(env or {})}, merged=True)
    return done.returncode, done.stdout


class Answer:
    """What a server said to a request."""

    def __init__(self, status: int, headers: Mapping[str, str], content: bytes, seconds: float) -> None:
        self.status = status
        self.headers = headers
        self.content = content
        self.seconds = seconds

    @property
    def document(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> str:
        return str(self.document["error"])


class Client:
    """A connection that is kept, from an address of its own if need be."""

    def __init__(self, port: int, source: str = "127.0.0.1") -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=120, source_address=(source, 0))

    def ask(self, path: str = "/predict", body: Any = None, **headers: str) -> Answer:
        """POST a document, or bytes as they are; GET without a body."""
        began = time.monotonic()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request("GET" if body is None else "POST", path, data, fields)
        answer = self._connection.getresponse()
        content = answer.read()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, named, content, time.monotonic() - began)

    def close(self) -> None:
        self._connection.close()


class HttpClientMixin:
    """Requests to a server that has a port."""

    ports: list[int]

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def grpc_port(self) -> int:
        return self.ports[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def client(self, source: str = "127.0.0.1") -> Iterator[Client]:
        client = Client(self.port, source)
        try:
            yield client
        finally:
            client.close()

    def ask(self, path: str = "/predict", body: Any = None, *, source: str = "127.0.0.1", **headers: str) -> Answer:
        with self.client(source) as client:
            return client.ask(path, body, **headers)

    def counted(self, model: str) -> dict[str, Any]:
        """The engine's statistics of all versions of a model, added up."""
        versions = self.ask(f"/v2/models/{model}/stats").document["model_stats"]
        sizes = [size for version in versions for size in version["batch_stats"]]
        return {
            "rows": sum(version["inference_count"] for version in versions),
            "batches": sum(version["execution_count"] for version in versions),
            "largest": max((size["batch_size"] for size in sizes), default=0),
        }

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels."""
        total = 0.0
        for line in self.ask("/metrics").content.decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(f'{key}="{text}"' in series for key, text in labels.items()):
                total += float(value)
        return total


class Server(HttpClientMixin):
    """A `headrace serve` in a thread of this process."""

    def __init__(self, running: ThreadServer, log: _Log) -> None:
        self.ports = running.ports
        self._log = log

    @property
    def log(self) -> str:
        return "\n".join(self._log.lines)

    def wait_for(self, text: str) -> None:
        """Return when the log has a text."""
        eventually(lambda: text in self.log, message=f"{text!r} in the log")


class ServerProcess(HttpClientMixin, Program):
    """A `headrace serve` as a process."""

    @property
    def ports(self) -> list[int]:  # type: ignore[override]
        """See `Program.ports`; those for other machines too."""
        return [int(port) for port in re.findall(r"listening on [\d.]+:(\d+)", self.log)]


class _Log(logging.Handler):
    """Keeps all that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def serve(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start a server on free ports in a thread of this process, with its models loaded. Paths have to be absolute."""
    log, logger = _Log(), logging.getLogger("headrace")
    logger.addHandler(log)
    try:
        with ExitStack() as stack:
            with _environment(env):
                running = stack.enter_context(serve_in_thread(*arguments))
            yield Server(running, log)
    finally:
        logger.removeHandler(log)


@contextmanager
def _environment(env: Mapping[str, str] | None) -> Iterator[None]:
    """While a server starts: these variables, and no other `INFERENCE_*`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFERENCE_")}
    with patch.dict(os.environ, kept | dict(env or {}), clear=True):
        yield


@contextmanager
def serve_process(
    log: Path,
    *arguments: str | Path,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    ready: str = "ready: ",
) -> Iterator[ServerProcess]:
    """Start a server process on free ports, wait for a line of its log, and end it well."""
    argv = ("serve", *arguments, "--http-port", "0", "--grpc-port", "0")
    with ServerProcess(*argv, log=log, cwd=folder, env=env, ready=ready) as running:
        yield running


def together(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all of them at the same time; what they returned, in order."""
    results: list[Any] = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def call(index: int) -> None:
        start.wait(120)
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
