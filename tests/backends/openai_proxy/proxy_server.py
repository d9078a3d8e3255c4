# SPDX-License-Identifier: Apache-2.0
"""What the tests of the proxy share: a repository with models of the fake engine, served by a real engine in a thread."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contract_serving import Served

from headrace.core.errors import HeadraceError
from headrace.core.generation import Generation, GenerationRequest
from headrace.core.requests import InferRequest
from headrace.engine.scheduling.pending_request import PendingRequest
from support.waiting import eventually

FAKE = Path(__file__).with_name("fake_engine.py")
WAIT = 90.0


def command(*options: str) -> str:
    """The parameter `command` for the fake."""
    return json.dumps([sys.executable, str(FAKE), "--port", "{port}", *options])


def write_fake(repository: Path, name: str, *options: str, **parameters: str) -> None:
    """A model whose engine is the fake, which tells its port to a file."""
    env = json.loads(parameters.pop("env", "{}")) | {
        "PORT_FILE": str(repository.parent / f"{repository.name}.{name}.port")
    }
    write_model(repository, name, command=command(*options), env=json.dumps(env), **parameters)


def write_model(repository: Path, name: str, more: str = "", **parameters: str) -> None:
    """A model of the proxy with these parameters."""
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    lines = [f'backend: "openai_proxy"\n{more}']
    for key, value in parameters.items():
        lines.append(f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}")
    (repository / name / "config.pbtxt").write_text("\n".join(lines))


class Streaming:
    """One request with all its answers. Made and told in the loop's thread, waited for in the test's."""

    def __init__(self) -> None:
        self.received: list[tuple[Any, bool]] = []
        self.pending: PendingRequest | None = None
        self.news = asyncio.Event()

    def __call__(self, result: Any, final: bool) -> None:
        self.received.append((result, final))
        self.news.set()

    @property
    def over(self) -> bool:
        return bool(self.received) and (self.received[-1][1] or isinstance(self.received[-1][0], BaseException))

    @property
    def answers(self) -> list[Any]:
        return [result for result, _ in self.received if result is not None and not isinstance(result, BaseException)]

    @property
    def error(self) -> HeadraceError:
        result = self.received[-1][0]
        assert isinstance(result, HeadraceError), self.received
        return result

    @property
    def text(self) -> str:
        if isinstance(self.received[-1][0], BaseException):
            raise self.received[-1][0]
        return "".join(piece.decode() for answer in self.answers for piece in answer.outputs[0].array)

    @property
    def raw(self) -> list[Any]:
        return [json.loads(answer.parameters["openai"]) for answer in self.answers]


class Proxied(Served):
    """A repository of models of the proxy."""

    def port(self, model: str) -> int:
        """Where the engine of a model that `write_fake` wrote listens."""
        return int((self.repository.parent / f"{self.repository.name}.{model}.port").read_text())

    def stats(self, model: str) -> Any:
        """What the engine has seen."""
        return stats_of(self.port(model))

    def begin(self, request: InferRequest) -> Streaming:
        """Send a request."""

        async def start() -> Streaming:
            streaming = Streaming()
            streaming.pending = self.plane.infer_stream(request, streaming)
            return streaming

        return self.wait(start())

    def until(self, streaming: Streaming, seen: Callable[[Streaming], bool]) -> Streaming:
        """Wait until it has been told enough."""

        async def wait() -> None:
            async with asyncio.timeout(WAIT):
                while not (seen(streaming) or streaming.over):
                    streaming.news.clear()
                    await streaming.news.wait()

        self.wait(wait())
        return streaming

    def ask(self, request: InferRequest) -> Streaming:
        """Send a request and wait for its last answer."""
        return self.until(self.begin(request), lambda _: False)

    def give_up(self, streamings: Sequence[Streaming]) -> None:
        """Their callers hang up."""

        async def cancel() -> None:
            for streaming in streamings:
                assert streaming.pending is not None
                streaming.pending.cancel()

        self.wait(cancel())


@contextmanager
def proxied(repository: Path) -> Iterator[Proxied]:
    served = Proxied(repository)
    try:
        yield served
    finally:
        served.close()


def chat(model: str, text: str, *, stream: bool = True, **more: Any) -> GenerationRequest:
    """A request of /v1/chat/completions."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": stream, **more}
    return GenerationRequest(model, Generation(stream=stream, path="/v1/chat/completions", body=body))


@contextmanager
def fake_engine(port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The fake, started by the test and not by the server."""
    process = subprocess.Popen([sys.executable, str(FAKE), "--port", str(port), *options], stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: stats_of(port) is not None, message="the fake listens")
        yield process
    finally:
        process.kill()
        process.wait()


def stats_of(port: int) -> Any:
    """What the fake at a port has seen; None while nobody is there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats", timeout=30) as answer:
            return json.load(answer)
    except OSError:
        return None


def alive(pid: int) -> bool:
    """Whether a process runs (and is no zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def environment_without(name: str) -> dict[str, str]:
    """The environment of the tests, but for one variable."""
    return {key: value for key, value in os.environ.items() if key != name}
