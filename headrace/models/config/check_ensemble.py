# SPDX-License-Identifier: Apache-2.0
"""Checks of an ensemble: that its steps make a graph from its inputs to its outputs.

Whether the models of the steps exist, and have those tensors, is for the engine to say.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from headrace.models.config.reports import Report

_STEP = "ensemble_scheduling.step"


def check_ensemble(message: Any, backend: str, report: Report) -> None:
    """All of it."""
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
        report.add(f"{place}.model_version", f"{step.model_version} is no version; write -1 for the newest")
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
    """Run the steps in thought; what never gets its inputs waits in a circle."""
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
