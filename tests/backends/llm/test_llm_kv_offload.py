# SPDX-License-Identifier: Apache-2.0
"""KV offload in the simulated device, which checks the contents of every slot: whatever is saved, loaded or cancelled."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from llm_scheduling import END, Memory, said_alone, scheduler_of

from headrace.backends.llm.kv_offload.host_pages import HostPages
from headrace.backends.llm.kv_offload.offload import KVOffload
from headrace.backends.llm.scheduler import Chunk, Scheduler, Sequence

SIZE = 4


class FakeJob:
    """A copy that ends when it was asked a few times."""

    def __init__(self, looks: int, end: Any = None) -> None:
        self.looks = looks
        self.end = end

    @property
    def done(self) -> bool:
        if self.looks:
            self.looks -= 1
        elif self.end is not None:
            self.end, end = None, self.end
            end()
        return not self.looks and self.end is None


class Slow(random.Random):
    """Every copy takes long."""

    def randrange(self, *limits: int) -> int:  # type: ignore[override]
        return 50


class FakeCopier:
    """Copies between the simulated device and the slots of the host: what it fills is undefined until the copy ends."""

    def __init__(self, memory: Memory, chance: random.Random, *, batch: int, most: int) -> None:
        self.memory = memory
        self.chance = chance
        self.batch_pages, self.most_pages = batch, most
        self.kept: dict[int, Any] = {}
        self.fails = False

    def save(self, pages: list[int], block: Any, slots: list[int]) -> FakeJob:
        if self.fails:
            raise RuntimeError("a fault of the test")
        contents = [[self.memory.slots[page * SIZE + place] for place in range(SIZE)] for page in pages]
        for slot in slots:
            self.kept.pop(slot, None)
        return FakeJob(self.chance.randrange(3), lambda: self.kept.update(zip(slots, contents, strict=True)))

    def load(self, pages: list[int], block: Any, slots: list[int]) -> FakeJob:
        if self.fails:
            raise RuntimeError("a fault of the test")
        for page in pages:
            for place in range(SIZE):
                self.memory.slots[page * SIZE + place] = ()

        def end() -> None:
            for page, slot in zip(pages, slots, strict=True):
                for place in range(SIZE):
                    assert self.memory.slots[page * SIZE + place] == (), "a page was written to while it was loaded"
                    self.memory.slots[page * SIZE + place] = self.kept[slot][place]

        return FakeJob(self.chance.randrange(4), end)


class Simulated:
    """A scheduler, its device and its host level."""

    def __init__(self, seed: int = 0, *, pages: int = 40, host: int = 200, batch: int = 8, most: int = 32) -> None:
        self.scheduler: Scheduler = scheduler_of(pages, SIZE, max_running=6, max_step_tokens=24)
        self.memory = Memory(self.scheduler)
        self.copier = FakeCopier(self.memory, random.Random(seed), batch=batch, most=most)
        self.host = HostPages(host, 1, pinned=False)
        self.offload = KVOffload(self.scheduler.pool, self.host, self.copier, None, least_tokens=8)  # type: ignore[arg-type]
        self.scheduler.loader = self.scheduler.pool.saver = self.offload
        self.flights: deque[tuple[list[Chunk], list[int]]] = deque()

    def step(self, ahead: int) -> None:
        scheduler = self.scheduler
        self.offload.poll()
        plan = scheduler.schedule()
        self.offload.before_step()
        if plan:
            self.flights.append((plan, self.memory.launch(plan)))
        if self.flights and (len(self.flights) > ahead or not plan):
            done, tokens = self.flights.popleft()
            for _, sequence in scheduler.commit(done, tokens):
                if sequence.tokens[-1] == END or len(sequence.tokens) >= sequence.limit:
                    scheduler.finish([sequence])
        assert self.host.pinned <= self.host.slots
        assert self.host.held_bytes <= self.host.slots

    def run(self, ahead: int = 0) -> None:
        for _ in range(5000):
            if self.scheduler.idle and not self.flights and not self.offload.busy:
                return
            self.step(ahead)
        raise AssertionError("no progress")

    def ask(self, prompt: list[int], limit: int) -> Sequence:
        sequence = Sequence(list(prompt), limit)
        self.scheduler.add(sequence)
        return sequence

    def visit(self, prompt: list[int]) -> Sequence:
        sequence = self.ask(prompt, len(prompt) + 4)
        self.run()
        return sequence

    def tokens(self, level: str) -> int:
        return self.offload.counts[level].tokens


def prompt_of(number: int, length: int = 50) -> list[int]:
    return [1 + (number * 7 + place * place) % 97 for place in range(length)]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_random_visits_find_what_they_would_compute(seed: int, ahead: int) -> None:
    """Memory checks each slot that is read; several run at a time, some are cancelled, also in the middle of a load."""
    chance = random.Random(seed)
    small = seed % 2
    simulated = Simulated(seed, host=60 if small else 400, batch=4, most=8 if small else 64)
    scheduler, offload = simulated.scheduler, simulated.offload
    prompts = [prompt_of(number, chance.randrange(5, 70)) for number in range(10)]
    prompts += [prompts[0][:20] + prompt_of(20), prompts[1][:20] + prompt_of(21)]
    open_sequences: list[Sequence] = []
    answered: list[tuple[list[int], Sequence]] = []
    cancelled_loads = 0
    for _ in range(400):
        while len(open_sequences) < 9 and chance.random() < 0.4:
            prompt = chance.choice(prompts)
            sequence = simulated.ask(prompt, len(prompt) + chance.randrange(2, 16))
            open_sequences.append(sequence)
            answered.append((prompt, sequence))
        if open_sequences and chance.random() < 0.1:
            loading = [load.sequence for load in offload._loads if load.sequence in open_sequences]
            cancelled = chance.choice(loading or open_sequences)
            cancelled_loads += any(load.sequence is cancelled for load in offload._loads)
            scheduler.finish([cancelled])
            answered = [entry for entry in answered if entry[1] is not cancelled]
        simulated.step(ahead)
        open_sequences = [sequence for sequence in open_sequences if sequence.state != Sequence.FINISHED]
    simulated.run(ahead)
    assert len(answered) > 50
    for prompt, sequence in answered:
        alone = said_alone(prompt, sequence.limit)
        assert sequence.tokens[: len(alone)] == alone
    assert offload.counts["host"].tokens > 0
    assert cancelled_loads > 0
    assert scheduler.pool.used == 0
    assert simulated.host.pinned == 0
    assert not offload._loads and not offload._loading and not offload._saves


def test_a_second_visit_loads_what_was_evicted_and_levels_are_counted_apart() -> None:
    simulated = Simulated()
    for number in range(8):
        simulated.visit(prompt_of(number))
    assert (simulated.tokens("gpu"), simulated.tokens("host")) == (0, 0)
    second = simulated.visit(prompt_of(0))
    assert (simulated.tokens("gpu"), simulated.tokens("host")) == (0, 48)
    assert second.cached == 48
    assert simulated.scheduler.prefix_hits == 0, "hits of the host level are counted apart"
    simulated.visit(prompt_of(0))
    assert (simulated.tokens("gpu"), simulated.tokens("host")) == (48, 48)
    counts = simulated.offload.counts
    assert (counts["gpu"].lookups, counts["gpu"].hits) == (10, 1)
    assert (counts["host"].lookups, counts["host"].hits) == (9, 1), "the last was all on the GPU"


def test_what_several_wait_for_is_loaded_once_and_others_run_meanwhile() -> None:
    simulated = Simulated()
    for number in range(8):
        simulated.visit(prompt_of(number))
    simulated.copier.chance = Slow()
    waiting = [simulated.ask(prompt_of(0) + [9, number], 56) for number in range(3)]
    other = simulated.ask([5, 6, 7], 6)
    simulated.step(0)
    assert [sequence.state for sequence in waiting] == [Sequence.WAITING] * 3
    assert other.state == Sequence.RUNNING
    for _ in range(10):
        simulated.step(0)
    assert other.state == Sequence.FINISHED
    assert [sequence.state for sequence in waiting] == [Sequence.WAITING] * 3
    simulated.run()
    assert simulated.tokens("host") == 48
    assert [sequence.cached for sequence in waiting] == [48] * 3


def test_short_prefixes_are_computed() -> None:
    simulated = Simulated()
    simulated.visit(prompt_of(99, 7))
    for number in range(8):
        simulated.visit(prompt_of(number))
    assert simulated.visit(prompt_of(99, 7)).cached == 0
    assert simulated.tokens("host") == 0


def test_when_the_copier_is_behind_pages_are_dropped_not_waited_for() -> None:
    simulated = Simulated(batch=1, most=2)
    simulated.copier.chance = Slow()
    for number in range(8):
        sequence = simulated.ask(prompt_of(number), 54)
        steps = 0
        while sequence.state != Sequence.FINISHED:
            simulated.step(0)
            steps += 1
        assert steps < 12
    counts = simulated.offload.counts["host"]
    assert counts.dropped > 0
    simulated.run()
    assert simulated.host.pinned == 0


def test_the_least_recently_used_pages_make_room() -> None:
    simulated = Simulated(host=30)
    for number in range(12):
        simulated.visit(prompt_of(number))
        assert simulated.host.held_bytes <= 30
    assert simulated.host.held_bytes == 30
    assert simulated.visit(prompt_of(0)).cached == 0
    assert simulated.visit(prompt_of(9)).cached > 0


def test_a_failed_copy_costs_pages_not_answers() -> None:
    simulated = Simulated()
    for number in range(8):
        simulated.visit(prompt_of(number))
    simulated.copier.fails = True
    for number in range(8):
        prompt = prompt_of(number)
        sequence = simulated.visit(prompt)
        alone = said_alone(prompt, sequence.limit)
        assert sequence.tokens[: len(alone)] == alone
    simulated.copier.fails = False
    assert simulated.host.pinned == 0
    assert simulated.scheduler.pool.used == 0


def test_a_cleared_prefix_cache_saves_nothing_more() -> None:
    simulated = Simulated()
    for number in range(3):
        simulated.visit(prompt_of(number))
    simulated.offload.drain()
    before = simulated.host.held_bytes
    simulated.scheduler.pool.reset_prefix_cache()
    assert not simulated.offload.busy
    simulated.offload.drain()
    assert simulated.host.held_bytes == before
