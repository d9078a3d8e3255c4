# SPDX-License-Identifier: Apache-2.0
"""The upstream engine of a model: start its process, check its health, and restart it when it dies.

Used by `instance`, in the loop's thread. An engine at a URL is the same without a process. Knows nothing of requests but the
callback that fails them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from headrace.backends.contract import Placement
from headrace.backends.openai_proxy.client import ConnectionPool, fetch
from headrace.backends.openai_proxy.settings import MODELS_PATH, Origin, ProxySettings
from headrace.backends.restart_backoff import Backoff
from headrace.core import child_stub
from headrace.core.errors import INTERNAL_TEXT, FailedPrecondition, HeadraceError, Internal, Unavailable
from headrace.core.exit_status import describe_exit

log = logging.getLogger("headrace.backends.openai_proxy")

WATCH_SECONDS = 10.0
_HEALTH_SECONDS = 5.0
_UNHEALTHY_AFTER = 3
_FIRST_POLL_SECONDS = 0.1
_MAX_POLL_SECONDS = 2.0
_SHOWN_LINES = 8
_SHOWN_CHARACTERS = 1200
_READ_BYTES = 65_536
_LINE_CHARACTERS = 2000
_MAX_LINES = 20
_POLL_SECONDS = 0.2
_KILL_SECONDS = 2.0
_LAST_READS = 64


class Engine:
    """The upstream engine of one instance. `pool` is None while it is not available; `down` is the error then."""

    def __init__(
        self,
        settings: ProxySettings,
        placement: Placement,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[Unavailable], None],
    ) -> None:
        self._settings = settings
        self._placement = placement
        self._loop = loop
        self._on_lost = on_lost
        self._backoff = Backoff((0.5, 1.0), longest=60.0, lived=120.0)
        self._task: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[None] = loop.create_future()
        self._process: EngineProcess | None = None
        self.pool: ConnectionPool | None = None
        self.down: Unavailable | None = self._unavailable("has not been started")
        self.served_model = settings.served_model or settings.model_name

    async def open(self) -> None:
        """Start the engine and return when it is healthy; raises if it fails to start."""
        self._task = self._loop.create_task(self._supervise())
        await self._opened

    def abandon(self) -> None:
        """Make `open` fail soon."""
        self._fail_open(Unavailable("the server is closing"))
        if self._process is not None:
            self._process.kill()
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop the engine."""
        self.down = self._unavailable("is being unloaded")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def kill_without_loop(self) -> None:
        """Kill the process after the loop has stopped. From any thread."""
        if self._process is not None:
            self._process.kill_without_loop()

    async def _supervise(self) -> None:
        """Run the engine and restart it when it dies, until cancelled."""
        try:
            while True:
                reason, last_lines = await self._run_once()
                if not self._opened.done():
                    name = self._settings.model_name
                    self._fail_open(FailedPrecondition(f"the engine of model '{name}' {reason}{last_lines}"))
                    return
                delay = self._backoff.next_delay(self._loop.time())
                log.error(
                    "The engine of %s %s%s; restarting it in %g s.", self._placement.name, reason, last_lines, delay
                )
                self.down = self._unavailable(f"{reason}; it is being started again, retry", delay)
                self._on_lost(self.down)
                await asyncio.sleep(delay)
        except Exception:
            log.exception("The engine of %s is no longer supervised.", self._placement.name)
            self._fail_open(Internal(INTERNAL_TEXT))
            self.down = self._unavailable("failed; load the model again")
            self._on_lost(self.down)

    async def _run_once(self) -> tuple[str, str]:
        """Run the engine until it ends; return the reason, and its last log lines, which are for operators only."""
        settings, pool = self._settings, None
        try:
            port = _free_port() if settings.command else 0
            if settings.command:
                self._process = self._start_process(port)
            pool = ConnectionPool(self._loop, settings.origin or Origin("127.0.0.1", port), settings.api_key)
            reason = await self._wait_until_healthy(pool, self._process)
            if reason:
                return reason, self._last_lines()
            await self._discover_model_name(pool)
            self._mark_healthy(pool)
            return await self._watch(pool, self._process), self._last_lines()
        except OSError as error:
            return f"cannot be started ({error.strerror or 'no reason given'})", ""
        finally:
            self.pool = None
            process, self._process = self._process, None
            if process is not None:
                await process.stop(settings.stop_seconds)
            if pool is not None:
                pool.close()

    def _start_process(self, port: int) -> EngineProcess:
        settings, placement = self._settings, self._placement
        environment = dict(os.environ)
        if placement.kind == "gpu":
            environment["CUDA_VISIBLE_DEVICES"] = _visible_gpu(placement.device)
        names = list(settings.environment)
        environment |= zip(names, _fill_in(settings.environment.values(), port, settings), strict=True)
        command = _fill_in(settings.command, port, settings)
        log.info("%s: starting %s.", placement.name, command[0])
        return EngineProcess(self._loop, placement.name, command, environment, settings.folder)

    async def _wait_until_healthy(self, pool: ConnectionPool, process: EngineProcess | None) -> str:
        """Return "" when the engine is healthy, or the reason why it is not."""
        seconds = self._settings.start_seconds
        deadline = self._loop.time() + seconds
        pause = _FIRST_POLL_SECONDS
        while True:
            problem = await self._problem(pool)
            if process is not None and process.exited.done():
                return f"ended before it was healthy ({process.exited.result()})"
            if not problem:
                return ""
            left = deadline - self._loop.time()
            if left <= 0:
                return (
                    f"was not healthy within {seconds:g} seconds: it {problem}. The parameter start_seconds allows more"
                )
            pause = min(pause * 1.5, _MAX_POLL_SECONDS)
            await self._exit_within(process, min(pause, left))

    async def _watch(self, pool: ConnectionPool, process: EngineProcess | None) -> str:
        """Check the health of a running engine until it ends; return the reason."""
        failures = 0
        while True:
            if process is not None and await self._exit_within(process, WATCH_SECONDS):
                return f"died ({process.exited.result()})"
            if process is None:
                await asyncio.sleep(WATCH_SECONDS)
            problem = await self._problem(pool)
            failures = failures + 1 if problem else 0
            if failures >= _UNHEALTHY_AFTER:
                if failures == _UNHEALTHY_AFTER:
                    log.error("The engine of %s is not healthy: it %s.", self._placement.name, problem)
                self.down = self._unavailable(f"is not healthy: it {problem}", WATCH_SECONDS)
            elif not problem and self.down is not None:
                log.info("The engine of %s is healthy again.", self._placement.name)
                self.down = None

    async def _exit_within(self, process: EngineProcess | None, seconds: float) -> bool:
        if process is None:
            await asyncio.sleep(seconds)
            return False
        await asyncio.wait({process.exited}, timeout=seconds)
        return process.exited.done()

    async def _problem(self, pool: ConnectionPool) -> str:
        """Check the health once; return the problem, or ""."""
        settings = self._settings
        path = settings.health_path
        try:
            status, _ = await fetch(pool, path, _HEALTH_SECONDS)
            if status == 404 and settings.health_fallback:
                path = settings.health_fallback
                status, _ = await fetch(pool, path, _HEALTH_SECONDS)
        except ConnectionError as error:
            return str(error)
        if 200 <= status < 300:
            return ""
        remedy = "; check the key that api_key_env names" if status in (401, 403) else ""
        return f"answers {path} with status {status}{remedy}"

    async def _discover_model_name(self, pool: ConnectionPool) -> None:
        """Ask the engine for the model's name, unless the configuration sets it."""
        if self._settings.served_model:
            return
        try:
            status, body = await fetch(pool, MODELS_PATH, _HEALTH_SECONDS)
            name = json.loads(body)["data"][0]["id"] if status == 200 else ""
        except (ConnectionError, ValueError, LookupError, TypeError, RecursionError):
            name = ""
        if isinstance(name, str) and name:
            self.served_model = name
        else:
            log.warning("The engine of %s does not list its models: set served_model.", self._placement.name)

    def _mark_healthy(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.down = None
        self._backoff.started(self._loop.time())
        log.info("The engine of %s is healthy and serves '%s'.", self._placement.name, self.served_model)
        if not self._opened.done():
            self._opened.set_result(None)

    def _fail_open(self, error: HeadraceError) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)

    def _unavailable(self, reason: str, seconds: float | None = None) -> Unavailable:
        text = f"the engine of model '{self._settings.model_name}' {reason}"
        return Unavailable(text, retry_after_seconds=None if seconds is None else max(seconds, 1.0))

    def _last_lines(self) -> str:
        if self._process is None or not self._process.last_lines:
            return ""
        text = " | ".join([*self._process.last_lines][-_SHOWN_LINES:])
        return f". Its last lines: {text[-_SHOWN_CHARACTERS:]}"


def _fill_in(texts: Iterable[str], port: int, settings: ProxySettings) -> list[str]:
    return [text.replace("{port}", str(port)).replace("{folder}", str(settings.folder)) for text in texts]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _visible_gpu(device: int) -> str:
    """Return the engine's CUDA_VISIBLE_DEVICES for this GPU of the server."""
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return visible[device] if device < len(visible) else str(device)


class EngineProcess:
    """The process of an engine, in its own session and process group.

    Created in the loop's thread: the kernel stops the process with the thread that started it. Its output goes to the log,
    and the last lines are kept for error messages.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        title: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
    ) -> None:
        self._loop = loop
        self._title = title
        self.exited: asyncio.Future[str] = loop.create_future()
        """The exit code or the signal, as text."""
        self.last_lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._line = b""
        self._output, write_end = os.pipe()
        try:
            self._popen = subprocess.Popen(  # noqa: S603  # the operator's command, without a shell
                [sys.executable, "-I", child_stub.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=dict(environment),
                cwd=folder if folder.is_dir() else None,
                start_new_session=True,
            )
        except OSError:
            os.close(self._output)
            raise
        finally:
            os.close(write_end)
        self.pid = self._popen.pid
        os.set_blocking(self._output, False)
        loop.add_reader(self._output, self._readable)
        self._reading = True
        self._pidfd = -1
        self._poll: asyncio.TimerHandle | None = None
        try:
            self._pidfd = os.pidfd_open(self.pid)
            loop.add_reader(self._pidfd, self._check_exit)
        except OSError:
            # An old kernel, or a sandbox: poll.
            self._check_exit()

    async def stop(self, seconds: float) -> None:
        """Send SIGTERM to the process group; kill what is left after `seconds`."""
        if not self.exited.done():
            self._signal(signal.SIGTERM)
            # Not `asyncio.timeout`: in Python 3.11 it misbehaves in a task that was already cancelled.
            await asyncio.wait({self.exited}, timeout=seconds)
        if not self.exited.done():
            log.warning("%s did not stop within %g seconds; killing it.", self._title, seconds)
            self._signal(signal.SIGKILL)
            await asyncio.wait({self.exited})

    def kill(self) -> None:
        """Kill the process and wait for it: the loop of a server that shuts down may not run again."""
        if not self.exited.done():
            self._signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._handle_exit(self._popen.wait(_KILL_SECONDS))

    def kill_without_loop(self) -> None:
        """Kill the process after the loop has stopped. From any thread."""
        if self._popen.returncode is None:
            self._signal(signal.SIGKILL)
            self._popen.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def _readable(self) -> None:
        self._read()

    def _read(self) -> bool:
        """Read and log some output; return whether there was any."""
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._stop_reading()
            return False
        *lines, self._line = (self._line + data).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._write(line)
        if len(self._line) > _LINE_CHARACTERS:
            self._write(self._line)
            self._line = b""
        return True

    def _write(self, line: bytes) -> None:
        text = line[:_LINE_CHARACTERS].decode(errors="replace").rstrip()
        if text:
            self.last_lines.append(text)
            log.info("%s: %s", self._title, text)

    def _check_exit(self) -> None:
        """Handle the exit of the process, if it has ended."""
        if self.exited.done():
            return
        # WNOWAIT: until the process is reaped, its id, which is also that of its group, cannot be reused.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if self._pidfd < 0:
                self._poll = self._loop.call_later(_POLL_SECONDS, self._check_exit)
            return
        self._signal(signal.SIGKILL)
        self._handle_exit(self._popen.wait())

    def _handle_exit(self, code: int) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._read_rest()
        self.exited.set_result(describe_exit(code))

    def _read_rest(self) -> None:
        """Read the last output. Bounded: a process that left the session may hold the pipe open forever."""
        for _ in range(_LAST_READS):
            if not self._reading or not self._read():
                break
        self._write(self._line)
        self._line = b""
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._output)
            os.close(self._output)
