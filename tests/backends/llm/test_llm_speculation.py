# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: answers are those without it, drafts that fail are stopped, and nothing of them remains."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_instances import AsyncLauncher, Caller, Served, runs, served
from llm_scheduling import UNLIMITED, Guess, Memory, run, scheduler_of

from headrace.backends.llm import backend
from headrace.backends.llm.engine_core import _sampling_states
from headrace.backends.llm.sampling.sampler import Sampler
from headrace.backends.llm.sampling.state import SamplingState
from headrace.backends.llm.scheduler import Sequence
from headrace.backends.llm.speculation import draft_loader
from headrace.backends.llm.speculation.budget import (
    CREDIT_PER_STEP,
    CREDIT_PER_TOKEN,
    START_CREDIT,
    BatchBudget,
    DraftBudget,
)
from headrace.backends.llm.speculation.draft_model import DraftModel
from headrace.backends.llm.speculation.ngram import NgramDrafter, look_up
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.generation import Generation, OutputFormat, Sampling
from support import llm_models

PROMPTS = [("the quick brown fox jumps over Grüße " * 3)[number : 3 + 5 * number] for number in range(20)]
GREEDY = Sampling(temperature=0.0, max_tokens=12)
ROOM = {"speculation": "ngram", "prompt_lookup_min": "60", "prompt_lookup_max": "60"}
"""Captured steps have rows for drafts, and no n-gram is so long that it is found."""
REPEATING = "the quick brown fox jumps over the lazy dog. " * 6


class Oracle:
    """A drafter that knows answers: drafts are right but for some tokens, so that every case happens."""

    batch = UNLIMITED

    def __init__(self, wrong_every: int = 5) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        """By prompt."""
        self.wrong_every = wrong_every
        self.drafted = 0

    def waits(self, sequence: Sequence) -> bool:
        return bool(self._known(sequence))

    def draft(self, wanted: list[tuple[Sequence, int]], room: int) -> list[list[int]]:
        drafts = []
        for sequence, most in wanted:
            known = self._known(sequence)[: min(most, 1 + len(sequence.tokens) % 6)]
            first = len(sequence.tokens)
            drafts.append(
                [token if (first + i) % self.wrong_every else (token + 1) % 500 for i, token in enumerate(known)]
            )
        self.drafted += sum(map(len, drafts))
        return drafts

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        pass

    def release(self, sequence: Sequence) -> None:
        pass

    def _known(self, sequence: Sequence) -> list[int]:
        prompt = tuple(sequence.tokens[: sequence.prompt_length])
        return self.answers.get(prompt, [])[len(sequence.tokens) - sequence.prompt_length :]


class Recorded:
    """Keeps the tokens of all sequences that end."""

    def __init__(self, tiny: Served) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        finish = tiny.engine.scheduler.finish

        def finished(sequences: Any) -> None:
            for sequence in (given := list(sequences)):
                length = sequence.prompt_length
                self.answers[tuple(sequence.tokens[:length])] = sequence.tokens[length:]
            finish(given)

        tiny.engine.scheduler.finish = finished  # type: ignore[method-assign]


def speculate(tiny: Served, drafter: Any, rows: int = 16) -> None:
    tiny.engine.scheduler.drafter, tiny.engine.scheduler.max_draft_rows = drafter, rows


async def all_of(tiny: Served, asked: Several[Generation]) -> list[Caller]:
    callers = [tiny.begin(generation) for generation in asked]
    for caller in callers:
        await asyncio.wait_for(caller.ended.wait(), 60)
    return callers


def answer(caller: Caller) -> Any:
    """All that a client sees, but for where a stream is cut."""
    ends = [told for _, told in caller.answers if "finish_reason" in told]
    told = {(end["index"], end["finish_reason"], end["prompt_tokens"], end["completion_tokens"]) for end in ends}
    logprobs = [entry for _, told in caller.answers for entry in json.loads(str(told.get("logprobs", "[]")))]
    return caller.texts(), told, [(entry["token"], round(entry["logprob"], 3)) for entry in logprobs]


def asked_of(samplings: Several[Sampling], *, stream: bool) -> list[Generation]:
    return [
        Generation(prompt=prompt, sampling=sampling, stream=stream)
        for prompt, sampling in zip(PROMPTS, (list(samplings) * len(PROMPTS))[: len(PROMPTS)], strict=True)
    ]


VARIED = [
    GREEDY,
    Sampling(temperature=1.0, max_tokens=12, seed=1),
    Sampling(temperature=0.7, top_p=0.9, max_tokens=9, seed=2, min_tokens=4),
    Sampling(temperature=1.3, top_k=20, max_tokens=15, seed=3, logit_bias={7: 2.0}),
    Sampling(temperature=1.0, max_tokens=10, seed=4, n=2),
    Sampling(temperature=1.0, min_p=0.05, max_tokens=11, seed=5),
    Sampling(temperature=0.0, max_tokens=14, logprobs=2),
    Sampling(temperature=0.8, max_tokens=14, logprobs=0, seed=8),
    Sampling(temperature=0.0, max_tokens=16, stop=("e",)),
    Sampling(temperature=0.0, max_tokens=9, ignore_eos=True, min_tokens=9),
    Sampling(temperature=0.0, max_tokens=12, repetition_penalty=1.3),
    Sampling(temperature=0.0, max_tokens=12, prompt_logprobs=1),
    Sampling(temperature=0.9, max_tokens=12, seed=3, bad_words=("the fox", "e")),
]


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_without_drafts(runs_ahead: bool, stream: bool) -> None:
    """Greedy or sampled, with stop strings, log-probabilities and all else; steps launched ahead or not."""
    small = {"max_running": "6", "page_size": "4", "kv_cache_bytes": str(512 * 200)}

    async def compare() -> None:
        async with served(**small) as tiny:
            recorded = Recorded(tiny)
            without = await all_of(tiny, asked_of(VARIED, stream=stream))
        async with served(**small, **ROOM) as tiny:
            oracle = Oracle()
            oracle.answers = recorded.answers
            speculate(tiny, oracle)
            if runs_ahead:
                AsyncLauncher(tiny.engine.runner)
            drafted = await all_of(tiny, asked_of(VARIED, stream=stream))
            scheduler = tiny.engine.scheduler
            assert scheduler.pool.used == 0
            assert 40 < sum(scheduler.accepted_tokens) < scheduler.draft_tokens
            assert len(scheduler.accepted_tokens) == 6
            assert tiny.value("headrace_llm_speculation_draft_tokens_total") == scheduler.draft_tokens
            assert tiny.value("headrace_llm_speculation_accepted_tokens_total") == sum(scheduler.accepted_tokens)
            assert tiny.value("headrace_llm_speculation_drafts_total") == scheduler.drafts
            ended = [told for caller in drafted for _, told in caller.answers if "finish_reason" in told]
            wanted = sum(int(told["completion_tokens"]) for told in ended)
            assert tiny.value("headrace_llm_generated_tokens_total") == wanted
        assert [answer(caller) for caller in drafted] == [answer(caller) for caller in without]

    asyncio.run(compare())


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gemma3"])
def test_architectures_verify_drafts(kind: str, tmp_path: Path) -> None:
    """Sliding windows are among them: rejected tokens are not in a window of those that follow."""
    folder = getattr(llm_models, f"tiny_{kind}")(tmp_path / "1")
    long = [Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)]

    async def compare() -> None:
        async with served(folder) as tiny:
            recorded = Recorded(tiny)
            without = await all_of(tiny, asked_of(long, stream=False)[::4])
        async with served(folder, **ROOM) as tiny:
            oracle = Oracle()
            oracle.answers = recorded.answers
            speculate(tiny, oracle)
            drafted = await all_of(tiny, asked_of(long, stream=False)[::4])
            assert 40 < sum(tiny.engine.scheduler.accepted_tokens) < tiny.engine.scheduler.draft_tokens
        assert [answer(caller) for caller in drafted] == [answer(caller) for caller in without]

    asyncio.run(compare())


def test_ngrams_of_a_text_that_repeats_itself_save_steps(tmp_path: Path) -> None:
    """Models with narrow weights repeat themselves."""
    folder = llm_models.tiny_llama(tmp_path / "1", initializer_range=0.05)
    endless = Sampling(temperature=0.0, max_tokens=120, ignore_eos=True)
    texts, steps = [], []

    async def ask(**parameters: str) -> None:
        async with served(folder, **parameters) as tiny:
            texts.append([(await tiny.ask(Generation(prompt=prompt, sampling=endless))).text for prompt in PROMPTS[:2]])
            steps.append(tiny.value("headrace_llm_steps_total"))
            assert tiny.engine.scheduler.pool.used == 0

    asyncio.run(ask())
    asyncio.run(ask(speculation="ngram"))
    assert texts[0] == texts[1]
    assert steps[1] < steps[0] * 0.7


@runs
async def test_few_pages_and_many_requests_with_ngrams() -> None:
    small = {"kv_cache_bytes": str(512 * 80), "page_size": "4", "max_running": "6", "max_step_tokens": "5"}
    async with served() as tiny:
        wanted = [caller.text for caller in await all_of(tiny, asked_of([GREEDY], stream=False))]
    async with served(speculation="ngram", prompt_lookup_min="1", **small) as tiny:
        callers = await all_of(tiny, asked_of([GREEDY], stream=False))
        assert [caller.text for caller in callers] == wanted
        assert tiny.value("headrace_llm_preemptions_total") > 0
        assert tiny.engine.scheduler.draft_tokens > 0
        assert tiny.engine.scheduler.pool.used == 0


@runs
async def test_what_depends_on_each_token_is_not_drafted() -> None:
    """Penalties and structured output: the row is computed token by token."""
    generations = [
        Generation(prompt=REPEATING, sampling=Sampling(temperature=0.0, max_tokens=20, frequency_penalty=0.1)),
        Generation(
            prompt=REPEATING,
            sampling=Sampling(temperature=0.0, max_tokens=20),
            output_format=OutputFormat("regex", regex="(a|b){20}"),
        ),
    ]
    async with served(speculation="ngram", prompt_lookup_min="1") as tiny:
        callers = await all_of(tiny, generations)
        assert [caller.last["completion_tokens"] for caller in callers] == [20, 20]
        assert tiny.engine.scheduler.drafts == 0


@runs
async def test_a_request_that_is_cancelled_while_its_draft_is_verified() -> None:
    async with served(**ROOM) as tiny:
        recorded = Recorded(tiny)
        endless = Generation(prompt=REPEATING, sampling=Sampling(temperature=0.0, max_tokens=100, ignore_eos=True))
        await tiny.ask(endless)
        oracle = Oracle(wrong_every=10**9)
        oracle.answers = recorded.answers
        speculate(tiny, oracle)
        runner = tiny.engine.runner
        launch = runner.launch

        def cancelling(chunks: Any, **named: Any) -> Any:
            if any(chunk.draft is not None for chunk in chunks):
                caller.cancelled = True
            return launch(chunks, **named)

        runner.launch = cancelling  # type: ignore[method-assign]
        caller = tiny.begin(endless)
        await asyncio.wait_for(caller.ended.wait(), 60)
        assert caller.cancelled and "finish_reason" not in caller.last if caller.answers else True
        await tiny.quiet()
        assert tiny.engine.scheduler.pool.used == 0


@runs
async def test_a_step_with_drafts_that_has_too_little_memory_is_made_again() -> None:
    async with served(max_running="4", max_step_tokens="256", **ROOM) as tiny:
        recorded = Recorded(tiny)
        wanted = (await tiny.ask(Generation(prompt=PROMPTS[9], sampling=GREEDY))).text
        oracle = Oracle(wrong_every=7)
        oracle.answers = recorded.answers
        speculate(tiny, oracle)
        runner, fails = tiny.engine.runner, [True, True]
        launch = runner.launch

        def limited(chunks: Any, **named: Any) -> Any:
            if any(chunk.draft is not None for chunk in chunks) and fails:
                fails.pop()
                raise torch.OutOfMemoryError("out of memory")
            return launch(chunks, **named)

        runner.launch = limited  # type: ignore[method-assign]
        generation = Generation(prompt=PROMPTS[9], sampling=GREEDY)
        callers = await all_of(tiny, [generation, generation, generation])
        assert [caller.text for caller in callers] == [wanted] * 3
        assert len(fails) == 1, "the first shortage stops drafts for a while"
        assert tiny.engine.scheduler.max_running == 4
        assert tiny.engine.scheduler.pool.used == 0


def test_pages_of_rejected_tokens_are_used_again_and_never_found() -> None:
    scheduler = scheduler_of(100, 4, max_step_tokens=64)
    memory = Memory(scheduler)

    class Wrong(Guess):
        def draft(self, wanted: list[tuple[Sequence, int]], room: int) -> list[list[int]]:
            return [[7] * min(most, 6) for _, most in wanted]

    scheduler.drafter, scheduler.max_draft_rows = Wrong(), 16
    sequence = Sequence([1, 2, 3], 40, speculates=True)
    scheduler.add(sequence)
    most = 0
    while len(sequence.tokens) < 30:
        plan = scheduler.schedule()
        memory.launch(plan)
        scheduler.commit(plan, [1 + len(sequence.tokens) % 3] * sum(chunk.samples for chunk in plan))
        most = max(most, len(sequence.pages) - (len(sequence.tokens) - 1) // 4)
        assert all(
            not scheduler.pool.is_registered(page) for page in sequence.pages[-(-(len(sequence.tokens) - 1) // 4) :]
        )
        assert sequence.computed == len(sequence.tokens) - 1
    assert most <= 3, "what one draft needs, and no more"
    assert scheduler.accepted_tokens == [0] * 6
    scheduler.finish([sequence])
    assert scheduler.pool.used == 0
    assert not any(7 in memory.slots[page * 4 + 3] for page in scheduler.pool._hashes)


def test_drafts_preempt_no_sequence_and_leave_prompts_their_share() -> None:
    scheduler = scheduler_of(8, 2, prefix_cache=False, max_running=4, max_step_tokens=9)
    memory = Memory(scheduler)
    scheduler.drafter, scheduler.max_draft_rows = Guess(), 100
    sequences = [Sequence([number + 1] * 3, 8, speculates=True) for number in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    run(memory)
    assert scheduler.preemptions == 0 < scheduler.draft_tokens


def test_a_few_sequences_that_speculate_do_not_hold_up_the_others() -> None:
    """Others are launched ahead; where most speculate, steps are read first, so that all are in one step."""

    class Always(Guess):
        def waits(self, sequence: Sequence) -> bool:
            return True

    for speculating, first in ((1, False), (2, True), (4, True)):
        scheduler = scheduler_of(100, 4, max_step_tokens=64)
        memory = Memory(scheduler)
        scheduler.drafter, scheduler.max_draft_rows = Always(), 16
        sequences = [Sequence([number + 1] * 3, 40, speculates=number < speculating) for number in range(4)]
        for sequence in sequences:
            scheduler.add(sequence)
        assert not scheduler.must_read_first()
        memory.launch(scheduler.schedule())
        assert scheduler.must_read_first() is first
        assert [chunk.sequence for chunk in scheduler.schedule()] == sequences[speculating:]


# The distribution of sampled tokens


def transitions(sampling: Sampling, draws: int, drafter: Any) -> Counter[tuple[int, int]]:
    """Sample from a Markov chain over 6 tokens, through the real scheduler and sampler; count pairs of tokens."""
    torch.manual_seed(5)
    table = torch.randn(6, 6) * 1.5
    sampler = Sampler(6, "cpu")
    pages, count = 20_000, 40
    scheduler = scheduler_of(pages, 4, max_running=count, max_step_tokens=400, prefix_cache=False)
    scheduler.drafter, scheduler.max_draft_rows = drafter, 240 if drafter is not None else 0
    sequences = []
    for number in range(count):
        state = SamplingState(sampling, [0], index=number)
        owner = type("Owner", (), {"sampling_state": state})()
        sequences.append(Sequence([number % 6], 1 + draws // count, owner=owner, speculates=state.can_speculate))
        scheduler.add(sequences[-1])
    while not scheduler.idle:
        plan = scheduler.schedule()
        last = [chunk.first_token for chunk in plan]
        drawn = sampler.sample(table[last], _sampling_states(plan)).tokens
        for number, sequence in scheduler.commit(plan, drawn):
            sequence.owner.sampling_state.advance(drawn[number])
            if len(sequence.tokens) >= sequence.limit:
                scheduler.finish([sequence])
    pairs = Counter(pair for sequence in sequences for pair in zip(sequence.tokens, sequence.tokens[1:], strict=False))
    assert pairs.total() == draws
    return pairs


class Likely(Guess):
    """Drafts what often follows, and sometimes what seldom does."""

    def draft(self, wanted: list[tuple[Sequence, int]], room: int) -> list[list[int]]:
        return [[(sequence.tokens[-1] * (i + 2)) % 6 for i in range(min(most, 5))] for sequence, most in wanted]


@pytest.mark.parametrize("draws", [10_000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=11),
        Sampling(temperature=0.7, top_p=0.8, seed=12),
        Sampling(temperature=1.3, top_k=4, min_p=0.05, logit_bias={2: 1.0}, seed=13),
    ],
)
def test_sampled_tokens_have_the_distribution_of_the_model(sampling: Sampling, draws: int) -> None:
    """Most draws are of steps with drafts; compared with the exact probabilities by a chi-squared test."""
    drafter = Likely()
    drawn = transitions(sampling, draws, drafter)
    assert drafter.accepted > draws // 10 < drafter.rejected
    torch.manual_seed(5)
    logits = torch.randn(6, 6) * 1.5
    chi_squared, freedom = 0.0, 0
    for before in range(6):
        probabilities = exact_probabilities(logits[before], sampling)
        total = sum(drawn[before, after] for after in range(6))
        for after, probability in enumerate(probabilities):
            if probability == 0.0:
                assert drawn[before, after] == 0
            else:
                chi_squared += (drawn[before, after] - total * probability) ** 2 / (total * probability)
        freedom += int((probabilities > 0).sum()) - 1
    # Mean `freedom`, variance twice that: five standard deviations are never reached by chance.
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5
    if sampling.temperature == 1.0:
        assert drawn == transitions(sampling, draws, None), "with a seed, the very same tokens as without drafts"


def exact_probabilities(logits: torch.Tensor, sampling: Sampling) -> np.ndarray[Any, np.dtype[np.float64]]:
    scores = logits.double().numpy().copy()
    for token, bias in (sampling.logit_bias or {}).items():
        scores[int(token)] += bias
    scores /= sampling.temperature
    order = np.argsort(-scores)
    if sampling.top_k > 0:
        scores[order[sampling.top_k :]] = -np.inf
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= sampling.top_p]] = 0.0
    probabilities[probabilities < sampling.min_p * probabilities.max()] = 0.0
    return np.asarray(probabilities / probabilities.sum(), np.float64)


# N-grams


def found(text: str, count: int = 3, shortest: int = 2, longest: int = 4) -> str:
    return "".join(map(chr, look_up(np.asarray([ord(c) for c in text], np.int32), count, shortest, longest)))


def test_what_followed_the_longest_ngram_is_drafted() -> None:
    assert found("abcdef xbc") == "def"
    assert found("abcX ybcY abc") == "X y", "three tokens in common, not the later two"
    assert found("ab1 ab2 ab") == "2 a", "of equal ones the latest"
    assert found("xyzab") == ""
    assert found("xaya") == "" and found("xaya", shortest=1) == "yay"
    assert found("0123456789 3456789", 2, 2, 4) == " 3", "n-grams of more than `longest` tokens are not compared"
    assert found("", shortest=1) == found("a", shortest=1) == ""


def test_a_text_that_repeats_goes_on_repeating() -> None:
    assert found("ababab", 7) == "abababa"
    assert found("xaaa", 5) == "aaaaa"


def test_long_texts_are_searched_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.backends.llm.speculation import ngram

    monkeypatch.setattr(ngram, "_LOOKED_TOKENS", 8)
    drafter = NgramDrafter(3, shortest=2, longest=4, token_cost=0.02)
    near, far = Sequence([1, 2, 3, 4, 1, 2], 100), Sequence([1, 2, 3, *range(10, 20), 1, 2], 100)
    assert drafter.draft([(near, 9), (far, 9)], 99) == [[3, 4, 1], []]


def test_a_history_grows_with_its_sequence() -> None:
    drafter = NgramDrafter(7, shortest=2, longest=4, token_cost=0.02)
    drafter.batch = UNLIMITED
    random.seed(3)
    sequence = Sequence([1, 2, 3], 10_000)
    for _ in range(2000):
        sequence.tokens.append(random.randrange(40))
        if sequence.drafting is not None:
            sequence.drafting.budget = DraftBudget(7, **COSTS)
        assert drafter.draft([(sequence, 3)], 99)[0] == look_up(np.asarray(sequence.tokens, np.int32), 3, 2, 4)
    drafter.release(sequence)
    assert sequence.drafting is None


# The budget


COSTS = {"step_cost": 0.2, "token_cost": 0.02}


def lost(tokens: int, accepted: Any) -> float:
    """Return how many steps drafting costs a sequence of so many tokens."""
    budget = DraftBudget(7, **COSTS)
    generated, steps = 0, 0.0
    while generated < tokens:
        count = budget.tokens(generated)
        steps += 1.0
        generated += 1
        if count:
            taken = min(count, accepted(generated))
            budget.record(count, taken)
            generated += taken
            steps += 0.2 + 0.02 * count
    return steps - generated


def test_drafts_that_fail_cost_a_few_percent_and_those_that_succeed_pay() -> None:
    for tokens in (20, 200, 2000):
        assert lost(tokens, lambda at: 0) <= START_CREDIT + CREDIT_PER_TOKEN * tokens
    assert lost(2000, lambda at: 7) < -1600
    assert lost(2000, lambda at: 7 if at > 1000 else 0) < -700, "it begins again where the text changes"
    assert lost(2000, lambda at: 7 if at < 1000 else 0) < -700


def test_drafts_are_as_long_as_what_is_accepted_is_worth() -> None:
    budget = DraftBudget(7, **COSTS)
    counts = []
    for accepted in (7, 1, *[0] * 12, 1, 2, 4, 4):
        counts.append(budget.tokens(1000))
        budget.record(counts[-1], min(accepted, counts[-1]))
    assert counts[0] == counts[1] == 7 and counts[-4] == 1 < counts[-1]
    assert DraftBudget(2, **COSTS).tokens(0) == 2


def test_a_costly_draft_model_drafts_what_it_can_afford() -> None:
    assert DraftBudget(7, step_cost=0.2, token_cost=0.1).tokens(0) == 5
    assert DraftBudget(7, step_cost=0.2, token_cost=0.5).tokens(0) == 1
    assert DraftBudget(7, step_cost=0.2, token_cost=1.0).tokens(0) == 0


def batch_loss(steps: int, rows: int, accepted: int) -> tuple[float, int]:
    """Return how many steps drafts cost a batch, and how many steps had some. Of each draft so many tokens are accepted."""
    budget = BatchBudget(step_cost=0.2, unit_cost=0.02)
    loss, drafts = 0.0, 0
    for _ in range(steps):
        budget.earn(CREDIT_PER_STEP)
        if not budget.is_paused and budget.units:
            units = min(budget.units, 7 * rows)
            budget.spend(units)
            budget.earn(accepted)
            drafts += 1
            loss += 0.2 + 0.02 * units - accepted
    return loss, drafts


def test_drafts_that_fail_cost_a_batch_of_any_size_a_few_percent() -> None:
    for rows in (1, 4, 16):
        loss, drafts = batch_loss(1000, rows, 0)
        assert 0 < loss <= START_CREDIT + CREDIT_PER_STEP * 1000
        assert 10 < drafts < 100
        assert batch_loss(1000, rows, 3)[1] == 1000, "drafts that pay are never stopped"


def test_sequences_that_are_held_up_use_up_the_credit_of_a_batch() -> None:
    budget = BatchBudget(step_cost=0.2, unit_cost=0.02)
    budget.earn(CREDIT_PER_STEP - 15 / 16)
    assert budget.is_paused and not budget.units
    while budget.is_paused:
        budget.earn(CREDIT_PER_STEP)
    assert budget.units >= 10, "it begins again with a draft that can tell something"


class NeverRight(Guess):
    """Drafts what never comes, for sequences that always wait for it."""

    def __init__(self, batch: BatchBudget) -> None:
        super().__init__()
        self.batch = batch
        self.waited = 0

    def waits(self, sequence: Sequence) -> bool:
        self.waited += 1
        return True

    def draft(self, wanted: list[tuple[Sequence, int]], room: int) -> list[list[int]]:
        most = min(room, self.batch.units) // len(wanted)
        self.batch.spend(most * len(wanted))
        return [[77] * most for _ in wanted]


def test_a_batch_whose_drafts_fail_is_launched_ahead_again() -> None:
    """Sixteen sequences that nothing can be guessed of: nearly all steps are those of a scheduler without drafts."""
    steps = {}
    for drafter in (None, NeverRight(UNLIMITED), NeverRight(BatchBudget(step_cost=0.2, unit_cost=0.02))):
        scheduler = scheduler_of(400, 4, max_running=16, max_step_tokens=200, prefix_cache=False)
        memory = Memory(scheduler)
        scheduler.drafter, scheduler.max_draft_rows = drafter, 160 if drafter is not None else 0
        sequences = [Sequence([number + 1] * 3, 83, speculates=True) for number in range(16)]
        for sequence in sequences:
            scheduler.add(sequence)
        rows = 0
        while not scheduler.idle:
            plan = scheduler.schedule()
            rows += len(plan)
            memory.launch(plan)
            scheduler.commit(plan, [1] * sum(chunk.samples for chunk in plan))
            scheduler.finish([sequence for sequence in sequences if len(sequence.tokens) >= sequence.limit])
        steps[drafter] = rows
    plain, unlimited, limited = steps.values()
    assert unlimited > 1.9 * plain
    assert limited < 1.1 * plain


# The draft model


def perturbed(folder: Path, noise: float) -> Path:
    """Add noise to the weights of a folder."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(2)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: tensor + noise * torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


FEW_PAGES = {"kv_cache_bytes": str(512 * 160), "page_size": "4", "max_running": "6", "max_step_tokens": "9"}
"""Sequences are preempted."""


@pytest.fixture(scope="module")
def answers_without(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a model with few pages says without drafts."""
    folder = llm_models.tiny_llama(tmp_path_factory.mktemp("without") / "tiny" / "1")

    async def ask() -> list[Any]:
        async with served(folder, **FEW_PAGES) as tiny:
            return [answer(caller) for caller in await all_of(tiny, asked_of(VARIED, stream=False))]

    return asyncio.run(ask())


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.5])
def test_answers_are_those_without_a_draft_model(
    noise: float, answers_without: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is always right, often right, and never right."""
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")
    draft = perturbed(llm_models.tiny_llama(tmp_path / "draft"), noise)

    monkeypatch.setattr(draft_loader, "weight_bytes", _shrunk())

    async def compare() -> None:
        async with served(folder, **FEW_PAGES, speculation="draft", draft_model=str(draft)) as tiny:
            tiny.engine.scheduler.drafter.batch = UNLIMITED  # type: ignore[union-attr]  # it is as large as the model
            drafted = await all_of(tiny, asked_of(VARIED, stream=False))
            scheduler = tiny.engine.scheduler
            drafter = scheduler.drafter
            assert isinstance(drafter, DraftModel)
            assert scheduler.pool.used == drafter._pool.used == 0 and not drafter._drafted
            assert sorted(drafter._free_indices) == list(range(16))
            accepted, tokens = sum(scheduler.accepted_tokens), scheduler.draft_tokens
            if noise == 0.0:
                assert accepted > 30 and accepted > 0.3 * tokens  # sampled tokens are not the likeliest ones
            elif noise < 0.1:
                assert 0 < accepted < tokens
            else:
                assert accepted < 0.1 * tokens
                assert tokens < 60 * 4, "it is switched off where it does not pay"
        assert [answer(caller) for caller in drafted] == answers_without

    asyncio.run(compare())


def _shrunk() -> Callable[[Any], int]:
    """In place of `weight_bytes`: the draft model, which is asked for first, is as large as the other one."""
    sizes = iter([1, 100])
    return lambda model: next(sizes)


def draft_of(folder: Path, **changes: Any) -> DraftModel:
    """A draft model with a runner, without a server."""
    from transformers import AutoModelForCausalLM

    from headrace.backends.llm.model_runner.attention import PagedAttention
    from headrace.backends.llm.model_runner.kv_cache import KVCache
    from headrace.backends.llm.model_runner.runner import ModelRunner

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    attention = PagedAttention(model)
    with torch.inference_mode():
        shapes = attention.probe(model)
    cache = KVCache(shapes, changes.pop("pages", 64), 4, torch.float32, torch.device("cpu"))
    attention.attach(cache)
    settings: dict[str, Any] = {
        "tokens": 4, "token_cost": 0.05, "max_running": 2, "max_step_tokens": 16, "max_length": 64,
        "vocabulary": 512, "prefix_cache": True,
    }  # fmt: skip
    drafter = DraftModel(ModelRunner(model, attention, cache, page_size=4), **{**settings, **changes})
    drafter.batch = UNLIMITED
    return drafter


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return list(out[0, len(prompt) :].tolist())


def running(prompt: list[int]) -> Sequence:
    sequence = Sequence(list(prompt), 1000)
    sequence.state = Sequence.RUNNING
    return sequence


def test_a_draft_follows_what_was_accepted(tmp_path: Path) -> None:
    """The draft model forgets what was rejected, computes what it has not seen, and nothing twice."""
    folder = llm_models.tiny_llama(tmp_path / "draft")
    drafter = draft_of(folder)
    sequence, prompt = running(list(range(20, 59))), list(range(20, 59))
    computed = 0
    launch = drafter._runner.launch

    def counted(chunks: Any, **named: Any) -> Any:
        nonlocal computed
        assert sum(chunk.count for chunk in chunks) <= 16
        computed += sum(chunk.count for chunk in chunks)
        return launch(chunks, **named)

    drafter._runner.launch = counted  # type: ignore[method-assign]
    (first,) = drafter.draft([(sequence, 3)], 9)
    assert first == greedy(folder, prompt, 3) and computed == 39 + 2
    sequence.tokens += [*first, 77]  # all accepted, and the next token
    computed = 0
    (second,) = drafter.draft([(sequence, 3)], 9)
    assert second == greedy(folder, [*prompt, *first, 77], 3) and computed == 2 + 2
    sequence.tokens += [second[0], 99]  # one accepted
    computed = 0
    (third,) = drafter.draft([(sequence, 2)], 9)
    assert third == greedy(folder, sequence.tokens, 2) and computed == 1 + 1
    again, computed = running(prompt), 0
    assert drafter.draft([(again, 3)], 9) == [first] and computed == 3 + 2, "nine pages are in the prefix cache"
    drafter.release(sequence)
    drafter.release(again)
    assert drafter._pool.used == 0 and drafter._pool.evictable > 9
    drafter.close()


def test_where_a_draft_model_has_no_room_it_drafts_nothing(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "draft")
    drafter = draft_of(folder, pages=12)
    first, second, third = (running([number + 9] * 20) for number in range(3))
    assert [len(draft) for draft in drafter.draft([(first, 3), (second, 3), (third, 3)], 9)] == [3, 3, 0]
    first.state = Sequence.WAITING  # preempted
    assert len(drafter.draft([(third, 3)], 9)[0]) == 3, "it takes the place of one that does not run"
    assert len(drafter.draft([(third, 3)], 2)[0]) == 2
    images, long = running([9] * 20), running([9] * 62)
    images.prompt_inputs = object()
    assert drafter.draft([(images, 3), (long, 3)], 9) == [[], []], "it sees no images, and its context ends"
    assert not drafter.waits(images)
    drafter.close()


def test_tokens_that_the_other_model_does_not_have_are_cut(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "draft")
    told = greedy(folder, [9] * 8, 3)
    drafter = draft_of(folder, vocabulary=max(told))
    (draft,) = drafter.draft([(running([9] * 8), 3)], 9)
    assert draft == told[: told.index(max(told))]
    drafter.close()


def test_a_draft_model_that_fails_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_loader, "weight_bytes", _shrunk())
    draft = llm_models.tiny_llama(tmp_path / "draft")

    async def compare() -> None:
        async with served(speculation="draft", draft_model=str(draft)) as tiny:
            drafter = tiny.engine.scheduler.drafter
            assert isinstance(drafter, DraftModel)

            def fails(chunks: Any, **named: Any) -> Any:
                raise RuntimeError("out of order")

            drafter._runner.launch = fails  # type: ignore[method-assign]
            assert (await tiny.ask(Generation(prompt=PROMPTS[3], sampling=GREEDY))).last["completion_tokens"] == 12
            assert tiny.engine.scheduler.drafts == 0
            assert drafter._pool.used == 0

    asyncio.run(compare())
    assert caplog.text.count("The draft model failed") == 1


@pytest.mark.parametrize("what", ["vocabulary", "nothing", "architecture", "context"])
def test_a_draft_model_that_cannot_draft_is_refused_before_weights_are_read(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = llm_models.tiny_llama(tmp_path / "small-llama")
    named = {
        "vocabulary": "draft model 'small-llama' has another vocabulary than '1': 2 tokens differ, such as",
        "nothing": "draft_model names 'small-llama', which is not a folder",
        "architecture": "draft model: 'small-llama/config.json' names no architectures",
        "context": "draft model: folder 'small-llama' has no config.json",
    }[what]
    if what == "vocabulary":
        path = draft / "tokenizer.json"
        document = json.loads(path.read_text())
        vocabulary = document["model"]["vocab"]
        one, other = sorted(vocabulary)[-2:]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
        path.write_text(json.dumps(document))
    elif what == "nothing":
        draft.rename(tmp_path / "elsewhere")
    elif what == "architecture":
        config = json.loads((draft / "config.json").read_text())
        del config["architectures"]
        (draft / "config.json").write_text(json.dumps(config))
    else:
        (draft / "config.json").unlink()
    monkeypatch.setattr(backend, "load_model", lambda *arguments: pytest.fail("weights were read"))

    async def load() -> None:
        async with served(speculation="draft", draft_model=str(draft)):
            pass

    with pytest.raises(FailedPrecondition, match=re.escape(named)):
        asyncio.run(load())


# Settings


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"speculation": "magic"}, "use one of ngram, draft"),
        ({"speculation_tokens": "3"}, "speculation_tokens needs parameter speculation"),
        ({"speculation": "ngram", "speculation_tokens": "0"}, "speculation_tokens"),
        ({"speculation": "ngram", "speculation_tokens": "64"}, "speculation_tokens"),
        (
            {"speculation": "ngram", "draft_model": "../small"},
            "draft_model needs parameter speculation: set it to draft",
        ),
        ({"speculation": "draft", "draft_model": "x", "prompt_lookup_max": "3"}, "prompt_lookup_max"),
        ({"speculation": "draft"}, "name the folder of the draft model in draft_model"),
        ({"speculation": "ngram", "tensor_parallel": "2"}, "speculation does not work with tensor_parallel yet"),
        (
            {"speculation": "ngram", "prompt_lookup_min": "5"},
            "prompt_lookup_min is '5': use a whole number from 1 to 4",
        ),
    ],
)
def test_a_bad_parameter_is_named(parameters: dict[str, str], named: str) -> None:
    async def load() -> None:
        async with served(**parameters):
            pass

    with pytest.raises(InvalidArgument, match=named):
        asyncio.run(load())


def test_a_sequence_that_ends_within_its_draft_has_nothing_behind_the_end() -> None:
    async def tried() -> None:
        async with served(**ROOM) as tiny:
            recorded = Recorded(tiny)
            sampling = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
            await tiny.ask(Generation(prompt=REPEATING, sampling=sampling))
            (told,) = recorded.answers.values()
            for ends in (1, 4, 9):
                stop = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=(told[ends],))
                await tiny.ask(Generation(prompt=REPEATING, sampling=stop))
            without = [caller.last["completion_tokens"] for caller in tiny.callers]
            oracle = Oracle(wrong_every=10**9)
            oracle.answers = dict.fromkeys(recorded.answers, told)
            speculate(tiny, oracle)
            for ends in (1, 4, 9):
                stop = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=(told[ends],))
                await tiny.ask(Generation(prompt=REPEATING, sampling=stop))
            counts = [caller.last["completion_tokens"] for caller in tiny.callers]
            assert counts[4:] == without[1:] and oracle.drafted
            assert [caller.text for caller in tiny.callers[4:]] == [caller.text for caller in tiny.callers[1:4]]

    asyncio.run(tried())
