# SPDX-License-Identifier: Apache-2.0
"""One child process of a Python model: command line, start, socket, shared memory and exit."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from headrace.backends.contract import ModelFiles, Placement
from headrace.backends.python.protocol import (
    KEPT_BYTES,
    Arena,
    ArenaView,
    Buffer,
    Frame,
    FrameReader,
    Kind,
    Meta,
    encode_frame,
    make_region,
)
from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from headrace.core.exit_status import describe_exit
from headrace.models.config.messages import to_json
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec

_INIT_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the processes of one version."""

    model_name: str
    version: int
    file: Path
    model_folder: Path
    python: str
    init_timeout_seconds: float
    max_batch_size: int
    decoupled: bool
    output_names: tuple[str, ...]
    config_json: str

    def settings(self, placement: Placement, *, complete: bool = False) -> Meta:
        """Return the first message to a child."""
        return {
            "file": str(self.file),
            "instance": placement.name,
            "decoupled": self.decoupled,
            "outputs": self.output_names,
            "log_level": logging.getLogger(f"headrace.model.{self.model_name}").getEffectiveLevel(),
            "complete": complete,
            "args": {
                "model_config": self.config_json,
                "model_instance_kind": placement.kind.upper(),
                "model_instance_name": placement.name,
                "model_instance_device_id": str(placement.device),
                "model_repository": str(self.model_folder),
                "model_version": str(self.version),
                "model_name": self.model_name,
            },
        }


def launch_of(config: ModelConfig, files: ModelFiles) -> Launch:
    """Return how to start a version, or raise an error that says why it cannot start."""
    file = (files.version_folder / (config.default_model_filename or "model.py")).absolute()
    if not file.is_file():
        raise NotFound(f"model '{config.name}' has no {file.name} in {files.version_folder}: put it there")
    return Launch(
        model_name=config.name,
        version=files.version,
        file=file,
        model_folder=files.model_folder.absolute(),
        python=_interpreter(config, files),
        init_timeout_seconds=_seconds(config, "INIT_TIMEOUT_SECONDS", _INIT_TIMEOUT_SECONDS),
        max_batch_size=config.max_batch_size,
        decoupled=config.decoupled,
        output_names=tuple(output.name for output in config.outputs),
        config_json=config_json(config),
    )


def _interpreter(config: ModelConfig, files: ModelFiles) -> str:
    given = config.parameters.get("EXECUTION_ENV_PATH", "")
    if not given:
        return sys.executable
    folder = Path(given.replace("$$TRITON_MODEL_DIRECTORY", str(files.model_folder)))
    if not folder.is_absolute():
        folder = files.model_folder / folder
    python = folder / "bin" / "python"
    if python.is_file() and os.access(python, os.X_OK):
        return str(python.absolute())
    if folder.is_file():
        raise Unimplemented(
            f"EXECUTION_ENV_PATH of model '{config.name}' is an archive, which is not supported: unpack it and name the "
            "folder, one that has bin/python"
        )
    raise FailedPrecondition(
        f"EXECUTION_ENV_PATH of model '{config.name}' names {folder}, which has no bin/python: name the folder of a "
        "virtual environment, or leave it out"
    )


def _seconds(config: ModelConfig, name: str, default: float) -> float:
    given = config.parameters.get(name)
    if given is None:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise InvalidArgument(f"parameter {name} of model '{config.name}' is {given[:32]!a}: use seconds above 0")
    return seconds


class StartingProcesses:
    """The processes that are starting, by model folder, with a function to stop each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ends: dict[object, tuple[Path, Callable[[], None]]] = {}

    @contextmanager
    def registered(self, model_folder: Path, end: Callable[[], None]) -> Iterator[None]:
        """Register a starting process for the duration of the context."""
        key = object()
        with self._lock:
            self._ends[key] = (model_folder, end)
        try:
            yield
        finally:
            with self._lock:
                del self._ends[key]

    def end(self, model_folder: Path) -> None:
        """Stop everything that is starting for a model."""
        with self._lock:
            ends = [end for folder, end in self._ends.values() if folder == model_folder]
        for end in ends:
            end()


_JOIN_BYTES = 65_536
_FREE_AT_ONCE_BYTES = 4 << 20
_TRIM_SECONDS = 10.0
_EXIT_POLL_SECONDS = 0.05
_EXIT_POLLS = 40
_ROOT = Path(__file__).resolve().parents[3]
_STUB = Path(__file__).with_name("stub.py")


class Started:
    """A process with the server's ends of socket and shared memory."""

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
        """Close the descriptors of the shared memory; the mappings stay."""
        for fd in (self.incoming, self.outgoing):
            if fd >= 0:
                os.close(fd)
        self.incoming = self.outgoing = -1


class Process:
    """A running child. The loop's thread calls `on_frame` and, once and last, `on_exit`."""

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
            pass  # An old kernel or a sandbox: detect the exit by the end of the socket.
        self._poll: asyncio.TimerHandle | None = None
        self._polls = 0

    @property
    def over(self) -> bool:
        """Whether the process has exited."""
        return self._gone

    def send(self, kind: Kind, meta: Meta, pieces: Sequence[Buffer] = ()) -> None:
        """Send a frame; what the socket does not accept now is sent later."""
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
        """Send a signal, if the process still runs."""
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
        """Handle the end of the socket: the process must exit soon, since it is useless without it."""
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
        # A model that streams large responses gets no other frame that could carry the freed blocks.
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
                unsent.clear()  # The process is dead; its exit is reported soon.
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
        # The socket may still hold its last frames.
        sock = self._started.sock
        try:
            while data := self._reader.read(sock):
                self._feed(data)
        except OSError:
            pass
        self._close()
        self._on_exit(self, describe_exit(code))

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
        """Kill the process without the loop, which has already stopped. Safe from any thread."""
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


def config_json(config: ModelConfig) -> str:
    """Return the configuration as `initialize` gets it, defaults included."""
    return json.dumps(_from_types(config) if config.proto is None else to_json(config.proto))


def config_message(config: ModelConfig, completed: dict[str, Any]) -> Any:
    """Parse the result of `auto_complete_config` as a message of the same class."""
    try:
        return ParseDict(completed, type(config.proto)())
    except ParseError as error:
        raise InvalidArgument(
            f"auto_complete_config of model '{config.name}' gave a configuration that is not valid: {error}"
        ) from None


def _from_types(config: ModelConfig) -> dict[str, Any]:
    """Convert a configuration that was never a message."""
    return {
        "name": config.name,
        "backend": config.backend,
        "max_batch_size": config.max_batch_size,
        "input": [_tensor(spec) for spec in config.inputs],
        "output": [_tensor(spec) for spec in config.outputs],
        "model_transaction_policy": {"decoupled": config.decoupled},
        "parameters": {name: {"string_value": value} for name, value in config.parameters.items()},
    }


def _tensor(spec: InputSpec | OutputSpec) -> dict[str, Any]:
    data_type = "TYPE_INVALID" if spec.dtype is None else spec.dtype.config_name
    return {"name": spec.name, "data_type": data_type, "dims": list(spec.dims or ())}
