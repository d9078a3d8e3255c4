# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of a model runner, step by step, without an engine.

answers = greedy_answers(runner, [[5, 9, 100], [7]], 12)        # 12 tokens each, computed together
check_company(runner)                                           # logits do not depend on other requests
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from headrace.backends.llm.engine_core import make_scheduler
from headrace.backends.llm.page_pool import PagePool
from headrace.backends.llm.scheduler import Scheduler, Sequence

Request = tuple[list[int], int]
"""A prompt, and how many tokens its answer has."""

_FIRST_ARRIVALS = itertools.count(0, 10_000)
"""Graphs know the sequence of a batch index by its arrival, so no two schedulers of a runner may number them alike."""


def greedy_answers(
    runner: Any,
    prompts: SequenceOf[list[int]],
    count: int,
    *,
    max_running: int = 4,
    step_tokens: int = 64,
    adapter: str = "",
) -> list[list[int]]:
    """Return the answers to all prompts: prompts in chunks, beside the tokens of other sequences."""
    scheduler = make_scheduler(runner, max_running=max_running, max_step_tokens=step_tokens, prefix_cache=True)
    sequences = [Sequence(list(prompt), len(prompt) + count, adapter=adapter) for prompt in prompts]
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.idle:
        plan = scheduler.schedule()
        scheduler.commit(plan, runner.launch(plan, greedy=True).tokens())
        scheduler.finish([sequence for sequence in sequences if len(sequence.tokens) == sequence.limit])
    return [sequence.tokens[-count:] for sequence in sequences]


def answer_logits(
    runner: Any,
    requests: SequenceOf[Request],
    *,
    max_running: int = 8,
    step_tokens: int = 64,
    prefix_cache: bool = True,
    pages: int = 0,
) -> tuple[list[torch.Tensor], Scheduler]:
    """Return the logits before each token of the greedy answers, `[tokens, vocabulary]` for each request."""
    pool = PagePool(pages or runner.cache.pages, runner.page_size, prefix_cache=prefix_cache)
    scheduler = Scheduler(pool, max_running=max_running, max_step_tokens=step_tokens)
    scheduler._arrivals = next(_FIRST_ARRIVALS)
    sequences = [Sequence(list(prompt), len(prompt) + count) for prompt, count in requests]
    rows: dict[Sequence, list[torch.Tensor]] = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.idle:
        plan = scheduler.schedule()
        step = runner.launch(plan, greedy=False)
        sampling = [chunk.sequence for chunk in plan if chunk.samples]
        logits = step.logits.cpu() if sampling else torch.empty(0, 1)
        for sequence, row in zip(sampling, logits, strict=True):
            rows[sequence].append(row.clone())
        scheduler.commit(plan, logits.argmax(-1).tolist())
        scheduler.finish([sequence for sequence in sequences if len(sequence.tokens) == sequence.limit])
    return [torch.stack(rows[sequence]) for sequence in sequences], scheduler


def check_company(
    runner: Any, *, vocabulary: int = 500, lengths: SequenceOf[int] = (1, 17, 70), count: int = 9, others: int = 9
) -> None:
    """Check that logits are bit-equal alone, in company, in chunks, behind cached prefixes and after preemptions."""
    random.seed(5)

    def request(length: int) -> Request:
        return [random.randrange(8, vocabulary) for _ in range(length)], count

    watched = [request(length) for length in lengths]
    company = [request(random.choice(lengths) + random.randrange(9)) for _ in range(others)]
    alone = [answer_logits(runner, [each], prefix_cache=False, step_tokens=512)[0][0] for each in watched]
    most = len(watched) + others

    def check(what: str, found: SequenceOf[torch.Tensor]) -> None:
        for number, (one, other) in enumerate(zip(alone, found, strict=True)):
            assert torch.equal(one, other), f"{what}: prompt of {lengths[number]} tokens"

    for step_tokens in (1, 24, 512):
        mixed = [*company[: others // 2], *watched, *company[others // 2 :]]
        together, _ = answer_logits(runner, mixed, max_running=most, step_tokens=step_tokens)
        check(f"in company, {step_tokens} tokens a step", together[others // 2 :][: len(watched)])
    again, scheduler = answer_logits(runner, [*watched, *watched], max_running=1, step_tokens=512)
    assert scheduler.prefix_hits >= max(lengths) // 2
    check("from the prefix cache", again[len(watched) :])
    needed = sum(-(-(len(prompt) + count) // runner.page_size) for prompt, _ in watched)
    crowded, scheduler = answer_logits(runner, watched, pages=needed - 1, prefix_cache=False)
    assert scheduler.preemptions, "all fit: choose other lengths, or pages of 8 tokens"
    check("after preemptions", crowded)
