# SPDX-License-Identifier: Apache-2.0
"""One child process: its start, its socket, its shared memory, its end.

Used by `instance` for models that serve and by `completion` for configurations. Everything here happens in the thread of
the loop, the start too: the kernel ends the child with the thread that started it, and loader threads come and go.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.backends.python.arena import KEPT_BYTES, Arena, ArenaView, make_region
from headrace.backends.python.frames import Buffer, Frame, FrameReader, Kind, Meta, encode_frame

_JOIN_BYTES = 65_536
_FREE_AT_ONCE_BYTES = 4 << 20
_TRIM_SECONDS = 10.0
_EXIT_POLL_SECONDS = 0.05
_EXIT_POLLS = 40
_ROOT = Path(__file__).resolve().parents[3]
_STUB = Path(__file__).with_name("stub.py")


class Started:
    """A process with the ends of what it shares with us."""

    def __init__(self, python: str, title: str) -> None:
        ours, theirs = socket.socketpair()
        self.incoming = make_region("headrace-out")
        self.outgoing = make_region("headrace-in") if self.incoming >= 0 else -1
        self.sock = ours
        shared = [fd for fd in (theirs.fileno(), self.outgoing, self.incoming) if fd >= 0]
        numbers = [theirs.fileno(), self.outgoing, self.incoming, os.getpid()]
        try:
            self.popen = subprocess.Popen(  # noqa: S603  # our own file, the operator's interpreter
                [python, "-u", str(_STUB), *map(str, numbers), str(_ROOT), title],
                pass_fds=shared,
                stdin=subprocess.DEVNULL,
            )
        except OSError:
            ours.close()
            self.close_regions()
            raise
        finally:
            theirs.close()

    def close_regions(self) -> None:
        """Close the descriptors of the shared memory; mappings stay."""
        for fd in (self.incoming, self.outgoing):
            if fd >= 0:
                os.close(fd)
        self.incoming = self.outgoing = -1


class Process:
    """A running child. `on_frame` and `on_exit` are called in the loop's thread; `on_exit` once, as the last."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frame: Callable[[Process, Frame], None],
        on_exit: Callable[[Process, str], None],
        python: str = sys.executable,
        title: str = "",
    ) -> None:
        self._loop = loop
        self._on_frame = on_frame
        self._on_exit = on_exit
        self._started = started = Started(python, title)
        self.pid = started.popen.pid
        self.arena = Arena(started.outgoing) if started.outgoing >= 0 else None
        self.view = ArenaView(started.incoming) if started.incoming >= 0 else None
        self._reader = FrameReader()
        self._unsent: deque[memoryview] = deque()
        self._gone = False
        self._trim: asyncio.TimerHandle | None = None
        started.sock.setblocking(False)
        loop.add_reader(started.sock.fileno(), self._readable)
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(self.pid)
            loop.add_reader(self._pidfd, self._exited)
        except OSError:
            pass  # an old kernel, or a sandbox: the end of the socket has to tell
        self._poll: asyncio.TimerHandle | None = None
        self._polls = 0

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._gone

    def send(self, kind: Kind, meta: Meta, pieces: Sequence[Buffer] = ()) -> None:
        """Send a frame; what the socket does not take at once follows when it does."""
        if self._gone:
            return
        if self.view is not None:
            freed = self.view.take_freed()
            if freed:
                meta["free"] = freed
        buffers = encode_frame(kind, meta, pieces)
        if len(buffers) > 1 and sum(map(len, buffers)) <= _JOIN_BYTES:
            buffers = [b"".join(buffers)]
        waiting = bool(self._unsent)
        self._unsent.extend(map(memoryview, buffers))
        if not waiting:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._started.sock.fileno(), self._writable)
        if self._trim is None and self.arena is not None and self.view is not None and kind is not Kind.TRIM:
            self._trim_later(self.arena, self.view)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._started.popen.returncode is None:
            self._started.popen.send_signal(number)

    def _readable(self) -> None:
        try:
            data = self._reader.read(self._started.sock)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._started.sock.fileno())
            self._await_exit()
            return
        self._feed(data)

    def _await_exit(self) -> None:
        """The socket has ended, and the process should any moment: without its socket it is of no use."""
        if not self._gone and self._polls == _EXIT_POLLS:
            self.signal(signal.SIGKILL)
        self._polls += 1
        self._poll = self._loop.call_later(_EXIT_POLL_SECONDS, self._await_exit)
        self._exited()

    def _feed(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            freed = frame.meta.get("free")
            if freed and self.arena is not None:
                for offset in freed:
                    self.arena.release(offset)
            self._on_frame(self, frame)
        # A model that streams large responses gets nothing else from us that could carry this.
        if self.view is not None and self.view.freed_bytes() > _FREE_AT_ONCE_BYTES:
            self.send(Kind.NOTE, {})

    def _write(self) -> None:
        sock, unsent = self._started.sock, self._unsent
        while unsent:
            piece = unsent[0]
            try:
                sent = sock.send(piece)
            except BlockingIOError:
                return
            except OSError:
                unsent.clear()  # dead; the exit is on its way to us
                return
            if sent < len(piece):
                unsent[0] = piece[sent:]
            else:
                unsent.popleft()

    def _writable(self) -> None:
        self._write()
        if not self._unsent:
            self._loop.remove_writer(self._started.sock.fileno())

    def _trim_later(self, arena: Arena, view: ArenaView) -> None:
        if arena.size > KEPT_BYTES or view.mapped > KEPT_BYTES:
            self._trim = self._loop.call_later(_TRIM_SECONDS, self._trim_idle, arena.put_bytes)

    def _trim_idle(self, put_bytes: int) -> None:
        self._trim = None
        if self._gone or self.arena is None:
            return
        if self.arena.put_bytes == put_bytes and self.arena.empty:
            self.arena.trim()
            self.send(Kind.TRIM, {})
        else:
            self._trim = self._loop.call_later(_TRIM_SECONDS, self._trim_idle, self.arena.put_bytes)

    def _exited(self) -> None:
        code = self._started.popen.poll()
        if code is None or self._gone:
            return
        # Its last words may still be in the socket.
        sock = self._started.sock
        try:
            while data := self._reader.read(sock):
                self._feed(data)
        except OSError:
            pass
        self._close()
        self._on_exit(self, _described(code))

    def _close(self) -> None:
        self._gone = True
        self._loop.remove_reader(self._started.sock.fileno())
        self._loop.remove_writer(self._started.sock.fileno())
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
        for timer in (self._trim, self._poll):
            if timer is not None:
                timer.cancel()
        self._release()
        self._unsent.clear()
        if self.arena is not None:
            self.arena.close()
        if self.view is not None:
            self.view.close()

    def kill_and_wait(self) -> None:
        """End it at once, without the loop, which has stopped already. From any thread."""
        self._started.popen.kill()
        self._started.popen.wait()
        if not self._gone:
            self._gone = True
            self._release()

    def _release(self) -> None:
        self._started.sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._started.close_regions()


def _described(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}: {(signal.strsignal(-code) or 'unknown').lower()}"
