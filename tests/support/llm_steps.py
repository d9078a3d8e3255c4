# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of a model runner, step by step, without an engine.

answers = greedy_answers(runner, [[5, 9, 100], [7]], 12)        # 12 tokens each, computed together
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from headrace.backends.llm.engine_core import make_scheduler
from headrace.backends.llm.scheduler import Sequence


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
