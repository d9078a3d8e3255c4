# SPDX-License-Identifier: Apache-2.0
"""All of it together, in an order nobody chose: whatever happens around a request, it is answered once, and rightly."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from headrace.core.dtypes import INT64
from headrace.core.errors import Cancelled, Internal, InvalidArgument, Unavailable
from headrace.core.requests import InferRequest, InferResponse
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.models.config.types import (
    DynamicBatching,
    InputSpec,
    InstanceGroup,
    ModelConfig,
    OutputSpec,
    QueuePolicy,
    Resource,
)
from support.engines import RecordingCaller, array_of, config_of, counted, serving_plane, tensors_of

REQUESTS = 1500
UNLUCKY = -13

CONFIGS: dict[str, dict[str, Any]] = {
    "inline": {"instance_groups": (InstanceGroup("m", runs="inline"),)},
    "auto": {"instance_groups": (InstanceGroup("m", runs="auto"),)},
    "threads": {"instance_groups": (InstanceGroup("m", count=3, runs="thread"),)},
    "ordered": {
        "instance_groups": (InstanceGroup("m", count=3, runs="thread"),),
        "scheduling": DynamicBatching((4,), 500, preserve_ordering=True),
    },
    "delayed": {"scheduling": DynamicBatching((2, 6), 2000)},
    "one by one": {"scheduling": None, "instance_groups": (InstanceGroup("m", count=2, runs="thread"),)},
    "policies": {
        "instance_groups": (InstanceGroup("m", count=2, runs="thread"),),
        "scheduling": DynamicBatching(
            (4,),
            500,
            priority_levels=3,
            default_priority_level=2,
            default_queue_policy=QueuePolicy(max_queue_size=40, default_timeout_microseconds=3000),
            priority_queue_policies={3: QueuePolicy("delay", 100, allow_timeout_override=True, max_queue_size=20)},
        ),
    },
    "limited": {
        "instance_groups": (
            InstanceGroup("m", count=3, runs="thread", resources=(Resource("R", 1, is_global=True),), priority=1),
            InstanceGroup("n", count=2, runs="thread", resources=(Resource("R", 2, is_global=True),), priority=2),
        ),
    },
}


def config(kind: str) -> ModelConfig:
    settings: dict[str, Any] = {
        "max_batch_size": 8,
        "inputs": (InputSpec("INPUT0", INT64, (-1,)),),
        "outputs": (OutputSpec("OUTPUT0", INT64, (-1,)),),
        **CONFIGS[kind],
    }
    return config_of("m", **settings)


def compute(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    rows = inputs["INPUT0"]
    if np.any(rows == UNLUCKY):
        raise RuntimeError("unlucky")
    if rows.flat[0] % 50 == 0:
        time.sleep(0.0005)
    return {"OUTPUT0": rows * 2 + 1}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Caller(RecordingCaller):
    def __init__(self, array: Any, heard: list[Caller]) -> None:
        super().__init__()
        self.array = array
        self.gave_up = False
        self._heard = heard

    def __call__(self, result: Any) -> None:
        self._heard.append(self)
        super().__call__(result)


def check(caller: Caller, result: InferResponse | BaseException) -> str:
    assert len(caller.received) == 1
    if isinstance(result, Cancelled):
        assert caller.gave_up
        return "cancelled"
    if isinstance(result, Unavailable):
        assert result.message == "Request timeout expired"
        return "late"
    if np.any(caller.array == UNLUCKY):
        assert isinstance(result, Internal)
        return "failed"
    assert array_of(result).tolist() == (caller.array * 2 + 1).tolist()
    return "answered"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("kind", CONFIGS)
def test_everybody_is_answered_once_and_rightly(kind: str, seed: int) -> None:
    async def main() -> Counter[str]:
        chance = random.Random(f"{kind} {seed}")
        outcomes: Counter[str] = Counter()
        async with serving_plane([(config(kind), compute)], limiter=RateLimiter({"R": 3})) as plane:
            callers: list[Caller] = []
            received: list[Caller] = []
            for number in range(REQUESTS):
                array = np.full((chance.randint(1, 8), chance.choice([1, 1, 1, 2])), number)
                if chance.random() < 0.02:
                    array[-1] = UNLUCKY
                caller = Caller(array, received)
                parameters = {"priority": chance.randint(0, 3), "timeout": chance.choice([0, 50, 5000])}
                try:
                    request = InferRequest("m", tensors_of(INPUT0=array), parameters=parameters)
                    caller.pending = plane.infer(request, caller)
                except Unavailable:
                    assert not caller.received
                    outcomes["refused"] += 1
                    continue
                callers.append(caller)
                if chance.random() < 0.1:
                    someone = chance.choice(callers[-30:])
                    someone.gave_up = someone.gave_up or not someone.received
                    someone.pending.cancel()
                if chance.random() < 0.01:
                    with pytest.raises(InvalidArgument):
                        plane.infer(InferRequest("m", tensors_of(INPUT0=np.zeros((9, 1), np.int64))), caller)
                    outcomes["wrong"] += 1
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.choice([0, 0, 0, 0.0005]))
            for caller in callers:
                outcomes[check(caller, await caller.answer())] += 1
            if kind == "ordered":
                order = [callers.index(caller) for caller in received]
                assert order == sorted(order)
            statistics = counted(plane, "m")
            total = statistics.total()
            assert statistics.in_flight == 0
            assert total.success == outcomes["answered"]
            assert total.fail == sum(outcomes.values()) - outcomes["answered"]
            assert statistics.failures["CANCELED"] == outcomes["cancelled"]
            assert statistics.failures["REJECTED"] == outcomes["refused"] + outcomes["late"]
            assert statistics.failures["BACKEND"] == outcomes["failed"]
            assert statistics.failures["OTHER"] == outcomes["wrong"]
            assert max(record.rows for record in statistics.log.recent) <= 8
        return outcomes

    outcomes = asyncio.run(main())
    assert outcomes["answered"] > REQUESTS / 20
    assert outcomes["cancelled"] + outcomes["failed"] > 0
