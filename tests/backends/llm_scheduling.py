# SPDX-License-Identifier: Apache-2.0
"""A simulated device for the scheduler of the backend `llm`, which checks the contents of every slot, and a drafter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any

from headrace.backends.llm.page_pool import PagePool
from headrace.backends.llm.scheduler import Chunk, Scheduler, Sequence
from headrace.backends.llm.speculation.budget import BatchBudget

END = 0


def next_token(context: tuple[int, ...]) -> int:
    """What the model says: the end now and then, otherwise a number that depends on all that came before."""
    mixed = hash(context) & 0xFFFF
    return END if mixed % 17 == 0 else 1 + mixed % 3


def said_alone(prompt: list[int], limit: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tuple(tokens)))
        if tokens[-1] == END:
            break
    return tokens


class Memory:
    """A simulated device: a slot holds all tokens up to its own. Keeps the last token of each batch index."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.size = scheduler.pool.page_size
        self.slots: dict[int, tuple[int, ...]] = {}
        self.last: dict[int, int] = {}

    def launch(self, chunks: Several[Chunk]) -> list[int]:
        pool, said = self.scheduler.pool, []
        assert sum(chunk.count for chunk in chunks) <= self.scheduler.max_step_tokens
        own = [chunk for chunk in chunks if chunk.draft is None]
        assert len({chunk.sequence.batch_index for chunk in own}) == len(own)
        assert len(chunks) <= max(self.scheduler.max_running, self.scheduler.max_draft_rows)
        drafts: dict[Sequence, list[int]] = {}
        for chunk in chunks:
            sequence = chunk.sequence
            assert 0 <= sequence.batch_index < self.scheduler.max_running
            assert chunk.end <= len(sequence.pages) * self.size
            known = [*sequence.tokens]
            if not chunk.known:
                assert chunk.count == 1 and chunk.start == len(known)
                known.append(self.last[sequence.batch_index])
            if chunk.draft is not None:
                drafts.setdefault(sequence, []).append(chunk.draft)
                known += drafts[sequence]
                assert chunk.count == 1 and chunk.samples and chunk.end == len(known)
            for place in range(chunk.start, chunk.end):
                page = sequence.pages[place // self.size]
                assert pool.ref_count(page) == 1, "a page that others read is written to"
                assert not pool.is_registered(page), "a page that others may find is written to"
                self.slots[page * self.size + place % self.size] = tuple(known[: place + 1])
            for place in range(chunk.end):
                page = sequence.pages[place // self.size]
                assert self.slots[page * self.size + place % self.size] == tuple(known[: place + 1])
            if chunk.samples:
                token = next_token(tuple(known[: chunk.end]))
                said.append(token)
                self.last[sequence.batch_index] = token
        return said


def run(memory: Memory, *, ahead: int = 0, each_step: Callable[[int], Any] = lambda step: None) -> int:
    """Until there is nothing more to do; returns the number of steps."""
    scheduler, flights, steps, turns = memory.scheduler, deque[tuple[list[Chunk], list[int]]](), 0, 0
    while not scheduler.idle or flights:
        turns += 1
        assert turns < 5000, "no progress"
        each_step(steps)
        plan = scheduler.schedule()
        assert plan or flights or scheduler.idle, "stuck"
        if plan:
            steps += 1
            flights.append((plan, memory.launch(plan)))
        if flights and (len(flights) > ahead or not plan):
            done, tokens = flights.popleft()
            for number, sequence in scheduler.commit(done, tokens):
                assert tokens[number] in sequence.tokens
                said = sequence.tokens[sequence.prompt_length :]
                if END in said or len(sequence.tokens) >= sequence.limit:
                    # Drafted tokens behind the end may have been accepted with it.
                    del said[said.index(END) + 1 if END in said else len(said) :]
                    sequence.tokens = [*sequence.tokens[: sequence.prompt_length], *said]
                    scheduler.finish([sequence])
    return steps


class Unlimited(BatchBudget):
    """Never stops drafts."""

    is_paused = False  # type: ignore[assignment]
    units = 1 << 20  # type: ignore[assignment]


UNLIMITED = Unlimited(step_cost=0.0, unit_cost=1.0)


class Guess:
    """A drafter that is right for a while, then wrong, as the tokens so far decide."""

    batch: BatchBudget = UNLIMITED

    def __init__(self) -> None:
        self.accepted = self.rejected = 0

    def waits(self, sequence: Sequence) -> bool:
        return bool(self._of(sequence, 5))

    def draft(self, wanted: list[tuple[Sequence, int]], room: int) -> list[list[int]]:
        assert room > 0 and len({sequence for sequence, _ in wanted}) == len(wanted)
        return [self._of(sequence, most) for sequence, most in wanted]

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted > 0
        self.accepted += accepted
        self.rejected += drafted - accepted

    def release(self, sequence: Sequence) -> None:
        raise AssertionError("nothing is kept")

    def _of(self, sequence: Sequence, most: int) -> list[int]:
        tokens = list(sequence.tokens)
        mixed = hash(tuple(tokens)) >> 16
        count, right = min(most, mixed % 7), mixed // 7 % 7
        drafted: list[int] = []
        for number in range(count):
            token = next_token((*tokens, *drafted))
            drafted.append(token if number < right else 1 + token % 3)
        return drafted


def scheduler_of(
    pages: int = 64, size: int = 4, *, prefix_cache: bool = True, max_running: int = 8, max_step_tokens: int = 16
) -> Scheduler:
    return Scheduler(
        PagePool(pages, size, prefix_cache=prefix_cache), max_running=max_running, max_step_tokens=max_step_tokens
    )
