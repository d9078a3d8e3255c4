# SPDX-License-Identifier: Apache-2.0
"""The scheduler: chooses the tokens that the next step computes (continuous batching with chunked prefill).

    chunks = scheduler.schedule()        # decode chunks of one token first; may be empty
    ... the model runner computes them ...
    scheduler.commit(chunks, tokens)     # in the order of the steps; may come after the next `schedule`

Rules: sequences that decode go first, one token each. The rest of `max_step_tokens` is for prompts, in chunks, oldest
first; a prompt gets at most half of what is left while others wait behind it, so that a short prompt overtakes a long one. A
sequence starts when a batch index and pages for its whole prompt are free. When pages run out, the youngest sequence is
preempted: it frees its pages, keeps its place in the queue and is recomputed later. Requests that arrive together often
have a prefix in common: the first computes it, and the others wait for its pages instead of computing them again.

With a drafter, a decode chunk may be followed by chunks of drafted tokens (speculative decoding): the same step verifies
them, and `commit` keeps those that are what the model says itself. Pages with rejected tokens stay with their sequence,
whose next tokens overwrite them; they are never in the prefix cache.

With a loader (KV offload), pages of a prompt's prefix that were evicted may be loaded again. The sequence waits meanwhile,
and others start before it.

With priorities, "oldest" is the lowest priority number, then the earliest arrival, and "youngest" is the opposite. A
sequence of the `BACKGROUND` is preempted when another has no batch index or pages to start with.

Only the engine's thread calls it. It knows no torch.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.backends.llm.page_pool import PagePool, extend_page_hashes
from headrace.backends.llm.speculation.budget import CREDIT_PER_STEP, BatchBudget

_PROMPT_LOGPROB_ROWS = 256
"""Prompt tokens in a chunk whose log-probabilities are wanted: each needs the logits of the whole vocabulary."""
BACKGROUND = 1 << 31
"""The priority of sequences that all others come before: above every priority that a request may have."""
_RECOVERY_STEPS = 1000
"""Steps without a memory shortage after which the limits grow again."""


class Scheduler:
    """Waiting and running sequences over one page pool."""

    least_to_wait_for = 64
    """Tokens in common with a running prompt that are worth the step or two that waiting for them takes."""

    def __init__(self, pool: PagePool, *, max_running: int, max_step_tokens: int) -> None:
        self.pool = pool
        self.max_running = max_running
        # Every running sequence has a token in every step, and prompts must make progress beside them.
        self.max_step_tokens = max(max_step_tokens, max_running + pool.page_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Oldest first."""
        self._free_indices = list(range(max_running - 1, -1, -1))
        self._pages_to_come: dict[bytes, Sequence] = {}
        """Hashes of prompt pages that running sequences have not computed yet, and which sequence computes each."""
        self._arrivals = 0
        self._steps_in_flight = 0
        self._configured = (self.max_running, self.max_step_tokens)
        self._steps_since_shortage = 0
        self.prefix_hits = 0
        """Prompt tokens found in the prefix cache."""
        self.prefix_queries = 0
        """Prompt tokens looked up in the prefix cache."""
        self.preemptions = 0
        self.events: PageEvents | None = None
        self.loader: PageLoader | None = None
        """Loads pages that were evicted; None: they are computed again."""
        self.drafter: Drafter | None = None
        """Drafts tokens of sequences that may speculate; None: no speculative decoding."""
        self.max_draft_rows = 0
        """Rows of a step up to which drafts are added."""
        self.shares_all_prompts = True
        """Whether others may use pages of prompts whose log-probabilities are wanted: they may be computed another way."""
        self._drafts_paused = False
        """Whether a step with drafts ran out of device memory."""
        self.drafts = 0
        """Drafts that were verified, of one or more tokens each."""
        self.draft_tokens = 0
        self.accepted_tokens: list[int] = []
        """Accepted tokens by their position in the draft."""

    @property
    def capacity(self) -> int:
        """The longest sequence, in tokens, that can run."""
        return self.pool.pages * self.pool.page_size

    @property
    def idle(self) -> bool:
        """Whether no sequence runs or waits."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence, children: Iterable[Sequence] = ()) -> None:
        """Queue a new sequence, whose `limit` is at most the `capacity`.

        Its children have the same prompt and start when the prompt is computed.
        """
        if sequence.limit > self.capacity:
            raise ValueError(f"a sequence of {sequence.limit} tokens does not fit into {self.capacity}")
        sequence.children = list(children)
        for member in (sequence, *sequence.children):
            self._arrivals += 1
            member.arrived = self._arrivals
            member.state = Sequence.BLOCKED
            member.parent = None if member is sequence else sequence
        self._wait(sequence)

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """Free the pages and batch indices of sequences that have ended or were cancelled. Idempotent."""
        for sequence in sequences:
            if sequence.state == Sequence.RUNNING:
                self.running.remove(sequence)
                self._release(sequence)
            elif sequence.state == Sequence.WAITING:
                self.waiting.remove(sequence)
            sequence.state = Sequence.FINISHED
            self._release_children(sequence)
            if sequence.drafting is not None and self.drafter is not None:
                self.drafter.release(sequence)

    def schedule(self) -> list[Chunk]:
        """Return the chunks of the next step. If empty and not `idle`, commit the steps in flight first."""
        if not self._admit():
            return []  # which sequence to preempt depends on the tokens in flight
        chunks: list[Chunk] = []
        prompts: list[Sequence] = []
        page_size = self.pool.page_size
        drafter, delayed = self._active_drafter(), 0
        for sequence in tuple(self.running):
            if sequence.state != Sequence.RUNNING:
                continue  # preempted by an older sequence in this loop
            if sequence.drafted:
                continue  # how many of its tokens are computed is not known yet
            # For each sequence and step, so properties are written out.
            computed, length = sequence.computed, len(sequence.tokens) + sequence.pending
            if computed != length - 1 or computed < sequence.prompt_length:
                if computed < length:
                    prompts.append(sequence)
            elif length < sequence.limit:
                if drafter is not None and sequence.pending and sequence.speculates and drafter.waits(sequence):
                    delayed += 1
                    continue
                if computed >= len(sequence.pages) * page_size and not self._grow(sequence):
                    if self._steps_in_flight:
                        return []  # which sequence to preempt depends on the tokens in flight
                    continue
                chunks.append(Chunk(sequence, computed, 1, True, not sequence.pending))
        if drafter is not None:
            chunks = self._with_drafts(chunks, drafter)
        self._add_prompts(chunks, [sequence for sequence in prompts if sequence.state == Sequence.RUNNING])
        for chunk in chunks:
            chunk.sequence.computed = chunk.end
            if chunk.draft is None:
                chunk.sequence.pending += chunk.samples
            else:
                chunk.sequence.drafted += 1
        if chunks:
            self._steps_in_flight += 1
            if self.drafter is not None:
                self.drafter.batch.earn(CREDIT_PER_STEP - delayed / len(self.running))
        return chunks

    def commit(self, chunks: list[Chunk], tokens: list[int]) -> list[tuple[int, Sequence]]:
        """Record a computed step; `tokens` are those of the chunks that sample, in their order.

        Returns the index of each token that counts and the sequence it was appended to: a sequence that finished in the
        meantime gets none, and one whose drafted tokens were accepted gets several.
        """
        self._steps_in_flight -= 1
        self._steps_since_shortage += 1
        if self._steps_since_shortage >= _RECOVERY_STEPS:
            self._recover()
        grown = []
        verified: dict[Sequence, int] = {}
        number, page_size = 0, self.pool.page_size
        for chunk in chunks:
            sequence = chunk.sequence
            alive = sequence.state == Sequence.RUNNING
            if chunk.draft is not None:
                if alive:
                    alive = _is_accepted(chunk)
                    verified[sequence] = verified.get(sequence, 0) + alive
                if not alive:
                    sequence.computed = min(sequence.computed, chunk.start)
                    number += 1
                    continue
            if chunk.samples:
                if alive:
                    sequence.pending -= chunk.draft is None
                    sequence.tokens.append(tokens[number])
                    grown.append((number, sequence))
                number += 1
            if alive:
                if chunk.count > 1 or not chunk.end % page_size:
                    self._register(sequence, chunk)
                if sequence.children and chunk.end >= sequence.prompt_length:
                    self._release_children(sequence)
        for sequence, accepted in verified.items():
            self._count_draft(sequence, accepted)
        return grown

    def must_read_first(self) -> bool:
        """Return whether the steps in flight should be read before the next one is launched.

        So it is where most sequences wait for their tokens, to draft behind them: a step of the others alone takes as long
        as one of all.
        """
        drafter = self._active_drafter()
        if drafter is None or not self._steps_in_flight:
            return False
        waiting = sum(
            bool(sequence.drafted or (sequence.pending and sequence.speculates and drafter.waits(sequence)))
            for sequence in self.running
        )
        return waiting > 0 and 2 * waiting >= len(self.running)

    def abort(self, chunks: list[Chunk]) -> list[Sequence]:
        """Finish and return the sequences of a step that failed. No other step may be in flight."""
        self._steps_in_flight -= 1
        sequences = list(dict.fromkeys(chunk.sequence for chunk in chunks))
        self.finish(sequences)
        return sequences

    def roll_back(self, chunks: list[Chunk]) -> bool:
        """Undo a step that ran out of device memory, and make later steps smaller. No other step may be in flight.

        Returns False, and changes nothing, where steps cannot be smaller. The limits grow again after `_RECOVERY_STEPS`
        steps without a shortage.
        """
        self._steps_since_shortage = 0
        has_drafts = any(chunk.draft is not None for chunk in chunks)
        least = self.max_running + self.pool.page_size
        large = sum(chunk.count for chunk in chunks) > least
        if not large and not has_drafts and len(self.running) <= 1:
            return False
        self._steps_in_flight -= 1
        for chunk in reversed(chunks):  # the chunks of drafts come behind the chunk whose token they follow
            chunk.sequence.computed = chunk.start
            chunk.sequence.pending -= chunk.samples and chunk.draft is None
            chunk.sequence.drafted = 0
        if has_drafts:
            self._drafts_paused = True
            return True
        if large:
            self.max_step_tokens = max(least, self.max_step_tokens // 2)
            return True
        self.max_running = max(1, len(self.running) // 2)
        while len(self.running) > self.max_running:
            self._preempt(self.running[-1])
        return True

    def _recover(self) -> None:
        self._steps_since_shortage = 0
        self._drafts_paused = False
        running, step_tokens = self._configured
        self.max_running = min(running, self.max_running * 2)
        self.max_step_tokens = min(step_tokens, self.max_step_tokens * 2)

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = Sequence.WAITING
        if self.waiting and _turn(self.waiting[-1]) > _turn(sequence):
            insort(self.waiting, sequence, key=_turn)
        else:
            self.waiting.append(sequence)

    def _release_children(self, parent: Sequence) -> None:
        children, parent.children = parent.children, []
        for child in children:
            if child.state == Sequence.BLOCKED:
                self._wait(child)

    def _admit(self) -> bool:
        """Start waiting sequences. False: one needs the place of a background sequence, and steps are in flight."""
        held: list[Sequence] = []
        blocked = False
        while self.waiting and not blocked:
            if len(self.running) >= self.max_running:
                if not self._may_displace(self.waiting[0]):
                    break
                blocked = not self._preempt_background()
                continue
            sequence = self.waiting.popleft()
            if sequence.awaited_page in self._pages_to_come:
                held.append(sequence)
                continue
            shared = self._cached_pages(sequence)
            sequence.awaited_page = self._page_to_await(sequence, len(shared))
            if sequence.awaited_page or self._loads(sequence, shared):
                held.append(sequence)
            elif not self._start(sequence, shared):
                if not self._may_displace(sequence):
                    held.append(sequence)
                    break
                self.waiting.appendleft(sequence)
                blocked = not self._preempt_background()
        self.waiting.extendleft(reversed(held))
        return not blocked

    def _may_displace(self, sequence: Sequence) -> bool:
        """Return whether a background sequence runs that this one comes before."""
        return sequence.priority < BACKGROUND and bool(self.running) and self.running[-1].priority >= BACKGROUND

    def _preempt_background(self) -> bool:
        """Preempt the youngest sequence; False if its tokens are in flight."""
        if self._steps_in_flight:
            return False
        self._preempt(self.running[-1])
        return True

    def _start(self, sequence: Sequence, shared: list[int]) -> bool:
        """Give a waiting sequence its pages; False if there are too few."""
        size = self.pool.page_size
        needed = self._pages_needed(sequence, shared)
        if needed is None:
            return False
        for page in shared:
            self.pool.share(page)
        sequence.pages = [*shared, *(self.pool.allocate() for _ in range(needed))]
        sequence.computed = len(shared) * size
        if sequence.received_pages is not None:
            self._use_received_pages(sequence, len(shared))
        if not sequence.preemptions:
            sequence.tokens = list(sequence.tokens)
            sequence.cached = len(shared) * size
            found = max(0, sequence.cached - sequence.loaded)
            self.prefix_hits += found
            self.prefix_queries += sequence.length
            if self.loader is not None:
                self.loader.started(found)
        for page_hash in sequence.page_hashes[sequence.computed // size :]:
            self._pages_to_come.setdefault(page_hash, sequence)
        sequence.batch_index = self._free_indices.pop()
        sequence.state = Sequence.RUNNING
        insort(self.running, sequence, key=_turn)
        return True

    def _pages_needed(self, sequence: Sequence, shared: list[int]) -> int | None:
        """Return how many pages a sequence needs besides those it shares; None if there are too few to start it."""
        size = self.pool.page_size
        needed = min(-(-(sequence.length + 1) // size), -(-sequence.limit // size)) - len(shared)
        # Cached pages that are evictable count as available until they are shared. And each running sequence may need
        # a page soon: without that reserve a sequence would start, be preempted and start again.
        reserved = sum(map(self.pool.is_evictable, shared)) + len(self.running)
        return needed if needed + reserved <= self.pool.available else None

    def _loads(self, sequence: Sequence, shared: list[int]) -> bool:
        """Return whether the pages behind those it shares are being loaded, which begins here."""
        loader, full = self.loader, (sequence.length - 1) // self.pool.page_size
        if loader is None or len(shared) >= full or not sequence.may_load or sequence.prompt_logprobs is not None:
            return False
        if sequence.parent is not None and sequence.parent.pages:
            return False  # it shares what its parent computes
        if loader.is_loading(sequence.page_hashes[len(shared)]):
            return True
        if self._pages_needed(sequence, shared) is None:
            return False
        return loader.load(sequence, shared, sequence.page_hashes[len(shared) : full])

    def _page_to_await(self, sequence: Sequence, shared: int) -> bytes:
        """Return the hash of the last page of its prompt that running sequences are about to compute; b"" to start now."""
        if sequence.received_pages is not None or sequence.parent is not None or sequence.prompt_logprobs is not None:
            return b""
        to_come = sequence.page_hashes[shared:]
        count = next((index for index, page_hash in enumerate(to_come) if not self._comes(page_hash, sequence)), None)
        count = len(to_come) if count is None else count
        return to_come[count - 1] if count and count * self.pool.page_size >= self.least_to_wait_for else b""

    def _comes(self, page_hash: bytes, sequence: Sequence) -> bool:
        """Return whether a running sequence is about to compute a page: one that this sequence need not come before."""
        computing = self._pages_to_come.get(page_hash)
        return computing is not None and (computing.priority < BACKGROUND or sequence.priority >= BACKGROUND)

    def _cached_pages(self, sequence: Sequence) -> list[int]:
        """Return the pages that already hold its first tokens, without the last token, whose logits are needed."""
        pool = self.pool
        full = (sequence.length - 1) // pool.page_size
        parent = sequence.parent
        cached: list[int] = []
        if parent is not None and parent.pages:
            ready = min(parent.computed, sequence.prompt_length - 1) // pool.page_size
            cached = parent.pages[: min(full, ready)]
        if not pool.prefix_cache or len(cached) == full or sequence.prompt_logprobs is not None:
            return cached
        page_hashes = extend_page_hashes(
            sequence.page_hashes, sequence.tokens, pool.page_size, sequence.cache_salt, full
        )
        for page_hash in page_hashes[len(cached) : full]:
            page = pool.find(page_hash)
            if page is None:
                break
            cached.append(page)
        return cached

    def _use_received_pages(self, sequence: Sequence, shared: int) -> None:
        """Copy pages that another server computed behind the `shared` pages."""
        received, sequence.received_pages = sequence.received_pages, None
        if received is None or not received.first <= shared < received.end:
            return  # since the transfer was requested, cached pages were evicted or the missing ones were computed
        pool = self.pool
        pages = sequence.pages[shared : received.end]
        if not received.copy_to(shared, pages):
            return
        sequence.computed = received.end * pool.page_size
        page_hashes = extend_page_hashes(
            sequence.page_hashes, sequence.tokens, pool.page_size, sequence.cache_salt, received.end
        )
        for index, page in enumerate(pages, shared):
            if pool.register(page, page_hashes[index]) and self.events is not None:
                self.events.stored(sequence, index, pool.page_size)

    def _grow(self, sequence: Sequence) -> bool:
        """Allocate a page for its next token. False: it has to wait, or was preempted itself."""
        while not self.pool.available:
            if self._steps_in_flight:
                return False
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.pages.append(self.pool.allocate())
        return True

    def _active_drafter(self) -> Drafter | None:
        """Return the drafter if a step has room for drafts and they have paid lately."""
        drafter = self.drafter
        if drafter is None or drafter.batch.is_paused or self._drafts_paused:
            return None
        return drafter if len(self.running) < self.max_draft_rows else None

    def _with_drafts(self, chunks: list[Chunk], drafter: Drafter) -> list[Chunk]:
        """Return decode chunks with chunks of drafted tokens behind those whose sequences speculate."""
        # Every running sequence has a row, and prompts must make progress beside drafts.
        room = min(self.max_draft_rows, self.max_step_tokens - self.pool.page_size) - len(self.running)
        wanted = [
            (chunk.sequence, min(room, chunk.sequence.limit - len(chunk.sequence.tokens) - 1))
            for chunk in chunks
            if chunk.known and chunk.sequence.speculates
        ]
        wanted = [(sequence, most) for sequence, most in wanted if most > 0]
        if not wanted:
            return chunks
        drafts = dict(zip((sequence for sequence, _ in wanted), drafter.draft(wanted, room), strict=True))
        extended: list[Chunk] = []
        for chunk in chunks:
            extended.append(chunk)
            draft = drafts.get(chunk.sequence)
            if draft:
                draft = draft[: self._add_draft_pages(chunk.sequence, min(len(draft), room))]
                room -= len(draft)
                extended += [
                    Chunk(chunk.sequence, start, 1, True, draft=token) for start, token in enumerate(draft, chunk.end)
                ]
        return extended

    def _add_draft_pages(self, sequence: Sequence, count: int) -> int:
        """Allocate pages for drafted tokens; return how many tokens fit. No sequence is preempted for drafts."""
        pool, end = self.pool, sequence.computed + 1 + count
        while len(sequence.pages) * pool.page_size < end and pool.available > len(self.running):
            sequence.pages.append(pool.allocate())
        return min(count, len(sequence.pages) * pool.page_size - sequence.computed - 1)

    def _count_draft(self, sequence: Sequence, accepted: int) -> None:
        drafted, sequence.drafted = sequence.drafted, 0
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += [0] * (drafted - len(self.accepted_tokens))
        for position in range(accepted):
            self.accepted_tokens[position] += 1
        if self.drafter is not None:
            self.drafter.verified(sequence, drafted, accepted)
            self.drafter.batch.earn(accepted / max(1, len(self.running)))

    def _add_prompts(self, chunks: list[Chunk], prompts: list[Sequence]) -> None:
        left = self.max_step_tokens - len(chunks)
        for index, sequence in enumerate(prompts):
            if left <= 0:
                return
            # A prompt of the background takes what the others leave.
            others_wait = index + 1 < len(prompts) and (
                sequence.priority >= BACKGROUND or prompts[index + 1].priority < BACKGROUND
            )
            most = max(left // 2, self.pool.page_size) if others_wait else left
            if sequence.prompt_logprobs is not None:
                most = min(most, _PROMPT_LOGPROB_ROWS)
            count = min(sequence.length - sequence.computed, most, left)
            end = sequence.computed + count
            last_page = (sequence.length - 1) // self.pool.page_size * self.pool.page_size
            if self._is_alone(sequence) and sequence.computed < last_page < end:
                # As when the pages before are in the prefix cache: steps of the same sizes give the same answer.
                end, count = last_page, last_page - sequence.computed
            chunks.append(Chunk(sequence, sequence.computed, count, samples=end == sequence.length))
            left -= count

    def _is_alone(self, sequence: Sequence) -> bool:
        """Return whether the server is idle but for this prompt, of which pages may be in the prefix cache another time."""
        finds_pages = self.pool.prefix_cache and sequence.prompt_logprobs is None
        return finds_pages and len(self.running) == 1 and not self.waiting

    def _register(self, sequence: Sequence, chunk: Chunk) -> None:
        """Add the pages that this chunk has filled to the prefix cache, as far as their tokens are known."""
        pool = self.pool
        if not pool.prefix_cache or (sequence.prompt_logprobs is not None and not self.shares_all_prompts):
            return
        full = min(chunk.end, len(sequence.tokens)) // pool.page_size
        first = chunk.start // pool.page_size
        if full <= first:
            return
        page_hashes = extend_page_hashes(
            sequence.page_hashes, sequence.tokens, pool.page_size, sequence.cache_salt, full
        )
        for index in range(first, full):
            if pool.register(sequence.pages[index], page_hashes[index]) and self.events is not None:
                self.events.stored(sequence, index, pool.page_size)
            self._pages_to_come.pop(page_hashes[index], None)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self._wait(sequence)

    def _release(self, sequence: Sequence) -> None:
        for page_hash in sequence.page_hashes if self._pages_to_come else ():
            if self._pages_to_come.get(page_hash) is sequence:
                del self._pages_to_come[page_hash]
        self.pool.free(reversed(sequence.pages))
        sequence.pages = []
        sequence.computed = 0
        sequence.pending = sequence.drafted = 0
        self._free_indices.append(sequence.batch_index)
        sequence.batch_index = -1


class PageEvents(Protocol):
    """Receives what enters the prefix cache: `kv_events.KVEventPublisher`."""

    def stored(self, sequence: Sequence, index: int, page_size: int) -> None:
        """Take note of a page of a sequence; its hash is in `page_hashes`."""


class PageLoader(Protocol):
    """Loads pages that were evicted from the prefix cache into it again: `kv_offload.offload.KVOffload`."""

    def is_loading(self, page_hash: bytes) -> bool:
        """Return whether a page is being loaded."""

    def load(self, sequence: Sequence, shared: list[int], hashes: SequenceOf[bytes]) -> bool:
        """Load the pages with the first of these hashes, which come behind the `shared` pages. False: none are loaded."""

    def started(self, tokens: int) -> None:
        """Count a prompt of which so many tokens were in the prefix cache without a load."""


class ReceivedPages(Protocol):
    """Pages of a prompt that another server computed: `kv_transfer.page_layout.ReceivedPages`."""

    first: int
    """Index of the first received page in the prompt, ..."""
    end: int
    """... and of the first page that was not received."""

    def copy_to(self, start: int, pages: list[int]) -> bool:
        """Fill these pages, the prompt's from index `start` on; False if that failed."""


class PromptLogitsReceiver(Protocol):
    """Receives the logits of a prompt: `sampling.prompt_logprobs.PromptLogprobs`."""

    def rows_of(self, start: int, end: int) -> int:
        """Return how many of the rows `start` to `end` are wanted."""

    def add(self, start: int, logits: Any) -> None:
        """Receive the logits of wanted rows."""


class Drafter(Protocol):
    """Drafts the next tokens of sequences, which the model then verifies: see `speculation`."""

    batch: BatchBudget
    """What drafts may cost all running sequences together."""

    def waits(self, sequence: Sequence) -> bool:
        """Return whether a sequence should wait for its token in flight, because the tokens behind it can be drafted."""

    def draft(self, wanted: list[tuple[Sequence, int]], room: int) -> list[list[int]]:
        """Return a draft for each sequence, with at most this many tokens; of all together, only `room` are verified."""

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn how many tokens of a draft were accepted."""

    def release(self, sequence: Sequence) -> None:
        """Free what is kept for a sequence that has ended."""


class Sequence:
    """The tokens of one choice of one request, and their pages. The scheduler never reads `owner` or `prompt_inputs`."""

    __slots__ = (
        "adapter",
        "arrived",
        "awaited_page",
        "batch_index",
        "cache_salt",
        "cached",
        "children",
        "computed",
        "drafted",
        "drafting",
        "limit",
        "loaded",
        "may_load",
        "owner",
        "page_hashes",
        "pages",
        "parent",
        "pending",
        "preemptions",
        "priority",
        "prompt_inputs",
        "prompt_length",
        "prompt_logprobs",
        "received_pages",
        "speculates",
        "state",
        "tokens",
    )

    NEW, BLOCKED, WAITING, RUNNING, FINISHED = range(5)

    def __init__(
        self,
        tokens: list[int],
        limit: int,
        *,
        cache_salt: bytes = b"",
        adapter: str = "",
        prompt_inputs: Any = None,
        prompt_logprobs: PromptLogitsReceiver | None = None,
        priority: int = 0,
        owner: Any = None,
        parent: Sequence | None = None,
        speculates: bool = False,
    ) -> None:
        self.tokens = tokens
        """The prompt and the generated tokens. `pending` counts tokens that were sampled but not read yet.

        Until the sequence first runs, this is the caller's list: waiting choices of one request share their prompt."""
        self.prompt_length = len(tokens)
        self.limit = limit
        """Maximum number of tokens, prompt included."""
        self.cache_salt = cache_salt
        """Sequences share pages only if their salts are equal: the adapter's name and a hash of images."""
        self.adapter = adapter
        self.prompt_inputs = prompt_inputs
        """The model runner's `PromptInputs`, if the prompt has images."""
        self.prompt_logprobs = prompt_logprobs
        """Receives the logits of the prompt, which is then computed whole and in small chunks."""
        self.priority = priority
        """Lower is earlier."""
        self.owner = owner
        """The engine's `Choice`."""
        self.parent = parent
        """Another choice of the same request, whose prompt pages this one shares."""
        self.children: list[Sequence] = []
        """The other choices, blocked until this one's prompt is computed."""
        self.state = self.NEW
        self.arrived = 0
        """Arrival number, given by the scheduler: lower is older."""
        self.awaited_page = b""
        """While it waits: hash of a page that a running sequence computes for both; b"" if it can start."""
        self.batch_index = -1
        """While it runs: a number below `max_running` that no other running sequence has."""
        self.pages: list[int] = []
        self.computed = 0
        """Tokens whose keys and values are in its pages, or will be after the steps in flight."""
        self.pending = 0
        self.speculates = speculates
        """Whether its tokens may be drafted, if there is a drafter."""
        self.drafting: Any = None
        """What the drafter keeps for it."""
        self.drafted = 0
        """Drafted tokens in the step in flight."""
        self.cached = 0
        """Prompt tokens that were in the prefix cache when it first ran."""
        self.loaded = 0
        """Tokens of it that were loaded into the prefix cache while it waited."""
        self.may_load = True
        """Whether its pages may be loaded: not after an error."""
        self.page_hashes: list[bytes] = []
        """Hashes of its first pages, as far as they were needed."""
        self.preemptions = 0
        self.received_pages: ReceivedPages | None = None
        """Prompt pages that another server computed, until the sequence first runs."""

    @property
    def length(self) -> int:
        """Number of tokens, pending ones included."""
        return len(self.tokens) + self.pending


@dataclass(slots=True)
class Chunk:
    """Tokens `start` to `start + count` of a sequence, scheduled for one step.

    The token of a decode chunk may still be in flight: it is then the one that the previous step samples, and `known` is
    False. The token of a chunk with a `draft` is only a guess; such chunks have one token and follow one another.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """Whether a token is sampled after its last row: not in the middle of a prompt."""
    known: bool = True
    draft: int | None = None

    @property
    def end(self) -> int:
        """Number of tokens of the sequence that are computed after this chunk."""
        return self.start + self.count

    @property
    def first_token(self) -> int:
        """The token at `start`, which must be `known`."""
        return self.sequence.tokens[self.start] if self.draft is None else self.draft


def _is_accepted(chunk: Chunk) -> bool:
    """Return whether the tokens up to a chunk's draft are those that the model said, and the draft is the next one."""
    tokens = chunk.sequence.tokens
    return chunk.start < len(tokens) and tokens[chunk.start] == chunk.draft


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrived
