# SPDX-License-Identifier: Apache-2.0
"""The child's end of the socket, shared by all threads of the model.

There is no thread that reads: whoever waits for something reads for everybody until it has come, so a request takes no
detour between threads. Used by `main` for commands and by the classes of `pb_utils` for answers and calls. Must not know
what a model does with them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from headrace.backends.python.arena import Arena, ArenaView
from headrace.backends.python.frames import Buffer, Frame, FrameReader, Kind, Meta, encode_frame
from headrace.backends.python.packing import Unpacker
from headrace.core.tensors import Tensor

_JOIN_BYTES = 65_536
_PACE_BYTES = 16 << 20
_COMMANDS = frozenset({Kind.INIT, Kind.EXECUTE, Kind.CLOSE})


class ServerGone(Exception):
    """The server has closed the socket: nothing is left to do."""

    def __str__(self) -> str:
        """Shown where a model's own fork tries."""
        return "the server cannot be reached from here: it has ended, or this process was forked by the model"


class Reply:
    """One answer to a call."""

    __slots__ = ("meta", "tensors")

    def __init__(self, meta: Meta, tensors: list[Tensor]) -> None:
        self.meta = meta
        self.tensors = tensors


class Call:
    """Something asked of the server."""

    __slots__ = ("ended", "number", "replies", "wake")

    def __init__(self, number: int, wake: Callable[[Reply], None] | None) -> None:
        self.number = number
        self.replies: deque[Reply] = deque()
        self.ended = False
        self.wake = wake
        """Told of the last reply, for callers that cannot wait."""


class Channel:
    """Frames to and from the server."""

    def __init__(self, sock: socket.socket, arena: Arena | None, view: ArenaView | None) -> None:
        self.arena = arena
        self.view = view
        self.measures: deque[list[Any]] = deque()
        """Updates of metrics that go with the next frame."""
        self.closing = False
        self._sock = sock
        self._reader = FrameReader()
        self._turn = threading.Condition()
        self._reading = False
        self._gone = False
        self._commands: deque[Frame] = deque()
        self._calls: dict[int, Call] = {}
        self._last_call = 0
        self._cancelled: set[int] = set()
        self._outbox: deque[tuple[int, Meta, Sequence[Buffer]]] = deque()
        self._sending = threading.Lock()
        self._paced = 0
        self._to_wake = 0
        self._pump: threading.Thread | None = None
        # A process the model forks must not speak for it.
        os.register_at_fork(after_in_child=self._detach)

    # Sending

    def send(self, kind: Kind, meta: Meta, pieces: Sequence[Buffer] = ()) -> None:
        """Send a frame, from any thread, a destructor's too: never waits for another thread's turn to send."""
        self._outbox.append((kind, meta, pieces))
        while self._outbox:
            # Who has the turn sends what others have left.
            if not self._sending.acquire(blocking=False):
                return
            try:
                while self._outbox:
                    self._write(*self._outbox.popleft())
            finally:
                self._sending.release()

    def _write(self, kind: int, meta: Meta, pieces: Sequence[Buffer]) -> None:
        if self._gone:
            return
        if self.view is not None:
            freed = self.view.take_freed()
            if freed:
                meta["free"] = freed
        if self.measures:
            meta["measures"] = [self.measures.popleft() for _ in range(len(self.measures))]
        buffers = encode_frame(kind, meta, pieces)
        try:
            if len(buffers) == 1:
                self._sock.sendall(buffers[0])
            elif sum(map(len, buffers)) <= _JOIN_BYTES:
                self._sock.sendall(b"".join(buffers))
            else:
                for buffer in buffers:
                    self._sock.sendall(buffer)
        except ConnectionError:
            self._gone = True

    # Receiving

    def next_command(self) -> Frame:
        """Wait for what the server wants next. Called by the main thread."""
        self._wait(lambda: bool(self._commands))
        return self._commands.popleft()

    def is_cancelled(self, number: int) -> bool:
        """Whether the server has said that nobody waits for this request."""
        if number not in self._cancelled:
            self._look()
        return number in self._cancelled

    def forget(self, number: int) -> None:
        """A request is answered."""
        self._cancelled.discard(number)

    def call(self, meta: Meta, pieces: Sequence[Buffer] = (), wake: Callable[[Reply], None] | None = None) -> Call:
        """Ask the server for something. With `wake` nobody needs to wait: it is called with the last reply."""
        with self._turn:
            self._last_call += 1
            call = Call(self._last_call, wake)
            self._calls[call.number] = call
            if wake is not None:
                self._to_wake += 1
                self._start_pump()
                self._turn.notify_all()
        meta["call"] = call.number
        self.send(Kind.CALL, meta, pieces)
        return call

    def next_reply(self, call: Call) -> Reply | None:
        """Wait for the next answer to a call; None when there is no more."""
        self._wait(lambda: bool(call.replies) or call.ended)
        return call.replies.popleft() if call.replies else None

    def abandon(self, call: Call) -> None:
        """Nobody wants the rest of the replies."""
        if not call.ended:
            self.send(Kind.CALL, {"call": call.number, "op": "cancel"})

    def _wait(self, come: Callable[[], bool]) -> None:
        turn = self._turn
        with turn:
            while not come():
                if self._gone:
                    raise ServerGone
                if self._reading:
                    turn.wait()
                    continue
                self._reading = True
                turn.release()
                data: bytes | None = None
                try:
                    data = self._reader.read(self._sock)
                except ConnectionError:
                    data = b""
                finally:
                    turn.acquire()
                    self._reading = False
                    # None: a signal handler of the model has raised something (a TimeoutError is an OSError, too).
                    if data is None:
                        turn.notify_all()
                    else:
                        self._received(data)

    def _look(self) -> None:
        """Read what is there, without waiting."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if not self._reading and not self._gone:
                self._received(self._reader.read(self._sock, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        except ConnectionError:
            self._received(b"")
        finally:
            self._turn.release()

    def _received(self, data: bytes) -> None:
        if not data:
            self._gone = True
        for frame in self._reader.feed(data):
            self._dispatch(frame)
        self._turn.notify_all()

    def _dispatch(self, frame: Frame) -> None:
        meta = frame.meta
        freed = meta.get("free")
        if freed and self.arena is not None:
            for offset in freed:
                self.arena.release(offset)
        if frame.kind in _COMMANDS:
            self._commands.append(frame)
        elif frame.kind == Kind.REPLY:
            self._replied(frame)
        elif frame.kind == Kind.CANCEL:
            self._cancelled.update(meta["requests"])
        elif frame.kind == Kind.TRIM and self.arena is not None:
            self.arena.trim()

    def _replied(self, frame: Frame) -> None:
        meta = frame.meta
        # Unpacked even if nobody wants it: that is what gives the shared memory back.
        tensors = Unpacker(bytearray(frame.payload), self.view).tensors(meta.get("tensors") or ())
        call = self._calls.get(meta["call"])
        if call is None:
            return
        reply = Reply(meta, tensors)
        call.replies.append(reply)
        if meta["last"]:
            call.ended = True
            del self._calls[call.number]
            if call.wake is not None:
                self._to_wake -= 1
                call.wake(reply)

    def keep_pace(self) -> None:
        """Wait until the server has taken what was sent, if it was much; else a quick model fills the memory."""
        if self.arena is not None and self.arena.put_bytes - self._paced > _PACE_BYTES:
            self._paced = self.arena.put_bytes
            self.next_reply(self.call({"op": "pace"}))

    def _start_pump(self) -> None:
        if self._pump is None:
            self._pump = threading.Thread(target=self._pump_replies, name="headrace-replies", daemon=True)
            self._pump.start()

    def _pump_replies(self) -> None:
        """Read for coroutines, which cannot; only while one of them waits."""
        try:
            while True:
                with self._turn:
                    while not self._to_wake:
                        self._turn.wait()
                self._wait(lambda: not self._to_wake)
        except ServerGone:
            return

    def _detach(self) -> None:
        self._gone = True
        # Whoever held them is not in this process.
        self._sending = threading.Lock()
        self._turn = threading.Condition()
