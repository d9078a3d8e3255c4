# SPDX-License-Identifier: Apache-2.0
"""Checks of sequence batching: strategies, control inputs, implicit state."""

from __future__ import annotations

from typing import Any

from headrace.models.config.check_schedule import check_preferred
from headrace.models.config.check_tensors import check_dims
from headrace.models.config.reports import Report
from headrace.models.config.typed import dtype_of_field

_KINDS = {
    0: "CONTROL_SEQUENCE_START",
    1: "CONTROL_SEQUENCE_READY",
    2: "CONTROL_SEQUENCE_END",
    3: "CONTROL_SEQUENCE_CORRID",
}
_CORRID = 3
_CORRID_TYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")


def check_sequence_batching(message: Any, report: Report) -> None:
    """All of it."""
    batching = message.sequence_batching
    place = "sequence_batching"
    utilization = batching.direct.minimum_slot_utilization
    if not 0 <= utilization <= 1:
        report.add(f"{place}.direct.minimum_slot_utilization", f"{utilization} is not a share; write 0.0 to 1.0")
    if batching.HasField("oldest"):
        _check_oldest(message, batching.oldest, f"{place}.oldest", report)
    _check_controls(batching, place, report)
    _check_states(message, place, report)


def _check_oldest(message: Any, oldest: Any, place: str, report: Report) -> None:
    check_preferred(oldest.preferred_batch_size, f"{place}.preferred_batch_size", message, report)
    if oldest.max_candidate_sequences < 1:
        report.add(
            f"{place}.max_candidate_sequences",
            "say how many sequences an instance may have at a time: add max_candidate_sequences: 4 or so",
        )


def _check_controls(batching: Any, place: str, report: Report) -> None:
    kinds: dict[int, str] = {}
    names: set[str] = set()
    for index, tensor in enumerate(batching.control_input):
        at = f"{place}.control_input[{index}]"
        if not tensor.name:
            report.add(at, "a control input needs 'name'")
        elif tensor.name in names:
            report.add(f"{at}.name", f"'{tensor.name}' is a control input twice; give each control a tensor of its own")
        names.add(tensor.name)
        if len(tensor.control) != 1:
            report.add(at, f"control input '{tensor.name}' needs exactly one control, and has {len(tensor.control)}")
        for number, control in enumerate(tensor.control):
            if control.kind in kinds:
                report.add(
                    f"{at}.control[{number}].kind",
                    f"{_KINDS.get(control.kind)} is told by '{kinds[control.kind]}' already; remove one",
                )
            kinds.setdefault(control.kind, tensor.name)
            _check_control(control, f"{at}.control[{number}]", tensor.name, report)


def _check_control(control: Any, place: str, name: str, report: Report) -> None:
    pairs = {
        field: getattr(control, field)
        for field in ("int32_false_true", "fp32_false_true", "bool_false_true")
        if getattr(control, field)
    }
    if control.kind == _CORRID:
        dtype = dtype_of_field(control)
        if pairs:
            report.add(
                f"{place}.{next(iter(pairs))}", f"control '{name}' is the correlation id, which has no false or true"
            )
        if dtype is None or dtype.name not in _CORRID_TYPES:
            report.add(
                f"{place}.data_type",
                f"control '{name}' needs data_type: TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 or TYPE_STRING",
            )
        return
    if control.data_type:
        report.add(f"{place}.data_type", f"control '{name}' has its type from its false and true; remove data_type")
    if len(pairs) != 1:
        report.add(
            place, f"control '{name}' needs one of int32_false_true, fp32_false_true and bool_false_true, like [ 0, 1 ]"
        )
    for field, values in pairs.items():
        if len(values) != 2:
            report.add(
                f"{place}.{field}", f"control '{name}' needs exactly two values, like [ 0, 1 ], not {len(values)}"
            )


def _check_states(message: Any, place: str, report: Report) -> None:
    taken = {tensor.name for tensor in message.input}
    given: set[str] = set()
    for index, state in enumerate(message.sequence_batching.state):
        at = f"{place}.state[{index}]"
        called = f"state '{state.input_name}'"
        if not state.input_name or not state.output_name:
            report.add(at, "a state needs 'input_name' and 'output_name'")
        if state.input_name in taken:
            report.add(f"{at}.input_name", f"{called} has the name of another input or state; rename one")
        if state.output_name in given:
            report.add(f"{at}.output_name", f"{called} has the output of another state; rename one")
        taken.add(state.input_name)
        given.add(state.output_name)
        if dtype_of_field(state) is None:
            report.add(at, f"{called} must specify 'data_type'")
        if not state.dims:
            report.add(at, f"{called} must specify 'dims'")
        check_dims(state.dims, f"{at}.dims", called, report)
        if len(state.initial_state) > 1:
            report.add(f"{at}.initial_state[1]", f"{called} begins in one way only; remove one initial_state")
        for number, initial in enumerate(state.initial_state):
            _check_initial(state, initial, f"{at}.initial_state[{number}]", called, report)


def _check_initial(state: Any, initial: Any, place: str, called: str, report: Report) -> None:
    if not initial.name:
        report.add(place, f"the initial state of {called} needs 'name'")
    if initial.data_type != state.data_type:
        report.add(place, f"the initial state of {called} must specify the data_type of the state")
    if not initial.dims and -1 in state.dims:
        report.add(place, f"{called} has variable dims, so its initial state must specify 'dims'")
    check_dims(initial.dims, f"{place}.dims", f"the initial state of {called}", report, fixed=True)
    if initial.WhichOneof("state_data") is None:
        report.add(place, f"the initial state of {called} needs zero_data: true or data_file")
    elif initial.data_file:
        report.check_file(f"{place}.data_file", "initial_state", initial.data_file)
