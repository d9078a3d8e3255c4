# SPDX-License-Identifier: Apache-2.0
"""The backend `python`: a `model.py` with a class TritonPythonModel or a function `predict`."""

from __future__ import annotations

import ast
import logging
import socket
import time
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.python.instance import PythonInstance
from headrace.backends.python.model_calls import MetricFamilies, SelfCalls, log_from_model
from headrace.backends.python.process import Launch, Started, StartingProcesses, config_message, launch_of
from headrace.backends.python.protocol import Frame, FrameReader, Kind, encode_frame
from headrace.core.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from headrace.core.python_source import parse_python
from headrace.core.telemetry.metrics import Registry
from headrace.models.config.types import ModelConfig

_END_SECONDS = 5.0


def may_complete(file: Path) -> bool:
    """Return whether to start a process for it: False only for a plain class that clearly has no such method."""
    try:
        module = parse_python(file.read_bytes())
    except (SyntaxError, ValueError):
        return True  # The child reports what is wrong, with the line.
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
    """Reject a class that clearly lacks `execute`, without starting a process."""
    source = file.read_bytes()
    if b"execute" not in source:
        shown = "/".join(file.parts[-3:])
        raise InvalidArgument(
            f"Python model {shown} does not implement `execute` method: give its class TritonPythonModel one, or write a "
            "function `def predict(x: np.ndarray) -> np.ndarray` in place of the class"
        )


def completed_config(launch: Launch, starting: StartingProcesses) -> dict[str, Any] | None:
    """Return the configuration as the model completes it; None if it does not."""
    started = Started(launch.python, launch.model_name)
    try:
        settings = launch.settings(Placement(launch.model_name), complete=True)
        started.sock.sendall(b"".join(encode_frame(Kind.INIT, settings)))
        with starting.registered(launch.model_folder, started.popen.kill):
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
    log = logging.getLogger(f"headrace.model.{launch.model_name}")
    if frame.kind == Kind.FAILED:
        text = f"failed to {frame.meta['stage']} model '{launch.model_name}': {frame.meta['text']}"
        log_from_model(log, {**frame.meta, "text": text})
        raise InvalidArgument(text)
    if frame.kind == Kind.LOG:
        log_from_model(log, frame.meta)
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


class PythonBackend:
    """A `contract.Backend` whose models are `model.py` files."""

    def __init__(self) -> None:
        # Shared by all models: metric families, which several models may name.
        self._families: WeakKeyDictionary[Registry, MetricFamilies] = WeakKeyDictionary()
        self._starting = StartingProcesses()

    def usable_gpus(self, present: int) -> int:
        """Return all GPUs: the model decides how to use them."""
        return present

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return the configuration from `auto_complete_config` or from the type hints of `predict`; None without either."""
        launch = launch_of(config, files)
        if config.proto is None:
            return None
        if not may_complete(launch.file):
            check_has_execute(launch.file)
            return None
        completed = completed_config(launch, self._starting)
        return None if completed is None else config_message(config, completed)

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> PythonModel:
        """Check what can be checked without a process; `open` starts the processes."""
        families = self._families.setdefault(services.metrics, MetricFamilies(services.metrics))
        return PythonModel(launch_of(config, files), services, families, self._starting)

    def abandon(self, model_folder: Path) -> None:
        """Stop the starting processes of a model. Call from the loop's thread."""
        self._starting.end(model_folder.absolute())


class PythonModel:
    """One version of a Python model."""

    def __init__(
        self, launch: Launch, services: EngineServices, families: MetricFamilies, starting: StartingProcesses
    ) -> None:
        self._launch = launch
        self._services = services
        self._families = families
        self._starting = starting
        self._self_calls = SelfCalls(launch.model_name, launch.version)

    def open(self, placement: Placement) -> PythonInstance:
        """Start a process and wait until its model is initialised."""
        instance = PythonInstance(self._launch, placement, self._services, self._families, self._self_calls)
        with self._starting.registered(self._launch.model_folder, instance.abandon):
            instance.open()
        return instance

    def close(self) -> None:
        """Do nothing: instances share nothing."""
