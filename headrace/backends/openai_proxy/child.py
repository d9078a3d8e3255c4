# SPDX-License-Identifier: Apache-2.0
"""The process of an engine: its start, what it writes, its end and that of all its children.

Used by `engine`, in the loop's thread, the start too: the kernel ends the child with the thread that started it. What the
engine writes goes to the log line by line, and the last lines are kept for whoever asks why it died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

log = logging.getLogger("headrace.backends.openai_proxy")

_STUB = Path(__file__).with_name("stub.py")
_READ_BYTES = 65_536
_LINE_CHARACTERS = 2000
_KEPT_LINES = 20
_POLL_SECONDS = 0.2
_KILLED_SECONDS = 2.0
_LAST_READS = 64


class Child:
    """A running engine, in a session and process group of its own."""

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
        """How it ended, in words."""
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._line = b""
        self._output, theirs = os.pipe()
        try:
            self._popen = subprocess.Popen(  # noqa: S603  # the operator's command, without a shell
                [sys.executable, "-I", str(_STUB), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                env=dict(environment),
                cwd=folder if folder.is_dir() else None,
                start_new_session=True,
            )
        except OSError:
            os.close(self._output)
            raise
        finally:
            os.close(theirs)
        self.pid = self._popen.pid
        os.set_blocking(self._output, False)
        loop.add_reader(self._output, self._readable)
        self._reading = True
        self._pidfd = -1
        self._poll: asyncio.TimerHandle | None = None
        try:
            self._pidfd = os.pidfd_open(self.pid)
            loop.add_reader(self._pidfd, self._look)
        except OSError:
            # An old kernel, or a sandbox.
            self._look()

    async def stop(self, seconds: float) -> None:
        """Ask it to end, and its children; kill what is left after so long."""
        if not self.exited.done():
            self._signal(signal.SIGTERM)
            # Not `asyncio.timeout`, which a task that has been cancelled already takes for that in Python 3.11.
            await asyncio.wait({self.exited}, timeout=seconds)
        if not self.exited.done():
            log.warning("%s did not end within %g seconds and is killed", self._title, seconds)
            self._signal(signal.SIGKILL)
            await asyncio.wait({self.exited})

    def kill(self) -> None:
        """End it at once, and take note of that: a server that is closing may give the loop no other turn."""
        if not self.exited.done():
            self._signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ended(self._popen.wait(_KILLED_SECONDS))

    def kill_without_loop(self) -> None:
        """The same, when the loop has stopped already. From any thread."""
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
        """Whether there was something."""
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

    def _look(self) -> None:
        """Whether it has ended."""
        if self.exited.done():
            return
        # Left as it is for a moment: while it has not been waited for, nobody else can get its number, which is also that
        # of its group.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if self._pidfd < 0:
                self._poll = self._loop.call_later(_POLL_SECONDS, self._look)
            return
        self._signal(signal.SIGKILL)
        self._ended(self._popen.wait())

    def _ended(self, code: int) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._read_rest()
        self.exited.set_result(_described(code))

    def _read_rest(self) -> None:
        """Its last words. What ran away into another session may hold the pipe open for ever."""
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


def _described(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}: {(signal.strsignal(-code) or 'unknown').lower()}"
