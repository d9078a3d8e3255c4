# SPDX-License-Identifier: Apache-2.0
"""Checks of inputs, outputs, and the tensors that describe a batch."""

from __future__ import annotations

from math import prod
from typing import Any

from headrace.core.dtypes import BYTES, FP32, INT32
from headrace.models.config.reports import Report
from headrace.models.config.typed import dtype_of_field

MAX_DIMS = 32
"""As many as numpy 1 has."""

_FLOATS = ("BF16", "FP16", "FP32", "FP64")


def check_tensors(message: Any, report: Report, *, told: bool) -> None:
    """Inputs and outputs."""
    for what in ("input", "output"):
        tensors = getattr(message, what)
        if not tensors:
            reason = "" if told else "; the backend cannot tell"
            report.add(what, f"model '{message.name}' has no {what}s{reason}; add them to config.pbtxt")
        seen: set[str] = set()
        for index, tensor in enumerate(tensors):
            place = f"{what}[{index}]"
            _check_tensor(message, tensor, place, what, report)
            if tensor.name and tensor.name in seen:
                report.add(f"{place}.name", f"{what} '{tensor.name}' is there twice; rename or remove one")
            seen.add(tensor.name)
    for index, tensor in enumerate(message.input):
        _check_input(message, tensor, f"input[{index}]", report)
    padded = {tensor.name for tensor in message.input if tensor.HasField("pad_value")}
    for index, tensor in enumerate(message.output):
        if tensor.padded_like and tensor.padded_like not in padded:
            report.add(
                f"output[{index}].padded_like",
                f"'{tensor.padded_like}' is not an input with pad_value; name one that is",
            )


def _check_tensor(message: Any, tensor: Any, place: str, what: str, report: Report) -> None:
    called = f"{what} '{tensor.name}'" if tensor.name else f"an {what}"
    if not tensor.name:
        report.add(place, f"model {what} must specify 'name'")
    if dtype_of_field(tensor) is None:
        report.add(place, f"{called} must specify 'data_type', for example data_type: TYPE_FP32")
    if not tensor.dims:
        report.add(place, f"{called} must specify 'dims', for example dims: [ 3, 224, 224 ]")
    check_dims(tensor.dims, f"{place}.dims", called, report)
    if tensor.HasField("reshape"):
        _check_reshape(message, tensor, place, called, report)


def check_dims(dims: Any, place: str, called: str, report: Report, *, fixed: bool = False) -> None:
    """Each size is positive, or -1 where any size will do."""
    if len(dims) > MAX_DIMS:
        report.add(place, f"{called} has {len(dims)} dimensions; at most {MAX_DIMS} are possible")
    for dim in dims:
        if dim < (1 if fixed else -1) or dim == 0:
            allowed = "integer >= 1" if fixed else "integer >= 1, or -1 to indicate a variable-size dimension"
            report.add(place, f"{called}: dimension must be {allowed}, and {dim} is not")
            return


def _check_reshape(message: Any, tensor: Any, place: str, called: str, report: Report) -> None:
    place = f"{place}.reshape"
    check_dims(tensor.reshape.shape, place, called, report)
    if not tensor.reshape.shape and message.max_batch_size < 1:
        report.add(place, f"{called} has an empty reshape, which needs a model that batches; set max_batch_size")
    if max(len(tensor.dims), len(tensor.reshape.shape)) > MAX_DIMS:
        return
    dims, shape = _runs(tensor.dims), _runs(tensor.reshape.shape)
    if len(dims) != len(shape):
        report.add(
            place, f"{called} has {len(dims) - 1} variable sizes in dims and {len(shape) - 1} in reshape; use as many"
        )
    elif dims != shape:
        report.add(
            place,
            f"{called} has {dims} elements between variable sizes in dims and {shape} in reshape; they must be equal"
            if len(dims) > 1
            else f"{called} has {dims[0]} elements in dims and {shape[0]} in reshape; they must be equal",
        )


def _runs(dims: Any) -> list[int]:
    """How many elements lie before, between and behind the variable sizes: what a reshape must keep."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [prod(run) for run in runs]


def _check_input(message: Any, tensor: Any, place: str, report: Report) -> None:
    dtype = dtype_of_field(tensor)
    if tensor.format and tensor.dims and len(tensor.dims) != 3:
        report.add(
            f"{place}.format",
            f"input '{tensor.name}' has a format, which needs 3 dims, not {len(tensor.dims)}; remove 'format'",
        )
    if tensor.allow_ragged_batch and not message.HasField("dynamic_batching"):
        report.add(
            f"{place}.allow_ragged_batch",
            f"input '{tensor.name}' allows ragged batches, which dynamic batching makes; add dynamic_batching {{ }}",
        )
    if tensor.finite and dtype is not None and dtype.name not in _FLOATS:
        report.add(
            f"{place}.finite", f"input '{tensor.name}' has whole numbers or text, which are always finite; remove it"
        )
    if not tensor.HasField("pad_value"):
        return
    at = f"{place}.pad_value"
    if -1 not in tensor.dims:
        report.add(at, f"input '{tensor.name}' has no variable size to pad; remove pad_value, or write -1 in dims")
    if tensor.allow_ragged_batch:
        report.add(at, f"input '{tensor.name}' is either padded or ragged; remove pad_value or allow_ragged_batch")
    if dtype is BYTES:
        report.add(at, f"input '{tensor.name}' is TYPE_STRING, which a number cannot pad; remove pad_value")
    if message.max_batch_size < 1:
        report.add(at, "padding is for batches; set max_batch_size, or remove pad_value")


def check_batch_tensors(message: Any, report: Report) -> None:
    """`batch_input` and `batch_output`."""
    inputs = {tensor.name for tensor in message.input}
    outputs = {tensor.name for tensor in message.output}
    for index, tensor in enumerate(message.batch_input):
        place = f"batch_input[{index}]"
        _check_sources(tensor, place, inputs, report)
        if dtype_of_field(tensor) not in (INT32, FP32):
            report.add(place, "a batch input has data_type: TYPE_INT32 or TYPE_FP32; write one of them")
        taken = [name for name in tensor.target_name if name in inputs]
        if taken:
            report.add(f"{place}.target_name", f"'{taken[0]}' is an input of requests already; use another name")
    for index, tensor in enumerate(message.batch_output):
        place = f"batch_output[{index}]"
        _check_sources(tensor, place, inputs, report)
        unknown = [name for name in tensor.target_name if name not in outputs]
        if unknown:
            report.add(f"{place}.target_name", f"'{unknown[0]}' is not an output of the model; name one")


def _check_sources(tensor: Any, place: str, inputs: set[str], report: Report) -> None:
    if not tensor.target_name:
        report.add(place, "has no target_name; name the model's tensor that it is for")
    if len(tensor.source_input) != 1:
        report.add(place, f"needs exactly one source_input, and has {len(tensor.source_input)}")
    unknown = [name for name in tensor.source_input if name not in inputs]
    if unknown:
        report.add(f"{place}.source_input", f"'{unknown[0]}' is not an input of the model; name one")
