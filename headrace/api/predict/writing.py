# SPDX-License-Identifier: Apache-2.0
"""Answers of the data plane as JSON: `predictions`, `model_version`, `latency_ms`.

Called by HTTP and WebSocket. NaN and the infinities, for which JSON has no word, are null.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import orjson

from headrace.api.predict.known import KnownModel, KnownOutput
from headrace.api.predict.reading import Question
from headrace.core.dtypes import BF16, BYTES, bf16_to_float32
from headrace.core.errors import InvalidArgument
from headrace.core.messages import InferResponse
from headrace.core.tensors import Tensor

_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_ANY = KnownOutput(None, False)
"""Of an output that the configuration does not name."""


def answer_json(question: Question, answers: Sequence[InferResponse], started: float, extra: bytes = b"") -> bytes:
    """The whole answer. `extra` are further members, each behind its comma."""
    known = question.known
    if question.parts is None:
        text = prediction_json(known, answers[0], question.added)
    else:
        rows = [
            _rows_json(known, answer, part.rows, part.added)
            for answer, part in zip(answers, question.parts, strict=True)
        ]
        text = b"[%b]" % b",".join(rows)
    took = (perf_counter() - started) * 1000
    return b'{"predictions":%b%b%.3f%b}' % (text, known.tail(answers[0].model_version), took, extra)


def prediction_json(known: KnownModel, answer: InferResponse, added: bool) -> bytes:
    """One prediction: a list, or an object of lists where there are several outputs."""
    outputs = answer.outputs
    if known.one_output and len(outputs) == 1:
        tensor, plain = outputs[0], known.plain
        # By far the most common: a vector of floats of a length that is known.
        if plain is not None and tensor.array.shape == plain.alone:
            return _numbers_json(tensor.array.reshape(plain.row))
        return _output_json(known, tensor, added)
    written = [b"%b:%b" % (orjson.dumps(output.name), _output_json(known, output, added)) for output in outputs]
    return b"{%b}" % b",".join(written)


def _output_json(known: KnownModel, tensor: Tensor, added: bool) -> bytes:
    output = known.outputs.get(tensor.name, _ANY)
    array = tensor.array
    if array.shape == output.alone:
        shape: Any = output.row
    else:
        whole = array.shape[1:] if known.most and array.ndim else array.shape
        shape = output.row_shape(whole, added)
    return _array_json(tensor, array.reshape(shape))


def _rows_json(known: KnownModel, answer: InferResponse, rows: int, added: bool) -> bytes:
    """Predictions side by side, without the brackets around them."""
    if not known.most:
        return prediction_json(known, answer, added)
    outputs = answer.outputs
    shaped = []
    for tensor in outputs:
        array = tensor.array
        shape = known.outputs.get(tensor.name, _ANY).row_shape(array.shape[1:])
        shaped.append(array.reshape((rows, *shape)))
    if known.one_output and len(outputs) == 1:
        return _array_json(outputs[0], shaped[0])[1:-1]
    names = [orjson.dumps(tensor.name) for tensor in outputs]
    written = []
    for row in range(rows):
        texts = [_array_json(tensor, array[row]) for tensor, array in zip(outputs, shaped, strict=True)]
        written.append(b"{%b}" % b",".join(map(b"%b:%b".__mod__, zip(names, texts, strict=True))))
    return b",".join(written)


def _array_json(tensor: Tensor, array: Any) -> bytes:
    if tensor.dtype is BYTES:
        return _texts_json(tensor.name, array)
    if tensor.dtype is BF16:
        array = bf16_to_float32(array)
    return _numbers_json(array)


def _numbers_json(array: Any) -> bytes:
    try:
        return orjson.dumps(array, option=_NUMPY)
    except orjson.JSONEncodeError:  # it lies in memory in a way that orjson does not read
        return orjson.dumps(np.ascontiguousarray(array), option=_NUMPY)


def _texts_json(name: str, array: Any) -> bytes:
    try:
        texts = np.array([element.decode() for element in array.ravel()], dtype=object).reshape(array.shape)
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"output '{name}' is not UTF-8 and cannot be JSON: ask for it over v2, with binary_data"
        ) from None
    return orjson.dumps(texts.tolist())
