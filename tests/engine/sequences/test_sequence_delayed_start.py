# SPDX-License-Identifier: Apache-2.0
"""TRITONSERVER_DELAY_SCHEDULER and TRITONSERVER_BACKLOG_DELAY_SCHEDULER for models with sequences: exact batch counts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from sequence_fakes import ALL_CONTROLS, Caller, HeldRunner, model, turns

from headrace.engine.scheduling.pending_request import BatchLog
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.engine.scheduling.scheduler import StartDelay
from headrace.engine.sequences.scheduler import DelayedSequenceScheduler
from headrace.models.config.types import OldestStrategy, SequenceBatching
from support.engines import Recorder, config_of, serving_plane, submit

DIRECT = SequenceBatching(controls=ALL_CONTROLS, max_sequence_idle_microseconds=60_000_000)
OLDEST = replace(DIRECT, strategy=OldestStrategy(max_candidate_sequences=4))
BOTH = pytest.mark.parametrize("sequences", [DIRECT, OLDEST], ids=["direct", "oldest"])


def delayed(
    sequences: SequenceBatching, requests: int, backlog: int = 0, *, runners: int = 1, max_batch_size: int = 4
) -> tuple[Caller, list[HeldRunner]]:
    """A delayed scheduler with runners that wait for the test."""
    fakes = [HeldRunner(f"held{index}") for index in range(runners)]
    scheduler = DelayedSequenceScheduler(
        model(sequences, max_batch_size), sequences, fakes, BatchLog(), limiter=RateLimiter()
    )
    scheduler.delay_start(StartDelay(requests, backlog))
    return Caller(scheduler, max_batch_size), fakes


async def answer_all(runner: HeldRunner) -> list[list[float]]:
    """Answer batch after batch until nothing comes any more; returns their inputs."""
    await turns()
    answered = 0
    while answered < len(runner.batches):
        runner.answer()
        answered += 1
        await turns()
    return runner.values()


def test_direct_four_sequences_make_exact_batches() -> None:
    """As in Triton's test of four sequences of unequal length: all twelve requests are there before the first batch."""

    async def main() -> None:
        caller, (runner,) = delayed(DIRECT, 12)
        for number, values in ((1, (11, 12, 13, 14)), (2, (21, 22)), (3, (31, 32, 33, 34)), (4, (41, 42))):
            for value in values:
                assert runner.batches == []
                flags = ("S" if value == values[0] else "") + ("E" if value == values[-1] else "")
                caller.send(number, value, flags)
                await turns()
        assert await answer_all(runner) == [[11, 21, 31, 41], [12, 22, 32, 42], [13, 0, 33], [14, 0, 34]]

    asyncio.run(main())


@BOTH
def test_only_the_first_batch_is_delayed(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, (runner,) = delayed(sequences, 2)
        caller.send(1, 1, "S")
        await turns()
        assert runner.batches == []
        caller.send(2, 2, "S")
        assert await answer_all(runner) == [[1, 2]]
        caller.send(1, 11, "E")
        await turns()
        assert runner.values() == [[1, 2], [11]]

    asyncio.run(main())


def test_direct_counts_requests_with_a_slot_and_those_in_the_backlog_apart() -> None:
    async def main() -> None:
        caller, (runner,) = delayed(DIRECT, 4, 3, max_batch_size=2)
        caller.send(1, 1, "S")
        caller.send(2, 2, "SE")
        caller.send(3, 3, "S")
        caller.send(3, 33, "E")
        caller.send(4, 4, "SE")
        await turns()
        assert runner.batches == []  # three in the backlog, two with a slot
        caller.send(1, 11)
        await turns()
        assert runner.batches == []
        caller.send(1, 111, "E")
        assert await answer_all(runner) == [[1, 2], [11, 3], [111, 33], [4]]

    asyncio.run(main())


def test_direct_waits_for_the_backlog_alone_too() -> None:
    async def main() -> None:
        caller, (runner,) = delayed(DIRECT, 0, 2, max_batch_size=1)
        for number in (1, 2):
            caller.send(number, number, "SE")
            await turns()
            assert runner.batches == []
        caller.send(3, 3, "SE")
        assert await answer_all(runner) == [[1], [2], [3]]

    asyncio.run(main())


def test_direct_instances_start_together() -> None:
    async def main() -> None:
        caller, runners = delayed(DIRECT, 4, runners=2, max_batch_size=2)
        for number in (1, 2, 3):
            caller.send(number, number, "SE")
        await turns()
        assert [runner.batches for runner in runners] == [[], []]
        caller.send(4, 4, "SE")
        await turns()
        assert [runner.values() for runner in runners] == [[[1, 3]], [[2, 4]]]

    asyncio.run(main())


def test_oldest_counts_sequences_that_have_a_request_and_no_backlog() -> None:
    """As in Triton, where the batcher of an instance is given one request of each sequence at a time."""

    async def main() -> None:
        caller, (runner,) = delayed(OLDEST, 3, 5)
        for value in (1, 11, 111):
            caller.send(1, value, "S" if value == 1 else "")
        caller.send(2, 2, "S")
        await turns()
        assert runner.batches == []
        caller.send(3, 3, "S")
        assert await answer_all(runner) == [[1, 2, 3], [11], [111]]

    asyncio.run(main())


def test_oldest_instances_start_each_by_itself() -> None:
    async def main() -> None:
        sequences = replace(OLDEST, strategy=OldestStrategy(2))
        caller, runners = delayed(sequences, 2, runners=2, max_batch_size=2)
        for number in (1, 2, 3):
            caller.send(number, number, "S")
        await turns()
        assert [runner.values() for runner in runners] == [[[1, 3]], []]
        caller.send(4, 4, "S")
        await turns()
        assert [runner.values() for runner in runners] == [[[1, 3]], [[2, 4]]]

    asyncio.run(main())


def test_a_sequence_that_moves_up_from_the_backlog_counts_with_its_slot() -> None:
    async def main() -> None:
        caller, (runner,) = delayed(DIRECT, 2, max_batch_size=1)
        first, _ = caller.send(1, 1, "S")
        caller.send(2, 2, "S")
        caller.send(2, 22, "E")
        await turns()
        assert runner.batches == []
        first.cancel()
        assert await answer_all(runner) == [[2], [22]]

    asyncio.run(main())


@BOTH
def test_the_variables_reach_a_model(sequences: SequenceBatching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "2")
    monkeypatch.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", "0")

    async def main() -> None:
        recorder = Recorder()
        config = config_of("m", max_batch_size=4, scheduling=replace(sequences, controls=()))
        async with serving_plane([(config, recorder)]) as plane:
            requests = []
            for number in (1, 2):
                assert recorder.received == []
                parameters = {"sequence_id": number, "sequence_start": True, "sequence_end": True}
                requests.append(submit(plane, "m", request={"parameters": parameters}, INPUT0=np.array([[number]])))
                await turns()
            for request in requests:
                await request.answer()
            assert recorder.rows == [2]

    asyncio.run(main())


@BOTH
def test_a_backlog_alone_delays_the_direct_strategy_only(
    sequences: SequenceBatching, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", "1")

    async def main() -> None:
        recorder = Recorder()
        config = config_of("m", max_batch_size=4, scheduling=replace(sequences, controls=()))
        async with serving_plane([(config, recorder)]) as plane:
            parameters = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
            request = submit(plane, "m", request={"parameters": parameters}, INPUT0=np.array([[1]]))
            await turns()
            assert len(recorder.received) == (sequences is OLDEST)
            request.pending.cancel()

    asyncio.run(main())
    assert len(caplog.records) == (sequences is DIRECT)
