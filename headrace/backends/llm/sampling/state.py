# SPDX-License-Identifier: Apache-2.0
"""The sampling state of a sequence: its sampling params and the history that its next token depends on.

Created by the engine core, read by the sampler and the logits processors. It holds numpy arrays, no tensors, so that the
data of all rows is copied to the device together.
"""

from __future__ import annotations

import copy
import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.backends.llm.sampling.bad_words import BadWords
from headrace.backends.llm.sampling.structured_output import Constraint
from headrace.core.errors import HeadraceError
from headrace.core.generation import Sampling

GREEDY_BELOW = 1e-5
"""Below this temperature only the likeliest token is left, and dividing by it would overflow."""

_MASK = (1 << 64) - 1
_NO_TOKENS: frozenset[int] = frozenset()


class SamplingState:
    """The sampling state of one choice: one row of a step's logits."""

    __slots__ = (
        "_allowed_mask",
        "_always_argmax_only",
        "_argmax_only",
        "_random_key",
        "_stop_ids",
        "bad_words",
        "bias",
        "can_run_ahead",
        "can_speculate",
        "constraint",
        "greedy",
        "in_flight",
        "is_plain",
        "penalised",
        "position",
        "sampling",
        "token_counts",
    )

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        constraint: Constraint | None = None,
        eos_ids: frozenset[int] = frozenset(),
        index: int = 0,
        bad_words: BadWords | None = None,
    ) -> None:
        self.sampling = sampling
        self.constraint = constraint
        self.position = 0
        """Number of generated tokens."""
        self.in_flight = 0
        """Tokens that were sampled and not passed to `advance` yet."""
        self.greedy = sampling.temperature < GREEDY_BELOW
        repetition = sampling.repetition_penalty != 1.0
        self.penalised = repetition or bool(sampling.presence_penalty or sampling.frequency_penalty)
        self.token_counts = TokenCounts(prompt if repetition else ()) if self.penalised else None
        self.bias = _bias(sampling) if sampling.logit_bias else None
        """Token ids and the values added to their logits."""
        self.bad_words = bad_words
        self._allowed_mask = _bitmask(sampling.allowed_token_ids) if sampling.allowed_token_ids is not None else None
        self._stop_ids = eos_ids.union(sampling.stop_token_ids)
        if sampling.ignore_eos:
            self._stop_ids = frozenset(sampling.stop_token_ids)
        self._random_key = _random_key(sampling.seed, index)
        self._argmax_only = (
            self.greedy
            and not self.penalised
            and self.bias is None
            and constraint is None
            and bad_words is None
            and self._allowed_mask is None
            and sampling.logprobs is None
        )
        self._always_argmax_only = self._argmax_only and not sampling.min_tokens
        self.can_speculate = (
            not self.penalised and constraint is None and (bad_words is None or not bad_words.depends_on_history)
        )
        """Whether tokens behind the next one can be sampled in the same step: each depends on its logits alone."""
        self.can_run_ahead = self.can_speculate and sampling.logprobs is None
        """Whether the next token can be sampled before the last one is known: it depends on the logits alone."""
        self.is_plain = not self.penalised and constraint is None and bad_words is None and sampling.logprobs is None
        """Whether `advance` only counts, and no log-probabilities are wanted."""

    @property
    def argmax_only(self) -> bool:
        """Whether the next token is the likeliest one and nothing else is asked for."""
        if self._always_argmax_only or not self._argmax_only:
            return self._argmax_only
        return self.position + self.in_flight >= self.sampling.min_tokens

    @property
    def unprocessed(self) -> bool:
        """Whether no logits processor changes its logits."""
        return (
            not self.penalised
            and self.bias is None
            and self.constraint is None
            and self._allowed_mask is None
            and not self.forbidden_tokens()
        )

    @property
    def finished(self) -> bool:
        """Whether its constraint is complete and allows no more tokens."""
        return self.constraint is not None and self.constraint.finished

    @property
    def error(self) -> HeadraceError | None:
        """The error that ended its request, if any."""
        return self.constraint.error if self.constraint is not None else None

    def is_stop_token(self, token: int) -> bool:
        """Return whether a token ends the choice; it is then not part of the text."""
        return token in self._stop_ids

    def forbidden_tokens(self) -> frozenset[int]:
        """Return the tokens that must not come next: those of bad words, and stop tokens until there are `min_tokens`."""
        forbidden = self.bad_words.forbidden if self.bad_words is not None else _NO_TOKENS
        if self.position + self.in_flight >= self.sampling.min_tokens:
            return forbidden
        return forbidden | self._stop_ids

    def token_bitmask(self) -> npt.NDArray[Any] | None:
        """Return the bits of the tokens that its constraint and `allowed_token_ids` allow; None: all."""
        mask = self.constraint.token_bitmask() if self.constraint is not None else None
        if mask is None or self._allowed_mask is None:
            return self._allowed_mask if mask is None else mask
        words = min(len(mask), len(self._allowed_mask))
        return mask.view(np.int32)[:words] & self._allowed_mask[:words]

    def ahead(self, count: int) -> SamplingState:
        """Return the state for the token that comes `count` tokens later. Only of one that `can_speculate`."""
        if self._always_argmax_only:
            return self
        state = copy.copy(self)
        state.in_flight += count
        return state

    def advance(self, token: int) -> None:
        """Record a generated token. Never raises: see `error`."""
        self.position += 1
        if self.token_counts is not None:
            self.token_counts.add(token)
        if self.bad_words is not None:
            self.bad_words.advance(token)
        if self.constraint is not None:
            self.constraint.advance(token)

    def uniform(self) -> float:
        """Return the random number from 0 to 1 for the next token.

        It depends on the seed, the choice and the position only: not on the batch, nor on a token that was dropped.
        """
        # SplitMix64: passes statistical tests, and takes half a microsecond.
        mixed = (self._random_key + (self.position + self.in_flight + 1) * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53


class TokenCounts:
    """The distinct tokens of a sequence, and how often the model generated each. Tokens of the prompt alone count 0."""

    __slots__ = ("_counts", "_ids", "_indices", "_used")

    def __init__(self, prompt: Sequence[int]) -> None:
        ids = np.unique(np.asarray(prompt, np.int64)) if len(prompt) else np.empty(0, np.int64)
        self._used = len(ids)
        self._indices = {token: index for index, token in enumerate(ids.tolist())}
        self._ids = np.concatenate([ids, np.zeros(max(64, len(ids)), np.int64)])
        self._counts = np.zeros(len(self._ids), np.float64)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The token ids."""
        return self._ids[: self._used]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """The count of each token in `ids`."""
        return self._counts[: self._used]

    def add(self, token: int) -> None:
        """Count a generated token."""
        index = self._indices.setdefault(token, self._used)
        if index == self._used:
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(index, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(index, np.float64)])
            self._ids[index] = token
            self._used += 1
        self._counts[index] += 1.0


def _bias(sampling: Sampling) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    pairs = sampling.logit_bias
    return np.fromiter(pairs.keys(), np.int64, len(pairs)), np.fromiter(pairs.values(), np.float64, len(pairs))


def _bitmask(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    bits = np.zeros((max(tokens) // 32 + 1) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _random_key(seed: int | None, index: int) -> int:
    if seed is None:
        return secrets.randbits(64)
    return int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little")
