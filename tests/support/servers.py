# SPDX-License-Identifier: Apache-2.0
"""`headrace serve` for tests that ask a server: inside this process, or one process for a whole session.

with serve_in_thread(models, "--model-control-mode=explicit") as server:     # 0.1 s; the same code but for signals and logs
    requests to server.url, server.grpc_url

def test_list(session_server):                                               # a process over `tiny_models.SHARED`
    requests to session_server.url; nothing that changes the server
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import uvloop

from support.programs import Program
from support.tiny_models import shared_models

_FREE_PORTS = ("--http-port", "0", "--grpc-port", "0")
_START_SECONDS = 240.0


class ThreadServer:
    """A running server of this process: its ports, and its loop for whoever wants to look inside."""

    def __init__(self, servers: Sequence[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.servers = servers
        self.loop = loop
        self.pid = os.getpid()

    @property
    def ports(self) -> list[int]:
        """In the order that a process tells them: metrics if it has a port, HTTP, gRPC."""
        return [server.port for server in self.servers]

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def grpc_url(self) -> str:
        return f"grpc://127.0.0.1:{self.ports[-1]}"


@contextmanager
def serve_in_thread(*arguments: str | Path) -> Iterator[ThreadServer]:
    """Run `headrace serve WORDS` in a thread until the block ends; its ports are free ones by default.

    The command line, the settings, the engine and the ports are those of the command. The signal that ends it comes from
    here, connections are cut at the end, and logs go where the test's logs go. One process only: no `--workers`.
    """
    from headrace.cli.serve_settings import open_settings
    from headrace.core.telemetry.progress import silent
    from headrace.programs.configuration.resolution import configure
    from headrace.programs.serve import server as app

    options, folders = _parse(*_FREE_PORTS, *arguments)
    outcome: dict[str, Any] = {}
    started = threading.Event()

    async def until_stopped(servers: Sequence[Any], _: float, *, on_signal: Callable[[], None]) -> int:
        outcome["stop"] = stop = asyncio.Event()
        outcome["server"] = ThreadServer(servers, asyncio.get_running_loop())
        await stop.wait()
        on_signal()
        for server in servers:
            server.abort()
        return 0

    def run() -> None:
        try:
            with open_settings(configure(options, folders, os.environ), silent) as settings:
                settings = replace(settings, on_start=lambda report: started.set())
                outcome["code"] = uvloop.run(app._Serving(settings, "", None, 0).run())
        except BaseException as error:
            outcome["error"] = error
        finally:
            started.set()

    no_collection = SimpleNamespace(
        collect=lambda: 0, freeze=lambda: None
    )  # the tests' garbage must not be kept for ever
    with patch.object(app, "run_until_signal", until_stopped), patch.object(app, "gc", no_collection):
        thread = threading.Thread(target=run, daemon=True, name="headrace serve")
        thread.start()
        ready = started.wait(_START_SECONDS)
    if not ready or "error" in outcome or "code" in outcome:
        raise RuntimeError(f"headrace serve {arguments} did not start: {outcome}") from outcome.get("error")
    server: ThreadServer = outcome["server"]
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(outcome["stop"].set)
        thread.join(_START_SECONDS)
    if "error" in outcome:
        raise outcome["error"]


def _parse(*words: str | Path) -> tuple[dict[str, Any], list[str]]:
    """Read a command line as `headrace serve` does: the texts of its options, and its folders."""
    from headrace.cli.commands import SECTIONS
    from headrace.cli.root import load_command
    from headrace.programs.configuration.option_table import FLAGS

    verb = next(verb for verbs in SECTIONS.values() for verb in verbs if verb.name == "serve")
    arguments = [str(word) for word in words]
    texts = load_command(verb).make_context("serve", arguments).params
    return {name: texts.get(name.replace("-", "_")) for name in FLAGS}, list(texts["models"] or ())


@contextmanager
def serve_process(
    log: Path, *arguments: str | Path, ready: str | re.Pattern[str] = "model(s)", **more: Any
) -> Iterator[Program]:
    """Run `headrace serve WORDS` as a process on free ports, wait until it has tried its models, and end it well."""
    with Program("serve", *_FREE_PORTS, *arguments, log=log, ready=ready, **more) as server:
        yield server


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """One `headrace serve` over `tiny_models.SHARED` for all tests of this worker that only ask."""
    with serve_process(tmp_path_factory.mktemp("session_server") / "log", shared_models()) as server:
        yield server
