# SPDX-License-Identifier: Apache-2.0
"""Drafts of a smaller model with the same vocabulary: its likeliest tokens, computed one after the other.

The draft model has a runner and KV pages of its own, as many as the model that it drafts for, with a prefix cache. It
computes a prompt when the first draft of its sequence is wanted. On a GPU a step of a draft is launched before the last one
is read.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from headrace.backends.llm.model_runner.runner import ModelRunner, Step
from headrace.backends.llm.page_pool import PagePool, extend_page_hashes
from headrace.backends.llm.scheduler import Chunk, Sequence
from headrace.backends.llm.speculation.budget import BatchBudget, DraftBudget

log = logging.getLogger("headrace.backends.llm")

_STEP_COST = 0.2
"""Steps that verifying a draft costs, beside those of the draft model: see `ngram`."""


class DraftModel:
    """Implements `scheduler.Drafter`."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        tokens: int,
        token_cost: float,
        max_running: int,
        max_step_tokens: int,
        max_length: int,
        vocabulary: int,
        prefix_cache: bool,
    ) -> None:
        """`tokens`: of a draft, at most. `token_cost`: of a step of this model, in steps of the other.

        `max_length`: tokens that this model can read. `vocabulary`: tokens that the other model knows.
        """
        self._runner = runner
        self._tokens = tokens
        self._token_cost = token_cost
        self.batch = BatchBudget(step_cost=_STEP_COST, unit_cost=token_cost)
        self._max_step_tokens = max_step_tokens
        self._max_length = max_length
        self._vocabulary = vocabulary
        self._pool = PagePool(runner.cache.pages, runner.page_size, prefix_cache=prefix_cache)
        self._free_indices = list(range(max_running - 1, -1, -1))
        self._drafted: dict[Sequence, _Draft] = {}
        """Sequences that have a batch index here."""
        self._created = 0
        self._failed = False

    def waits(self, sequence: Sequence) -> bool:
        """Return whether a draft will be wanted when the sequence's token in flight is known."""
        return self._wanted(sequence, 1) > 0

    def draft(self, wanted: list[tuple[Sequence, int]], room: int) -> list[list[int]]:
        """Return a draft for each sequence; [] where it does not pay, or where there are no pages for it."""
        share = max(1, min(room // len(wanted), self.batch.units))
        started: dict[Sequence, _Draft] = {}
        for sequence, most in wanted:
            count = self._wanted(sequence, min(most, share))
            draft = self._start(sequence, count) if count else None
            if draft is not None:
                started[sequence] = draft
        try:
            self._generate(list(started.values()))
        except Exception:
            log.exception("The draft model failed: answers go on without drafts.")
            self._failed = True
            return [[] for _ in wanted]
        if started:
            self.batch.spend(max(len(draft.tokens) for draft in started.values()))
        return [started[sequence].tokens if sequence in started else [] for sequence, _ in wanted]

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn how many tokens of a draft were accepted."""
        sequence.drafting.record(drafted, accepted)

    def release(self, sequence: Sequence) -> None:
        """Free the pages of a sequence that has ended."""
        sequence.drafting = None
        self._drop(sequence)

    @property
    def runner(self) -> ModelRunner:
        """The runner of the draft model."""
        return self._runner

    def forget(self) -> None:
        """Forget what is in the KV cache, which is about to be released. Not while sequences run."""
        self._pool.reset_prefix_cache()

    def close(self) -> None:
        """Free the model and its KV cache."""
        self._runner.close()

    def _wanted(self, sequence: Sequence, most: int) -> int:
        """Return how many tokens to draft."""
        if self._failed or sequence.prompt_inputs is not None:
            return 0  # the draft model does not see the images of a prompt
        if sequence.drafting is None:
            sequence.drafting = DraftBudget(self._tokens, step_cost=_STEP_COST, token_cost=self._token_cost)
        budget: DraftBudget = sequence.drafting
        known = len(sequence.tokens)
        return max(0, min(most, budget.tokens(known - sequence.prompt_length), self._max_length - known))

    def _start(self, sequence: Sequence, count: int) -> _Draft | None:
        """Bring the copy of a sequence up to date and allocate pages for its draft; None without memory for it."""
        draft = self._drafted.get(sequence)
        if draft is None:
            if not self._free_indices:
                self._drop_idle()
            if not self._free_indices:
                return None
            self._created += 1
            draft = self._drafted[sequence] = _Draft(sequence.tokens, self._created, self._free_indices.pop())
            self._share_pages(draft.copy)
        else:
            draft.follow(sequence.tokens)
        draft.start(count)
        copy, size = draft.copy, self._pool.page_size
        missing = -(-(len(copy.tokens) + count) // size) - len(copy.pages)
        if missing > self._pool.available:
            self._drop_idle()
        if missing > self._pool.available:
            self._drop(sequence)
            return None
        copy.pages += [self._pool.allocate() for _ in range(missing)]
        return draft

    def _share_pages(self, copy: Sequence) -> None:
        """Use the pages of the prefix cache, but for the last token, whose logits are needed."""
        pool = self._pool
        if not pool.prefix_cache:
            return
        full = (len(copy.tokens) - 1) // pool.page_size
        for page_hash in extend_page_hashes(copy.page_hashes, copy.tokens, pool.page_size, b"", full):
            page = pool.find(page_hash)
            if page is None:
                break
            pool.share(page)
            copy.pages.append(page)
        copy.computed = len(copy.pages) * pool.page_size

    def _register(self, drafts: Iterable[_Draft]) -> None:
        """Add full pages of known tokens to the prefix cache."""
        pool = self._pool
        for draft in drafts if pool.prefix_cache else ():
            copy, full = draft.copy, draft.copy.computed // pool.page_size
            page_hashes = extend_page_hashes(copy.page_hashes, copy.tokens, pool.page_size, b"", full)
            for index in range(draft.registered, full):
                pool.register(copy.pages[index], page_hashes[index])
            draft.registered = max(full, draft.registered)

    def _generate(self, drafts: list[_Draft]) -> None:
        """Compute what is missing of each sequence, and then the draft, token by token."""
        unread: deque[tuple[list[_Draft], Step]] = deque()
        behind = drafts
        while behind:
            chunks, ready = self._catch_up(behind)
            unread.append((ready, self._runner.launch(chunks, greedy=True)))
            self._register(behind)
            behind = [draft for draft in behind if draft not in ready]
            self._read(unread)
        for number in range(1, self._tokens):
            going = [draft for draft in drafts if draft.count > number]
            if not going:
                break
            chunks = [draft.next_chunk(number, known=not self._runner.async_scheduling) for draft in going]
            unread.append((going, self._runner.launch(chunks, greedy=True)))
            self._read(unread)
        while unread:
            _read_step(*unread.popleft())
        for draft in drafts:
            draft.cut(self._vocabulary)

    def _catch_up(self, drafts: list[_Draft]) -> tuple[list[Chunk], list[_Draft]]:
        """Return the chunks of one step and the sequences that are complete with it, in the same order."""
        left = self._max_step_tokens
        found: list[tuple[Chunk, _Draft]] = []
        for draft in sorted(drafts, key=lambda draft: len(draft.copy.tokens) - draft.copy.computed):
            copy = draft.copy
            count = min(left, len(copy.tokens) - copy.computed)
            if not count:
                break
            complete = copy.computed + count == len(copy.tokens)
            found.append((Chunk(copy, copy.computed, count, samples=complete), draft))
            copy.computed += count
            left -= count
        found.sort(key=lambda pair: pair[0].count > 1)  # chunks of one token come first
        return [chunk for chunk, _ in found], [draft for chunk, draft in found if chunk.samples]

    def _read(self, unread: deque[tuple[list[_Draft], Step]]) -> None:
        """Read steps, but for the last one where the next can be launched before."""
        while len(unread) > self._runner.async_scheduling:
            _read_step(*unread.popleft())

    def _drop(self, sequence: Sequence) -> None:
        draft = self._drafted.pop(sequence, None)
        if draft is not None:
            self._pool.free(reversed(draft.copy.pages))
            self._free_indices.append(draft.copy.batch_index)

    def _drop_idle(self) -> None:
        """Free the pages of sequences that were preempted."""
        for sequence in [sequence for sequence in self._drafted if sequence.state != Sequence.RUNNING]:
            self._drop(sequence)


class _Draft:
    """A sequence as the draft model has it, and the draft of its next tokens."""

    __slots__ = ("copy", "count", "registered", "tokens")

    def __init__(self, tokens: list[int], number: int, batch_index: int) -> None:
        self.copy = Sequence(list(tokens), len(tokens))
        """The known tokens. `computed` also counts drafted tokens behind them."""
        self.copy.arrived = number
        self.copy.batch_index = batch_index
        self.tokens: list[int] = []
        self.count = 0
        """How many tokens are drafted."""
        self.registered = 0
        """Pages that are in the prefix cache."""

    def follow(self, tokens: list[int]) -> None:
        """Add the tokens that are known now; forget what was computed for others."""
        copy, known = self.copy, len(self.copy.tokens)
        agreed = 0
        for drafted, token in zip(self.tokens, tokens[known:], strict=False):
            if drafted != token:
                break
            agreed += 1
        copy.computed = min(copy.computed, known + agreed, len(tokens) - 1)
        copy.tokens += tokens[known:]

    def start(self, count: int) -> None:
        """Begin a draft."""
        self.tokens, self.count = [], count

    def next_chunk(self, number: int, *, known: bool) -> Chunk:
        """Return the chunk of the drafted token with this number; if it is not known, the device has it."""
        start = len(self.copy.tokens) + number - 1
        self.copy.computed = start + 1
        return Chunk(self.copy, start, 1, True, known, self.tokens[number - 1] if known else None)

    def cut(self, vocabulary: int) -> None:
        """Drop tokens from the first one that the other model does not have: padding of a larger head."""
        for index, token in enumerate(self.tokens):
            if token >= vocabulary:
                del self.tokens[index:]
                break


def _read_step(drafts: list[_Draft], step: Step) -> None:
    for draft, token in zip(drafts, step.tokens(), strict=True):
        draft.tokens.append(token)
