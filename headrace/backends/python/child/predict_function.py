# SPDX-License-Identifier: Apache-2.0
"""Turn a `model.py` with one `predict` function or class into a class like TritonPythonModel, which `main` runs."""

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
from headrace.backends.python.child.errors import (
    ErrorCode,
    TritonError,
    TritonModelException,
    describe_error,
    format_trace,
    is_raised_by_model,
    shown_file,
)
from headrace.backends.python.child.metrics import Logger, log_with_trace
from headrace.backends.python.child.requests import InferenceRequest
from headrace.backends.python.child.responses import TRITONSERVER_RESPONSE_COMPLETE_FINAL, InferenceResponse
from headrace.backends.python.child.tensors import Tensor
from headrace.backends.python.child.type_hints import Hint, Signature, read_signature
from headrace.backends.python.child.values import Output, WrongInput, to_argument, to_array, to_outputs
from headrace.core.dtypes import BY_CONFIG_NAME, FP32

ANY_TYPE = "TYPE_INVALID"
_ASSUMED_DIMS = [-1]


def complete(signature: Signature, batch: int, config: ModelConfig) -> ModelConfig:
    """Add inputs and outputs from the hints to the configuration; log where a hint has no type or shape."""
    given = config.as_dict()
    batches = bool(given.get("max_batch_size", 0) or batch)
    check_batching(signature, batches)
    check_inputs(signature, given)
    for name, hint in signature.inputs.items():
        more = {"optional": True} if hint.optional else {}
        config.add_input({**_described("input", name, hint, given), **more})
    for name, hint in output_hints(signature, given).items():
        config.add_output(_described("output", name, hint, given))
    if batch and not given.get("max_batch_size", 0):
        config.set_max_batch_size(batch)
    if batches and "sequence_batching" not in given:
        config.set_dynamic_batching()
    if signature.streams:
        config.set_model_transaction_policy({"decoupled": True})
    return config


def check_batching(signature: Signature, batches: bool) -> None:
    """Reject batching for hints without rows."""
    if not batches:
        return
    if signature.streams:
        raise TritonModelException("predict answers several times, so it cannot batch: take BATCH out")
    hints = {**signature.inputs, **signature.outputs}
    wrong = [name for name, hint in hints.items() if hint.form != "array"]
    if wrong:
        raise TritonModelException(
            f"predict batches, and {', '.join(wrong)} cannot have rows: make each an array, such as "
            "npt.NDArray[np.float32], whose first dimension is the batch; or take BATCH out"
        )


def check_inputs(signature: Signature, config: dict[str, Any]) -> None:
    """Reject a configuration with inputs that the function does not have."""
    for tensor in config.get("input", ()):
        if tensor["name"] not in signature.inputs:
            raise TritonModelException(
                f"the configuration has an input '{tensor['name']}', and predict takes "
                f"{', '.join(signature.inputs)}: rename one of them"
            )


def output_hints(signature: Signature, config: dict[str, Any]) -> dict[str, Hint]:
    """Return the hints under the configuration's output names, if it has any."""
    hints = dict(signature.outputs)
    declared = [tensor["name"] for tensor in config.get("output", ())]
    if not declared:
        if not hints:
            raise TritonModelException(
                "predict returns a dict or tuple, and the type hint does not say what is in it: write a TypedDict or "
                "tuple[X, Y], or declare the outputs in config.pbtxt"
            )
        return hints
    if not hints or set(declared) <= hints.keys():
        return {name: hints.get(name, Hint()) for name in declared}
    # `output` and `output_0` are default names.
    if all(name.startswith("output") for name in hints) and len(declared) == len(hints):
        return dict(zip(declared, hints.values(), strict=True))
    raise TritonModelException(
        f"the configuration has the outputs {', '.join(declared)}, and predict returns {', '.join(hints)}: use the same "
        "names"
    )


def _described(side: str, name: str, hint: Hint, config: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = next((tensor for tensor in config.get(side, ()) if tensor["name"] == name), {})
    dtype = hint.dtype or BY_CONFIG_NAME.get(given.get("data_type", ""))
    dims = list(hint.dims or given.get("dims", ()))
    if dtype is None and not dims:
        # Any type and shape, as a function without hints has it.
        return {"name": name, "data_type": ANY_TYPE, "dims": []}
    if dtype is None or not dims:
        Logger.log_info(
            f"{side} '{name}' of predict is taken to be {(dtype or FP32).name} of shape {dims or _ASSUMED_DIMS}, as its "
            "type hint does not say; to change that, write for example Annotated[npt.NDArray[np.float32], (-1, 16)]"
        )
    return {"name": name, "data_type": (dtype or FP32).config_name, "dims": dims or list(_ASSUMED_DIMS)}


_MAX_CONCURRENT = 64
_MAX_ROWS = 1 << 20

NOTHING_TO_SERVE = (
    "{file} has no class TritonPythonModel and no predict: write a function `def predict(x: np.ndarray) -> np.ndarray`, "
    "a class with such a method, or Triton's class"
)


def model_class_of(module: ModuleType, file: str) -> type[PredictModel]:
    """Return the class for what a file defines."""
    predict = getattr(module, "predict", None)
    if callable(predict) and not inspect.isclass(predict):
        source: Any = predict
        signature = read_signature(predict, bound=False)
    else:
        source = _class_of(module, shown_file(file))
        plain = not isinstance(inspect.getattr_static(source, "predict"), staticmethod | classmethod)
        signature = read_signature(source.predict, bound=plain)
    batch = getattr(module, "BATCH", 0)
    if type(batch) is not int or not 0 <= batch <= _MAX_ROWS:
        raise TritonModelException(
            f"BATCH in {shown_file(file)} is {batch!r}: use the largest number of rows in a batch, or 0"
        )
    fields = {"source": staticmethod(source), "signature": signature, "file": file, "batch": batch}
    return type("PredictModel", (PredictModel,), fields)


def _class_of(module: ModuleType, file: str) -> type:
    # Skip classes that the file only imports.
    candidates = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and callable(getattr(value, "predict", None))
    }
    if len(candidates) > 1 and "Model" in candidates:
        candidates = {"Model": candidates["Model"]}
    if len(candidates) > 1:
        raise TritonModelException(
            f"{file} has several classes with predict, {', '.join(candidates)}: name the one to be served Model"
        )
    if not candidates:
        raise TritonModelException(NOTHING_TO_SERVE.format(file=file))
    (only,) = candidates.values()
    if any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(only).parameters.values()
    ):
        raise TritonModelException(
            f"{only.__name__} in {file} cannot be created without arguments: give those of __init__ default values"
        )
    return only


class PredictModel:
    """The class that `main` runs in place of a TritonPythonModel."""

    source: Callable[..., Any]
    signature: Signature
    file: str
    batch: int

    @classmethod
    def auto_complete_config(cls, config: ModelConfig) -> ModelConfig:
        """Add inputs and outputs from the hints to the configuration."""
        return complete(cls.signature, cls.batch, config)

    def __init__(self) -> None:
        target: Any = self.source
        self._owner: Any = None
        self._predict: Callable[..., Any] = target
        if inspect.isclass(target):
            self._owner = target()
            self._predict = self._owner.predict
        self._running: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._warned: set[str] = set()

    def initialize(self, args: dict[str, str]) -> None:
        """Read the configuration, which may not have been completed by `auto_complete_config`."""
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
            Output(tensor["name"], BY_CONFIG_NAME.get(tensor.get("data_type", "")), tuple(tensor.get("dims", ())))
            for tensor in config.get("output", ())
        ]

    def finalize(self) -> None:
        """Call the model's `close`, if it has one."""
        if hasattr(self._owner, "close"):
            self._owner.close()

    def execute(self, requests: Sequence[InferenceRequest]) -> Any:
        """Return a list of responses, or a coroutine, or None if senders respond; see `main`."""
        if self.signature.awaits:
            return self._begin(requests)
        if self._decoupled:
            for request in requests:
                self._stream(request)
            return None
        if self._batches and len(requests) > 1:
            try:
                joined = self._join(requests)
                if joined is not None:
                    return self._split_responses(requests, self._predict(**joined))
            except Exception as error:
                # Running each request alone shows which one fails.
                Logger.log_verbose(f"a batch of {len(requests)} requests failed, running each alone: {error}")
        return [self._answered(request) for request in requests]

    # One request

    def _answered(self, request: InferenceRequest) -> InferenceResponse:
        try:
            return self._response(self._predict(**self._arguments(request)))
        except (Exception, SystemExit) as error:  # The model's code may raise anything.
            return self._failure(error)

    def _stream(self, request: InferenceRequest) -> None:
        sender = request.get_response_sender()
        try:
            returned = self._predict(**self._arguments(request))
            for part in returned if self.signature.streams else (returned,):
                if sender.is_cancelled():
                    break
                sender.send(self._response(part))
            # Close the generator if the client wants no more.
            if self.signature.streams and hasattr(returned, "close"):
                returned.close()
            sender.send(flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except (Exception, SystemExit) as error:  # The model's code may raise anything.
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
            self._warn_of_integers(value, output)
            tensors.append(Tensor(output.name, to_array(value, output, batched=self._batches)))
        return InferenceResponse(tensors)

    def _warn_of_integers(self, value: Any, output: Output) -> None:
        """Log once that integers become FP32 because the hint has no type."""
        hint = self._hints.get(output.name)
        kind = getattr(getattr(value, "dtype", None), "kind", "f")
        untyped = output.dtype is FP32 and hint is not None and hint.dtype is None
        if untyped and kind in "iub" and output.name not in self._warned:
            self._warned.add(output.name)
            Logger.log_warn(
                f"output '{output.name}' of model '{self._name}' is {value.dtype} and is sent as FP32: the hint does not "
                "say its type; write npt.NDArray[np.int64] or the like"
            )

    def _failure(self, error: BaseException) -> InferenceResponse:
        if isinstance(error, ValueError | WrongInput):
            reason = describe_error(error, self.file)
            log_with_trace(f"model '{self._name}' refused a request: {reason}", Logger.INFO, format_trace(error))
            if isinstance(error, WrongInput) or is_raised_by_model(error, self.file):
                # Written for the client.
                reason = " ".join(str(error).split())
            text = f"model '{self._name}' refused the request: {reason}"
            return InferenceResponse(error=TritonError(text, ErrorCode.INVALID_ARG))
        text = f"Failed to process the request(s) for model instance '{self._instance}', message: "
        text += describe_error(error, self.file)
        log_with_trace(text, Logger.ERROR, format_trace(error))
        return InferenceResponse(error=TritonError(text))

    # Several requests in one call

    def _join(self, requests: Sequence[InferenceRequest]) -> dict[str, Any] | None:
        """Return the inputs of all requests, concatenated; None if they differ in more than their rows."""
        arguments_of_requests = [self._arguments(request) for request in requests]
        first = arguments_of_requests[0]
        if any(arguments.keys() != first.keys() for arguments in arguments_of_requests):
            return None
        joined: dict[str, Any] = {}
        for name in first:
            arrays = [arguments[name] for arguments in arguments_of_requests]
            if all(array is None for array in arrays):
                joined[name] = None
                continue
            if any(array is None or array.shape[1:] != arrays[0].shape[1:] for array in arrays):
                return None
            joined[name] = np.concatenate(arrays)
        return joined

    def _split_responses(self, requests: Sequence[InferenceRequest], returned: Any) -> list[InferenceResponse]:
        rows = [request.inputs()[0].shape()[0] for request in requests]
        joined_tensors = self._response(returned).output_tensors()
        for tensor in joined_tensors:
            if tensor.shape()[0] != sum(rows):
                raise TritonModelException(f"predict got {sum(rows)} rows and returned shape {tensor.shape()}")
        responses = []
        start = 0
        for count in rows:
            parts = [Tensor(tensor.name(), tensor.as_numpy()[start : start + count]) for tensor in joined_tensors]
            responses.append(InferenceResponse(parts))
            start += count
        return responses

    # With `async`

    async def _begin(self, requests: Sequence[InferenceRequest]) -> None:
        """Start the requests. The next ones may arrive before these are answered."""
        groups = [list(requests)] if self._batches else [[request] for request in requests]
        for group in groups:
            await self._slots.acquire()
            # In its own context: it is not awaited, so it may call its own model.
            task = asyncio.create_task(self._answer_later(group), context=Context())
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._slots.release()

    async def _answer_later(self, requests: Sequence[InferenceRequest]) -> None:
        if self._batches and len(requests) > 1:
            try:
                joined = self._join(requests)
                if joined is not None:
                    responses = self._split_responses(requests, await self._predict(**joined))
                    for request, response in zip(requests, responses, strict=True):
                        request.get_response_sender().send(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                    return
            except Exception as error:
                Logger.log_verbose(f"a batch of {len(requests)} requests failed, running each alone: {error}")
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
        except (Exception, SystemExit) as error:  # The model's code may raise anything.
            sender.send(self._failure(error), TRITONSERVER_RESPONSE_COMPLETE_FINAL)
