# SPDX-License-Identifier: Apache-2.0
"""The draft budget of one sequence: how many tokens to draft next; none where drafts have cost more than they gained.

Costs and gains are in steps of one token: an accepted token saves a step. A sequence may spend a small share of its steps on
drafts that fail; accepted tokens earn more. So drafting stops by itself on text that cannot be guessed, costs a few percent
there at most, and begins again where the text changes. The length of a draft is the one that promises the most tokens for
its cost, as often as tokens were accepted lately.
"""

from __future__ import annotations

START_CREDIT = 1.0
"""Steps that a new sequence may lose."""
CREDIT_PER_TOKEN = 0.02
"""Steps that it may lose for each of its tokens."""
_MOST_CREDIT = 4.0
"""What a sequence can save up: it was guessed well for long, and its text changes."""
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
