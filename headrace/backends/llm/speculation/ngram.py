# SPDX-License-Identifier: Apache-2.0
"""N-gram drafts (prompt look-up): what followed the last tokens of a sequence when they occurred before.

Needs no second model. It pays where an answer repeats its prompt or itself: code edits, extraction, summaries, JSON.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np
import numpy.typing as npt

from headrace.backends.llm.scheduler import Sequence
from headrace.backends.llm.speculation.budget import BatchBudget, DraftBudget

_STEP_COST = 0.2
"""Steps that verifying a rejected draft costs, compared with a step launched ahead. On the high side."""
_WAIT_COST = 0.1
"""Steps that waiting for a token costs that then gives no draft."""
_LOOKED_TOKENS = 1 << 16
"""Only the last tokens of a longer sequence are searched: a search takes about 1 ns for each."""

TokenArray = npt.NDArray[np.int32]


class NgramDrafter:
    """Implements `scheduler.Drafter`."""

    def __init__(self, tokens: int, *, shortest: int, longest: int, token_cost: float) -> None:
        """`tokens`: of a draft, at most. An n-gram has `shortest` to `longest` tokens. `token_cost`: see `DraftBudget`."""
        self._tokens = tokens
        self._token_cost = token_cost
        self._shortest = shortest
        self._longest = longest
        self.batch = BatchBudget(step_cost=_STEP_COST, unit_cost=token_cost)

    def waits(self, sequence: Sequence) -> bool:
        """Return whether the tokens behind the one in flight can be drafted, as far as is known."""
        history = self._history(sequence)
        history.waited = bool(history.draft(sequence, self._shortest, self._longest))
        return history.waited

    def draft(self, wanted: list[tuple[Sequence, int]], room: int) -> list[list[int]]:
        """Return a draft for each sequence; [] where its last tokens are new."""
        share = max(1, min(room, self.batch.units) // len(wanted))
        waited = any(self._history(sequence).waited for sequence, _ in wanted)
        drafts = [self._draft(sequence, min(most, share)) for sequence, most in wanted]
        rows = sum(map(len, drafts))
        if rows:
            self.batch.spend(rows)
        elif waited:
            self.batch.earn(-_WAIT_COST)
        return drafts

    def _draft(self, sequence: Sequence, most: int) -> list[int]:
        history = self._history(sequence)
        draft = history.draft(sequence, self._shortest, self._longest)[:most]
        if history.waited and not draft:
            history.budget.spend(_WAIT_COST)
        history.waited = False
        return draft

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn how many tokens of a draft were accepted."""
        self._history(sequence).budget.record(drafted, accepted)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        sequence.drafting = None

    def _history(self, sequence: Sequence) -> _History:
        history = sequence.drafting
        if not isinstance(history, _History):
            budget = DraftBudget(self._tokens, step_cost=_STEP_COST, token_cost=self._token_cost)
            history = sequence.drafting = _History(budget)
        return history


class _History:
    """The tokens of a sequence as an array, its budget, and what was found last."""

    __slots__ = ("_array", "_count", "_found", "_found_at", "budget", "waited")

    def __init__(self, budget: DraftBudget) -> None:
        self.budget = budget
        self.waited = False
        """Whether the sequence waited for its last token."""
        self._array: TokenArray = np.empty(0, np.int32)
        self._count = 0
        self._found: list[int] = []
        self._found_at = 0
        """The number of tokens after which `_found` was looked up."""

    def draft(self, sequence: Sequence, shortest: int, longest: int) -> list[int]:
        """Return what may follow the known tokens of the sequence."""
        known = len(sequence.tokens)
        count = self.budget.tokens(known - sequence.prompt_length)
        if not count:
            return []
        if self._found_at != known or len(self._found) > count:
            self._extend(sequence.tokens)
            self._found = look_up(self._array[max(0, known - _LOOKED_TOKENS) : known], count, shortest, longest)
            self._found_at = known
        return self._found

    def _extend(self, tokens: Sequences[int]) -> None:
        count = len(tokens)
        if count > len(self._array):
            array = np.empty(count + max(256, count // 4), np.int32)
            array[: self._count] = self._array[: self._count]
            self._array = array
        self._array[self._count : count] = tokens[self._count :]
        self._count = count


def look_up(tokens: TokenArray, count: int, shortest: int, longest: int) -> list[int]:
    """Return `count` tokens that followed the last n-gram of a text when it occurred before; [] if it did not.

    The longest n-gram that is found counts, and of several occurrences the latest. What followed it is repeated where it is
    shorter than `count`.
    """
    end = len(tokens)
    if end < 2:
        return []
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    start = 0
    for length in range(1, longest + 1):
        if length > 1:
            places = places[places >= length - 1]
            places = places[tokens[places - (length - 1)] == tokens[end - length]]
        if not len(places):
            break
        if length >= shortest:
            start = int(places[-1]) + 1
    if not start:
        return []
    found: list[int] = tokens[start : start + count].tolist()
    period = end - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return found
