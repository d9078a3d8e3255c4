# SPDX-License-Identifier: Apache-2.0
"""Checks of dynamic batching: sizes, priorities, and a delay that is chosen by itself."""

from __future__ import annotations

import math
from typing import Any

from headrace.models.config.reports import Report

_QUEUE_FIELDS = ("priority_levels", "default_queue_policy", "priority_queue_policy", "preserve_ordering")


def check_dynamic_batching(message: Any, report: Report) -> None:
    """All of it."""
    batching = message.dynamic_batching
    place = "dynamic_batching"
    written = {field.name for field, _ in batching.ListFields()}
    # Without batches it is still the place for queue policies.
    if message.max_batch_size == 0 and not written.intersection(_QUEUE_FIELDS):
        report.add(place, "batching is on but max_batch_size is 0; set max_batch_size, or remove dynamic_batching")
    else:
        check_preferred(batching.preferred_batch_size, f"{place}.preferred_batch_size", message, report)
    _check_priorities(batching, place, report)
    _check_delay(batching, place, report)


def check_preferred(sizes: Any, place: str, message: Any, report: Report) -> None:
    """Each preferred size is one that can be reached."""
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
    at = f"{place}.latency_target_ms"
    if not batching.max_queue_delay_auto:
        if target:
            report.add(at, "only counts with max_queue_delay_microseconds: auto; write that, or remove it")
        return
    if not (target > 0 and math.isfinite(target)):
        where = at if target else f"{place}.max_queue_delay_auto"
        report.add(where, "a delay chosen by itself needs to know what it may cost; add latency_target_ms: 50 or so")
    if batching.max_queue_delay_microseconds:
        report.add(f"{place}.max_queue_delay_microseconds", "is given as a number and as auto; keep one of them")
