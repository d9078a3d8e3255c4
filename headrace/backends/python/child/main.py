# SPDX-License-Identifier: Apache-2.0
"""The model's process: loads `model.py`, initialises the model and gives it batches until the server says it is over.

Started through `stub` by the server's `process`. Whatever the model does wrong becomes a message to the server.
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

from headrace.backends.python.arena import Arena, ArenaView
from headrace.backends.python.child import pb_utils
from headrace.backends.python.child.channel import Channel, ServerGone
from headrace.backends.python.child.configs import ModelConfig
from headrace.backends.python.child.errors import ErrorCode, TritonModelException, told
from headrace.backends.python.child.quick import model_class_of
from headrace.backends.python.child.requests import (
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    received_request,
)
from headrace.backends.python.child.responses import AGAIN, FINAL, InferenceResponse, RequestState
from headrace.backends.python.child.session import Session, bind, in_awaited
from headrace.backends.python.frames import Buffer, Frame, Kind
from headrace.backends.python.packing import Unpacker

_Batch = Sequence[tuple[InferenceRequest, RequestState]]


def main(sock: socket.socket, incoming: int, outgoing: int) -> None:
    """Serve one model until the server closes the channel."""
    channel = Channel(sock, Arena(outgoing) if outgoing >= 0 else None, ArenaView(incoming) if incoming >= 0 else None)
    _keep_from_signals(channel)
    try:
        runner = Runner(channel, channel.next_command().meta)
        if runner.start():
            runner.serve()
    except ServerGone:
        pass


class Runner:
    """The model and what is around it."""

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
        """Load and initialise the model, or complete its configuration; whether batches are to follow."""
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
        except (Exception, SystemExit) as error:  # the model's own code: anything may come
            self._channel.send(Kind.FAILED, {"stage": stage, "text": told(error, self._file)})
            return False
        # What exists now stays: the collector need not look at it again and again.
        gc.freeze()
        self._channel.send(Kind.READY, {})
        return True

    def serve(self) -> None:
        """Give batches to the model until the end."""
        while True:
            frame = self._channel.next_command()
            if frame.kind == Kind.EXECUTE:
                self._execute(frame)
            elif frame.kind == Kind.CLOSE:
                break
            # Otherwise the tensors of this batch would live until the next one is here.
            del frame
        self._channel.closing = True
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except (Exception, SystemExit) as error:  # as above
            self._log_error(f"finalize of model instance '{self._name}' failed: {told(error, self._file)}")
        self._channel.send(Kind.BYE, {})

    def _load(self) -> Any:
        folder = os.path.dirname(self._file)
        # Triton's name for the module, and that of its compiled half, which some models import.
        sys.modules["triton_python_backend_utils"] = sys.modules["c_python_backend_utils"] = pb_utils
        sys.path[:0] = [folder, os.path.dirname(folder)]
        # As a package, so that `from . import helper` finds what lies beside it.
        spec = importlib.util.spec_from_file_location("model", self._file, submodule_search_locations=[folder])
        if spec is None or spec.loader is None:
            raise TritonModelException(f"{self._file} is not a Python file: name it model.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["model"] = module
        spec.loader.exec_module(module)
        if hasattr(module, "TritonPythonModel"):
            model_class = module.TritonPythonModel
            if not hasattr(model_class, "execute"):
                raise TritonModelException(f"Python model {self._file} does not implement `execute` method.")
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
                    self._follow(asyncio.run_coroutine_threadsafe(returned, self._event_loop()), batch)
                    returned = None
                else:
                    returned = self._waited_for(returned)
            answers = self._answers(batch, returned, pieces)
            del returned
        except (Exception, SystemExit) as error:  # as above; the end of the process is the server's to decide
            answers, pieces = self._failed(batch, error), []
        # Before the frame is made: memory that is free now is told with it.
        del batch
        self._session.busy = False
        self._channel.send(Kind.ANSWER, {"answers": answers, "done": done}, pieces)

    def _waited_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._session.awaited = mark = object()

        async def marked() -> Any:
            in_awaited.set(mark)
            return await coroutine

        try:
            return asyncio.run_coroutine_threadsafe(marked(), self._event_loop()).result()
        finally:
            self._session.awaited = None

    def _answers(self, batch: _Batch, returned: Any, pieces: list[Buffer]) -> list[list[Any]]:
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
        # Only now that all of them are known to be good does anything take memory.
        for (request, state), response in zip(batch, returned, strict=True):
            if response is not None:
                answers.append([state.number, FINAL, *response.packed(state.wanted, self._channel, pieces)])
            elif request.release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE and not state.over:
                answers.append([state.number, AGAIN, None, None, None])
                # Its sender stays good, whoever has it; and may be used up before the request is back.
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
        text = told(error, self._file)
        message = f"Failed to process the request(s) for model instance '{self._name}', message: {text}"
        self._log_error(message)
        answers: list[list[Any]] = []
        for _, state in batch:
            if not state.over:
                answers.append([state.number, FINAL, [int(ErrorCode.INTERNAL), message], None, None])
            state.close()
        return answers

    def _follow(self, future: Future[Any], batch: _Batch) -> None:
        """A decoupled coroutine goes on by itself; if it fails, its requests do."""

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

    def _log_error(self, text: str) -> None:
        self._channel.send(Kind.LOG, {"level": 40, "text": text})


def _keep_from_signals(channel: Channel) -> None:
    """Ctrl-C and a service manager's SIGTERM reach this process too, but ending in order is the server's to decide."""
    own = os.getpid()

    def handle(number: int, _: FrameType | None) -> None:
        if os.getpid() != own:
            # In a process that the model forked: as if nobody had ever caught it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif channel.closing and number == signal.SIGTERM:
            os._exit(128 + number)

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
