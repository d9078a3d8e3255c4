# SPDX-License-Identifier: Apache-2.0
"""The numbers of one run of a scenario. Made by `running`, shown by the verb and by `report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.programs.loadtest.chat.streams import Answer
from headrace.programs.loadtest.measured import percentile

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True)
class ChatRun:
    """One scenario at one number of requests at a time."""

    scenario: str
    concurrency: int
    seconds: float
    """From the first request to the end of the last."""
    answers: tuple[Answer, ...]
    """Those that were answered well."""
    errors: Mapping[str, int]
    examples: Mapping[str, str]

    @property
    def requests_per_second(self) -> float:
        """Answered well."""
        return len(self.answers) / self.seconds if self.seconds else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """As the server counts them."""
        return sum(each.prompt_tokens for each in self.answers) / self.seconds if self.seconds else 0.0

    @property
    def answer_tokens_per_second(self) -> float:
        """Of all answers together."""
        return sum(each.answer_tokens for each in self.answers) / self.seconds if self.seconds else 0.0

    def first_token_ms(self) -> list[float]:
        """Of each answer: from the request to the first token."""
        return [(each.times[0] - each.began) * 1000 for each in self.answers if each.times]

    def token_ms(self) -> list[float]:
        """Of each answer: the mean time of a token after the first."""
        told = [each for each in self.answers if len(each.times) > 1 and each.answer_tokens > 1]
        return [(each.times[-1] - each.times[0]) / (each.answer_tokens - 1) * 1000 for each in told]

    def gap_ms(self) -> list[float]:
        """Between one piece of an answer and the next: what a reader sees stall."""
        pairs = ((one, other) for each in self.answers for one, other in zip(each.times, each.times[1:], strict=False))
        return [(other - one) * 1000 for one, other in pairs]

    def whole_ms(self) -> list[float]:
        """Of each answer: from the request to its end."""
        return [(each.ended - each.began) * 1000 for each in self.answers]

    def warnings(self) -> list[str]:
        """What a reader should know before believing the numbers."""
        found = []
        if self.answers and not any(each.prompt_tokens for each in self.answers):
            found.append("the server does not tell how many tokens a prompt has, so sizes are guesses")
        if 0 < len(self.answers) < 100:
            found.append(f"{len(self.answers)} answers are few for the highest percentiles: p99 is their maximum")
        return found

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "scenario": self.scenario,
            "concurrency": self.concurrency,
            "seconds": round(self.seconds, 3),
            "requests": len(self.answers) + sum(self.errors.values()),
            "answered": len(self.answers),
            "errors": dict(self.errors),
            "error_texts": dict(self.examples),
            "requests_per_second": round(self.requests_per_second, 3),
            "prompt_tokens_per_second": round(self.prompt_tokens_per_second, 3),
            "answer_tokens_per_second": round(self.answer_tokens_per_second, 3),
            "prompt_tokens": _mean([each.prompt_tokens for each in self.answers]),
            "answer_tokens": _mean([each.answer_tokens for each in self.answers]),
            "first_token_ms": summed(self.first_token_ms()),
            "token_ms": summed(self.token_ms()),
            "gap_ms": summed(self.gap_ms()),
            "latency_ms": summed(self.whole_ms()),
            "warnings": self.warnings(),
        }


def chat_run(scenario: str, concurrency: int, seconds: float, answers: Sequence[Answer]) -> ChatRun:
    """Sum answers up."""
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for each in answers:
        if each.error:
            errors[each.error] += 1
            examples.setdefault(each.error, each.told)
    good = tuple(each for each in answers if not each.error)
    return ChatRun(scenario, concurrency, seconds, good, dict(errors.most_common()), examples)


def at(values: Callable[[], list[float]], share: float) -> float:
    """A percentile; NaN for none."""
    return percentile(np.array(values(), np.float64), share)


def summed(values: list[float]) -> dict[str, float | None]:
    """Percentiles, mean and the extremes of what was measured."""
    ordered = np.array(values, np.float64)
    told = {f"p{share:g}": percentile(ordered, share) for share in PERCENTILES}
    if len(ordered):
        told |= {"mean": float(ordered.mean()), "min": float(ordered.min()), "max": float(ordered.max())}
    return {name: None if value != value else round(value, 4) for name, value in told.items()}  # noqa: PLR0124 - NaN


def _mean(values: list[int]) -> float | None:
    return round(float(np.mean(values)), 2) if values else None
