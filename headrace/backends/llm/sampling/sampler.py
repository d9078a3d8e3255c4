# SPDX-License-Identifier: Apache-2.0
"""From the logits of a step to its tokens, all rows at once. Called by the engine, once a step.

In this order: penalties, `logit_bias`, tokens that may not come yet, constraints; then, where a row is not greedy,
temperature, `top_k`, `top_p` and `min_p` as transformers has them. Log-probabilities are the model's, before all of it.
What no row asks for is not computed, and the host waits for the device once, when `Drawn.read` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.backends.llm.sampling.drawing import drawn
from headrace.backends.llm.sampling.rows import Row, Seen
from headrace.backends.llm.sampling.warping import likeliest


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, by its natural logarithm, and which were the likeliest."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Sampled:
    """For each row its token, and what it asked to know of it."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


class Drawn:
    """Tokens that lie on the device."""

    __slots__ = ("_log", "_rows", "tokens")

    def __init__(self, tokens: torch.Tensor, rows: Sequence[Row], log: torch.Tensor | None) -> None:
        self.tokens = tokens
        """One of int64 for each row."""
        self._rows = rows
        self._log = log
        """For each row that asked: the chosen one's logarithm, the top ones', and their ids."""

    def read(self) -> Sampled:
        """Wait for the device."""
        if self._log is None:
            return Sampled(self.tokens.tolist(), [None] * len(self._rows))
        count = len(self._rows)
        # One copy for all: doubles carry ids exactly.
        both = torch.cat([self.tokens.double(), self._log.flatten()]).tolist()
        tokens = [int(token) for token in both[:count]]
        width = self._log.shape[1]
        most = width // 2
        logprobs: list[TokenLogprobs | None] = []
        start = count
        for row in self._rows:
            wanted = row.sampling.logprobs
            if wanted is None:
                logprobs.append(None)
                continue
            log = both[start : start + width]
            start += width
            ids = [int(token) for token in log[1 + most : 1 + most + wanted]]
            logprobs.append(TokenLogprobs(log[0], list(zip(ids, log[1 : 1 + wanted], strict=True))))
        return Sampled(tokens, logprobs)


class Sampler:
    """Of one model on one device."""

    def __init__(self, vocabulary: int, device: torch.device | str) -> None:
        self._vocabulary = vocabulary
        self._device = torch.device(device)
        self._places = torch.arange(32, dtype=torch.int32, device=self._device)

    @staticmethod
    def is_plain(rows: Sequence[Row]) -> bool:
        """Whether every row takes its likeliest token and asks for nothing else: then `argmax` is all there is to do."""
        return all(row.plain for row in rows)

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> Sampled:
        """The tokens of `rows`, whose logits are the rows of `logits`. These are left as they are."""
        return self.start(logits, rows).read()

    def start(self, logits: torch.Tensor, rows: Sequence[Row], ahead: int = 0) -> Drawn:
        """The same without waiting. `ahead`: how many tokens of these rows were drawn but not yet told by `advance`.

        Only rows that are `independent` may be ahead.
        """
        with torch.inference_mode():
            if self.is_plain(rows):
                return Drawn(likeliest(logits), rows, None)
            return self._started(logits, rows, ahead)

    def _started(self, logits: torch.Tensor, rows: Sequence[Row], ahead: int) -> Drawn:
        raw = logits.float()
        scores = self._allowed(self._biased(raw, rows, ahead), rows)
        drawing = [place for place, row in enumerate(rows) if not row.greedy]
        if not drawing:
            tokens = likeliest(scores)
        elif len(drawing) == len(rows):
            tokens = self._drawn(scores, rows, ahead)
        else:
            where = self._moved(np.asarray(drawing, np.int64))
            some = self._drawn(scores.index_select(0, where), [rows[place] for place in drawing], ahead)
            tokens = likeliest(scores).index_copy_(0, where, some)
        return Drawn(tokens, rows, self._log(raw, tokens, rows))

    def _moved(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _biased(self, raw: torch.Tensor, rows: Sequence[Row], ahead: int) -> torch.Tensor:
        """Penalties, `logit_bias` and `min_tokens`. The first change makes a copy."""
        scores = raw
        penalised = [(place, row.seen) for place, row in enumerate(rows) if row.seen is not None and len(row.seen.ids)]
        if penalised:
            scores = self._penalised(scores.clone(), rows, penalised)
        biases = [(place, row.bias) for place, row in enumerate(rows) if row.bias is not None]
        if biases:
            scores = scores.clone() if scores is raw else scores
            places = np.concatenate([np.full(len(ids), place) for place, (ids, _) in biases])
            packed = np.stack([places, *(np.concatenate([bias[part] for _, bias in biases]) for part in (0, 1))])
            where, ids, values = self._moved(packed.astype(np.float64))
            scores.index_put_((where.long(), ids.long()), values.float(), accumulate=True)
        early = [
            (place, token)
            for place, row in enumerate(rows)
            if row.sampling.min_tokens
            for token in row.forbidden(ahead)
            if token < scores.shape[1] and not row.finished
        ]
        if early:
            scores = scores.clone() if scores is raw else scores
            where, ids = self._moved(np.asarray(early, np.int64).T.copy())
            # Made on the device: a number of the host's would be waited for.
            scores.index_put_((where, ids), scores.new_full((1,), -torch.inf))
        return scores

    def _penalised(
        self, scores: torch.Tensor, rows: Sequence[Row], penalised: Sequence[tuple[int, Seen]]
    ) -> torch.Tensor:
        strengths = np.asarray(
            [
                (row.repetition_penalty, row.presence_penalty, row.frequency_penalty)
                for row in (rows[place].sampling for place, _ in penalised)
            ],
            np.float64,
        )
        sizes = [len(seen.ids) for _, seen in penalised]
        packed = np.empty((6, sum(sizes)), np.float64)
        packed[0] = np.repeat([place for place, _ in penalised], sizes)
        packed[1] = np.concatenate([seen.ids for _, seen in penalised])
        packed[2] = np.concatenate([seen.counts for _, seen in penalised])
        packed[3:] = np.repeat(strengths.T, sizes, axis=1)
        moved = self._moved(packed)
        where, ids = moved[0].long(), moved[1].long()
        counts, repetition, presence, frequency = moved[2:].float()
        old = scores[where, ids]
        new = torch.where(old < 0, old * repetition, old / repetition)
        scores[where, ids] = new - frequency * counts - presence * (counts > 0)
        return scores

    def _allowed(self, scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        """Leave each constraint only what it allows."""
        masks = [
            (place, mask)
            for place, row in enumerate(rows)
            if row.constraint is not None and (mask := row.constraint.allowed()) is not None
        ]
        if not masks:
            return scores
        width = scores.shape[1]
        words = np.zeros((len(masks), (width + 31) // 32), np.int32)
        for line, (_, mask) in zip(words, masks, strict=True):
            line[: len(mask)] = mask.view(np.int32)[: len(line)]
        bits = (self._moved(words).unsqueeze(-1) >> self._places) & 1
        forbidden = bits.view(len(masks), -1)[:, :width] == 0
        if len(masks) == len(rows):
            return scores.masked_fill(forbidden, -torch.inf)
        where = self._moved(np.asarray([place for place, _ in masks], np.int64))
        return scores.index_copy(0, where, scores.index_select(0, where).masked_fill(forbidden, -torch.inf))

    def _drawn(self, scores: torch.Tensor, rows: Sequence[Row], ahead: int) -> torch.Tensor:
        numbers = np.asarray(
            [
                (row.uniform(ahead), sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
                for row in rows
                for sampling in (row.sampling,)
            ],
            np.float64,
        )
        return drawn(scores, numbers, self._moved(numbers))

    def _log(self, raw: torch.Tensor, tokens: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor | None:
        asking = [(place, row.sampling.logprobs) for place, row in enumerate(rows) if row.sampling.logprobs is not None]
        if not asking:
            return None
        where = self._moved(np.asarray([place for place, _ in asking], np.int64))
        log = raw.index_select(0, where).log_softmax(-1)
        chosen = log.gather(1, tokens.index_select(0, where).unsqueeze(-1))
        most = min(max(count for _, count in asking), raw.shape[1])
        if not most:
            return chosen.double()
        values, ids = log.topk(most, -1)
        return torch.cat([chosen.double(), values.double(), ids.double()], 1)
