# SPDX-License-Identifier: Apache-2.0
"""Asks a model's own `auto_complete_config` what its configuration may leave out, in a child that does only that.

Called by `backend`, from a loader thread, which waits.
"""

from __future__ import annotations

import ast
import logging
import socket
import time
from pathlib import Path
from typing import Any

from headrace.backends.contract import Placement
from headrace.backends.python.frames import Frame, FrameReader, Kind, encode_frame
from headrace.backends.python.launch import Launch
from headrace.backends.python.process import Started
from headrace.backends.python.starting import Starting
from headrace.core.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument

_END_SECONDS = 5.0


def may_complete(file: Path) -> bool:
    """Whether it is worth a process to ask: False only for a plain class that plainly has no such function."""
    try:
        module = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return True  # the child says what is wrong, and where
    for statement in module.body:
        if isinstance(statement, ast.ClassDef) and statement.name == "TritonPythonModel":
            plain = not statement.bases and not statement.decorator_list and not statement.keywords
            names = {inner.name for inner in ast.walk(statement) if isinstance(inner, ast.FunctionDef)}
            mentioned = any(
                isinstance(node, ast.Attribute | ast.Name | ast.Constant) and "auto_complete_config" in ast.dump(node)
                for node in ast.walk(module)
            )
            return not plain or "auto_complete_config" in names or mentioned
    return True


def check_has_execute(file: Path) -> None:
    """Refuse a class that plainly lacks what every model needs: no process is started that would say so."""
    source = file.read_bytes()
    if b"execute" not in source:
        raise InvalidArgument(
            f"Python model {file} does not implement `execute` method: give its class TritonPythonModel one, or write a "
            "function `def predict(x: np.ndarray) -> np.ndarray` in place of the class"
        )


def completed_config(launch: Launch, starting: Starting) -> dict[str, Any] | None:
    """The configuration as the model completes it; None if it does not."""
    started = Started(launch.python, launch.model_name)
    try:
        settings = launch.settings(Placement(launch.model_name), complete=True)
        started.sock.sendall(b"".join(encode_frame(Kind.INIT, settings)))
        with starting.noted(launch.model_folder, started.popen.kill):
            return _answer(started.sock, launch)
    finally:
        started.sock.close()
        started.close_regions()
        _end(started)


def _answer(sock: socket.socket, launch: Launch) -> dict[str, Any] | None:
    reader = FrameReader()
    end = time.monotonic() + launch.init_timeout_seconds
    while True:
        sock.settimeout(max(0.01, end - time.monotonic()))
        try:
            data = reader.read(sock)
        except TimeoutError:
            raise DeadlineExceeded(
                f"auto_complete_config of model '{launch.model_name}' took longer than {launch.init_timeout_seconds:g} "
                "seconds; the parameter INIT_TIMEOUT_SECONDS allows more"
            ) from None
        except OSError:
            data = b""
        if not data:
            raise FailedPrecondition(
                f"the process that completes the configuration of model '{launch.model_name}' died; the log has what it "
                "wrote"
            )
        for frame in reader.feed(data):
            if frame.kind == Kind.READY:
                completed: dict[str, Any] | None = frame.meta["config"]
                return completed
            _other(sock, frame, launch)


def _other(sock: socket.socket, frame: Frame, launch: Launch) -> None:
    if frame.kind == Kind.FAILED:
        text = f"failed to {frame.meta['stage']} model '{launch.model_name}': {frame.meta['text'].strip()}"
        raise InvalidArgument(text)
    if frame.kind == Kind.LOG:
        logging.getLogger(f"headrace.model.{launch.model_name}").log(frame.meta["level"], "%s", frame.meta["text"])
    elif frame.kind == Kind.CALL:
        refusal = [5, "the server cannot be called from auto_complete_config"]
        reply = {"call": frame.meta["call"], "last": True, "error": refusal}
        sock.sendall(b"".join(encode_frame(Kind.REPLY, reply)))


def _end(started: Started) -> None:
    try:
        started.popen.wait(_END_SECONDS)
    except Exception:
        started.popen.kill()
        started.popen.wait()
