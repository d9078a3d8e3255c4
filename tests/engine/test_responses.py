# SPDX-License-Identifier: Apache-2.0
"""Responses of decoupled models are counted by their place among those to a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any

import numpy as np

from headrace.backends.contract import Work
from headrace.core.errors import Unavailable
from headrace.core.tensors import Tensor
from headrace.engine.statistics import MAX_RESPONSE_INDEX, ResponseStats, ResponseTimer, response_index_text
from support.engines import Streamed, config_of, counted, ensemble, serving_plane, step


def row(value: int) -> Any:
    return np.array([[value]])


class Counting:
    """As many answers as the number says and then an empty one; after two an error for 3; nothing at all for 9."""

    def __init__(self) -> None:
        self.left: list[Work] = []

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        for work in batch:
            number = int(work.request.inputs[0].array.item())
            if number == 9:
                self.left.append(work)
                continue
            for answer in range(min(number, 2) if number == 3 else number):
                work.reply([Tensor.of("OUTPUT0", row(answer))], final=False)
            work.reply(Unavailable("three is too many") if number == 3 else None)
        finished()

    def close(self) -> None:
        pass


def _counts(stats: ResponseStats) -> tuple[int, int, int, int]:
    return stats.success, stats.fail, stats.empty, stats.cancel


def test_each_place_has_its_own_numbers() -> None:
    async def main() -> None:
        model = Counting()
        async with serving_plane([(config_of("m", decoupled=True), model)]) as plane:
            before_ns = monotonic_ns()
            for number in (2, 0, 3):
                await Streamed(plane, "m", INPUT0=row(number)).all()
            took_ns = monotonic_ns() - before_ns
            responses = counted(plane, "m").responses
            assert {place: _counts(stats) for place, stats in responses.items()} == {
                0: (2, 0, 1, 0),
                1: (2, 0, 0, 0),
                2: (0, 1, 1, 0),
            }
            first = responses[0]
            assert 0 < first.success_ns + first.empty_ns <= first.infer_ns + first.output_ns
            assert sum(stats.infer_ns + stats.output_ns for stats in responses.values()) <= took_ns
            assert sum(stats.fail_ns for stats in responses.values()) == responses[2].fail_ns > 0

            stream = Streamed(plane, "m", INPUT0=row(9))
            while not model.left:
                await asyncio.sleep(0)
            stream.pending.cancel()
            model.left[0].reply([Tensor.of("OUTPUT0", row(0))])
            assert _counts(first) == (2, 0, 1, 1)
            assert first.cancel_ns > 0

    asyncio.run(main())


def test_an_ordinary_model_has_none() -> None:
    async def main() -> None:
        async with serving_plane([(config_of("m"), lambda inputs: {"OUTPUT0": inputs["INPUT0"]})]) as plane:
            await Streamed(plane, "m", INPUT0=row(1)).all()
            assert counted(plane, "m").responses == {}

    asyncio.run(main())


def test_an_ensemble_counts_its_own() -> None:
    async def main() -> None:
        models = [
            (config_of("m", decoupled=True), Counting()),
            ensemble(step("m", "INPUT0=IN", "OUTPUT0=OUT"), decoupled=True),
        ]
        async with serving_plane(models) as plane:
            await Streamed(plane, "ensemble", IN=row(1)).all()
            await Streamed(plane, "ensemble", IN=row(3)).all()
            results = {place: _counts(stats) for place, stats in counted(plane, "ensemble").responses.items()}
            assert results == {0: (2, 0, 0, 0), 1: (1, 0, 1, 0), 2: (0, 1, 0, 0)}

    asyncio.run(main())


def test_an_endless_stream_takes_no_endless_memory() -> None:
    by_place: dict[int, ResponseStats] = {}
    watch = ResponseTimer(by_place, monotonic_ns())
    for _ in range(MAX_RESPONSE_INDEX + 50):
        watch.record([], monotonic_ns(), cancelled=False)
    assert len(by_place) == MAX_RESPONSE_INDEX + 1
    assert by_place[MAX_RESPONSE_INDEX].success == 50
    assert (response_index_text(MAX_RESPONSE_INDEX - 1), response_index_text(MAX_RESPONSE_INDEX)) == ("999", "1000+")
