# SPDX-License-Identifier: Apache-2.0
"""Chooses what the next step computes. Called by the engine's thread only; a function of what was added and committed.

    plan = scheduler.plan()            # pieces, single tokens first; or nothing
    ... compute ...
    scheduler.commit(plan, tokens)     # in the order of the plans; may come after the next plan was made

The rules: sequences that generate go first, one token each. What is left of `max_step_tokens` is for prompts, in chunks,
the earliest first, but none takes more than half of what is left while others wait behind it, so that a short prompt
passes a long one. A sequence starts when there is a seat and room for its whole prompt. When pages run out the sequence
that came last gives up its own and starts again later with what it has (recomputation); it keeps its place in the line.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

from headrace.backends.llm.scheduling.pages import PagePool, extend_digests
from headrace.backends.llm.scheduling.sequences import Piece, Sequence

_CALM_STEPS = 1000


class Scheduler:
    """Waiting and running sequences over one pool of pages."""

    def __init__(self, pool: PagePool, *, max_running: int, max_step_tokens: int) -> None:
        self.pool = pool
        self.max_running = max_running
        # Every running sequence has a token in every step, and prompts must get on beside them.
        self.max_step_tokens = max(max_step_tokens, max_running + pool.page_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """By arrival."""
        self._seats = list(range(max_running - 1, -1, -1))
        self._arrivals = 0
        self._under_way = 0
        self._wanted = (self.max_running, self.max_step_tokens)
        self._calm = 0
        """Steps since memory was last short."""
        self.prefix_hits = 0
        """Tokens of prompts that were found in pages."""
        self.prefix_looked = 0
        """Tokens of prompts that were looked for."""
        self.preemptions = 0

    @property
    def capacity(self) -> int:
        """The longest sequence that can ever run."""
        return self.pool.pages * self.pool.page_size

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence, followers: Iterable[Sequence] = ()) -> None:
        """A new one, whose `limit` is at most the `capacity`: it waits for its turn.

        Its followers have the same prompt and start when that is computed.
        """
        if sequence.limit > self.capacity:
            raise ValueError(f"a sequence of {sequence.limit} tokens cannot fit {self.capacity}")
        sequence.followers = list(followers)
        for follower in (sequence, *sequence.followers):
            self._arrivals += 1
            follower.arrived = self._arrivals
            follower.state = Sequence.HELD
            follower.leader = None if follower is sequence else sequence
        self._wait(sequence)

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """These are over, or nobody wants them any more: their pages and seats are free. More than once does no harm."""
        for sequence in sequences:
            if sequence.state == Sequence.RUNNING:
                self.running.remove(sequence)
                self._release(sequence)
            elif sequence.state == Sequence.WAITING:
                self.waiting.remove(sequence)
            sequence.state = Sequence.FINISHED
            self._let_go(sequence)

    def plan(self) -> list[Piece]:
        """The pieces of the next step. Nothing although not `idle`: only after what is under way is committed."""
        self._admit()
        pieces: list[Piece] = []
        prompts: list[Sequence] = []
        for sequence in tuple(self.running):
            if sequence.state != Sequence.RUNNING:
                continue  # it had to give way to one before it
            if not sequence.decoding:
                if sequence.computed < sequence.length:
                    prompts.append(sequence)
            elif sequence.length < sequence.limit:
                if not self._grow(sequence):
                    if self._under_way:
                        return []  # who gives way cannot be said before the tokens under way are known
                    continue
                start = sequence.computed
                pieces.append(Piece(sequence, start, 1, samples=True, known=not sequence.pending))
        self._add_prompts(pieces, [sequence for sequence in prompts if sequence.state == Sequence.RUNNING])
        for piece in pieces:
            piece.sequence.computed = piece.end
            piece.sequence.pending += piece.samples
        if pieces:
            self._under_way += 1
        return pieces

    def commit(self, pieces: list[Piece], tokens: list[int]) -> list[tuple[int, Sequence]]:
        """A plan was computed; `tokens` are those of the pieces that sample, in their order.

        Returns which of the tokens count, by their number, and the sequence that each was appended to: one that was
        finished in the meantime gets none.
        """
        self._under_way -= 1
        self._calm += 1
        if self._calm >= _CALM_STEPS:
            self._recover()
        grown = []
        number = 0
        for piece in pieces:
            sequence = piece.sequence
            alive = sequence.state == Sequence.RUNNING
            if piece.samples:
                if alive:
                    sequence.pending -= 1
                    sequence.tokens.append(tokens[number])
                    grown.append((number, sequence))
                number += 1
            if alive:
                self._register(sequence, piece)
                if sequence.followers and piece.end >= sequence.prompt_length:
                    self._let_go(sequence)
        return grown

    def abort(self, pieces: list[Piece]) -> list[Sequence]:
        """A plan could not be computed: its sequences, which are finished. Call when nothing else is under way."""
        self._under_way -= 1
        sequences = [piece.sequence for piece in pieces]
        self.finish(sequences)
        return sequences

    def retreat(self, pieces: list[Piece]) -> bool:
        """A plan needed more memory than there is: it is undone, and from now on steps are smaller.

        False where they cannot be: then nothing is changed. After a thousand steps without that they grow again. Call when
        nothing else is under way.
        """
        self._calm = 0
        least = self.max_running + self.pool.page_size
        large = sum(piece.count for piece in pieces) > least
        if not large and len(self.running) <= 1:
            return False
        self._under_way -= 1
        for piece in pieces:
            piece.sequence.computed = piece.start
            piece.sequence.pending -= piece.samples
        if large:
            self.max_step_tokens = max(least, self.max_step_tokens // 2)
            return True
        self.max_running = max(1, len(self.running) // 2)
        while len(self.running) > self.max_running:
            self._preempt(self.running[-1])
        return True

    def _recover(self) -> None:
        self._calm = 0
        running, step_tokens = self._wanted
        self.max_running = min(running, self.max_running * 2)
        self.max_step_tokens = min(step_tokens, self.max_step_tokens * 2)

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = Sequence.WAITING
        if self.waiting and self.waiting[-1].arrived > sequence.arrived:
            insort(self.waiting, sequence, key=_arrival)
        else:
            self.waiting.append(sequence)

    def _let_go(self, leader: Sequence) -> None:
        followers, leader.followers = leader.followers, []
        for follower in followers:
            if follower.state == Sequence.HELD:
                self._wait(follower)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            shared = self._found(sequence)
            size = self.pool.page_size
            needed = min(-(-(sequence.length + 1) // size), -(-sequence.limit // size)) - len(shared)
            # Pages that are found but nobody's are among those available, and will not be any more. And each that runs
            # may need a page soon: without that reserve one sequence would start, give way and start again.
            kept = sum(map(self.pool.is_idle, shared)) + len(self.running)
            if needed + kept > self.pool.available:
                return
            self.waiting.popleft()
            for page in shared:
                self.pool.share(page)
            sequence.pages = [*shared, *(self.pool.take() for _ in range(needed))]
            sequence.computed = len(shared) * size
            if sequence.brought is not None:
                self._fill(sequence, len(shared))
            if not sequence.preemptions:
                sequence.tokens = list(sequence.tokens)
                sequence.cached = len(shared) * size
                self.prefix_hits += sequence.cached
                self.prefix_looked += sequence.length
            sequence.seat = self._seats.pop()
            sequence.state = Sequence.RUNNING
            insort(self.running, sequence, key=_arrival)

    def _found(self, sequence: Sequence) -> list[int]:
        """Pages that hold its first tokens already. Not the last token: its logits are wanted."""
        pool = self.pool
        full = (sequence.length - 1) // pool.page_size
        leader = sequence.leader
        found: list[int] = []
        if leader is not None and leader.pages:
            ready = min(leader.computed, sequence.prompt_length - 1) // pool.page_size
            found = leader.pages[: min(full, ready)]
        if not pool.prefix_cache or len(found) == full:
            return found
        digests = extend_digests(sequence.digests, sequence.tokens, pool.page_size, sequence.salt, full)
        for digest in digests[len(found) : full]:
            page = pool.find(digest)
            if page is None:
                break
            found.append(page)
        return found

    def _fill(self, sequence: Sequence, shared: int) -> None:
        """Use what came from elsewhere for the pages behind those that are shared."""
        brought, sequence.brought = sequence.brought, None
        if brought is None or not brought.first <= shared < brought.end:
            return  # pages that were here when it was asked for are gone, or have come meanwhile
        pool = self.pool
        pages = sequence.pages[shared : brought.end]
        if not brought.put(shared, pages):
            return
        sequence.computed = brought.end * pool.page_size
        digests = extend_digests(sequence.digests, sequence.tokens, pool.page_size, sequence.salt, brought.end)
        for page, digest in zip(pages, digests[shared : brought.end], strict=True):
            pool.register(page, digest)

    def _grow(self, sequence: Sequence) -> bool:
        """A page for its next token. False: it has to wait, or has given way itself."""
        if sequence.computed < len(sequence.pages) * self.pool.page_size:
            return True
        while not self.pool.available:
            if self._under_way:
                return False
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        sequence.pages.append(self.pool.take())
        return True

    def _add_prompts(self, pieces: list[Piece], prompts: list[Sequence]) -> None:
        left = self.max_step_tokens - len(pieces)
        for place, sequence in enumerate(prompts):
            if left <= 0:
                return
            behind = place + 1 < len(prompts)
            most = max(left // 2, self.pool.page_size) if behind else left
            count = min(sequence.length - sequence.computed, most, left)
            end = sequence.computed + count
            pieces.append(Piece(sequence, sequence.computed, count, samples=end == sequence.length))
            left -= count

    def _register(self, sequence: Sequence, piece: Piece) -> None:
        """The pages that this piece has filled may be shared, as far as their tokens are known."""
        pool = self.pool
        if not pool.prefix_cache:
            return
        full = min(piece.end, len(sequence.tokens)) // pool.page_size
        first = piece.start // pool.page_size
        if full <= first:
            return
        digests = extend_digests(sequence.digests, sequence.tokens, pool.page_size, sequence.salt, full)
        for index in range(first, full):
            pool.register(sequence.pages[index], digests[index])

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self._wait(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.give_back(reversed(sequence.pages))
        sequence.pages = []
        sequence.computed = 0
        sequence.pending = 0
        self._seats.append(sequence.seat)
        sequence.seat = -1


def _arrival(sequence: Sequence) -> int:
    return sequence.arrived
