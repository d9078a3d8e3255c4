# SPDX-License-Identifier: Apache-2.0
"""A `model.py` of one function, or one class with `predict`, made into the class that `main` drives.

    def predict(x: np.ndarray) -> np.ndarray: ...

The arguments are the inputs, by name; `hints` reads their types, `values` converts. With `BATCH = 32` in the file the
arrays have one more dimension in front, and requests that come together are computed by one call. `async def` computes
up to 64 requests side by side; a generator answers several times.

Errors: a ValueError means that the request is wrong, as it means everywhere in Python; anything else is the model's fault.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from contextvars import Context
from types import ModuleType
from typing import Any

import numpy as np

from headrace.backends.python.child.configs import ModelConfig
from headrace.backends.python.child.errors import ErrorCode, TritonError, TritonModelException, told
from headrace.backends.python.child.hints import Signature, read_signature
from headrace.backends.python.child.measures import Logger
from headrace.backends.python.child.quick_config import (
    check_batching,
    check_inputs,
    complete,
    dtype_of_field,
    output_hints,
)
from headrace.backends.python.child.requests import InferenceRequest
from headrace.backends.python.child.responses import TRITONSERVER_RESPONSE_COMPLETE_FINAL, InferenceResponse
from headrace.backends.python.child.tensors import Tensor
from headrace.backends.python.child.values import Output, WrongInput, to_argument, to_array, to_outputs
from headrace.core.dtypes import FP32

_AT_ONCE = 64
_MOST_ROWS = 1 << 20

NOTHING_TO_SERVE = (
    "{file} has no class TritonPythonModel and no predict: write a function `def predict(x: np.ndarray) -> np.ndarray`, "
    "a class with such a method, or Triton's class"
)


def model_class_of(module: ModuleType, file: str) -> type[QuickModel]:
    """The class for what a file defines."""
    predict = getattr(module, "predict", None)
    if callable(predict) and not inspect.isclass(predict):
        source: Any = predict
        signature = read_signature(predict, bound=False)
    else:
        source = _class_of(module, file)
        plain = not isinstance(inspect.getattr_static(source, "predict"), staticmethod | classmethod)
        signature = read_signature(source.predict, bound=plain)
    batch = getattr(module, "BATCH", 0)
    if type(batch) is not int or not 0 <= batch <= _MOST_ROWS:
        raise TritonModelException(f"BATCH in {file} is {batch!r}: use the largest number of rows in a batch, or 0")
    fields = {"source": staticmethod(source), "signature": signature, "file": file, "batch": batch}
    return type("QuickModel", (QuickModel,), fields)


def _class_of(module: ModuleType, file: str) -> type:
    # Not those that the file only imports.
    found = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and callable(getattr(value, "predict", None))
    }
    if len(found) > 1 and "Model" in found:
        found = {"Model": found["Model"]}
    if len(found) > 1:
        raise TritonModelException(
            f"{file} has several classes with predict, {', '.join(found)}: name the one to be served Model"
        )
    if not found:
        raise TritonModelException(NOTHING_TO_SERVE.format(file=file))
    (only,) = found.values()
    if any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(only).parameters.values()
    ):
        raise TritonModelException(
            f"{only.__name__} in {file} cannot be made without arguments: give those of __init__ default values"
        )
    return only


class QuickModel:
    """What `main` takes for a TritonPythonModel."""

    source: Callable[..., Any]
    signature: Signature
    file: str
    batch: int

    @classmethod
    def auto_complete_config(cls, config: ModelConfig) -> ModelConfig:
        """Add what the hints tell to what the configuration says."""
        return complete(cls.signature, cls.batch, config)

    def __init__(self) -> None:
        made: Any = self.source
        self._owner: Any = None
        self._predict: Callable[..., Any] = made
        if inspect.isclass(made):
            self._owner = made()
            self._predict = self._owner.predict
        self._running: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._surprised: set[str] = set()

    def initialize(self, args: dict[str, str]) -> None:
        """Note what the configuration has become; it may not have come by `auto_complete_config`."""
        config = json.loads(args["model_config"])
        check_inputs(self.signature, config)
        self._name, self._instance = args["model_name"], args["model_instance_name"]
        self._batches = config.get("max_batch_size", 0) > 0
        check_batching(self.signature, self._batches)
        decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        if self.signature.streams and not decoupled:
            raise TritonModelException(
                "predict answers several times, and the configuration does not allow it: add "
                "model_transaction_policy { decoupled: true }"
            )
        self._decoupled = decoupled
        self._hints = output_hints(self.signature, config)
        self._outputs = [
            Output(each["name"], dtype_of_field(each.get("data_type", "")), tuple(each.get("dims", ())))
            for each in config.get("output", ())
        ]

    def finalize(self) -> None:
        """Close the model, if it wants to be closed."""
        if hasattr(self._owner, "close"):
            self._owner.close()

    def execute(self, requests: Sequence[InferenceRequest]) -> Any:
        """See `main`: a list of responses, or a coroutine, or None for what is answered by its sender."""
        if self.signature.awaits:
            return self._begin(requests)
        if self._decoupled:
            for request in requests:
                self._stream(request)
            return None
        if self._batches and len(requests) > 1:
            try:
                joined = self._joined(requests)
                if joined is not None:
                    return self._parted(requests, self._predict(**joined))
            except Exception as error:
                # Whose fault it is shows when each is computed alone.
                Logger.log_verbose(f"a batch of {len(requests)} requests failed, each is tried alone: {error}")
        return [self._answered(request) for request in requests]

    # One request

    def _answered(self, request: InferenceRequest) -> InferenceResponse:
        try:
            return self._response(self._predict(**self._arguments(request)))
        except (Exception, SystemExit) as error:  # the model's own code: anything may come
            return self._failure(error)

    def _stream(self, request: InferenceRequest) -> None:
        sender = request.get_response_sender()
        try:
            returned = self._predict(**self._arguments(request))
            for part in returned if self.signature.streams else (returned,):
                if sender.is_cancelled():
                    break
                sender.send(self._response(part))
            # What is left of it, if nobody wants the rest.
            if self.signature.streams and hasattr(returned, "close"):
                returned.close()
            sender.send(flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except (Exception, SystemExit) as error:  # as above
            sender.send(self._failure(error), TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _arguments(self, request: InferenceRequest) -> dict[str, Any]:
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        arguments: dict[str, Any] = {}
        for name, hint in self.signature.inputs.items():
            if name in arrays:
                arguments[name] = to_argument(name, arrays[name], hint)
            elif not hint.has_default:
                arguments[name] = None
        return arguments

    def _response(self, returned: Any) -> InferenceResponse:
        tensors = []
        for output, value in to_outputs(returned, self._outputs):
            self._look(value, output)
            tensors.append(Tensor(output.name, to_array(value, output, batched=self._batches)))
        return InferenceResponse(tensors)

    def _look(self, value: Any, output: Output) -> None:
        """Whole numbers that become FP32 because nobody said what they are: told once."""
        hint = self._hints.get(output.name)
        kind = getattr(getattr(value, "dtype", None), "kind", "f")
        untold = output.dtype is FP32 and hint is not None and hint.dtype is None
        if untold and kind in "iub" and output.name not in self._surprised:
            self._surprised.add(output.name)
            Logger.log_warn(
                f"output '{output.name}' of model '{self._name}' is {value.dtype} and is sent as FP32: the hint does not "
                "say its type; write npt.NDArray[np.int64] or the like"
            )

    def _failure(self, error: BaseException) -> InferenceResponse:
        if isinstance(error, ValueError | WrongInput):
            Logger.log_info(f"model '{self._name}' refused a request: {told(error, self.file)}")
            text = f"model '{self._name}' refused the request: {error}"
            return InferenceResponse(error=TritonError(text, ErrorCode.INVALID_ARG))
        text = f"Failed to process the request(s) for model instance '{self._instance}', message: "
        text += told(error, self.file)
        Logger.log_error(text)
        return InferenceResponse(error=TritonError(text))

    # Several in one call

    def _joined(self, requests: Sequence[InferenceRequest]) -> dict[str, Any] | None:
        """The inputs of all, one below the other; None if they differ in more than their rows."""
        each = [self._arguments(request) for request in requests]
        first = each[0]
        if any(arguments.keys() != first.keys() for arguments in each):
            return None
        joined: dict[str, Any] = {}
        for name in first:
            arrays = [arguments[name] for arguments in each]
            if all(array is None for array in arrays):
                joined[name] = None
                continue
            if any(array is None or array.shape[1:] != arrays[0].shape[1:] for array in arrays):
                return None
            joined[name] = np.concatenate(arrays)
        return joined

    def _parted(self, requests: Sequence[InferenceRequest], returned: Any) -> list[InferenceResponse]:
        rows = [request.inputs()[0].shape()[0] for request in requests]
        whole = self._response(returned).output_tensors()
        for tensor in whole:
            if tensor.shape()[0] != sum(rows):
                raise TritonModelException(f"predict got {sum(rows)} rows and returned shape {tensor.shape()}")
        responses = []
        start = 0
        for count in rows:
            parts = [Tensor(tensor.name(), tensor.as_numpy()[start : start + count]) for tensor in whole]
            responses.append(InferenceResponse(parts))
            start += count
        return responses

    # With `async`

    async def _begin(self, requests: Sequence[InferenceRequest]) -> None:
        """Start to compute the requests. The next ones may come before they are answered."""
        groups = [list(requests)] if self._batches else [[request] for request in requests]
        for group in groups:
            await self._slots.acquire()
            # In a context of its own: nobody waits for it, so it may call the model itself.
            task = asyncio.create_task(self._answer_later(group), context=Context())
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._slots.release()

    async def _answer_later(self, requests: Sequence[InferenceRequest]) -> None:
        if self._batches and len(requests) > 1:
            try:
                joined = self._joined(requests)
                if joined is not None:
                    responses = self._parted(requests, await self._predict(**joined))
                    for request, response in zip(requests, responses, strict=True):
                        request.get_response_sender().send(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    return
            except Exception as error:
                Logger.log_verbose(f"a batch of {len(requests)} requests failed, each is tried alone: {error}")
        for request in requests:
            await self._answer_one_later(request)

    async def _answer_one_later(self, request: InferenceRequest) -> None:
        sender = request.get_response_sender()
        try:
            returned = self._predict(**self._arguments(request))
            if not self.signature.streams:
                sender.send(self._response(await returned), TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return
            async for part in returned:
                if sender.is_cancelled():
                    break
                sender.send(self._response(part))
            if hasattr(returned, "aclose"):
                await returned.aclose()
            sender.send(flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except (Exception, SystemExit) as error:  # as above
            sender.send(self._failure(error), TRITONSERVER_RESPONSE_COMPLETE_FINAL)
