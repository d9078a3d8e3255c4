# SPDX-License-Identifier: Apache-2.0
"""Who is computed when, and with whom: seats, backlog, idle sequences, cancelling, closing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from sequence_fakes import ALL_CONTROLS, Caller, HeldRunner, model, scheduler_with_held_runners, turns

from headrace.core.errors import Cancelled, Internal, InvalidArgument, Unavailable, Unimplemented
from headrace.engine.scheduling.pending_request import BatchLog
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.engine.sequences.scheduler import SequenceScheduler
from headrace.models.config.types import DirectStrategy, OldestStrategy, Resource, SequenceBatching
from support.engines import run_engine
from support.virtual_time import LoopClock

DIRECT = SequenceBatching(controls=ALL_CONTROLS, max_sequence_idle_microseconds=60_000_000)
OLDEST = replace(DIRECT, strategy=OldestStrategy(max_candidate_sequences=4))
BOTH = pytest.mark.parametrize("sequences", [DIRECT, OLDEST], ids=["direct", "oldest"])


@BOTH
@pytest.mark.parametrize("id", [0, "", None])
def test_a_request_without_an_id_is_refused(sequences: SequenceBatching, id: object) -> None:
    async def main() -> None:
        caller, _ = scheduler_with_held_runners(sequences)
        with pytest.raises(InvalidArgument) as refused:
            if id is None:
                pending, _ = caller.send(1, 1, "S")
                pending.request.parameters = {}
                caller.scheduler.add(pending)
            else:
                caller.send(id, 1, "S")
        assert (
            str(refused.value)
            == "inference request to model 'memory' must specify a non-zero or non-empty correlation ID"
        )

    asyncio.run(main())


@pytest.mark.parametrize("id", [True, False, 1.5, -1, 1 << 64, "x" * 129])
def test_a_strange_id_is_refused(id: object) -> None:
    async def main() -> None:
        caller, _ = scheduler_with_held_runners(DIRECT)
        with pytest.raises(InvalidArgument, match="sequence_id"):
            caller.send(id, 1, "S")

    asyncio.run(main())


def test_an_invalid_flag_is_refused() -> None:
    async def main() -> None:
        caller, _ = scheduler_with_held_runners(DIRECT)
        pending, _ = caller.send(1, 1, "S")
        pending.request.parameters = {"sequence_id": 1, "sequence_end": "yes"}
        with pytest.raises(InvalidArgument, match="'sequence_end' is 'yes'"):
            caller.scheduler.add(pending)

    asyncio.run(main())


@BOTH
def test_a_sequence_must_be_started(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(sequences)
        text = (
            "inference request for sequence 7 to model 'memory' must specify the START flag on the first request of "
            "the sequence"
        )
        with pytest.raises(InvalidArgument) as refused:
            caller.send(7, 1)
        assert str(refused.value) == text
        caller.send(7, 1, "SE")
        # After the END nothing more belongs to it, computed or not.
        with pytest.raises(InvalidArgument) as refused:
            caller.send(7, 2)
        assert str(refused.value) == text
        with pytest.raises(InvalidArgument):  # a number and a text are not the same
            caller.send("7", 2)
        await turns()
        assert runner.values() == [[1]]

    asyncio.run(main())


@BOTH
def test_a_request_of_several_rows_is_refused(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, _ = scheduler_with_held_runners(sequences)
        pending, _ = caller.send(1, 1, "S")
        pending.rows = 2
        with pytest.raises(InvalidArgument) as refused:
            caller.scheduler.add(pending)
        assert str(refused.value) == (
            "inference request to model 'memory' must specify batch-size 1 due to requirements of sequence batcher"
        )

    asyncio.run(main())


def test_iterative_sequences_are_not_offered() -> None:
    async def main() -> None:
        with pytest.raises(Unimplemented, match="iterative_sequence"):
            scheduler_with_held_runners(replace(DIRECT, iterative=True))

    asyncio.run(main())


@BOTH
def test_requests_of_a_sequence_are_computed_one_by_one_and_in_order(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(sequences)
        for value, flags in ((1, "S"), (2, ""), (3, "E")):
            caller.send(5, value, flags)
        for count in (1, 2, 3):
            await turns()
            assert len(runner.batches) == count
            runner.answer()
        assert runner.values() == [[1], [2], [3]]
        assert [runner.control("START", n) for n in range(3)] == [[1], [0], [0]]
        assert [runner.control("END", n) for n in range(3)] == [[0], [0], [1]]
        assert runner.control("READY") == [1]
        assert runner.control("CORRID") == [5]
        assert caller.answers == [(5, 1), (5, 2), (5, 3)]
        assert caller.owner.settled == 3

    asyncio.run(main())


def test_rows_are_placed_at_their_slots() -> None:
    async def main() -> None:
        log = BatchLog()
        caller, (runner,) = scheduler_with_held_runners(DIRECT, log=log)
        for name in (1, 2, 3):
            caller.send(name, name, "S")
        await turns()
        assert runner.values() == [[1, 2, 3]]
        runner.answer()
        caller.send(3, 33)
        caller.send(1, 11)
        await turns()
        assert runner.values()[1] == [11, 0, 33]
        assert runner.control("READY") == [1, 0, 1]
        assert runner.control("CORRID") == [1, 0, 3]
        assert log.recent[-1].requests == 2
        assert log.recent[-1].reason == "sequence"
        runner.answer()
        # The answer of the filler went to nobody.
        assert [value for _, value in caller.answers] == [1, 2, 3, 11, 33]
        # Slots behind the last one in use are not filled.
        caller.send(2, 22)
        await turns()
        assert runner.values()[2] == [0, 22]

    asyncio.run(main())


def test_a_freed_slot_is_given_to_the_backlog_in_order() -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(DIRECT, max_batch_size=2)
        for name in (1, 2, 3, 4):
            caller.send(name, name, "S")
        caller.send(3, 33)
        await turns()
        assert runner.values() == [[1, 2]]
        runner.answer()
        await turns()
        assert len(runner.batches) == 1  # 3 and 4 wait for a slot, not for an instance
        caller.send(2, 22, "E")
        await turns()
        assert runner.values()[1] == [0, 22]
        await turns()
        assert len(runner.batches) == 2
        runner.answer()
        await turns()
        assert runner.values()[2] == [0, 3]  # 3 has the slot of 2
        runner.answer()
        await turns()
        assert runner.values()[3] == [0, 33]
        caller.send(1, 11, "E")
        runner.answer()
        await turns()
        runner.answer()
        await turns()
        assert runner.values()[4:] == [[11], [4]]

    asyncio.run(main())


@pytest.mark.parametrize("sequences", [DIRECT, replace(OLDEST, strategy=OldestStrategy(2))], ids=["direct", "oldest"])
def test_sequences_are_spread_over_instances_and_stay_there(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, runners = scheduler_with_held_runners(sequences, runners=2, max_batch_size=2)
        for name in (1, 2, 3, 4):
            caller.send(name, name, "S")
        await turns()
        assert [runner.values() for runner in runners] == [[[1, 3]], [[2, 4]]]
        for runner in runners:
            runner.answer()
        for name in (4, 3, 2, 1):
            caller.send(name, 10 * name)
        await turns()
        assert [sorted(runner.values()[1]) for runner in runners] == [[10, 30], [20, 40]]

    asyncio.run(main())


def test_one_slot_for_a_model_without_batches() -> None:
    async def main() -> None:
        log = BatchLog()
        caller, (runner,) = scheduler_with_held_runners(DIRECT, max_batch_size=0, log=log)
        caller.send(1, 1, "S")
        caller.send(2, 2, "SE")
        caller.send(1, 11, "E")
        for _ in range(3):
            await turns()
            runner.answer()
        assert runner.values() == [[1], [11], [2]]
        assert runner.batches[0][0].request.inputs[1].array.shape == (1,)
        assert [record.reason for record in log.recent] == ["one at a time"] * 3

    asyncio.run(main())


def test_different_shapes_are_computed_apart() -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(DIRECT)
        caller.send(1, 1, "S")
        caller.send(2, [2, 2], "S")
        caller.send(3, 3, "S")
        await turns()
        runner.answer()
        await turns()
        assert runner.values() == [[1, 0, 3], [0, 2]]
        assert runner.batches[1][0].request.inputs[0].shape == (1, 2)

    asyncio.run(main())


def test_a_batch_waits_for_enough_slots() -> None:
    async def main() -> None:
        log = BatchLog()
        caller, (runner,) = scheduler_with_held_runners(
            replace(DIRECT, strategy=DirectStrategy(10_000_000, 0.5)), log=log
        )
        caller.send(1, 1, "S")
        await turns()
        assert runner.batches == []
        caller.send(2, 2, "S")
        await turns()
        assert runner.values() == [[1, 2]]
        caller.scheduler.close(Unavailable("over"))

    asyncio.run(main())


@pytest.mark.parametrize(
    "strategy",
    [DirectStrategy(2_000_000, 0.5), OldestStrategy(4, max_queue_delay_microseconds=2_000_000)],
    ids=["direct", "oldest"],
)
def test_a_batch_does_not_wait_for_ever(strategy: DirectStrategy | OldestStrategy) -> None:
    async def main(clock: LoopClock) -> None:
        log = BatchLog()
        caller, (runner,) = scheduler_with_held_runners(replace(DIRECT, strategy=strategy), log=log)
        caller.send(1, 1, "S")
        await asyncio.sleep(1.9)
        assert not runner.batches
        await asyncio.sleep(0.2)
        assert runner.values() == [[1]]
        assert log.recent[0].reason == "delay expired"
        assert log.recent[0].oldest_waited_ns == pytest.approx(2_000_000_000)

    run_engine(main)


def test_without_a_utilisation_there_is_no_delay() -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(replace(DIRECT, strategy=DirectStrategy(60_000_000)))
        caller.send(1, 1, "S")
        await turns()
        assert runner.values() == [[1]]

    asyncio.run(main())


def test_the_oldest_requests_are_first_and_no_rows_are_padded() -> None:
    async def main() -> None:
        log = BatchLog()
        caller, (runner,) = scheduler_with_held_runners(
            replace(OLDEST, strategy=OldestStrategy(6)), max_batch_size=2, log=log
        )
        for name in (1, 2, 3):
            caller.send(name, name, "S")
        caller.send(1, 11)
        await turns()
        runner.answer()
        await turns()
        runner.answer()
        assert runner.values() == [[1, 2], [3, 11]]
        caller.send(3, 33)
        await turns()
        assert runner.values()[2] == [33]
        assert [record.reason for record in log.recent] == ["full", "full", "idle instance"]

    asyncio.run(main())


def test_preferred_sizes() -> None:
    async def main() -> None:
        strategy = OldestStrategy(4, preferred_batch_sizes=(2,), max_queue_delay_microseconds=60_000_000)
        caller, (runner,) = scheduler_with_held_runners(replace(OLDEST, strategy=strategy))
        caller.send(1, 1, "S")
        await turns()
        assert runner.batches == []
        caller.send(2, 2, "S")
        caller.send(3, 3, "S")
        await turns()
        assert runner.values() == [[1, 2]]
        caller.scheduler.close(Unavailable("over"))

    asyncio.run(main())


def test_no_more_candidates_than_configured() -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(replace(OLDEST, strategy=OldestStrategy(2)))
        for name in (1, 2, 3):
            caller.send(name, name, "S")
        caller.send(1, 11, "E")
        for _ in range(3):
            await turns()
            runner.answer()
        assert runner.values() == [[1, 2], [11], [3]]

    asyncio.run(main())


class EagerRunner(HeldRunner):
    """Takes a batch while it holds others, as an instance in a process of its own may."""

    def run(self, batch: object, free: object) -> None:
        super().run(batch, free)
        free(self)  # type: ignore[operator]

    def answer_batch(self, index: int) -> None:
        for pending in self.batches[index]:
            pending.reply([pending.request.inputs[0]])


@pytest.mark.parametrize("in_order", [False, True])
def test_preserve_ordering(in_order: bool) -> None:
    async def main() -> None:
        sequences = replace(OLDEST, strategy=OldestStrategy(4, preserve_ordering=in_order))
        runner = EagerRunner()
        scheduler = SequenceScheduler(model(sequences, 1), sequences, [runner], BatchLog(), limiter=RateLimiter())
        caller = Caller(scheduler)
        for name in (1, 2):
            caller.send(name, name, "S")
        await turns()
        assert runner.values() == [[1], [2]]
        runner.answer_batch(1)
        assert caller.answers == ([] if in_order else [(2, 2)])
        runner.answer_batch(0)
        assert caller.answers == ([(1, 1), (2, 2)] if in_order else [(2, 2), (1, 1)])

    asyncio.run(main())


@BOTH
def test_a_free_instance_gets_no_second_request_of_a_sequence_in_flight(sequences: SequenceBatching) -> None:
    async def main() -> None:
        runner = EagerRunner()
        scheduler = SequenceScheduler(model(sequences), sequences, [runner], BatchLog(), limiter=RateLimiter())
        caller = Caller(scheduler)
        caller.send(1, 1, "S")
        caller.send(1, 2)
        await turns()
        assert runner.values() == [[1]]
        runner.answer_batch(0)
        await turns()
        assert runner.values() == [[1], [2]]

    asyncio.run(main())


@BOTH
def test_an_idle_sequence_loses_its_seat(sequences: SequenceBatching) -> None:
    async def main(clock: LoopClock) -> None:
        short = replace(sequences, max_sequence_idle_microseconds=20_000_000, strategy=_one_seat(sequences))
        caller, (runner,) = scheduler_with_held_runners(short, max_batch_size=1)
        caller.send(1, 1, "S")
        _, second = caller.send(2, 2, "S")
        await asyncio.sleep(50)
        assert len(runner.batches) == 1  # what is computed is not idle
        runner.answer()
        await asyncio.sleep(19)
        assert len(runner.batches) == 1
        await asyncio.sleep(2)
        assert len(runner.batches) == 2
        runner.answer()
        assert (await second).outputs[0].array.item() == 2
        with pytest.raises(InvalidArgument, match="sequence 1 .* must specify the START flag"):
            caller.send(1, 11)

    run_engine(main)


def test_a_busy_sequence_keeps_its_seat() -> None:
    async def main(clock: LoopClock) -> None:
        caller, (runner,) = scheduler_with_held_runners(replace(DIRECT, max_sequence_idle_microseconds=3_000_000))
        caller.send(1, 0, "S")
        await turns()
        runner.answer()
        for number in range(1, 11):
            await asyncio.sleep(2.9)
            caller.send(1, number)
            await turns()
            runner.answer()
        assert [value for _, value in caller.answers] == list(range(11))

    run_engine(main)


def _one_seat(sequences: SequenceBatching) -> DirectStrategy | OldestStrategy:
    return DirectStrategy() if isinstance(sequences.strategy, DirectStrategy) else OldestStrategy(1)


@BOTH
def test_start_restarts_a_running_sequence_in_its_slot(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(
            replace(sequences, strategy=_one_seat(sequences)), max_batch_size=1
        )
        caller.send(1, 1, "S")
        caller.send(1, 2)
        caller.send(2, 5, "SE")
        caller.send(1, 3, "S")
        caller.send(1, 4, "E")
        for _ in range(5):
            await turns()
            runner.answer()
        assert runner.values() == [[1], [2], [3], [4], [5]]
        assert [runner.control("START", n)[0] for n in range(5)] == [1, 0, 1, 0, 1]

    asyncio.run(main())


@BOTH
def test_an_id_that_is_used_again_waits_for_the_end(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(sequences)
        caller.send(1, 1, "S")
        caller.send(1, 2, "E")
        caller.send(1, 3, "S")
        for _ in range(3):
            await turns()
            assert len(runner.batches[-1]) == 1
            runner.answer()
        assert runner.values() == [[1], [2], [3]]

    asyncio.run(main())


@BOTH
def test_an_id_waits_for_the_end_even_when_the_one_between_is_cancelled(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(sequences)
        caller.send(1, 1, "SE")
        between, _ = caller.send(1, 2, "S")
        await turns()
        between.cancel()
        caller.send(1, 3, "S")
        await turns()
        assert runner.values() == [[1]]
        runner.answer()
        await turns()
        assert runner.values() == [[1], [3]]

    asyncio.run(main())


@BOTH
def test_cancelling_a_waiting_request_ends_its_sequence(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(
            replace(sequences, strategy=_one_seat(sequences)), max_batch_size=1
        )
        _, first = caller.send(1, 1, "S")
        second, told = caller.send(1, 2)
        _, third = caller.send(1, 3)
        _, other = caller.send(2, 9, "SE")
        await turns()
        second.cancel()
        assert isinstance(await told, Cancelled)
        assert "another request of sequence 1 was cancelled" in str(await third)
        with pytest.raises(InvalidArgument, match="START"):
            caller.send(1, 4)
        assert not first.done()  # it is being computed, and is answered
        runner.answer()
        await turns()
        runner.answer()
        assert (await first).outputs[0].array.item() == 1
        assert (await other).outputs[0].array.item() == 9
        assert runner.values() == [[1], [9]]
        assert caller.owner.settled == 4

    asyncio.run(main())


@BOTH
def test_a_request_that_waits_too_long_ends_its_sequence(sequences: SequenceBatching) -> None:
    async def main(clock: LoopClock) -> None:
        caller, (runner,) = scheduler_with_held_runners(
            replace(sequences, strategy=_one_seat(sequences)), max_batch_size=1
        )
        _, first = caller.send(1, 1, "S", timeout=5_000_000)
        _, second = caller.send(2, 2, "S", timeout=3_000_000)
        _, third = caller.send(2, 3)
        await asyncio.sleep(2)
        assert not second.done()
        await asyncio.sleep(2)
        for told in (await second, await third):
            assert isinstance(told, Unavailable)
            assert "timeout of the corresponding sequence has been expired" in str(told)
        with pytest.raises(InvalidArgument, match="sequence 2 .* must specify the START flag"):
            caller.send(2, 4, "E")
        await asyncio.sleep(10)  # the first one waits no longer: it is being computed
        runner.answer()
        assert (await first).outputs[0].array.item() == 1
        assert runner.values() == [[1]]
        assert caller.owner.settled == 3

    run_engine(main)


@BOTH
def test_cancelling_a_running_request_leaves_its_sequence(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(sequences)
        first, told = caller.send(1, 1, "S")
        _, second = caller.send(1, 2)
        await turns()
        first.cancel()
        assert isinstance(await told, Cancelled)
        assert runner.batches[0][0].cancelled
        await turns()
        assert len(runner.batches) == 1  # the model still has the first
        runner.answer()
        await turns()
        runner.answer()
        assert (await second).outputs[0].array.item() == 2
        assert caller.owner.settled == 2

    asyncio.run(main())


def test_a_cancelled_backlog_frees_its_place() -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(DIRECT, max_batch_size=1)
        caller.send(1, 1, "S")
        waiting, _ = caller.send(2, 2, "S")
        caller.send(3, 3, "SE")
        waiting.cancel()
        caller.send(1, 11, "E")
        for _ in range(3):
            await turns()
            runner.answer()
        assert runner.values() == [[1], [11], [3]]

    asyncio.run(main())


@BOTH
def test_a_failed_request_leaves_its_sequence(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(sequences)
        _, first = caller.send(1, 1, "S")
        _, second = caller.send(1, 2, "E")
        await turns()
        runner.answer(Internal("broken"))
        await turns()
        runner.answer()
        assert str(await first) == "broken"
        assert (await second).outputs[0].array.item() == 2

    asyncio.run(main())


@BOTH
def test_closing_fails_every_waiting_request(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(
            replace(sequences, strategy=_one_seat(sequences)), max_batch_size=1
        )
        _, running = caller.send(1, 1, "S")
        waiting = [caller.send(name, 2, flags)[1] for name, flags in ((1, ""), (1, "S"), (2, "S"), (2, "E"), (2, "S"))]
        await turns()
        reason = Unavailable("the model was unloaded")
        caller.scheduler.close(reason)
        assert [await future for future in waiting] == [reason] * 5
        with pytest.raises(Unavailable, match="unloaded"):
            caller.send(3, 3, "S")
        runner.answer()
        assert (await running).outputs[0].array.item() == 1
        await turns()
        assert len(runner.batches) == 1

    asyncio.run(main())


@BOTH
def test_nothing_is_computed_after_closing(sequences: SequenceBatching) -> None:
    async def main() -> None:
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        caller, (runner,) = scheduler_with_held_runners(sequences)
        _, told = caller.send(1, 1, "S")
        caller.scheduler.close(Unavailable("over"))
        assert isinstance(await told, Unavailable)
        await turns()
        assert runner.batches == []
        assert problems == []

    asyncio.run(main())


def test_an_instance_waits_for_shared_resources() -> None:
    async def main() -> None:
        runners = [HeldRunner("a"), HeldRunner("b")]
        limiter = RateLimiter()
        for runner in runners:
            runner.resources = (Resource("R", 1, is_global=True),)  # type: ignore[assignment]
            limiter.admit(runner)
        scheduler = SequenceScheduler(model(DIRECT, 1), DIRECT, runners, BatchLog(), limiter=limiter)
        caller = Caller(scheduler)
        caller.send(1, 1, "S")
        caller.send(2, 2, "S")
        await turns()
        assert [runner.values() for runner in runners] == [[[1]], []]
        runners[0].answer()
        await turns()
        assert [runner.values() for runner in runners] == [[[1]], [[2]]]

    asyncio.run(main())


def test_a_stream_of_answers_keeps_its_sequence_until_the_last() -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_held_runners(DIRECT)
        caller.send(1, 1, "S", stream=True)
        caller.send(1, 2)
        await turns()
        step = runner.batches[0][0]
        for value in (1, 2):
            step.reply([step.request.inputs[0]], final=False)
            await turns()
            assert caller.answers == [(1, 1)] * value
            assert len(runner.batches) == 1
        runner.answer()
        await turns()
        assert runner.values() == [[1], [2]]

    asyncio.run(main())
