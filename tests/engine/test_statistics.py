# SPDX-License-Identifier: Apache-2.0
"""The accounts of a version: after a known sequence of requests, known numbers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from headrace.engine.statistics import FAILURE_REASONS, RequestStats, VersionStatistics, failure_reason
from headrace.models.config.types import DynamicBatching, InstanceGroup, QueuePolicy
from support.engines import Gate, Recorder, answers, array_of, config_of, counted, serving_plane, submit


def rows(count: int, value: int = 0) -> Any:
    return np.full((count, 1), value)


def test_requests_are_counted_per_size_and_executions_per_batch() -> None:
    async def main() -> None:
        before_ms = int(time.time() * 1000)
        async with serving_plane([(config_of("m", max_batch_size=8), Recorder())]) as plane:
            await answers([submit(plane, "m", INPUT0=rows(count)) for count in (1, 2, 1, 4)])
            await submit(plane, "m", INPUT0=rows(2)).answer()
            statistics = counted(plane, "m")
            assert (statistics.received, statistics.settled, statistics.in_flight) == (5, 5, 0)
            assert (statistics.executions, statistics.inferences) == (2, 10)
            assert {size: stats.success for size, stats in statistics.by_rows.items()} == {1: 2, 2: 2, 4: 1}
            assert {size: stats.count for size, stats in statistics.batches.items()} == {8: 1, 2: 1}
            assert before_ms <= statistics.last_inference_ms <= time.time() * 1000
            total = statistics.total()
            assert (total.success, total.fail, total.computed) == (5, 0, 5)
            assert not any(statistics.failures.values())

    asyncio.run(main())


def test_the_parts_of_a_requests_time_are_at_most_the_total() -> None:
    async def main() -> None:
        def compute(inputs: Any) -> Any:
            time.sleep(0.005)
            return {"OUTPUT0": inputs["INPUT0"]}

        config = config_of("m", max_batch_size=8, scheduling=DynamicBatching((), 10_000))
        async with serving_plane([(config, compute)]) as plane:
            await answers([submit(plane, "m", INPUT0=rows(1)) for _ in range(3)])
            statistics = counted(plane, "m")
            stats = statistics.by_rows[1]
            parts = stats.queue_ns + stats.input_ns + stats.infer_ns + stats.output_ns
            assert parts <= stats.success_ns
            # Each of the three waited for the delay, and for the whole of the batch.
            assert stats.queue_ns >= 3 * 9_000_000
            assert stats.infer_ns >= 3 * 5_000_000
            batch = statistics.batches[3]
            assert (batch.count, batch.infer_ns * 3) == (1, stats.infer_ns)
            assert stats.input_ns == 3 * batch.input_ns > 0
            assert stats.output_ns == 3 * batch.output_ns > 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unavailable("full"), "REJECTED"),
        (ResourceExhausted("full"), "REJECTED"),
        (Cancelled("gone"), "CANCELED"),
        (DeadlineExceeded("late"), "CANCELED"),
        (Internal("broken"), "BACKEND"),
        (RuntimeError("broken"), "BACKEND"),
        (InvalidArgument("wrong"), "OTHER"),
        (NotFound("where"), "OTHER"),
    ],
)
def test_failures_have_one_of_triton_s_reasons(error: BaseException, reason: str) -> None:
    assert failure_reason(error) == reason
    assert reason in FAILURE_REASONS
    statistics = VersionStatistics()
    statistics.failed(3, error, 50)
    assert {name: count for name, count in statistics.failures.items() if count} == {reason: 1}
    assert (statistics.by_rows[3].fail, statistics.by_rows[3].fail_ns) == (1, 50)


def test_every_kind_of_failure_through_a_plane() -> None:
    async def main() -> None:
        gate = Gate()

        def compute(inputs: Any) -> Any:
            if np.any(inputs["INPUT0"] == 13):
                raise RuntimeError
            return gate(inputs)

        config = config_of(
            "m",
            max_batch_size=2,
            instance_groups=(InstanceGroup("m", runs="thread"),),
            scheduling=DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=1)),
        )
        async with serving_plane([(config, compute)]) as plane:
            statistics = counted(plane, "m")
            with pytest.raises(InvalidArgument):
                submit(plane, "m", INPUT0=rows(3))
            assert isinstance(await submit(plane, "m", INPUT0=rows(1, 13)).answer(), Internal)
            running = submit(plane, "m", INPUT0=rows(2))
            await gate.entered()
            waiting = submit(plane, "m", INPUT0=rows(1))
            assert statistics.in_flight == 2
            with pytest.raises(Unavailable):
                submit(plane, "m", INPUT0=rows(1))
            assert statistics.in_flight == 2
            waiting.pending.cancel()
            assert statistics.in_flight == 1
            gate.let()
            assert array_of(await running.answer()).shape == (2, 1)
            assert statistics.in_flight == 0
            reasons = {name: count for name, count in statistics.failures.items() if count}
            assert reasons == {"OTHER": 1, "BACKEND": 1, "REJECTED": 1, "CANCELED": 1}
            assert {size: stats.fail for size, stats in statistics.by_rows.items()} == {0: 1, 1: 3, 2: 0}
            assert statistics.by_rows[2].success == 1
            assert (statistics.executions, statistics.inferences) == (1, 2)
            total = statistics.total()
            assert (total.success, total.fail) == (1, 4)

    asyncio.run(main())


def test_a_version_begins_with_nothing() -> None:
    statistics = VersionStatistics()
    total = statistics.total()
    assert all(getattr(total, name) == 0 for name in RequestStats.__slots__)
    assert statistics.last_inference_ms == statistics.in_flight == 0


def test_all_numbers_are_added_up() -> None:
    statistics = VersionStatistics()
    for size in (1, 2, 3):
        stats = statistics.of_rows(size)
        for position, name in enumerate(RequestStats.__slots__):
            setattr(stats, name, size * 10 + position)
    total = statistics.total()
    for position, name in enumerate(RequestStats.__slots__):
        assert getattr(total, name) == 60 + 3 * position
