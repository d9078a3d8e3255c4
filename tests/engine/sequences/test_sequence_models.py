# SPDX-License-Identifier: Apache-2.0
"""Many sequences at once, through real runners, against models with a memory of their own: each as if it were alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from sequence_fakes import ALL_CONTROLS, CORRID, Caller, model, scheduler_with_compute_runners

from headrace.backends.contract import Array, Placement, Work
from headrace.core.dtypes import BYTES, FP32
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.tensors import Tensor
from headrace.engine.execution.concatenation import BatchConcatenator
from headrace.engine.execution.runners import RequestRunner
from headrace.engine.scheduling.dynamic_batcher import FixedDelay
from headrace.engine.scheduling.pending_request import BatchLog
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.engine.sequences.scheduler import SequenceScheduler
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import OldestStrategy, SequenceBatching

DIRECT = SequenceBatching(controls=ALL_CONTROLS, max_sequence_idle_microseconds=60_000_000)
OLDEST = replace(DIRECT, strategy=OldestStrategy(max_candidate_sequences=6))


class SlotSums:
    """Adds up what each row of its batches gets: it counts on a sequence having the same row all the time."""

    def __init__(self) -> None:
        self.sums = np.zeros((16, 1), np.float32)
        self.batches: list[int] = []

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        rows = len(inputs["X"])
        self.batches.append(int(inputs["READY"].sum()))
        sums = self.sums[:rows]
        sums[inputs["START"] == 1] = 0
        sums += np.where(inputs["READY"] == 1, inputs["X"], 0)
        return {"Y": sums.copy()}

    def close(self) -> None:
        """Nothing to close."""


class NamedSums:
    """Adds up by correlation id."""

    def __init__(self) -> None:
        self.sums: dict[int | bytes, float] = {}
        self.batches: list[int] = []

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        corrids = inputs["CORRID"].reshape(-1).tolist()
        real = [corrid for corrid in corrids if corrid]
        if len(set(real)) < len(real):
            raise InvalidArgument("two requests of one sequence in a batch")
        self.batches.append(len(real))
        out = np.zeros((len(corrids), 1), np.float32)
        for row, corrid in enumerate(corrids):
            if corrid:
                before = 0 if inputs["START"][row, 0] else self.sums[corrid]
                self.sums[corrid] = out[row, 0] = before + inputs["X"][row, 0]
                if inputs["END"][row, 0]:
                    del self.sums[corrid]
        return {"Y": out}

    def close(self) -> None:
        """Nothing to close."""


async def talk(caller: Caller, name: int | str, dice: random.Random) -> None:
    """Some sequences under one id, one after the other: some requests waited for, some sent in one go."""
    for _ in range(dice.randint(1, 3)):
        values = [dice.randint(1, 9) for _ in range(dice.randint(1, 8))]
        answers = []
        for index, value in enumerate(values):
            flags = "S" * (index == 0) + "E" * (index == len(values) - 1)
            answers.append(asyncio.ensure_future(caller.ask(name, value, flags)))
            await asyncio.sleep(0)
            if dice.random() < 0.5:
                await answers[-1]
            for _ in range(dice.randint(0, 4)):
                await asyncio.sleep(0)
        got = await asyncio.gather(*answers)
        assert got == list(accumulate(values))


async def crowd(caller: Caller, seed: int, names: Callable[[int], int | str] = lambda n: n + 1) -> None:
    await asyncio.gather(*(talk(caller, names(n), random.Random(seed * 1000 + n)) for n in range(12)))


@pytest.mark.parametrize("runs", ["inline", "thread"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("sequences", "kind"), [(DIRECT, SlotSums), (DIRECT, NamedSums), (OLDEST, NamedSums)])
def test_every_sequence_is_computed_as_if_alone(sequences: SequenceBatching, kind: Any, seed: int, runs: str) -> None:
    async def main() -> None:
        instances = [kind(), kind()]
        caller, runners = scheduler_with_compute_runners(sequences, instances, runs=runs)
        await crowd(caller, seed)
        if kind is NamedSums:
            assert [instance.sums for instance in instances] == [{}, {}]
        assert max(max(instance.batches) for instance in instances) > 1
        for runner in runners:
            await asyncio.to_thread(runner.close)

    asyncio.run(main())


@pytest.mark.parametrize("sequences", [DIRECT, OLDEST], ids=["direct", "oldest"])
def test_text_for_an_id(sequences: SequenceBatching) -> None:
    async def main() -> None:
        by_text = replace(sequences, controls=(*ALL_CONTROLS[:3], replace(CORRID, dtype=BYTES)))
        caller, _ = scheduler_with_compute_runners(by_text, [NamedSums()], runs="inline")
        await crowd(caller, 1, lambda n: f"sequence {n}")
        caller, _ = scheduler_with_compute_runners(sequences, [NamedSums()], runs="inline")
        with pytest.raises(
            InvalidArgument, match="'one' is text, but model 'memory' takes its correlation ID as UINT64"
        ):
            caller.send("one", 1, "S")

    asyncio.run(main())


def test_requests_that_fail_leave_the_other_sequences_alone() -> None:
    class Choosy(NamedSums):
        """Refuses negative numbers."""

        def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
            if (inputs["X"] < 0).any():
                raise InvalidArgument("not that")
            return super().compute(inputs, requested)

    async def main() -> None:
        caller, _ = scheduler_with_compute_runners(DIRECT, [Choosy()], runs="inline")
        assert await caller.ask(1, 1, "S") == 1
        with pytest.raises(InvalidArgument, match="not that"):
            await caller.ask(1, -1)
        assert await caller.ask(1, 2, "E") == 3

    asyncio.run(main())


class ScatteredSums:
    """A `RequestInstance` that is free at once and answers later, in any order."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.sums: dict[int, float] = {}
        self.in_flight: set[int] = set()

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for work in batch:
            tensors = {tensor.name: tensor.array.reshape(-1)[0].item() for tensor in work.request.inputs}
            name = tensors["CORRID"]
            if name in self.in_flight or not tensors["READY"]:
                work.reply(InvalidArgument("too early, or nothing"))
                continue
            self.in_flight.add(name)
            loop.call_later(self._dice.random() / 500, self._answer, work, name, tensors["X"], tensors["START"])
        finished()

    def _answer(self, work: Work, name: int, value: float, start: int) -> None:
        self.in_flight.discard(name)
        self.sums[name] = value if start else self.sums[name] + value
        work.reply([Tensor("Y", FP32, np.full((1, 1), self.sums[name], np.float32))])

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("sequences", [DIRECT, OLDEST], ids=["direct", "oldest"])
def test_instances_that_answer_in_any_order(sequences: SequenceBatching) -> None:
    async def main() -> None:
        config = model(sequences)
        statistics = VersionStatistics()
        runners = [
            RequestRunner(
                ScatteredSums(random.Random(index)),
                Placement(f"i{index}"),
                BatchConcatenator(config),
                statistics,
                FixedDelay(0),
            )
            for index in range(2)
        ]
        scheduler = SequenceScheduler(config, sequences, runners, BatchLog(), limiter=RateLimiter())
        await crowd(Caller(scheduler), 3)

    asyncio.run(main())


def test_random_cancels_and_restarts_leave_no_caller_waiting() -> None:
    async def main(seed: int) -> None:
        dice = random.Random(seed)
        caller, _ = scheduler_with_compute_runners(replace(DIRECT, controls=ALL_CONTROLS), [SlotSums()], runs="inline")
        futures = []
        pendings = []
        for _ in range(300):
            try:
                pending, future = caller.send(dice.randint(1, 7), 1, dice.choice(["", "", "S", "S", "E", "SE"]))
            except InvalidArgument:
                continue
            pendings.append(pending)
            futures.append(future)
            if dice.random() < 0.2:
                dice.choice(pendings).cancel()
            if dice.random() < 0.4:
                await asyncio.sleep(0)
        for name in range(1, 8):  # free every seat
            futures.append(caller.send(name, 1, "SE")[1])
        results = await asyncio.wait_for(asyncio.gather(*futures), 60)
        assert caller.owner.settled == len(futures)
        assert not any(isinstance(result, HeadraceError) for result in results[-7:])
        assert await caller.ask(99, 5, "SE") == 5

    for seed in range(20):
        asyncio.run(main(seed))
