# SPDX-License-Identifier: Apache-2.0
"""What a hostile tester found where models share a resource: one that always has work must not keep it to itself."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import numpy as np
import pytest

from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.models.config.types import DynamicBatching, InstanceGroup, ModelConfig, Resource
from support.engines import RecordingCaller, answers, config_of, serving_plane, submit

ROW = np.array([[1]])


def sharing(name: str, runs: Literal["inline", "thread"], batches: bool, priority: int = 1) -> ModelConfig:
    group = InstanceGroup(name, runs=runs, resources=(Resource("R", 1, is_global=True),), priority=priority)
    return config_of(
        name, max_batch_size=1, instance_groups=(group,), scheduling=DynamicBatching() if batches else None
    )


class Log:
    """Which model computed, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def model(self, name: str) -> Any:
        def compute(inputs: Any) -> Any:
            self.names.append(name)
            return {"OUTPUT0": inputs["INPUT0"]}

        return compute


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("runs", ["inline", "thread"])
def test_a_busy_model_lets_others_have_their_turn(runs: Literal["inline", "thread"], batches: bool) -> None:
    async def main() -> None:
        log = Log()
        models = [(sharing(name, runs, batches), log.model(name)) for name in ("a", "b")]
        async with serving_plane(models, limiter=RateLimiter({"R": 1})) as plane:
            requests: list[RecordingCaller] = [submit(plane, "a", INPUT0=ROW) for _ in range(40)]
            requests += [submit(plane, "b", INPUT0=ROW) for _ in range(10)]
            await answers(requests)
            # All of b's among the first half, though a's were there before.
            assert log.names[:25].count("b") == 10

    asyncio.run(main())


def test_half_the_turns_for_priority_two_also_between_schedulers() -> None:
    async def main() -> None:
        log = Log()
        models = [(sharing(name, "thread", True, priority), log.model(name)) for name, priority in (("a", 2), ("b", 1))]
        async with serving_plane(models, limiter=RateLimiter({"R": 1})) as plane:
            await answers([submit(plane, name, INPUT0=ROW) for name in ("a", "b") for _ in range(30)])
            assert 18 <= log.names[:30].count("b") <= 22

    asyncio.run(main())


def test_a_newcomer_does_not_make_up_for_the_time_before_it() -> None:
    async def main() -> None:
        log = Log()
        models = [(sharing(name, "thread", True), log.model(name)) for name in ("a", "b")]
        async with serving_plane(models, limiter=RateLimiter({"R": 1})) as plane:
            await answers([submit(plane, "a", INPUT0=ROW) for _ in range(30)])
            log.names.clear()
            await answers([submit(plane, name, INPUT0=ROW) for name in ("a", "b") for _ in range(20)])
            assert 8 <= log.names[:20].count("a") <= 12

    asyncio.run(main())


def test_who_needs_much_is_not_kept_waiting_by_those_who_need_little() -> None:
    """The two small instances take turns, so that never all of the resource is there by itself."""

    async def main() -> None:
        log = Log()

        def needing(name: str, of_r: int, count: int) -> ModelConfig:
            resources = (Resource("R", of_r, is_global=True),)
            group = InstanceGroup(name, count=count, runs="thread", resources=resources)
            return config_of(name, max_batch_size=1, instance_groups=(group,))

        models = [(needing("small", 1, 2), log.model("small")), (needing("large", 2, 1), log.model("large"))]
        async with serving_plane(models, limiter=RateLimiter({"R": 2})) as plane:
            await answers(
                [submit(plane, name, INPUT0=ROW) for name, n in (("small", 60), ("large", 5)) for _ in range(n)]
            )
            assert log.names[:40].count("large") == 5

    asyncio.run(main())


def test_no_turn_is_reserved_for_a_cancelled_request() -> None:
    async def main() -> None:
        log = Log()
        models = [(sharing(name, "thread", True), log.model(name)) for name in ("a", "b")]
        async with serving_plane(models, limiter=RateLimiter({"R": 1})) as plane:
            requests = [submit(plane, "a", INPUT0=ROW) for _ in range(5)]
            gone = [submit(plane, "b", INPUT0=ROW) for _ in range(5)]
            await asyncio.sleep(0)
            for one in gone:
                one.pending.cancel()
            await answers(requests)
            assert log.names.count("a") == 5

    asyncio.run(main())
