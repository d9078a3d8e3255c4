# SPDX-License-Identifier: Apache-2.0
"""What a model asks of the server: to infer with another model, to load one, to measure, to log.

Made by `instance` for each process; calls the engine through its services. Must not know how a model computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from headrace.backends.contract import Answer, EngineServices
from headrace.backends.python.errors import code_of
from headrace.backends.python.frames import Buffer, Frame, Kind, Meta
from headrace.backends.python.measures import Families, Measures
from headrace.backends.python.packing import Unpacker, pack
from headrace.backends.python.process import Process
from headrace.backends.python.self_calls import SelfCalls
from headrace.core.errors import HeadraceError, Internal
from headrace.core.messages import InferRequest, InferResponse, RequestedOutput

_log = logging.getLogger(__name__)


class Calls:
    """The calls of one instance."""

    def __init__(self, services: EngineServices, families: Families, model_name: str, self_calls: SelfCalls) -> None:
        self._services = services
        self._self_calls = self_calls
        self._log = logging.getLogger(f"headrace.model.{model_name}")
        self._measures = Measures(families)
        self._open: dict[int, Callable[[], None]] = {}

    def frame(self, process: Process, frame: Frame) -> None:
        """Take a frame of the kinds CALL and LOG."""
        if frame.kind == Kind.LOG:
            self._log.log(frame.meta["level"], "%s", frame.meta["text"])
        elif frame.kind == Kind.CALL:
            self._call(process, frame)

    def measured(self, updates: list[list[Any]]) -> None:
        """Take the measures that came with a frame."""
        self._measures.update(updates)

    def process_died(self) -> None:
        """Nobody waits for what it asked for."""
        calls, self._open = self._open, {}
        for cancel in calls.values():
            cancel()
        self._self_calls.process_died(self)
        self._measures.process_died()

    def close(self) -> None:
        """The instance is gone."""
        self._measures.close()

    def _call(self, process: Process, frame: Frame) -> None:
        meta = frame.meta
        number: int = meta["call"]
        try:
            deed = _DEEDS[meta["op"]]
            deed(self, process, number, meta, Unpacker(frame.payload, process.view))
        except HeadraceError as error:
            _reply_error(process, number, error)
        except Exception:
            _log.exception("a call of a model failed", extra={"op": str(meta.get("op"))})
            _reply_error(process, number, Internal("the call failed; the server's log has the details"))

    def _infer(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        request = InferRequest(
            meta["model"],
            unpacker.tensors(meta["tensors"]),
            meta["version"],
            meta["id"],
            [RequestedOutput(name) for name in meta["outputs"]],
            meta["parameters"],
        )
        ended = False
        waits = bool(meta.get("blocks")) and self._self_calls.is_own(meta["model"], meta["version"])
        own = self._self_calls.begin(self) if waits else None

        def answered(answer: Answer, last: bool) -> None:
            nonlocal ended
            last = last or isinstance(answer, HeadraceError)
            if last and not ended:
                ended = True
                self._self_calls.end(own)
                self._open.pop(number, None)
            if isinstance(answer, HeadraceError):
                _reply_error(process, number, answer)
            else:
                _reply_response(process, number, answer, last)

        try:
            cancel = self._services.infer(request, answered)
        except BaseException:
            self._self_calls.end(own)
            raise
        # The answer may have come before the call returned.
        if not ended:
            self._open[number] = cancel

    def _cancel(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        cancel = self._open.get(number)
        if cancel is not None:
            cancel()

    def _pace(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        _reply_value(process, number, None)

    def _load(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        files = {name: bytes(unpacker.take(size)) for name, size in meta["files"]}
        self._services.load(meta["model"], meta["config"], files, _replier(process, number))

    def _unload(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        self._services.unload(meta["model"], _replier(process, number))

    def _ready(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        _reply_value(process, number, self._services.is_ready(meta["model"], meta["version"]))

    def _family(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        self._measures.name(meta)
        _reply_value(process, number, None)

    def _metric(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        _reply_value(process, number, self._measures.declare(meta))

    def _value(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        _reply_value(process, number, self._measures.value(meta["metric"]))


_DEEDS: dict[str, Callable[[Calls, Process, int, Meta, Unpacker], None]] = {
    "infer": Calls._infer,
    "cancel": Calls._cancel,
    "pace": Calls._pace,
    "load": Calls._load,
    "unload": Calls._unload,
    "ready": Calls._ready,
    "family": Calls._family,
    "metric": Calls._metric,
    "value": Calls._value,
}


def _replier(process: Process, number: int) -> Callable[[Answer], None]:
    def done(answer: Answer) -> None:
        if isinstance(answer, HeadraceError):
            _reply_error(process, number, answer)
        else:
            _reply_value(process, number, None)

    return done


def _reply_value(process: Process, number: int, value: Any) -> None:
    process.send(Kind.REPLY, {"call": number, "last": True, "value": value})


def _reply_error(process: Process, number: int, error: HeadraceError) -> None:
    process.send(Kind.REPLY, {"call": number, "last": True, "error": [code_of(error), error.message]})


def _reply_response(process: Process, number: int, answer: InferResponse | None, last: bool) -> None:
    pieces: list[Buffer] = []
    meta: Meta = {"call": number, "last": last}
    if answer is None:
        meta["empty"] = True
    elif not process.over:
        meta["tensors"] = pack(answer.outputs, process.arena, pieces)
        meta["parameters"] = dict(answer.parameters)
    process.send(Kind.REPLY, meta, pieces)
