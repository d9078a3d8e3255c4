# SPDX-License-Identifier: Apache-2.0
"""The child's end of the socket, shared by all threads of the model.

There is no reader thread: a thread that waits for something reads for all threads until it has arrived, so a request
never switches threads. `main` uses it for commands, the classes of `pb_utils` for responses and calls.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from headrace.backends.python.protocol import (
    Arena,
    ArenaView,
    Buffer,
    Frame,
    FrameReader,
    Kind,
    Meta,
    Unpacker,
    encode_frame,
)
from headrace.core.tensors import Tensor

_JOIN_BYTES = 65_536
_PACE_BYTES = 16 << 20
_COMMANDS = frozenset({Kind.INIT, Kind.EXECUTE, Kind.CLOSE})


class ServerGone(Exception):
    """The server has closed the socket."""

    def __str__(self) -> str:
        """Return the message that a process forked by the model gets."""
        return "the server cannot be reached from here: it has ended, or this process was forked by the model"


class Reply:
    """One answer to a call."""

    __slots__ = ("meta", "tensors")

    def __init__(self, meta: Meta, tensors: list[Tensor]) -> None:
        self.meta = meta
        self.tensors = tensors


class Call:
    """A call to the server."""

    __slots__ = ("ended", "number", "replies", "wake")

    def __init__(self, number: int, wake: Callable[[Reply], None] | None) -> None:
        self.number = number
        self.replies: deque[Reply] = deque()
        self.ended = False
        self.wake = wake
        """Called with the last reply, for callers that cannot block."""


class Channel:
    """Frames to and from the server."""

    def __init__(self, sock: socket.socket, arena: Arena | None, view: ArenaView | None) -> None:
        self.arena = arena
        self.view = view
        self.metric_updates: deque[list[Any]] = deque()
        """Metric updates that go with the next frame."""
        self.closing = False
        self._sock = sock
        self._reader = FrameReader()
        self._read_turn = threading.Condition()
        self._reading = False
        self._server_gone = False
        self._commands: deque[Frame] = deque()
        self._calls: dict[int, Call] = {}
        self._last_call = 0
        self._cancelled: set[int] = set()
        self._outbox: deque[tuple[int, Meta, Sequence[Buffer]]] = deque()
        self._sending = threading.Lock()
        self._paced = 0
        self._to_wake = 0
        self._pump: threading.Thread | None = None
        # A process forked by the model must not use the channel.
        os.register_at_fork(after_in_child=self._detach)

    # Sending

    def send(self, kind: Kind, meta: Meta, pieces: Sequence[Buffer] = ()) -> None:
        """Send a frame from any thread or destructor; never wait for another thread's turn to send."""
        self._outbox.append((kind, meta, pieces))
        while self._outbox:
            # The thread that holds the lock also sends what other threads have queued.
            if not self._sending.acquire(blocking=False):
                return
            try:
                while self._outbox:
                    self._write(*self._outbox.popleft())
            finally:
                self._sending.release()

    def _write(self, kind: int, meta: Meta, pieces: Sequence[Buffer]) -> None:
        if self._server_gone:
            return
        if self.view is not None:
            freed = self.view.take_freed()
            if freed:
                meta["free"] = freed
        if self.metric_updates:
            meta["measures"] = [self.metric_updates.popleft() for _ in range(len(self.metric_updates))]
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
            self._server_gone = True

    # Receiving

    def next_command(self) -> Frame:
        """Wait for the server's next command. Called by the main thread."""
        self._wait(lambda: bool(self._commands))
        return self._commands.popleft()

    def is_cancelled(self, number: int) -> bool:
        """Return whether the server has cancelled this request."""
        if number not in self._cancelled:
            self._poll()
        return number in self._cancelled

    def remove_request(self, number: int) -> None:
        """Remove a request that is answered."""
        self._cancelled.discard(number)

    def call(self, meta: Meta, pieces: Sequence[Buffer] = (), wake: Callable[[Reply], None] | None = None) -> Call:
        """Call the server. With `wake`, no thread has to wait: it is called with the last reply."""
        with self._read_turn:
            self._last_call += 1
            call = Call(self._last_call, wake)
            self._calls[call.number] = call
            if wake is not None:
                self._to_wake += 1
                self._start_pump()
                self._read_turn.notify_all()
        meta["call"] = call.number
        self.send(Kind.CALL, meta, pieces)
        return call

    def next_reply(self, call: Call) -> Reply | None:
        """Wait for the next answer to a call; None after the last one."""
        self._wait(lambda: bool(call.replies) or call.ended)
        return call.replies.popleft() if call.replies else None

    def abandon(self, call: Call) -> None:
        """Discard the remaining replies of a call."""
        if not call.ended:
            self.send(Kind.CALL, {"call": call.number, "op": "cancel"})

    def _wait(self, has_arrived: Callable[[], bool]) -> None:
        turn = self._read_turn
        with turn:
            while not has_arrived():
                if self._server_gone:
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
                    # None: a signal handler of the model raised an exception (a TimeoutError is also an OSError).
                    if data is None:
                        turn.notify_all()
                    else:
                        self._received(data)

    def _poll(self) -> None:
        """Read what is available, without blocking."""
        if not self._read_turn.acquire(blocking=False):
            return
        try:
            if not self._reading and not self._server_gone:
                self._received(self._reader.read(self._sock, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        except ConnectionError:
            self._received(b"")
        finally:
            self._read_turn.release()

    def _received(self, data: bytes) -> None:
        if not data:
            self._server_gone = True
        for frame in self._reader.feed(data):
            self._dispatch(frame)
        self._read_turn.notify_all()

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
        # Always unpack, even if the reply is not wanted: that frees the shared memory.
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

    def apply_backpressure(self) -> None:
        """Wait until the server has read large messages; otherwise a fast model fills the memory."""
        if self.arena is not None and self.arena.put_bytes - self._paced > _PACE_BYTES:
            self._paced = self.arena.put_bytes
            self.next_reply(self.call({"op": "pace"}))

    def _start_pump(self) -> None:
        if self._pump is None:
            self._pump = threading.Thread(target=self._pump_replies, name="headrace-replies", daemon=True)
            self._pump.start()

    def _pump_replies(self) -> None:
        """Read for coroutines, which cannot block; only while one of them waits."""
        try:
            while True:
                with self._read_turn:
                    while not self._to_wake:
                        self._read_turn.wait()
                self._wait(lambda: not self._to_wake)
        except ServerGone:
            return

    def _detach(self) -> None:
        self._server_gone = True
        # Their holders are not in this process.
        self._sending = threading.Lock()
        self._read_turn = threading.Condition()
