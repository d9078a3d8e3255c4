# SPDX-License-Identifier: Apache-2.0
"""Validate a completed model configuration: tensors, instance groups, schedulers, ensembles, warm-up."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from math import prod
from pathlib import PurePosixPath
from typing import Any

from headrace.core.dtypes import BYTES, FP32, INT32
from headrace.core.names import is_name
from headrace.models.config.drafts import Draft
from headrace.models.config.formats import FORMATS, misnamed_file, version_folders
from headrace.models.config.messages import dtype_of_field
from headrace.models.config.problems import ConfigError, Problem

_MAX_CHARACTERS = 600
"""Maximum length of a problem: texts quote names, which may be as long as the file."""


class Report:
    """The problems of one configuration, in the order they were found."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.problems: list[Problem] = []

    def add(self, place: str, text: str) -> None:
        """Add a problem of the field at `place` (`input[0].dims`)."""
        self.problems.append(
            self._draft.problem(place, text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}...")
        )

    def check_inside(self, place: str, name: str, folder: str) -> bool:
        """Return whether a file name stays in its folder (links are allowed); add a problem if not."""
        if not name:
            return True
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            self.add(place, f"'{name[:64]}' is outside of {folder}; name a file in it, without '/' in front and '..'")
            return False
        return True

    def check_file(self, place: str, folder: str, name: str) -> None:
        """Add a problem if a file of the model's folder does not exist."""
        where = f"{folder}/ of the model's folder" if folder else "the model's folder"
        if not self.check_inside(place, name, where):
            return
        try:
            exists = (self._draft.model_folder / folder / name).is_file()
        except OSError:
            # The name is too long for the file system.
            exists = False
        if not exists:
            self.add(place, f"'{name[:64]}' is not a file in {where}; put it there, or correct the name")


MAX_DIMS = 32
"""As many as numpy 1 allows."""

_FLOATS = ("BF16", "FP16", "FP32", "FP64")


def check_tensors(message: Any, report: Report, *, reported: Any | None) -> None:
    """Check inputs and outputs."""
    for side in ("input", "output"):
        tensors = getattr(message, side)
        known = [] if reported is None else getattr(reported, side)
        open_names = {tensor.name for tensor in known if not tensor.data_type and not tensor.dims}
        if not tensors:
            reason = "" if reported is not None else "; the backend does not know them"
            report.add(side, f"model '{message.name}' has no {side}s{reason}; add them to config.pbtxt")
        seen: set[str] = set()
        for index, tensor in enumerate(tensors):
            place = f"{side}[{index}]"
            # Any type and shape, by what the backend says.
            is_open = tensor.name in open_names and not tensor.data_type and not tensor.dims
            _check_tensor(message, tensor, place, side, report, is_open=is_open)
            if tensor.name and tensor.name in seen:
                report.add(f"{place}.name", f"{side} '{tensor.name}' is there twice; rename or remove one")
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


def _check_tensor(message: Any, tensor: Any, place: str, side: str, report: Report, *, is_open: bool) -> None:
    label = f"{side} '{tensor.name}'" if tensor.name else f"an {side}"
    if not tensor.name:
        report.add(place, f"model {side} must specify 'name'")
    if is_open:
        return
    if dtype_of_field(tensor) is None:
        report.add(place, f"{label} must specify 'data_type', for example data_type: TYPE_FP32")
    if not tensor.dims:
        report.add(place, f"{label} must specify 'dims', for example dims: [ 3, 224, 224 ]")
    check_dims(tensor.dims, f"{place}.dims", label, report)
    if tensor.HasField("reshape"):
        _check_reshape(message, tensor, place, label, report)


def check_dims(dims: Any, place: str, label: str, report: Report, *, fixed: bool = False) -> None:
    """Check that each size is positive, or -1 for any size."""
    if len(dims) > MAX_DIMS:
        report.add(place, f"{label} has {len(dims)} dimensions; at most {MAX_DIMS} are possible")
    for dim in dims:
        if dim < (1 if fixed else -1) or dim == 0:
            allowed = "integer >= 1" if fixed else "integer >= 1, or -1 to indicate a variable-size dimension"
            report.add(place, f"{label}: dimension must be {allowed}, and {dim} is not")
            return


def _check_reshape(message: Any, tensor: Any, place: str, label: str, report: Report) -> None:
    place = f"{place}.reshape"
    check_dims(tensor.reshape.shape, place, label, report)
    if not tensor.reshape.shape and message.max_batch_size < 1:
        report.add(place, f"{label} has an empty reshape, which needs a model that batches; set max_batch_size")
    if max(len(tensor.dims), len(tensor.reshape.shape)) > MAX_DIMS:
        return
    dims, shape = _runs(tensor.dims), _runs(tensor.reshape.shape)
    if len(dims) != len(shape):
        report.add(
            place, f"{label} has {len(dims) - 1} variable sizes in dims and {len(shape) - 1} in reshape; use as many"
        )
    elif dims != shape:
        report.add(
            place,
            f"{label} has {dims} elements between variable sizes in dims and {shape} in reshape; they must be equal"
            if len(dims) > 1
            else f"{label} has {dims[0]} elements in dims and {shape[0]} in reshape; they must be equal",
        )


def _runs(dims: Any) -> list[int]:
    """Return the numbers of elements before, between and after variable sizes, which a reshape must keep."""
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
    path = f"{place}.pad_value"
    if -1 not in tensor.dims:
        report.add(path, f"input '{tensor.name}' has no variable size to pad; remove pad_value, or write -1 in dims")
    if tensor.allow_ragged_batch:
        report.add(path, f"input '{tensor.name}' is either padded or ragged; remove pad_value or allow_ragged_batch")
    if dtype is BYTES:
        report.add(path, f"input '{tensor.name}' is TYPE_STRING, which a number cannot pad; remove pad_value")
    if message.max_batch_size < 1:
        report.add(path, "padding is for batches; set max_batch_size, or remove pad_value")


def check_batch_tensors(message: Any, report: Report) -> None:
    """Check `batch_input` and `batch_output`."""
    inputs = {tensor.name for tensor in message.input}
    outputs = {tensor.name for tensor in message.output}
    for index, tensor in enumerate(message.batch_input):
        place = f"batch_input[{index}]"
        _check_sources(tensor, place, inputs, report)
        if dtype_of_field(tensor) not in (INT32, FP32):
            report.add(place, "a batch input has data_type: TYPE_INT32 or TYPE_FP32; write one of them")
        targets = [name for name in tensor.target_name if name in inputs]
        if targets:
            report.add(f"{place}.target_name", f"'{targets[0]}' is an input of requests already; use another name")
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


MAX_INSTANCES = 1024
"""Maximum instances of one group: each may be a process, and a configuration may come with a request."""

_GPU = 1
_KIND_NAMES = {2: "KIND_CPU", 3: "KIND_MODEL"}


def check_groups(message: Any, report: Report, gpus: int) -> None:
    """Check the instance groups."""
    seen: set[str] = set()
    for index, group in enumerate(message.instance_group):
        place = f"instance_group[{index}]"
        label = f"instance group {group.name} of model {message.name}"
        if group.count < 0:
            report.add(f"{place}.count", f"{label} has count {group.count}; write 1 or more")
        if group.count > MAX_INSTANCES:
            report.add(f"{place}.count", f"{label} has count {group.count}; write {MAX_INSTANCES} or less")
        if group.name in seen:
            report.add(f"{place}.name", f"{label} has the name of another group; rename one")
        seen.add(group.name)
        _check_devices(group, place, label, report, gpus)
        _check_limiter(group.rate_limiter, f"{place}.rate_limiter", label, report)


def _check_devices(group: Any, place: str, label: str, report: Report, gpus: int) -> None:
    if group.kind != _GPU:
        if group.gpus:
            kind = _KIND_NAMES.get(group.kind, "no kind")
            report.add(
                f"{place}.gpus",
                f"{label} has kind {kind} but specifies one or more GPUs ({gpus} are available); remove gpus",
            )
        return
    if gpus < 1:
        report.add(
            f"{place}.kind", f"{label} has kind KIND_GPU but no GPUs are available; write kind: KIND_CPU or KIND_AUTO"
        )
        return
    wrong = [gpu for gpu in group.gpus if not 0 <= gpu < gpus]
    if wrong:
        report.add(f"{place}.gpus", f"{label} specifies GPU {wrong[0]}; available are 0 to {gpus - 1}")


def _check_limiter(limiter: Any, place: str, label: str, report: Report) -> None:
    seen: set[str] = set()
    for index, resource in enumerate(limiter.resources):
        path = f"{place}.resources[{index}]"
        if not resource.name:
            report.add(path, f"{label} has a resource without 'name'; add one")
        elif resource.name in seen:
            report.add(path, f"{label} has the resource '{resource.name}' twice; remove one")
        seen.add(resource.name)
        if resource.count < 1:
            report.add(path, f"{label} needs 0 of the resource '{resource.name}'; write count: 1 or more")


_QUEUE_FIELDS = ("priority_levels", "default_queue_policy", "priority_queue_policy", "preserve_ordering")


def check_dynamic_batching(message: Any, report: Report) -> None:
    """Check dynamic batching."""
    batching = message.dynamic_batching
    place = "dynamic_batching"
    written = {field.name for field, _ in batching.ListFields()}
    # Without batching it can still have queue policies.
    if message.max_batch_size == 0 and not written.intersection(_QUEUE_FIELDS):
        report.add(place, "batching is on but max_batch_size is 0; set max_batch_size, or remove dynamic_batching")
    else:
        check_preferred(batching.preferred_batch_size, f"{place}.preferred_batch_size", message, report)
    _check_priorities(batching, place, report)
    _check_delay(batching, place, report)


def check_preferred(sizes: Any, place: str, message: Any, report: Report) -> None:
    """Check the preferred batch sizes."""
    for size in sizes:
        if size < 1:
            report.add(place, f"preferred batch size {size} is not positive; write 1 to {message.max_batch_size}")
            return
        if size > message.max_batch_size:
            report.add(
                place,
                f"preferred batch size {size} is larger than max_batch_size, {message.max_batch_size}; "
                "lower it, or raise max_batch_size",
            )
            return


def _check_priorities(batching: Any, place: str, report: Report) -> None:
    levels, default = batching.priority_levels, batching.default_priority_level
    if not levels:
        if default:
            report.add(f"{place}.default_priority_level", "there are no priorities; add priority_levels")
        if batching.priority_queue_policy:
            report.add(f"{place}.priority_queue_policy", "there are no priorities; add priority_levels")
        return
    if not 1 <= default <= levels:
        report.add(
            f"{place}.default_priority_level", f"default_priority_level must be in range [1, {levels}], not {default}"
        )
    if batching.preserve_ordering and levels > 1:
        report.add(
            f"{place}.preserve_ordering",
            "priorities reorder requests, preserve_ordering forbids it; only one priority level goes with it",
        )
    for level in batching.priority_queue_policy:
        if not 1 <= level <= levels:
            report.add(
                f"{place}.priority_queue_policy.{level}", f"there is no priority {level}; levels are 1 to {levels}"
            )


def _check_delay(batching: Any, place: str, report: Report) -> None:
    target = batching.latency_target_ms
    path = f"{place}.latency_target_ms"
    if not batching.max_queue_delay_auto:
        if target:
            report.add(path, "only counts with max_queue_delay_microseconds: auto; write that, or remove it")
        return
    if not (target > 0 and math.isfinite(target)):
        where = path if target else f"{place}.max_queue_delay_auto"
        report.add(where, "a delay chosen by itself needs to know what it may cost; add latency_target_ms: 50 or so")
    if batching.max_queue_delay_microseconds:
        report.add(f"{place}.max_queue_delay_microseconds", "is given as a number and as auto; keep one of them")


_KINDS = {
    0: "CONTROL_SEQUENCE_START",
    1: "CONTROL_SEQUENCE_READY",
    2: "CONTROL_SEQUENCE_END",
    3: "CONTROL_SEQUENCE_CORRID",
}
_CORRID = 3
_CORRID_TYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")


def check_sequence_batching(message: Any, report: Report) -> None:
    """Check sequence batching."""
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
        path = f"{place}.control_input[{index}]"
        if not tensor.name:
            report.add(path, "a control input needs 'name'")
        elif tensor.name in names:
            report.add(
                f"{path}.name", f"'{tensor.name}' is a control input twice; give each control a tensor of its own"
            )
        names.add(tensor.name)
        if len(tensor.control) != 1:
            report.add(path, f"control input '{tensor.name}' needs exactly one control, and has {len(tensor.control)}")
        for number, control in enumerate(tensor.control):
            if control.kind in kinds:
                report.add(
                    f"{path}.control[{number}].kind",
                    f"{_KINDS.get(control.kind)} is sent by '{kinds[control.kind]}' already; remove one",
                )
            kinds.setdefault(control.kind, tensor.name)
            _check_control(control, f"{path}.control[{number}]", tensor.name, report)


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
    outputs: set[str] = set()
    for index, state in enumerate(message.sequence_batching.state):
        path = f"{place}.state[{index}]"
        label = f"state '{state.input_name}'"
        if not state.input_name or not state.output_name:
            report.add(path, "a state needs 'input_name' and 'output_name'")
        if state.input_name in taken:
            report.add(f"{path}.input_name", f"{label} has the name of another input or state; rename one")
        if state.output_name in outputs:
            report.add(f"{path}.output_name", f"{label} has the output of another state; rename one")
        taken.add(state.input_name)
        outputs.add(state.output_name)
        if dtype_of_field(state) is None:
            report.add(path, f"{label} must specify 'data_type'")
        if not state.dims:
            report.add(path, f"{label} must specify 'dims'")
        check_dims(state.dims, f"{path}.dims", label, report)
        if len(state.initial_state) > 1:
            report.add(f"{path}.initial_state[1]", f"{label} begins in one way only; remove one initial_state")
        for number, initial in enumerate(state.initial_state):
            _check_initial(state, initial, f"{path}.initial_state[{number}]", label, report)


def _check_initial(state: Any, initial: Any, place: str, label: str, report: Report) -> None:
    if not initial.name:
        report.add(place, f"the initial state of {label} needs 'name'")
    if initial.data_type != state.data_type:
        report.add(place, f"the initial state of {label} must specify the data_type of the state")
    if not initial.dims and -1 in state.dims:
        report.add(place, f"{label} has variable dims, so its initial state must specify 'dims'")
    check_dims(initial.dims, f"{place}.dims", f"the initial state of {label}", report, fixed=True)
    if initial.WhichOneof("state_data") is None:
        report.add(place, f"the initial state of {label} needs zero_data: true or data_file")
    elif initial.data_file:
        report.check_file(f"{place}.data_file", "initial_state", initial.data_file)


_STEP = "ensemble_scheduling.step"


def check_ensemble(message: Any, backend: str, report: Report) -> None:
    """Check an ensemble."""
    if backend not in ("", "ensemble"):
        place = "backend" if message.backend else "platform"
        report.add(
            place, f"an ensemble has no backend of its own, and '{backend}' is one; write platform: \"ensemble\""
        )
    for place in ("instance_group", "model_warmup"):
        if getattr(message, place):
            report.add(place, f"an ensemble has no {place}; the models of its steps have")
    if not message.HasField("ensemble_scheduling"):
        report.add("ensemble_scheduling", f"must specify 'ensemble_scheduling' for ensemble '{message.name}'")
        if message.WhichOneof("scheduling_choice"):
            report.add(str(message.WhichOneof("scheduling_choice")), "an ensemble does not batch itself; remove it")
        return
    steps = message.ensemble_scheduling.step
    if not steps:
        report.add("ensemble_scheduling", f"must specify 'step' for ensemble '{message.name}'")
        return
    for index, step in enumerate(steps):
        _check_step(message, step, f"{_STEP}[{index}]", index, report)
    _check_graph(message, steps, report)


def _check_step(message: Any, step: Any, place: str, index: int, report: Report) -> None:
    if not step.model_name:
        report.add(place, f"must specify 'model_name' in step {index} of ensemble '{message.name}'")
    elif step.model_name == message.name:
        report.add(f"{place}.model_name", f"step {index} is the ensemble itself; name another model")
    if step.model_version < -1:
        report.add(f"{place}.model_version", f"{step.model_version} is not a version; write -1 for the newest")
    for field in ("input_map", "output_map"):
        pairs = getattr(step, field)
        if not pairs:
            report.add(place, f"must specify '{field}' in step {index} of ensemble '{message.name}'")
        for name, tensor in pairs.items():
            if not name or not tensor:
                report.add(f"{place}.{field}", 'maps a name to nothing; write key: "THEIRS" value: "ours"')


def _check_graph(message: Any, steps: Any, report: Report) -> None:
    inputs = {tensor.name for tensor in message.input}
    writers: dict[str, int] = {}
    for index, step in enumerate(steps):
        for tensor in step.output_map.values():
            place = f"{_STEP}[{index}].output_map"
            if tensor in inputs:
                report.add(place, f"ensemble tensor '{tensor}' is an input of the ensemble and cannot be written")
            elif tensor in writers:
                report.add(
                    place, f"ensemble tensor '{tensor}' is written in step {writers[tensor]} already; rename one"
                )
            writers.setdefault(tensor, index)
    read: set[str] = set()
    for index, step in enumerate(steps):
        for tensor in step.input_map.values():
            read.add(tensor)
            if tensor not in inputs and tensor not in writers:
                report.add(
                    f"{_STEP}[{index}].input_map",
                    f"ensemble tensor '{tensor}' is read in step {index}, but nothing writes it; "
                    "correct the name, or add it to the inputs or to an output_map",
                )
    for index, tensor in enumerate(message.input):
        if tensor.name not in read:
            report.add(f"input[{index}]", f"ensemble input '{tensor.name}' for ensemble '{message.name}' is not used")
    for index, tensor in enumerate(message.output):
        if tensor.name not in writers:
            report.add(
                f"output[{index}]",
                f"ensemble output '{tensor.name}' for ensemble '{message.name}' is written by no step; "
                "correct the name, or add it to an output_map",
            )
    _check_order(steps, inputs, writers, report)


def _check_order(steps: Any, inputs: set[str], writers: dict[str, int], report: Report) -> None:
    """Simulate the steps; those that never get their inputs form a cycle."""
    waits = [
        {writers[tensor] for tensor in step.input_map.values() if tensor in writers and tensor not in inputs}
        for step in steps
    ]
    followers: dict[int, list[int]] = {}
    for index, needed in enumerate(waits):
        for writer in needed:
            followers.setdefault(writer, []).append(index)
    missing = [len(needed) for needed in waits]
    ready = deque(index for index, count in enumerate(missing) if count == 0)
    done = 0
    while ready:
        done += 1
        for follower in followers.get(ready.popleft(), ()):
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    if done < len(waits):
        stuck = [str(index) for index, count in enumerate(missing) if count > 0]
        first = next(index for index, count in enumerate(missing) if count > 0)
        report.add(f"{_STEP}[{first}]", f"the steps {', '.join(stuck[:8])} wait for each other in a circle; break it")


MAX_WARMUP_RUNS = 10_000
"""Maximum runs of a warm-up sample: the model does not serve meanwhile."""


def check_warmups(message: Any, report: Report) -> None:
    """Check warm-up samples."""
    needed = [tensor.name for tensor in message.input if not tensor.optional]
    known = {tensor.name for tensor in message.input}
    if message.HasField("sequence_batching"):
        known.update(tensor.name for tensor in message.sequence_batching.control_input)
        known.update(state.input_name for state in message.sequence_batching.state)
    for index, sample in enumerate(message.model_warmup):
        place = f"model_warmup[{index}]"
        label = f"warm-up '{sample.name}'" if sample.name else f"warm-up {index}"
        if not sample.name:
            report.add(place, f"{label} needs 'name'")
        if sample.batch_size > max(1, message.max_batch_size):
            report.add(
                f"{place}.batch_size", f"{label} has more than the model takes, {max(1, message.max_batch_size)}"
            )
        if sample.count > MAX_WARMUP_RUNS:
            report.add(
                f"{place}.count", f"{label} is to be computed {sample.count} times; write {MAX_WARMUP_RUNS} or less"
            )
        missing = [name for name in needed if name not in sample.inputs]
        if missing:
            report.add(place, f"{label} must give every input, and '{missing[0]}' is missing; add it to its inputs")
        for name, tensor in sample.inputs.items():
            path = f"{place}.inputs.{name}"
            if name not in known:
                report.add(path, f"'{name}' is not an input of the model; correct the name, or remove it")
            _check_warmup_input(tensor, path, f"input '{name}' of {label}", report)


def _check_warmup_input(tensor: Any, place: str, label: str, report: Report) -> None:
    if dtype_of_field(tensor) is None:
        report.add(place, f"{label} must specify 'data_type'")
    check_dims(tensor.dims, f"{place}.dims", label, report, fixed=True)
    choice = tensor.WhichOneof("input_data_type")
    if choice is None:
        report.add(place, f"{label} needs zero_data: true, random_data: true or input_data_file")
    elif choice == "input_data_file":
        report.check_file(f"{place}.input_data_file", "warmup", tensor.input_data_file)


_MAX_NAME_BYTES = 255
"""Maximum length of a file name."""


def check_config(message: Any, draft: Draft, *, gpus: int, reported: Any | None) -> list[Problem]:
    """Return all problems. `reported` is what the backend reported about the model, if anything."""
    report = Report(draft)
    _check_name(message, draft, report)
    if not draft.backend:
        _check_backend(message, draft, report)
    if message.max_batch_size < 0:
        report.add("max_batch_size", f"{message.max_batch_size} is negative; write 0 for a model that does not batch")
    _check_versions(message.version_policy, report)
    _check_files(message, report)
    if draft.backend or message.input or message.output:
        check_tensors(message, report, reported=reported)
    check_batch_tensors(message, report)
    if draft.backend == "ensemble" or message.HasField("ensemble_scheduling"):
        check_ensemble(message, draft.backend, report)
    else:
        check_groups(message, report, gpus)
    if message.HasField("dynamic_batching"):
        check_dynamic_batching(message, report)
    if message.HasField("sequence_batching"):
        check_sequence_batching(message, report)
    check_warmups(message, report)
    if message.response_cache.enable and message.model_transaction_policy.decoupled:
        report.add(
            "response_cache.enable",
            "a decoupled model's responses cannot be cached; remove response_cache or model_transaction_policy",
        )
    _check_metrics(message.model_metrics, report)
    return report.problems


def check_model_filenames(draft: Draft) -> None:
    """Raise if the configuration names a model file outside of the version folder.

    Call it before a backend completes the draft: a backend opens the file, or even runs it.
    """
    report = Report(draft)
    _check_model_files(draft.message, report)
    if report.problems:
        raise ConfigError(report.problems)


def _check_backend(message: Any, draft: Draft, report: Report) -> None:
    """Say why no backend is known: the model's file has another name, or is not there."""
    usual = [model_format.filename for model_format in FORMATS if model_format.filename]
    for folder in version_folders(draft.model_folder):
        misnamed = misnamed_file(folder, usual)
        if misnamed:
            report.add("backend", f"version {folder.name} of model '{message.name}' has no model file: {misnamed}")
            return
    report.add(
        "backend",
        f"no backend is given for model '{message.name}'; add backend: \"onnxruntime\" or another, "
        "or put the model's file into the version folder",
    )


def _check_name(message: Any, draft: Draft, report: Report) -> None:
    folder = draft.model_folder.name
    if message.name != folder:
        report.add(
            "name",
            f"unexpected directory name '{folder}' for model '{message.name}', "
            "directory name must equal model name; rename one of them",
        )
    elif not is_name(message.name):
        report.add(
            "name",
            f"'{message.name[:64]}' cannot name a model: use letters, digits, '_', '.' and '-', "
            "beginning with a letter, a digit or '_'",
        )


def _check_versions(policy: Any, report: Report) -> None:
    choice = policy.WhichOneof("policy_choice")
    if choice == "latest" and policy.latest.num_versions < 1:
        report.add("version_policy.latest", "num_versions is 0, which would serve nothing; write 1 or more")
    if choice == "specific":
        if not policy.specific.versions:
            report.add("version_policy.specific", "lists no versions; write specific { versions: [ 1 ] }")
        wrong = [version for version in policy.specific.versions if version < 0]
        if wrong:
            report.add("version_policy.specific.versions", f"{wrong[0]} is negative; versions are 0, 1, 2, ...")


def _check_files(message: Any, report: Report) -> None:
    _check_model_files(message, report)
    for index, output in enumerate(message.output):
        if output.label_filename:
            report.check_file(f"output[{index}].label_filename", "", output.label_filename)


def _check_model_files(message: Any, report: Report) -> None:
    named = {"default_model_filename": message.default_model_filename}
    named |= {f"cc_model_filenames.{capability}": name for capability, name in message.cc_model_filenames.items()}
    for place, name in named.items():
        inside = report.check_inside(place, name, "the version folder")
        if inside and any(len(part.encode(errors="surrogatepass")) > _MAX_NAME_BYTES for part in name.split("/")):
            report.add(place, f"'{name[:64]}...' is longer than any file's name; correct it")


def _check_metrics(metrics: Any, report: Report) -> None:
    for index, control in enumerate(metrics.metric_control):
        place = f"model_metrics.metric_control[{index}]"
        if not control.metric_identifier.family:
            report.add(place, "names no metric; add metric_identifier { family: ... }")
        buckets = list(control.histogram_options.buckets)
        if any(not low < high for low, high in pairwise(buckets)):
            report.add(f"{place}.histogram_options.buckets", "are not in ascending order; sort them")
