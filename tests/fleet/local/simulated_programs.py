# SPDX-License-Identifier: Apache-2.0
"""Simulated processes and the programs that they run: a stub server, the real router, tasks. See `simulated_fleet`.

A program is a coroutine that is given its process and returns an exit code. It may listen, say something to its log, wait,
and handle SIGTERM; all of it takes virtual time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from memory_network import MemoryNetwork

import headrace.programs.router
from headrace.cli.router_settings import router_settings
from headrace.fleet.local.container_runtime import ExitStatus, ResourceLimits
from headrace.fleet.local.pod_status import OOM_KILLED
from headrace.fleet.router.discovery import file_changes, file_signature
from headrace.fleet.router.proxy import RouterProxy
from headrace.net.negotiation import NegotiatingProtocol
from headrace.programs.router import RouterAppSettings, build_router_site, make_scaler, report_cold_starts

Program = Callable[["SimulatedProcess"], Awaitable[int]]
_PIDS = itertools.count(5_000_001)
"""Above every number that Linux gives."""
TERM, KILL = -15, -9
_START_SECONDS = 0.01
"""Until a process does anything: a loop that starts one after the other takes time."""


class SimulatedProcess:
    """A process of the simulated machine. It outlives the daemon that started it."""

    def __init__(
        self,
        loop: MemoryNetwork,
        words: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        limits: ResourceLimits | None = None,
    ) -> None:
        self.loop = loop
        self.pid = next(_PIDS)
        self.words = tuple(words)
        self.environment = dict(environment)
        self.limits = limits or ResourceLimits()
        self.started = loop.time()
        self.ended_at = math.inf
        self.how: ExitStatus | None = None
        """None while it runs."""
        self.on_terminate: Callable[[], None] | None = None
        """What it does on SIGTERM; None: it dies of it."""
        self.memory = 10 << 20
        self.cores = 0.0
        """Busy cores, for who measures it."""
        self._log = log
        self._over = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        return self.how is None

    @property
    def ticks(self) -> int:
        """Hundredths of a second that it has computed."""
        return int((self.loop.time() - self.started) * self.cores * 100)

    def start(self, program: Program) -> None:
        self.loop.start_task(self.pid, self._run(program))

    def write_log(self, text: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{text}\n")

    def use_memory(self, size: int) -> None:
        self.memory += size
        if self.limits.memory is not None and self.memory > self.limits.memory:
            self.exit(KILL, OOM_KILLED, "it used more memory than its limit")

    def signal(self, number: int) -> None:
        if self.is_alive and number == -TERM and self.on_terminate is not None:
            self.on_terminate()
        elif self.is_alive:
            self.exit(-number)

    def kill(self) -> None:
        """As `kill -9` does."""
        self.signal(-KILL)

    def exit(self, code: int, reason: str = "", message: str = "") -> None:
        """It ends now, with all that it has."""
        if self.is_alive:
            self.how = ExitStatus(code, reason, message)
            self.ended_at = self.loop.time()
            self._over.set()
            self.loop.kill(self.pid)

    async def wait(self) -> ExitStatus:
        await self._over.wait()
        assert self.how is not None
        return self.how

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL when the grace is over."""
        self.signal(-TERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await self._over.wait()
        except TimeoutError:
            self.kill()

    async def _run(self, program: Program) -> None:
        try:
            await asyncio.sleep(_START_SECONDS)
            code = await program(self)
        except ProgramEnds as ends:
            code = ends.code
        self.exit(code)


class ProgramEnds(Exception):
    """Raised inside a program to end it."""

    def __init__(self, code: int) -> None:
        self.code = code


class HttpServer:
    """HTTP/1.1 of a simulated process: each request is answered by a coroutine that returns a status and a text."""

    def __init__(self, process: SimulatedProcess, port: int, answer: Callable[[str, str], Awaitable[Any]]) -> None:
        self._answer = answer
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()
        loop = process.loop
        self._server = loop.listen(port, partial(self._protocol, loop))

    async def drain(self) -> None:
        """Take no more connections, and answer what was asked."""
        self._server.close()
        await self._idle.wait()

    def _protocol(self, loop: MemoryNetwork) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), self._serve, loop=loop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
                if not head.startswith("GET "):
                    break
                self._busy += 1
                self._idle.clear()
                try:
                    path, _, query = head.split()[1].partition("?")
                    await self._write(writer, await self._answer(path, query))
                    await writer.drain()
                finally:
                    self._busy -= 1
                    if not self._busy:
                        self._idle.set()
                if "connection: close" in head.lower() or "HTTP/1.0" in head:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter, answer: Any) -> None:
        status, body = answer
        if isinstance(body, str):
            content = body.encode()
            writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
            return
        writer.write(f"HTTP/1.1 {status} -\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        async for piece in body:
            content = piece.encode()
            writer.write(b"%x\r\n%b\r\n" % (len(content), content))
        writer.write(b"0\r\n\r\n")


async def stub(process: SimulatedProcess) -> int:
    """As `stub_server.py`. More options: --start and --stop are seconds until it listens, and until it has ended."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--host", default="")
    parser.add_argument("--text", default="stub")
    parser.add_argument("--status", type=int, default=200)
    for name in ("--delay", "--start", "--stop"):
        parser.add_argument(name, type=float, default=0.0)
    options = parser.parse_args([word for word in process.words if word.startswith("--")])
    if options.text == "crash":
        process.write_log("this one crashes at its start")
        return 1
    process.write_log(f"{options.text} begins on {options.port}")
    await asyncio.sleep(options.start)
    hung = asyncio.Event()

    async def answer(path: str, query: str) -> tuple[int, Any]:
        if hung.is_set():
            await asyncio.sleep(math.inf)
        match path:
            case "/hang":
                hung.set()
            case "/die":
                process.exit(3)
                await asyncio.sleep(math.inf)
            case "/leak":
                process.use_memory(int(query) << 20)
            case "/slow":
                await asyncio.sleep(float(query))
            case "/stream":
                return 200, pieces(int(query))
        if path != "/ready":
            await asyncio.sleep(options.delay)
        reported = f"{options.text} {process.pid} {process.environment.get('LWS_WORKER_INDEX', '')}"
        return 404 if path == "/never" else 200 if path == "/ready" else options.status, reported

    async def pieces(count: int) -> Any:
        for number in range(count):
            yield f"{options.text} {number}\n"
            await asyncio.sleep(0.05)

    server = HttpServer(process, options.port, answer)
    stopped = asyncio.Event()
    process.on_terminate = stopped.set
    await stopped.wait()
    await server.drain()
    await asyncio.sleep(options.stop)
    return 0


async def metered(process: SimulatedProcess) -> int:
    """As `metered_server.py`: tells a number that stands in a file as a metric."""
    options = dict(word.removeprefix("--").split("=") for word in process.words if word.startswith("--"))
    process.cores = float(options.get("cores", 0.0))

    async def answer(path: str, query: str) -> tuple[int, str]:
        if path == "/slow":
            await asyncio.sleep(float(query))
        if path == "/metrics":
            number = Path(options["file"]).read_text()
            return 200, f'# TYPE waiting gauge\nwaiting{{queue="main"}} {number}\nother 1\n'
        return 200, f"{process.pid}\n"

    HttpServer(process, int(options["port"]), answer)
    await asyncio.sleep(math.inf)
    return 0


async def serve(process: SimulatedProcess) -> int:
    """`headrace serve WORD...`: answers everything with 200."""
    (port,) = (word.removeprefix("--http-port=") for word in process.words if word.startswith("--http-port="))

    async def answer(path: str, query: str) -> tuple[int, str]:
        return 200, f"serve {process.pid}"

    server = HttpServer(process, int(port), answer)
    process.write_log(f"listening on 127.0.0.1:{port}")
    stopped = asyncio.Event()
    process.on_terminate = stopped.set
    await stopped.wait()
    await server.drain()
    return 0


async def task(process: SimulatedProcess) -> int:
    """`task [--seconds=N] [--say=TEXT] [--exit=CODE] [--unless=FILE]`: runs for so long, then ends with that code.

    --unless: ends well if the file is there. --append=FILE: adds its text to it.
    """
    options = dict(word.removeprefix("--").split("=", 1) for word in process.words if word.startswith("--"))
    if "say" in options:
        process.write_log(options["say"])
    if "append" in options:
        with Path(options["append"]).open("a") as file:
            file.write(options["say"])
    await asyncio.sleep(float(options.get("seconds", 0.0)))
    if "unless" in options and Path(options["unless"]).exists():
        return 0
    return int(options.get("exit", 0))


async def idle(process: SimulatedProcess) -> int:
    """Does nothing until it is ended."""
    await asyncio.sleep(math.inf)
    return 0


async def router(process: SimulatedProcess) -> int:
    """`headrace router WORD...`: the real one, on the network in memory."""
    settings = _router_settings(process.words)
    proxy = RouterProxy(settings.router, make_scaler(settings.router), make_scaler=make_scaler)
    report_cold_starts(proxy)
    proxy.on_update.append(lambda _: report_cold_starts(proxy))
    site = build_router_site(proxy, None, settings)
    site.tick(process.loop.time())
    known = file_signature(settings.config) if settings.config else None
    await proxy.start()
    server = process.loop.listen(settings.address.port, partial(NegotiatingProtocol, site))
    stopped = asyncio.Event()
    process.on_terminate = stopped.set

    async def follow_settings() -> None:
        async for _ in file_changes(settings.config, known=known):
            await proxy.update_settings(router_settings({}, settings.config).router)

    async def keep_time() -> None:
        while True:
            await asyncio.sleep(1.0)
            site.tick(process.loop.time())
            for connection in tuple(site.connections):
                connection.sweep(process.loop.time())

    following = [asyncio.ensure_future(keep_time())]
    if settings.config:
        following.append(asyncio.ensure_future(follow_settings()))
    await stopped.wait()
    proxy.drain(settings.grace_seconds)
    site.draining = True
    server.close()
    for connection in tuple(site.connections):
        connection.drain()
    ends = process.loop.time() + settings.grace_seconds
    while site.connections and process.loop.time() < ends:
        await asyncio.sleep(0.05)
    for item in following:
        item.cancel()
    await proxy.close()
    return 0


def _router_settings(words: Sequence[str]) -> RouterAppSettings:
    """What the command line means, read by the command itself."""
    if words[1:2] == ("--config",) and len(words) == 3:
        return router_settings({}, words[2])
    from headrace.cli.main import app

    read: list[RouterAppSettings] = []

    def run_router(settings: RouterAppSettings, *_: Any, **__: Any) -> int:
        read.append(settings)
        return 0

    with patch.object(headrace.programs.router, "run_router", run_router):
        try:
            app(args=list(words), prog_name="headrace", standalone_mode=False)
        except SystemExit as ends:
            if not read:
                raise ProgramEnds(int(ends.code or 0)) from None
    return read[0]


class Bench:
    """`headrace bench` as a job: what it does is set by the test."""

    def __init__(self) -> None:
        self.seconds = 5.0
        self.code = 0
        self.text = "D(20,4): 3 answered"
        self.started: list[SimulatedProcess] = []

    async def __call__(self, process: SimulatedProcess) -> int:
        """`once.py EXIT_FILE headrace WORD...`: notes in the file how it ended."""
        seconds, code, said = self.seconds, self.code, self.text
        await asyncio.sleep(seconds)
        process.write_log(said)
        words = process.words
        if "--output" in words and not code:
            folder = Path(words[words.index("--output") + 1])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "results.json").write_text(json.dumps({"runs": []}))
        Path(words[0]).write_text(f"{code}\n")
        return code
