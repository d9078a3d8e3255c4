# SPDX-License-Identifier: Apache-2.0
"""TRITONSERVER_DELAY_SCHEDULER: no batch before enough requests are queued, so that batch counts are exact."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import Cancelled, InvalidArgument, Unavailable
from headrace.engine.scheduling.scheduler import StartDelay, read_start_delay
from headrace.models.config.types import DynamicBatching, InstanceGroup, QueuePolicy
from support.engines import Recorder, answers, array_of, config_of, counted, serving_plane, submit

REQUESTS = "TRITONSERVER_DELAY_SCHEDULER"
BACKLOG = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"


def row(number: int) -> Any:
    return np.array([[number]])


async def turns(times: int = 20) -> None:
    """Let everything happen that needs no waiting."""
    for _ in range(times):
        await asyncio.sleep(0)


async def spread(plane: Any, count: int, first: int = 0) -> list[Any]:
    """One request after the other, each in turns of the loop of its own, as from clients that know nothing of each other."""
    requests = []
    for number in range(first, first + count):
        requests.append(submit(plane, "m", INPUT0=row(number)))
        await turns()
    return requests


@pytest.mark.parametrize(
    ("preferred", "count", "expected"),
    [((), 8, [8]), ((), 20, [8, 8, 4]), ((2, 6), 9, [6, 2, 1]), ((4,), 12, [4, 4, 4])],
)
def test_batch_counts_are_exact(
    monkeypatch: pytest.MonkeyPatch, preferred: tuple[int, ...], count: int, expected: list[int]
) -> None:
    monkeypatch.setenv(REQUESTS, str(count))

    async def main() -> None:
        model = Recorder()
        config = config_of("m", max_batch_size=8, scheduling=DynamicBatching(preferred))
        async with serving_plane([(config, model)]) as plane:
            request = await spread(plane, count - 1)
            assert model.received == []
            assert not any(one.received for one in request)
            request += await spread(plane, 1, first=count - 1)
            results = await answers(request)
            assert [array_of(result).item() for result in results] == list(range(count))
            assert model.rows == expected
            assert counted(plane, "m").executions == len(expected)

    asyncio.run(main())


def test_only_the_first_batch_is_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUESTS, "3")

    async def main() -> None:
        model = Recorder()
        async with serving_plane([(config_of("m"), model)]) as plane:
            await answers(await spread(plane, 3))
            assert model.rows == [3]
            await answers(await spread(plane, 2))
            assert model.rows == [3, 1, 1]

    asyncio.run(main())


def test_requests_are_counted_not_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUESTS, "2")

    async def main() -> None:
        model = Recorder()
        async with serving_plane([(config_of("m", max_batch_size=8), model)]) as plane:
            first = submit(plane, "m", INPUT0=np.zeros((5, 1)))
            await turns()
            assert model.rows == []
            await answers([first, submit(plane, "m", INPUT0=np.zeros((3, 1)))])
            assert model.rows == [8]

    asyncio.run(main())


def test_different_shapes_are_never_joined_however_long_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUESTS, "6")

    async def main() -> None:
        model = Recorder()
        async with serving_plane([(config_of("m", max_batch_size=8), model)]) as plane:
            requests = []
            for width in (2, 2, 3, 3, 3, 2):
                requests.append(submit(plane, "m", INPUT0=np.zeros((1, width))))
                await turns()
            results = await answers(requests)
            assert [call.shape for call in model.received] == [(2, 2), (3, 3), (1, 2)]
            assert [array_of(result).shape for result in results] == [(1, width) for width in (2, 2, 3, 3, 3, 2)]

    asyncio.run(main())


def test_a_delay_in_the_queue_that_has_passed_meanwhile_makes_the_first_batch_as_large_as_it_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(REQUESTS, "3")

    async def main() -> None:
        model = Recorder()
        config = config_of("m", max_batch_size=8, scheduling=DynamicBatching((4,), 1))
        async with serving_plane([(config, model)]) as plane:
            await answers(await spread(plane, 3))
            assert model.rows == [3]
            assert counted(plane, "m").log.recent[0].reason == "delay expired"

    asyncio.run(main())


def test_queue_policies_apply_during_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUESTS, "3")

    async def main() -> None:
        model = Recorder()
        policy = QueuePolicy(max_queue_size=2)
        config = config_of("m", scheduling=DynamicBatching(default_queue_policy=policy))
        async with serving_plane([(config, model)]) as plane:
            request = await spread(plane, 2)
            with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
                submit(plane, "m", INPUT0=row(2))
            assert model.received == []
            for one in request:
                one.pending.cancel()
            assert [type(result) for result in await answers(request)] == [Cancelled, Cancelled]

    asyncio.run(main())


def test_unloading_a_model_fails_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUESTS, "3")

    async def main() -> None:
        model = Recorder()
        async with serving_plane([(config_of("m"), model)]) as plane:
            request = await spread(plane, 2)
            (version,) = plane.statistics("m")
            await version.retire(0)
            assert [type(result) for result in await answers(request)] == [Unavailable, Unavailable]
            assert model.received == []

    asyncio.run(main())


def test_models_without_dynamic_batching_are_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUESTS, "3")

    async def main() -> None:
        model = Recorder()
        async with serving_plane([(config_of("m", scheduling=None), model)]) as plane:
            await answers(await spread(plane, 2))
            assert model.rows == [1, 1]

    asyncio.run(main())


def test_each_model_counts_its_own_requests(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(REQUESTS, "2")

    async def main() -> None:
        first, second = Recorder(), Recorder()
        async with serving_plane([(config_of("m"), first), (config_of("n"), second)]) as plane:
            waits = submit(plane, "n", INPUT0=row(0))
            await answers(await spread(plane, 2))
            assert (first.rows, second.rows) == ([2], [])
            await answers([waits, submit(plane, "n", INPUT0=row(1))])
            assert second.rows == [2]

    asyncio.run(main())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["model 'm'", "model 'n'"]
    assert all(REQUESTS in record.getMessage() for record in caplog.records)


def test_idle_instances_share_what_has_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUESTS, "4")

    async def main() -> None:
        config = config_of("m", max_batch_size=2, instance_groups=(InstanceGroup("m", count=2, runs="thread"),))
        async with serving_plane([(config, Recorder())]) as plane:
            await answers(await spread(plane, 4))
            assert [(record.rows, record.instance) for record in counted(plane, "m").log.recent] == [
                (2, "m_0_cpu"),
                (2, "m_1_cpu"),
            ]

    asyncio.run(main())


@pytest.mark.parametrize("variable", [REQUESTS, BACKLOG])
@pytest.mark.parametrize("value", ["four", "-1", "1.5", "٣", "1" * 5000])
def test_a_bad_value_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)

    async def main() -> None:
        with pytest.raises(InvalidArgument, match=f"^the environment variable {variable} is '"):
            async with serving_plane([(config_of("m"), Recorder())]):
                pass

    asyncio.run(main())


def test_the_values_of_the_variables() -> None:
    assert read_start_delay({}) == StartDelay(0, 0)
    assert read_start_delay({REQUESTS: "", BACKLOG: ""}) == StartDelay(0, 0)
    assert read_start_delay({REQUESTS: " 12 ", BACKLOG: "2"}) == StartDelay(12, 2)
