# SPDX-License-Identifier: Apache-2.0
"""Checks of warm-up requests: they must be requests that the model would take."""

from __future__ import annotations

from typing import Any

from headrace.models.config.check_tensors import check_dims
from headrace.models.config.reports import Report
from headrace.models.config.typed import dtype_of_field

MOST_TIMES = 10_000
"""How often a warm-up may be computed: nobody is warmer after that, and the model does not serve meanwhile."""


def check_warmups(message: Any, report: Report) -> None:
    """Each sample."""
    needed = [tensor.name for tensor in message.input if not tensor.optional]
    known = {tensor.name for tensor in message.input}
    if message.HasField("sequence_batching"):
        known.update(tensor.name for tensor in message.sequence_batching.control_input)
        known.update(state.input_name for state in message.sequence_batching.state)
    for index, sample in enumerate(message.model_warmup):
        place = f"model_warmup[{index}]"
        called = f"warm-up '{sample.name}'" if sample.name else f"warm-up {index}"
        if not sample.name:
            report.add(place, f"{called} needs 'name'")
        if sample.batch_size > max(1, message.max_batch_size):
            report.add(
                f"{place}.batch_size", f"{called} has more than the model takes, {max(1, message.max_batch_size)}"
            )
        if sample.count > MOST_TIMES:
            report.add(f"{place}.count", f"{called} is to be computed {sample.count} times; write {MOST_TIMES} or less")
        missing = [name for name in needed if name not in sample.inputs]
        if missing:
            report.add(place, f"{called} must give every input, and '{missing[0]}' is missing; add it to its inputs")
        for name, tensor in sample.inputs.items():
            at = f"{place}.inputs.{name}"
            if name not in known:
                report.add(at, f"'{name}' is not an input of the model; correct the name, or remove it")
            _check_input(tensor, at, f"input '{name}' of {called}", report)


def _check_input(tensor: Any, place: str, called: str, report: Report) -> None:
    if dtype_of_field(tensor) is None:
        report.add(place, f"{called} must specify 'data_type'")
    check_dims(tensor.dims, f"{place}.dims", called, report, fixed=True)
    choice = tensor.WhichOneof("input_data_type")
    if choice is None:
        report.add(place, f"{called} needs zero_data: true, random_data: true or input_data_file")
    elif choice == "input_data_file":
        report.check_file(f"{place}.input_data_file", "warmup", tensor.input_data_file)
