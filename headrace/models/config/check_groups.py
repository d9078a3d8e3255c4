# SPDX-License-Identifier: Apache-2.0
"""Checks of instance groups: are there the GPUs they ask for, are their numbers numbers of something."""

from __future__ import annotations

from typing import Any

from headrace.models.config.reports import Report

MOST_INSTANCES = 1024
"""Of one group: each may be a process, and a configuration may come with a request to load."""

_GPU = 1
_KIND_NAMES = {2: "KIND_CPU", 3: "KIND_MODEL"}


def check_groups(message: Any, report: Report, gpus: int) -> None:
    """Every group of a model that is not an ensemble."""
    seen: set[str] = set()
    for index, group in enumerate(message.instance_group):
        place = f"instance_group[{index}]"
        called = f"instance group {group.name} of model {message.name}"
        if group.count < 0:
            report.add(f"{place}.count", f"{called} has count {group.count}; write 1 or more")
        if group.count > MOST_INSTANCES:
            report.add(f"{place}.count", f"{called} has count {group.count}; write {MOST_INSTANCES} or less")
        if group.name in seen:
            report.add(f"{place}.name", f"{called} has the name of another group; rename one")
        seen.add(group.name)
        _check_devices(group, place, called, report, gpus)
        _check_limiter(group.rate_limiter, f"{place}.rate_limiter", called, report)


def _check_devices(group: Any, place: str, called: str, report: Report, gpus: int) -> None:
    if group.kind != _GPU:
        if group.gpus:
            kind = _KIND_NAMES.get(group.kind, "no kind")
            report.add(
                f"{place}.gpus",
                f"{called} has kind {kind} but specifies one or more GPUs ({gpus} are available); remove gpus",
            )
        return
    if gpus < 1:
        report.add(
            f"{place}.kind", f"{called} has kind KIND_GPU but no GPUs are available; write kind: KIND_CPU or KIND_AUTO"
        )
        return
    wrong = [gpu for gpu in group.gpus if not 0 <= gpu < gpus]
    if wrong:
        report.add(f"{place}.gpus", f"{called} specifies GPU {wrong[0]}; available are 0 to {gpus - 1}")


def _check_limiter(limiter: Any, place: str, called: str, report: Report) -> None:
    seen: set[str] = set()
    for index, resource in enumerate(limiter.resources):
        at = f"{place}.resources[{index}]"
        if not resource.name:
            report.add(at, f"{called} has a resource without 'name'; add one")
        elif resource.name in seen:
            report.add(at, f"{called} has the resource '{resource.name}' twice; remove one")
        seen.add(resource.name)
        if resource.count < 1:
            report.add(at, f"{called} needs 0 of the resource '{resource.name}'; write count: 1 or more")
