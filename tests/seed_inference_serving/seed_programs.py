# SPDX-License-Identifier: Apache-2.0
"""`headrace` as a user runs it: a server process on free ports, and commands that end by themselves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from support.ports import free_port

HEADRACE = Path(sys.executable).parent / "headrace"
_LISTENING = re.compile(r"listening on [\d.]+:(\d+)")
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("INFERENCE_")} | {
    "NO_COLOR": "1",
    "TERM": "dumb",
    "COLUMNS": "200",
}
ROW = [1.0, 2.0, 3.0, 4.0]


def run(*arguments: str | Path, folder: Path | None = None, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command to its end: its status, and all that it wrote."""
    done = subprocess.run(
        [HEADRACE, *arguments],
        cwd=folder,
        env=PLAIN | dict(env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
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


class Program:
    """A running `headrace serve`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def port(self) -> int:
        return int(_LISTENING.findall(self.log)[0])

    @property
    def grpc_port(self) -> int:
        return int(_LISTENING.findall(self.log)[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, text: str) -> None:
        """Return when the log has a text; the test's own time-out is the limit."""
        while text not in self.log:
            assert self.process.poll() is None, self.log
            time.sleep(0.02)

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


@contextmanager
def serve(
    log: Path,
    *arguments: str | Path,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    until: str = "ready: ",
) -> Iterator[Program]:
    """Start a server on free ports, wait for a line of its log, and end it well."""
    command = [HEADRACE, "serve", *arguments, "--http-port", "0", "--grpc-port", str(free_port())]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=PLAIN | dict(env or {}), stdout=output, stderr=subprocess.STDOUT
        )
    program = Program(process, log)
    try:
        program.wait_for(until)
        yield program
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            code = process.wait(180)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert code == 0, program.log


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
