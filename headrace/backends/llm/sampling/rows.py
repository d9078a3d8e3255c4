# SPDX-License-Identifier: Apache-2.0
"""What a sequence asks of its next token, and what of its past that depends on. Made by the engine, read by the sampler.

No tensors here: what the sampler needs of a row is kept as numpy arrays, so that all rows go to the device together.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.backends.llm.sampling.constraints import Constraint
from headrace.core.errors import HeadraceError
from headrace.core.generation import Sampling

GREEDY_BELOW = 1e-5
"""A temperature under which only the likeliest token is left, and dividing by it would overflow."""

_MASK = (1 << 64) - 1


class Row:
    """One choice of one request."""

    __slots__ = (
        "_ending",
        "_key",
        "_plain",
        "bias",
        "constraint",
        "greedy",
        "penalised",
        "position",
        "sampling",
        "seen",
    )

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        constraint: Constraint | None = None,
        eos_ids: frozenset[int] = frozenset(),
        index: int = 0,
    ) -> None:
        self.sampling = sampling
        self.constraint = constraint
        self.position = 0
        """How many tokens it has got."""
        self.greedy = sampling.temperature < GREEDY_BELOW
        repeats = sampling.repetition_penalty != 1.0
        self.penalised = repeats or bool(sampling.presence_penalty or sampling.frequency_penalty)
        self.seen = Seen(prompt if repeats else ()) if self.penalised else None
        self.bias = _bias(sampling) if sampling.logit_bias else None
        """Tokens and what is added to their logits."""
        self._ending = eos_ids.union(sampling.stop_token_ids)
        if sampling.ignore_eos:
            self._ending = frozenset(sampling.stop_token_ids)
        self._key = _key(sampling.seed, index)
        self._plain = (
            self.greedy
            and not self.penalised
            and self.bias is None
            and constraint is None
            and sampling.logprobs is None
        )

    @property
    def plain(self) -> bool:
        """Whether its next token is the likeliest, and nothing else is asked for."""
        return self._plain and self.position >= self.sampling.min_tokens

    @property
    def independent(self) -> bool:
        """Whether its choice depends on the logits alone, so that it can be drawn before the last token is known."""
        return not self.penalised and self.constraint is None

    @property
    def finished(self) -> bool:
        """Whether its constraint is fulfilled and lets nothing follow."""
        return self.constraint is not None and self.constraint.finished

    @property
    def error(self) -> HeadraceError | None:
        """Why it cannot go on. Only its own request has failed."""
        return self.constraint.error if self.constraint is not None else None

    def ends(self, token: int) -> bool:
        """Whether a token ends the choice, and is no part of its text."""
        return token in self._ending

    def forbidden(self, ahead: int = 0) -> frozenset[int]:
        """Tokens that may not come yet: those that end it, before it has `min_tokens`."""
        if self.position + ahead >= self.sampling.min_tokens:
            return frozenset()
        return self._ending

    def advance(self, token: int) -> None:
        """It has got this token. Never raises: see `error`."""
        self.position += 1
        if self.seen is not None:
            self.seen.add(token)
        if self.constraint is not None:
            self.constraint.advance(token)

    def uniform(self, ahead: int = 0) -> float:
        """Its number between 0 and 1 for the next token.

        It depends on the seed, the choice and the place only: not on the batch, nor on a token that was drawn in vain.
        """
        # SplitMix64: good enough that no test tells it from chance, and half a microsecond.
        mixed = (self._key + (self.position + ahead + 1) * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53


class Seen:
    """The different tokens of a sequence, and how often the model said each. Those of the prompt alone count 0."""

    __slots__ = ("_counts", "_ids", "_places", "_used")

    def __init__(self, prompt: Sequence[int]) -> None:
        ids = np.unique(np.asarray(prompt, np.int64)) if len(prompt) else np.empty(0, np.int64)
        self._used = len(ids)
        self._places = {token: place for place, token in enumerate(ids.tolist())}
        self._ids = np.concatenate([ids, np.zeros(max(64, len(ids)), np.int64)])
        self._counts = np.zeros(len(self._ids), np.float64)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens."""
        return self._ids[: self._used]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """For each, how often it was said."""
        return self._counts[: self._used]

    def add(self, token: int) -> None:
        """The model said it."""
        place = self._places.setdefault(token, self._used)
        if place == self._used:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(place, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(place, np.float64)])
            self._ids[place] = token
            self._used += 1
        self._counts[place] += 1.0


def _bias(sampling: Sampling) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    pairs = sampling.logit_bias
    return np.fromiter(pairs.keys(), np.int64, len(pairs)), np.fromiter(pairs.values(), np.float64, len(pairs))


def _key(seed: int | None, index: int) -> int:
    if seed is None:
        return secrets.randbits(64)
    return int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little")
