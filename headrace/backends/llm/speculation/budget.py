# SPDX-License-Identifier: Apache-2.0
"""Draft budgets: how many tokens to draft next; none where drafts have cost more than they gained.

Costs and gains are in steps: an accepted token saves a step. A small share of the steps may be spent on drafts that fail;
accepted tokens earn more. So drafting stops by itself on text that cannot be guessed, costs a few percent there at most, and
begins again where the text changes.

`DraftBudget` is the budget of one sequence: the length of a draft is the one that promises the most tokens for its cost, as
often as tokens were accepted lately. `BatchBudget` is that of all sequences together: a step with drafts takes longer for
every sequence in it, also for those without one.
"""

from __future__ import annotations

START_CREDIT = 1.0
"""Steps that a new sequence may lose; and a batch, once."""
CREDIT_PER_TOKEN = 0.02
"""Steps that a sequence may lose for each of its tokens."""
CREDIT_PER_STEP = 0.015
"""Steps that a batch may lose for each of its steps."""
_MOST_CREDIT = 4.0
"""What a sequence can save up: it was guessed well for long, and its text changes."""
_RESUME_CREDIT = 0.5
"""A batch that has used up its credit drafts again from here on: a single cheap try tells little."""
_MEMORY = 0.8
"""The weight of the last draft's acceptance when the next one comes."""


class DraftBudget:
    """The budget of one sequence."""

    __slots__ = ("_count", "_credit", "_most", "_rewarded", "_right", "_step_cost", "_token_cost", "_tried")

    def __init__(self, most: int, *, step_cost: float, token_cost: float) -> None:
        """`most`: tokens of a draft. The costs are those of verifying a draft, and of each of its tokens."""
        self._most = most
        self._step_cost = step_cost
        self._token_cost = token_cost
        self._credit = START_CREDIT
        self._right, self._tried = 1.5, 2.0
        """Tokens that were accepted, and those that could have been: the first rejected one ends a draft."""
        self._rewarded = 0
        """Tokens of the sequence that have earned their credit."""
        self._count = self._best_count()

    def tokens(self, generated: int) -> int:
        """Return how many tokens to draft for a sequence that has generated this many."""
        if generated > self._rewarded:
            self._earn((generated - self._rewarded) * CREDIT_PER_TOKEN)
            self._rewarded = generated
        return max(0, min(self._count, int((self._credit - self._step_cost) / self._token_cost)))

    def spend(self, steps: float) -> None:
        """Pay for something that gained nothing."""
        self._credit -= steps

    def record(self, drafted: int, accepted: int) -> None:
        """Record a verified draft."""
        self._earn(accepted - self._step_cost - self._token_cost * drafted)
        self._right = _MEMORY * self._right + accepted
        self._tried = _MEMORY * self._tried + accepted + (accepted < drafted)
        self._count = self._best_count()

    def _earn(self, steps: float) -> None:
        self._credit = min(_MOST_CREDIT, self._credit + steps)

    def _best_count(self) -> int:
        """Return the length of a draft that gives the most tokens for its cost."""
        acceptance = self._right / self._tried
        best, best_rate = 1, 0.0
        tokens, next_token = 1.0, acceptance
        for count in range(1, self._most + 1):
            tokens += next_token
            next_token *= acceptance
            rate = tokens / (1.0 + self._step_cost + count * self._token_cost)
            if rate > best_rate:
                best, best_rate = count, rate
        return best


class BatchBudget:
    """The budget of the sequences that run together. For the thread of the engine."""

    __slots__ = ("_credit", "_paused", "_step_cost", "_unit_cost")

    def __init__(self, *, step_cost: float, unit_cost: float) -> None:
        """`step_cost`: of verifying drafts. `unit_cost`: of what makes them longer, a row or a step of the draft model."""
        self._step_cost = step_cost
        self._unit_cost = unit_cost
        self._credit = START_CREDIT
        self._paused = False

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be drafted for the moment."""
        return self._paused

    @property
    def units(self) -> int:
        """How many rows, or steps of the draft model, the next drafts may take."""
        return 0 if self._paused else max(0, int((self._credit - self._step_cost) / self._unit_cost))

    def spend(self, units: int) -> None:
        """Pay for a step with drafts."""
        self.earn(-self._step_cost - self._unit_cost * units)

    def earn(self, steps: float) -> None:
        """Add the steps that accepted tokens saved or that went by; a negative number where sequences were held up."""
        self._credit = min(_MOST_CREDIT, self._credit + steps)
        if self._credit < self._step_cost + self._unit_cost:
            self._paused = True
        elif self._credit >= _RESUME_CREDIT:
            self._paused = False
