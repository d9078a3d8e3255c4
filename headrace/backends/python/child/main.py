# SPDX-License-Identifier: Apache-2.0
"""The main loop of a model's process: load `model.py`, initialise the model, execute batches until the server closes.

The server's `process` starts it through `stub`. Every error of the model becomes a message to the server.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any

from headrace.backends.python.child import pb_utils
from headrace.backends.python.child.channel import Channel, ServerGone
from headrace.backends.python.child.configs import ModelConfig
from headrace.backends.python.child.errors import (
    ErrorCode,
    TritonModelException,
    describe_error,
    format_trace,
    shown_file,
)
from headrace.backends.python.child.predict_function import model_class_of
from headrace.backends.python.child.requests import (
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    received_request,
)
from headrace.backends.python.child.responses import AGAIN, FINAL, InferenceResponse, RequestState
from headrace.backends.python.child.session import Session, bind, in_awaited
from headrace.backends.python.protocol import Arena, ArenaView, Buffer, Frame, Kind, Unpacker

_Batch = Sequence[tuple[InferenceRequest, RequestState]]


def main(sock: socket.socket, incoming: int, outgoing: int) -> None:
    """Serve one model until the server closes the channel."""
    channel = Channel(sock, Arena(outgoing) if outgoing >= 0 else None, ArenaView(incoming) if incoming >= 0 else None)
    _ignore_signals(channel)
    try:
        runner = Runner(channel, channel.next_command().meta)
        if runner.start():
            runner.serve()
    except ServerGone:
        pass


class Runner:
    """Runs one model."""

    def __init__(self, channel: Channel, settings: dict[str, Any]) -> None:
        self._channel = channel
        self._settings = settings
        self._file: str = settings["file"]
        self._name: str = settings["instance"]
        self._decoupled: bool = settings["decoupled"]
        self._session = Session(
            channel, os.path.dirname(self._file), self._decoupled, tuple(settings["outputs"]), settings["log_level"]
        )
        self._model: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[Future[Any]] = set()
        self._rescheduled: dict[int, RequestState] = {}

    def start(self) -> bool:
        """Load and initialise the model, or complete its configuration; return whether batches follow."""
        bind(self._session)
        stage = "load"
        try:
            model_class = self._load()
            if self._settings["complete"]:
                stage = "auto-complete the configuration of"
                self._channel.send(Kind.READY, {"config": self._completed(model_class)})
                return False
            stage = "initialize"
            self._model = model_class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(dict(self._settings["args"]))
        except (Exception, SystemExit) as error:  # The model's code may raise anything.
            self._channel.send(
                Kind.FAILED, {"stage": stage, "text": describe_error(error, self._file), "trace": format_trace(error)}
            )
            return False
        # Freeze existing objects: the garbage collector need not scan them again.
        gc.freeze()
        self._channel.send(Kind.READY, {})
        return True

    def serve(self) -> None:
        """Execute batches until the server closes the channel."""
        while True:
            frame = self._channel.next_command()
            if frame.kind == Kind.EXECUTE:
                self._execute(frame)
            elif frame.kind == Kind.CLOSE:
                break
            # Otherwise the tensors of this batch would live until the next one.
            del frame
        self._channel.closing = True
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except (Exception, SystemExit) as error:  # The model's code may raise anything.
            text = f"finalize of model instance '{self._name}' failed: {describe_error(error, self._file)}"
            self._log_error(text, error)
        self._channel.send(Kind.BYE, {})

    def _load(self) -> Any:
        folder = os.path.dirname(self._file)
        # Triton's module name, and its compiled part, which some models import.
        sys.modules["triton_python_backend_utils"] = sys.modules["c_python_backend_utils"] = pb_utils
        sys.path[:0] = [folder, os.path.dirname(folder)]
        # As a package, so that `from . import helper` finds neighbouring files.
        spec = importlib.util.spec_from_file_location("model", self._file, submodule_search_locations=[folder])
        if spec is None or spec.loader is None:
            raise TritonModelException(f"{shown_file(self._file)} is not a Python file: name it model.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["model"] = module
        spec.loader.exec_module(module)
        if hasattr(module, "TritonPythonModel"):
            model_class = module.TritonPythonModel
            if not hasattr(model_class, "execute"):
                raise TritonModelException(
                    f"Python model {shown_file(self._file)} does not implement `execute` method."
                )
            return model_class
        return model_class_of(module, self._file)

    def _completed(self, model_class: Any) -> Any:
        if not hasattr(model_class, "auto_complete_config"):
            return None
        completed = model_class.auto_complete_config(ModelConfig(self._settings["args"]["model_config"]))
        if not isinstance(completed, ModelConfig):
            raise TritonModelException("auto_complete_config must return the pb_utils.ModelConfig it was given")
        return completed.as_dict()

    def _execute(self, frame: Frame) -> None:
        unpacker = Unpacker(bytearray(frame.payload), self._channel.view)
        batch = [
            received_request(entry, unpacker, self._rescheduled.pop(entry[0], None)) for entry in frame.meta["requests"]
        ]
        done = frame.meta["batch"]
        del unpacker, frame
        self._session.busy = True
        answers: list[list[Any]] = []
        pieces: list[Buffer] = []
        try:
            returned = self._model.execute([request for request, _ in batch])
            if asyncio.iscoroutine(returned):
                if self._decoupled:
                    self._on_task_done(asyncio.run_coroutine_threadsafe(returned, self._event_loop()), batch)
                    returned = None
                else:
                    returned = self._run_coroutine(returned)
            answers = self._responses_of(batch, returned, pieces)
            del returned
        except (
            Exception,
            SystemExit,
        ) as error:  # The model's code may raise anything; the server decides whether the process ends.
            answers, pieces = self._failed(batch, error), []
        # Before the frame is built: it then carries the memory freed here.
        del batch
        self._session.busy = False
        self._channel.send(Kind.ANSWER, {"answers": answers, "done": done}, pieces)

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._session.awaited = mark = object()

        async def marked() -> Any:
            in_awaited.set(mark)
            return await coroutine

        try:
            return asyncio.run_coroutine_threadsafe(marked(), self._event_loop()).result()
        finally:
            self._session.awaited = None

    def _responses_of(self, batch: _Batch, returned: Any, pieces: list[Buffer]) -> list[list[Any]]:
        answers: list[list[Any]] = []
        if returned is None:
            returned = [None] * len(batch)
        elif self._decoupled:
            raise TritonModelException(
                f"Python model '{self._name}' is using the decoupled mode and the execute function must return None."
            )
        if not isinstance(returned, list):
            raise TritonModelException(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(batch):
            raise TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(batch)}, and InferenceResponse(s) size is:{len(returned)}"
            )
        for (request, state), response in zip(batch, returned, strict=True):
            self._check(request, response)
            if response is not None:
                state.count(response, final=True)
        # Nothing takes shared memory until all responses are checked.
        for (request, state), response in zip(batch, returned, strict=True):
            if response is not None:
                answers.append([state.number, FINAL, *response.packed(state.wanted, self._channel, pieces)])
            elif request.release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE and not state.over:
                answers.append([state.number, AGAIN, None, None, None])
                # Its sender stays valid, also in other threads, and may complete before the request returns.
                self._rescheduled = {number: old for number, old in self._rescheduled.items() if not old.over}
                self._rescheduled[state.number] = state
        for (_, state), response in zip(batch, returned, strict=True):
            if response is not None:
                state.close()
        return answers

    def _check(self, request: InferenceRequest, response: Any) -> None:
        if response is None:
            return
        if request.release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            raise TritonModelException(
                "Expected a None object in the execute function return list for rescheduled request, found type "
                f"'{type(response)}'."
            )
        if not isinstance(response, InferenceResponse):
            raise TritonModelException(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(response)}'."
            )

    def _failed(self, batch: _Batch, error: BaseException) -> list[list[Any]]:
        text = describe_error(error, self._file)
        message = f"Failed to process the request(s) for model instance '{self._name}', message: {text}"
        self._log_error(message, error)
        answers: list[list[Any]] = []
        for _, state in batch:
            if not state.over:
                answers.append([state.number, FINAL, [int(ErrorCode.INTERNAL), message], None, None])
            state.close()
        return answers

    def _on_task_done(self, future: Future[Any], batch: _Batch) -> None:
        """Log the error of a decoupled coroutine and fail its requests."""

        def finished(future: Future[Any]) -> None:
            self._running.discard(future)
            error = TritonModelException("the coroutine was cancelled") if future.cancelled() else future.exception()
            if error is not None:
                self._channel.send(Kind.ANSWER, {"answers": self._failed(batch, error)})

        self._running.add(future)
        future.add_done_callback(finished)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="headrace-asyncio", daemon=True).start()
        return self._loop

    def _log_error(self, text: str, error: BaseException) -> None:
        self._channel.send(Kind.LOG, {"level": 40, "text": text, "trace": format_trace(error)})


def _ignore_signals(channel: Channel) -> None:
    """Ignore SIGINT and SIGTERM, which also reach this process: the server decides when it ends."""
    own = os.getpid()

    def handle(number: int, _: FrameType | None) -> None:
        if os.getpid() != own:
            # In a process forked by the model: restore the default handlers.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif channel.closing and number == signal.SIGTERM:
            os._exit(128 + number)

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
