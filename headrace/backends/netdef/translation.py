# SPDX-License-Identifier: Apache-2.0
"""Translate the two nets of a Caffe2 model into one ONNX model.

The backend and `headrace models convert` use it. Only operators that the outputs depend on are translated: nets often
contain leftovers of training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError

from headrace.backends.netdef.files import Pair
from headrace.backends.netdef.graph import Graph, InvalidOperator
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.operators.table import OPERATORS
from headrace.core import dtypes
from headrace.core.dtypes import DType
from headrace.core.errors import InvalidArgument

log = logging.getLogger("headrace.backends")

ELEM_TYPES = {
    dtypes.BOOL: TensorProto.BOOL,
    dtypes.UINT8: TensorProto.UINT8,
    dtypes.UINT16: TensorProto.UINT16,
    dtypes.INT8: TensorProto.INT8,
    dtypes.INT16: TensorProto.INT16,
    dtypes.INT32: TensorProto.INT32,
    dtypes.INT64: TensorProto.INT64,
    dtypes.FP16: TensorProto.FLOAT16,
    dtypes.FP32: TensorProto.FLOAT,
    dtypes.FP64: TensorProto.DOUBLE,
    dtypes.BYTES: TensorProto.STRING,
}
"""The data types that Caffe2 has."""

_MAX_LISTED = 8
"""The most unknown operators that one error lists."""


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A declared input, since a net has no types and shapes."""

    name: str
    dtype: DType
    shape: tuple[int, ...] | None
    """-1: any size. None: any shape."""


def translate(
    pair: Pair,
    inputs: Sequence[InputTensor],
    outputs: Sequence[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> onnx.ModelProto:
    """Return the model that computes `outputs`, or all outputs of the net."""
    wanted = tuple(dict.fromkeys(outputs)) or pair.net.external_outputs
    names = {tensor.name for tensor in inputs}
    _check_inputs_and_outputs(pair, inputs, wanted)
    program = _needed(pair, names, wanted)
    _check_known(program)
    graph = Graph()
    for tensor in inputs:
        graph.add_input(tensor.name, ELEM_TYPES[tensor.dtype], tensor.shape)
    for done, operator in enumerate(program):
        if on_progress is not None:
            on_progress(done, len(program))
        missing = next((blob for blob in operator.inputs if blob not in graph.blobs), None)
        if missing is not None:
            raise operator.fault(_missing(pair, operator, missing, program))
        _translate_one(operator, graph)
    for blob in wanted:
        if blob not in graph.blobs:
            raise InvalidArgument(f"output '{blob[:128]}' is not computed by an operator of '{pair.net.file}'")
    try:
        return graph.finish(wanted)
    except InvalidOperator as unfit:
        raise InvalidArgument(f"'{pair.net.file}' {unfit}") from None


def _translate_one(operator: Operator, graph: Graph) -> None:
    before = {blob: graph.blobs[blob] for blob in operator.inputs}
    try:
        OPERATORS[operator.type](operator, graph)
    except InvalidOperator as unfit:
        raise operator.fault(str(unfit)) from None
    except (InferenceError, ValidationError, TypeError, ValueError, LookupError, OverflowError) as error:
        # ONNX's message names values of the graph, which a user of the net does not know.
        log.warning("%s could not be translated: %s", operator, str(error).partition("\n")[0])
        log.debug("how that came about", exc_info=error)
        given = ", ".join(
            f"'{blob[:64]}' {graph.type_name(value)} {graph.describe(value)}" for blob, value in before.items()
        )
        raise operator.fault(
            f"does not fit what it reads: {given or 'nothing'}. Compare the types and dims of the configuration with the "
            "net, and whether both files are of one model; the log says more"
        ) from None


def _check_inputs_and_outputs(pair: Pair, inputs: Sequence[InputTensor], wanted: Sequence[str]) -> None:
    known = pair.net.external_inputs
    for tensor in inputs:
        if tensor.name not in known:
            filled = {blob for operator in pair.init.operators for blob in operator.outputs}
            allowed = [name for name in known if name not in filled] or list(known)
            raise InvalidArgument(
                f"unexpected inference input '{tensor.name[:128]}', allowed inputs are: {', '.join(allowed[:32])}"
            )
        if tensor.dtype not in ELEM_TYPES:
            raise InvalidArgument(
                f"input '{tensor.name}' is {tensor.dtype.name}, which Caffe2 does not have: use one of "
                f"{', '.join(dtype.name for dtype in ELEM_TYPES)}"
            )
    if not wanted:
        raise InvalidArgument(f"'{pair.net.file}' names no outputs (external_output): name them in the configuration")
    computed = {blob for operator in pair.net.operators for blob in operator.outputs}
    for name in wanted:
        if name not in computed and name not in pair.net.external_outputs:
            raise InvalidArgument(
                f"unexpected inference output '{name[:128]}', allowed outputs are: "
                f"{', '.join(pair.net.external_outputs[:32])}"
            )


def _needed(pair: Pair, inputs: set[str], wanted: Sequence[str]) -> list[Operator]:
    """Return the operators that the outputs depend on, in order: first those that fill weights, then those that compute."""
    pending = set(wanted)
    needed: list[Operator] = []
    for net in (pair.net, pair.init):
        if net is pair.init:
            # Exporters also fill the inputs, often with a zero; the request's value takes precedence.
            pending -= inputs
        for operator in reversed(net.operators):
            if not pending.isdisjoint(operator.outputs):
                pending.difference_update(operator.outputs)
                pending.update(operator.inputs)
                needed.append(operator)
    return needed[::-1]


def _check_known(program: Sequence[Operator]) -> None:
    unknown = [operator for operator in program if operator.type not in OPERATORS]
    if unknown:
        names = ", ".join(str(operator) for operator in unknown[:_MAX_LISTED])
        more = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
        raise InvalidArgument(f"the net has unsupported operators: {names}{more}")


def _missing(pair: Pair, reader: Operator, blob: str, program: Sequence[Operator]) -> str:
    maker = next((operator for operator in program if blob in operator.outputs), None)
    shown = blob[:128]
    if maker is not None and maker.file == reader.file and maker.index >= reader.index:
        return f"reads '{shown}', which only {maker} makes: the net has a cycle, or its operators are out of order"
    if maker is not None and maker.index < reader.index:
        return f"reads '{shown}', an unsupported output of {maker}"
    if reader.file == pair.init.file:
        return f"reads '{shown}', which nothing before it makes: are the two files swapped?"
    return (
        f"reads '{shown}', which neither '{pair.init.file}' fills, nor an earlier operator makes, nor the configuration "
        f"declares as an input: put the '{pair.init.file}' of the same model beside '{pair.net.file}'"
    )
