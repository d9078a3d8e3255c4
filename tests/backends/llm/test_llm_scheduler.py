# SPDX-License-Identifier: Apache-2.0
"""The scheduler and the page pool, over a simulated device that checks the contents of every slot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_scheduling import Guess, Memory, run, said_alone, scheduler_of

from headrace.backends.llm.page_pool import PagePool, extend_page_hashes
from headrace.backends.llm.scheduler import BACKGROUND, Sequence
from support.properties import examples

prompts = st.lists(st.integers(1, 2), min_size=1, max_size=24)
requests = st.lists(
    st.tuples(
        prompts,
        st.integers(1, 16),
        st.integers(0, 12),
        st.integers(1, 3),
        st.booleans(),
        st.integers(0, 40),
        st.sampled_from([0, 0, BACKGROUND]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    requests,
    st.integers(10, 40),
    st.integers(1, 6),
    st.booleans(),
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(0, 1),
    st.sampled_from([0, 0, 3, 8]),
)
def test_everyone_gets_what_they_would_alone(
    asked: list[tuple[list[int], int, int, int, bool, int, int]],
    slots: int,
    size: int,
    prefix_cache: bool,
    max_running: int,
    max_step_tokens: int,
    ahead: int,
    draft_rows: int,
) -> None:
    pages = max(2, -(-slots // size))
    scheduler = scheduler_of(
        pages, size, prefix_cache=prefix_cache, max_running=max_running, max_step_tokens=max_step_tokens
    )
    scheduler.least_to_wait_for = 4
    scheduler.drafter, scheduler.max_draft_rows = (Guess(), draft_rows) if draft_rows else (None, 0)
    memory = Memory(scheduler)
    all_: list[tuple[int, int, list[Sequence]]] = []
    for prompt, more, arrives, choices, leaves, leaves_at, priority in asked:
        limit = min(len(prompt) + more, scheduler.capacity)
        if limit > len(prompt):
            sequences = [
                Sequence(list(prompt), limit, priority=priority, speculates=number != 1) for number in range(choices)
            ]
            all_.append((arrives, leaves_at if leaves else 10**9, sequences))

    def each_step(step: int) -> None:
        for arrives, leaves_at, sequences in all_:
            if sequences[0].state == Sequence.NEW and step >= arrives:
                scheduler.add(sequences[0], sequences[1:])
            if step >= leaves_at:
                scheduler.finish(sequences)

    each_step(0)
    while any(sequences[0].state == Sequence.NEW for _, _, sequences in all_) or not scheduler.idle:
        run(memory, ahead=ahead, each_step=each_step)
        for arrives, _, sequences in all_:
            if sequences[0].state == Sequence.NEW:
                each_step(arrives)
    assert scheduler.pool.used == 0
    assert not scheduler.running and not scheduler.waiting and not scheduler._pages_to_come
    assert sorted(scheduler._free_indices) == list(range(max_running))
    assert sum(scheduler.accepted_tokens) <= scheduler.draft_tokens >= scheduler.drafts
    for _, leaves_at, sequences in all_:
        for sequence in sequences:
            assert sequence.state == Sequence.FINISHED
            if leaves_at == 10**9:
                assert sequence.tokens == said_alone(sequence.tokens[: sequence.prompt_length], sequence.limit)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "back", "register"]), st.integers(0, 7)), max_size=80))
def test_pages_are_free_idle_or_used(actions: list[tuple[str, int]]) -> None:
    pool = PagePool(6, 2, prefix_cache=True)
    held: list[int] = []
    names: dict[bytes, int] = {}
    for action, number in actions:
        if action == "take" and pool.available:
            page = pool.allocate()
            assert page not in held, "a page that someone has was given out"
            assert not pool.is_registered(page)
            names = {name: other for name, other in names.items() if other != page}
            held.append(page)
        elif action == "share" and (found := pool.find(b"%d" % number)) is not None:
            assert names[b"%d" % number] == found
            pool.share(found)
            held.append(found)
        elif action == "back" and held:
            pool.free([held.pop(number % len(held))])
        elif action == "register" and held:
            page, name = held[number % len(held)], b"%d" % number
            if pool.find(name) is None and not pool.is_registered(page):
                names[name] = page
            pool.register(page, name)
        assert pool.used == len(set(held))
        assert pool.available + pool.used == 6
        assert all(pool.ref_count(page) == held.count(page) for page in range(6))
    pool.free(held)
    assert pool.used == 0
    pool.reset_prefix_cache()
    assert (pool.evictable, pool.available) == (0, 6)


def test_a_page_given_back_twice_is_a_fault_that_shows() -> None:
    pool = PagePool(2, 2, prefix_cache=True)
    page = pool.allocate()
    pool.free([page])
    with pytest.raises(RuntimeError, match="does not use it"):
        pool.free([page])


def test_the_least_recently_used_page_is_evicted_first() -> None:
    pool = PagePool(2, 2, prefix_cache=True)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"first")
    pool.register(second, b"second")
    pool.free([first])
    pool.free([second])
    assert pool.allocate() == first
    assert pool.find(b"first") is None
    assert pool.find(b"second") == second


def test_digests_differ_by_salt_tokens_and_prefix() -> None:
    def page_hashes(tokens: list[int], cache_salt: bytes = b"") -> list[bytes]:
        return list(extend_page_hashes([], tokens, 2, cache_salt, len(tokens) // 2))

    assert page_hashes([1, 2, 3, 4]) == page_hashes([1, 2, 3, 4])
    assert page_hashes([1, 2, 3, 4])[0] == page_hashes([1, 2, 9, 9])[0]
    assert page_hashes([1, 2, 3, 4])[1] != page_hashes([2, 1, 3, 4])[1]
    assert not set(page_hashes([1, 2, 3, 4])) & set(page_hashes([1, 2, 3, 4], b"adapter"))


def test_a_new_request_gets_its_first_token_in_the_step_that_computes_its_prompt() -> None:
    scheduler = scheduler_of(200, 4, max_running=8, max_step_tokens=32)
    memory = Memory(scheduler)
    for number in range(6):
        scheduler.add(Sequence([number + 1] * 3, 100))
    for _ in range(10):
        plan = scheduler.schedule()
        scheduler.commit(plan, [1] * len(memory.launch(plan)))
    newcomer = Sequence([9] * 20, 40)
    scheduler.add(newcomer)
    plan = scheduler.schedule()
    assert [chunk.count for chunk in plan] == [1, 1, 1, 1, 1, 1, 20], "those that generate do not wait for it"
    assert plan[-1].samples
    scheduler.commit(plan, [1] * 7)
    assert len(newcomer.tokens) == 21


def test_a_short_prompt_passes_a_long_one() -> None:
    scheduler = scheduler_of(200, 4, max_running=2, max_step_tokens=16)
    memory = Memory(scheduler)
    long, short = Sequence([1] * 200, 300), Sequence([2] * 8, 300)
    scheduler.add(long)
    scheduler.add(short)
    plan = scheduler.schedule()
    assert [(chunk.sequence, chunk.count) for chunk in plan] == [(long, 8), (short, 8)]
    scheduler.commit(plan, memory.launch(plan))
    assert len(short.tokens) == 9
    counts = [scheduler.schedule()]
    assert sum(chunk.count for chunk in counts[0]) == 16, "what is left goes to the long one"


def test_an_earlier_request_is_not_preempted_for_a_later_one() -> None:
    scheduler = scheduler_of(8, 2, prefix_cache=False, max_running=4)
    memory = Memory(scheduler)
    sequences = [Sequence([number + 1] * 3, 16) for number in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.idle:
        plan = scheduler.schedule()
        memory.launch(plan)
        for _, sequence in scheduler.commit(plan, [1] * sum(chunk.samples for chunk in plan)):
            if len(sequence.tokens) == sequence.limit:
                scheduler.finish([sequence])
                assert sequence is sequences[0] or sequences[0].state == Sequence.FINISHED
    assert sequences[0].preemptions == 0
    assert sequences[1].preemptions >= 1
    assert scheduler.pool.used == 0


def test_a_lower_priority_number_goes_first_and_is_preempted_last() -> None:
    scheduler = scheduler_of(8, 2, prefix_cache=False, max_running=4)
    memory = Memory(scheduler)
    later, usual, first = (
        Sequence([number + 1] * 3, 16, priority=priority) for number, priority in enumerate((5, 0, -1))
    )
    for sequence in (later, usual, first):
        scheduler.add(sequence)
    assert list(scheduler.waiting) == [first, usual, later]
    finished: list[Sequence] = []
    while not scheduler.idle:
        plan = scheduler.schedule()
        memory.launch(plan)
        for _, sequence in scheduler.commit(plan, [1] * sum(chunk.samples for chunk in plan)):
            if len(sequence.tokens) == sequence.limit:
                scheduler.finish([sequence])
                finished.append(sequence)
    assert finished == [first, usual, later]
    assert (first.preemptions, later.preemptions > 0) == (0, True)


class WantsLogits:
    """In place of `PromptLogprobs`."""

    def rows_of(self, start: int, end: int) -> int:
        return 0

    def add(self, start: int, logits: object) -> None:
        raise AssertionError


def test_a_prompt_whose_logits_are_wanted_is_computed_whole_and_in_small_chunks() -> None:
    scheduler = scheduler_of(400, 2, max_running=4, max_step_tokens=600)
    memory = Memory(scheduler)
    prompt = [1, 2] * 150
    for receiver, counts in ((None, [298, 2]), (WantsLogits(), [256, 44])):
        sequence = Sequence(prompt, 301, prompt_logprobs=receiver)
        scheduler.add(sequence)
        seen = []
        while sequence.state != Sequence.FINISHED:
            plan = scheduler.schedule()
            memory.launch(plan)
            seen += [chunk.count for chunk in plan]
            if scheduler.commit(plan, [1] * sum(chunk.samples for chunk in plan)):
                scheduler.finish([sequence])
        assert (seen, sequence.cached) == (counts, 0)


def test_the_background_starts_last_and_in_its_own_order() -> None:
    scheduler = scheduler_of(100, 4, max_running=1)
    background = [Sequence([1] * 4, 6, priority=BACKGROUND) for _ in range(2)]
    others = [Sequence([2 + number] * 4, 6) for number in range(2)]
    for sequence in (*background, *others):
        scheduler.add(sequence)
    started: list[Sequence] = []
    while not scheduler.idle:
        plan = scheduler.schedule()
        started += [sequence for sequence in scheduler.running if sequence not in started]
        for _, sequence in scheduler.commit(plan, [1] * sum(chunk.samples for chunk in plan)):
            if len(sequence.tokens) == sequence.limit:
                scheduler.finish([sequence])
    assert started == [*others, *background]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("pages", "max_running"), [(100, 2), (8, 8)])
def test_a_newcomer_takes_the_place_of_the_background(ahead: int, pages: int, max_running: int) -> None:
    """There are no more batch indices, or no more pages."""
    scheduler = scheduler_of(pages, 4, max_running=max_running)
    memory = Memory(scheduler)
    background = [Sequence([1 + number] * 9, 16, priority=BACKGROUND) for number in range(2)]
    for sequence in background:
        scheduler.add(sequence)
    plan = scheduler.schedule()
    tokens = [1] * len(memory.launch(plan))
    assert scheduler.running == background
    newcomer = Sequence([9] * 12, 16)
    scheduler.add(newcomer)
    if ahead:
        assert scheduler.schedule() == [], "what the background was about to say is read first"
    scheduler.commit(plan, tokens)
    plan = scheduler.schedule()
    assert scheduler.running == [newcomer, background[0]]
    assert [chunk.count for chunk in plan if chunk.sequence is newcomer] == [12]
    assert [sequence.preemptions for sequence in background] == [0, 1]
    scheduler.commit(plan, memory.launch(plan))
    run(memory, ahead=ahead)
    assert len(background[1].tokens) > 9, "it goes on afterwards"


def test_a_prompt_of_the_background_takes_what_others_leave() -> None:
    scheduler = scheduler_of(200, 4, max_running=2, max_step_tokens=16)
    late, live = Sequence([1] * 40, 50, priority=BACKGROUND), Sequence([2] * 14, 50)
    scheduler.add(late)
    scheduler.add(live)
    assert [(chunk.sequence, chunk.count) for chunk in scheduler.schedule()] == [(live, 14), (late, 2)]


def test_requests_do_not_wait_for_a_prefix_of_the_background() -> None:
    scheduler = scheduler_of(200, 4, max_step_tokens=48)
    late, live = prompts_with_a_common_prefix(2)
    late.priority = BACKGROUND
    scheduler.add(late)
    scheduler.schedule()
    scheduler.add(live)
    plan = scheduler.schedule()
    assert plan[0].sequence is live


def test_what_can_never_fit_is_refused() -> None:
    scheduler = scheduler_of(4, 4)
    with pytest.raises(ValueError, match="does not fit into 16"):
        scheduler.add(Sequence([1], 17))
    scheduler.add(Sequence([1], 16))


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_of_a_request_share_the_pages_of_its_prompt(prefix_cache: bool) -> None:
    scheduler = scheduler_of(100, 4, prefix_cache=prefix_cache, max_step_tokens=64)
    memory = Memory(scheduler)
    choices = [Sequence([1, 2, 3, 4] * 4, 30) for _ in range(4)]
    scheduler.add(choices[0], choices[1:])
    counts = []
    for _ in range(3 if prefix_cache else 2):
        plan = scheduler.schedule()
        counts.append([chunk.count for chunk in plan])
        scheduler.commit(plan, [1] * len(memory.launch(plan)))
    whole = [[12], [4]] if prefix_cache else [[16]]
    assert counts == [*whole, [1, 4, 4, 4]], "the others compute the last page only"
    assert {tuple(choice.pages[:3]) for choice in choices} == {tuple(choices[0].pages[:3])}
    assert len({choice.pages[3] for choice in choices}) == 4
    scheduler.finish(choices)
    assert scheduler.pool.used == 0


def test_a_prompt_that_was_computed_before_is_found_and_its_last_token_computed() -> None:
    scheduler = scheduler_of(100, 4, max_step_tokens=64)
    memory = Memory(scheduler)
    scheduler.add(Sequence([1, 2] * 8, 17))
    run(memory)
    second, other = Sequence([1, 2] * 8, 17), Sequence([1, 2] * 8, 17, cache_salt=b"other")
    scheduler.add(second)
    scheduler.add(other)
    run(memory)
    assert (second.cached, other.cached) == (12, 0)
    assert (scheduler.prefix_hits, scheduler.prefix_queries) == (12, 48)


@pytest.mark.parametrize("length", [4, 16, 17, 19, 43])
def test_alone_a_prompt_is_computed_in_the_same_steps_whether_its_pages_are_cached_or_not(length: int) -> None:
    scheduler = scheduler_of(100, 4, max_step_tokens=64)
    memory = Memory(scheduler)
    plans = []
    for _ in range(3):
        sequence = Sequence(list(range(1, length + 1)), length + 1)
        scheduler.add(sequence)
        plans.append([])
        while sequence.state != Sequence.FINISHED:
            plan = scheduler.schedule()
            plans[-1] += [(chunk.start, chunk.count) for chunk in plan]
            memory.launch(plan)
            if scheduler.commit(plan, [1] * sum(chunk.samples for chunk in plan)):
                scheduler.finish([sequence])
    first, *again = plans
    assert all(plan == first[-1:] for plan in again), "the last page, which is the last step of the first time"


def prompts_with_a_common_prefix(count: int, *, common: int = 64, own: int = 5) -> list[Sequence]:
    return [Sequence([1, 2] * (common // 2) + [3 + number] * own, common + own + 1) for number in range(count)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_common_prefix_of_prompts_that_arrive_together_is_computed_once(ahead: int) -> None:
    scheduler = scheduler_of(200, 4, max_step_tokens=48)
    memory = Memory(scheduler)
    together, other = prompts_with_a_common_prefix(6), Sequence([9] * 20, 30)
    for sequence in (*together, other):
        scheduler.add(sequence)
    first = scheduler.schedule()
    assert [chunk.sequence for chunk in first] == [together[0], other], "who shares nothing does not wait"
    scheduler.commit(first, memory.launch(first))
    run(memory, ahead=ahead)
    assert [sequence.cached for sequence in together] == [0, 64, 64, 64, 64, 64]


def test_who_waits_for_a_prefix_computes_it_if_the_first_leaves() -> None:
    scheduler = scheduler_of(200, 4, max_step_tokens=48)
    memory = Memory(scheduler)
    first, second, third = prompts_with_a_common_prefix(3)
    for sequence in (first, second, third):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    scheduler.commit(plan, memory.launch(plan))
    assert scheduler.running == [first] and list(scheduler.waiting) == [second, third]
    scheduler.finish([first])
    scheduler.schedule()
    assert scheduler.running == [second] and list(scheduler.waiting) == [third]
    assert second.cached == 48, "what the first had computed is used"


def test_a_short_common_prefix_is_not_waited_for() -> None:
    scheduler = scheduler_of(200, 4, max_step_tokens=64)
    for sequence in prompts_with_a_common_prefix(3, common=8):
        scheduler.add(sequence)
    scheduler.schedule()
    assert len(scheduler.running) == 3


def test_a_plan_that_is_undone_is_made_again_in_smaller_steps() -> None:
    scheduler = scheduler_of(100, 4, max_running=2, max_step_tokens=64)
    sequences = [Sequence([number + 1] * 40, 60) for number in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    before = scheduler.schedule()
    assert scheduler.roll_back(before)
    after = scheduler.schedule()
    assert sum(chunk.count for chunk in after) == sum(chunk.count for chunk in before) // 2
    assert [chunk.start for chunk in after] == [0] * len(after)
    while scheduler.roll_back(after):
        after = scheduler.schedule()
    assert len(scheduler.running) == 1, "it ends with one sequence in the smallest step"
    assert (scheduler.max_running, scheduler.max_step_tokens) == (1, 5)
    assert scheduler.abort(after) == [sequences[0]]
    scheduler.finish(sequences)
    assert scheduler.pool.used == 0
    for _ in range(4000):
        scheduler._steps_in_flight += 1
        scheduler.commit([], [])
    assert (scheduler.max_running, scheduler.max_step_tokens) == (2, 64), "it grows again when memory is not short"


def test_a_plan_that_failed_ends_its_sequences_and_no_other() -> None:
    scheduler = scheduler_of(100, 4)
    failed, other = Sequence([1] * 4, 8), Sequence([2] * 4, 8)
    scheduler.add(failed)
    plan = scheduler.schedule()
    scheduler.add(other)
    assert scheduler.abort(plan) == [failed]
    assert failed.state == Sequence.FINISHED
    run(Memory(scheduler))
    assert other.tokens == said_alone([2] * 4, 8)
