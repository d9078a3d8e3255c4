# SPDX-License-Identifier: Apache-2.0
"""Write responses as JSON: `predictions`, `model_version`, `latency_ms`. NaN and the infinities are null."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import orjson

from headrace.api.predict.models import ModelInfo, ModelOutput
from headrace.api.predict.requests import ParsedRequest
from headrace.core.dtypes import BF16, BYTES, bf16_to_float32
from headrace.core.errors import InvalidArgument
from headrace.core.requests import InferResponse
from headrace.core.tensors import Tensor

_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_ANY = ModelOutput(None, False)
"""For an output that is not in the configuration."""


def response_json(
    request: ParsedRequest, responses: Sequence[InferResponse], started: float, extra: bytes = b""
) -> bytes:
    """Return the response to a request. `extra` has further members, each after a comma."""
    model = request.model
    if request.parts is None:
        text = prediction_json(model, responses[0], request.added)
    else:
        rows = [
            _rows_json(model, response, part.rows, part.added)
            for response, part in zip(responses, request.parts, strict=True)
        ]
        text = b"[%b]" % b",".join(rows)
    latency_ms = (perf_counter() - started) * 1000
    return b'{"predictions":%b%b%.3f%b}' % (text, model.tail(responses[0].model_version), latency_ms, extra)


def prediction_json(model: ModelInfo, response: InferResponse, added: bool) -> bytes:
    """Return one prediction: a list, or an object of lists for several outputs."""
    outputs = response.outputs
    if model.one_output and len(outputs) == 1:
        tensor, plain = outputs[0], model.plain
        # The usual case: a vector of floats of a fixed length.
        if plain is not None and tensor.array.shape == plain.single:
            return _numbers_json(tensor.array.reshape(plain.row))
        return _output_json(model, tensor, added)
    objects = [b"%b:%b" % (orjson.dumps(output.name), _output_json(model, output, added)) for output in outputs]
    return b"{%b}" % b",".join(objects)


def _output_json(model: ModelInfo, tensor: Tensor, added: bool) -> bytes:
    output = model.outputs.get(tensor.name, _ANY)
    array = tensor.array
    if array.shape == output.single:
        shape: Any = output.row
    else:
        full = array.shape[1:] if model.max_batch_size and array.ndim else array.shape
        shape = output.row_shape(full, added)
    return _array_json(tensor, array.reshape(shape))


def _rows_json(model: ModelInfo, response: InferResponse, rows: int, added: bool) -> bytes:
    """Return the predictions of a batch, without the surrounding brackets."""
    if not model.max_batch_size:
        return prediction_json(model, response, added)
    outputs = response.outputs
    shaped = []
    for tensor in outputs:
        array = tensor.array
        shape = model.outputs.get(tensor.name, _ANY).row_shape(array.shape[1:])
        shaped.append(array.reshape((rows, *shape)))
    if model.one_output and len(outputs) == 1:
        return _array_json(outputs[0], shaped[0])[1:-1]
    names = [orjson.dumps(tensor.name) for tensor in outputs]
    objects = []
    for row in range(rows):
        texts = [_array_json(tensor, array[row]) for tensor, array in zip(outputs, shaped, strict=True)]
        objects.append(b"{%b}" % b",".join(map(b"%b:%b".__mod__, zip(names, texts, strict=True))))
    return b",".join(objects)


def _array_json(tensor: Tensor, array: Any) -> bytes:
    if tensor.dtype is BYTES:
        return _texts_json(tensor.name, array)
    if tensor.dtype is BF16:
        array = bf16_to_float32(array)
    return _numbers_json(array)


def _numbers_json(array: Any) -> bytes:
    try:
        return orjson.dumps(array, option=_NUMPY)
    except orjson.JSONEncodeError:  # a memory layout that orjson does not support
        return orjson.dumps(np.ascontiguousarray(array), option=_NUMPY)


def _texts_json(name: str, array: Any) -> bytes:
    try:
        texts = np.array([element.decode() for element in array.ravel()], dtype=object).reshape(array.shape)
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"output '{name}' is not UTF-8 and cannot be JSON: request it over v2, with binary_data"
        ) from None
    return orjson.dumps(texts.tolist())
