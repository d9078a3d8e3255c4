# SPDX-License-Identifier: Apache-2.0
"""The sampler: chooses the next token of every row of a step from its logits. Called by the engine core, once per step.

Order: logits processors (penalties, `logit_bias`, `min_tokens`, structured output), then, for rows that are not greedy,
temperature, `top_k`, `top_p`, `min_p` and a random draw. Log-probabilities are the model's own, before all of that. The
host waits for the device once, in `PendingSample.read`.

A drawn token is the one at which the cumulative probability, in the order of token ids, passes the row's random number:
so it is the same on every device and in every batch. Probabilities are counted in integer units, because integer sums do
not depend on the order in which a device adds. With `separate_rows`, every row is computed by itself, so that its last bits
do not depend on the others either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.backends.llm.sampling.logits_processors import (
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    LogitsProcessors,
    argmax_tokens,
    warp,
)
from headrace.backends.llm.sampling.state import SamplingState

Kernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Samples tokens from logits and the array of `_params`."""

_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity. OpenAI writes this for a token that is as good as impossible."""
_UNITS = 2.0**40
_CANDIDATES = 256
"""On a CPU, rows with `top_k`, `top_p` or `min_p` draw from this many of the likeliest tokens first: nearly always no other
token can be drawn, and a whole vocabulary costs milliseconds."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability (natural logarithm) of a token, and the likeliest tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The token of each row, and its log-probabilities where asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


class TokenBytes(Protocol):
    """The part of the tokenizer that log-probabilities need."""

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that a token stands for."""


def logprob_entry(tokenizer: TokenBytes, token: int, logprob: float) -> dict[str, Any]:
    """Return a token with its log-probability for JSON: see `core.generation`."""
    raw = tokenizer.token_bytes(token)
    # Written so that NaN becomes the lowest value, too.
    shown = logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB
    return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": shown}


class PendingSample:
    """Sampled tokens that are still on the device."""

    __slots__ = ("_logprobs", "_rows", "tokens")

    def __init__(self, tokens: torch.Tensor, rows: Sequence[SamplingState], logprobs: torch.Tensor | None) -> None:
        self.tokens = tokens
        """int64, one per row."""
        self._rows = rows
        self._logprobs = logprobs
        """For each row that asked: the chosen token's log-probability, those of the top tokens, and their ids."""

    def read(self) -> SamplerOutput:
        """Wait for the device and return the tokens."""
        if self._logprobs is None:
            return SamplerOutput(self.tokens.tolist(), [None] * len(self._rows))
        count = len(self._rows)
        # One copy for both: doubles represent ids exactly.
        values = torch.cat([self.tokens.double(), self._logprobs.flatten()]).tolist()
        tokens = [int(token) for token in values[:count]]
        width = self._logprobs.shape[1]
        most = width // 2
        logprobs: list[TokenLogprobs | None] = []
        start = count
        for row in self._rows:
            wanted = row.sampling.logprobs
            if wanted is None:
                logprobs.append(None)
                continue
            line = values[start : start + width]
            start += width
            ids = [int(token) for token in line[1 + most : 1 + most + wanted]]
            logprobs.append(TokenLogprobs(line[0], list(zip(ids, line[1 : 1 + wanted], strict=True))))
        return SamplerOutput(tokens, logprobs)


class _SeparateSamples(PendingSample):
    """Rows that were sampled one by one."""

    __slots__ = ("_samples",)

    def __init__(self, samples: Sequence[PendingSample], rows: Sequence[SamplingState]) -> None:
        super().__init__(torch.cat([sample.tokens for sample in samples]), rows, None)
        self._samples = samples

    def read(self) -> SamplerOutput:
        """Wait for the device and return the tokens."""
        outputs = [sample.read() for sample in self._samples]
        return SamplerOutput(self.tokens.tolist(), [logprobs for output in outputs for logprobs in output.logprobs])


class Sampler:
    """Samples for one model on one device."""

    def __init__(
        self,
        vocabulary: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        *,
        separate_rows: bool = False,
    ) -> None:
        """`dtype`: of the logits."""
        self._separate_rows = separate_rows
        self.processors = LogitsProcessors(torch.device(device))
        self._kernel = _gpu_kernel() if torch.device(device).type == "cuda" else None
        if self._kernel is not None:
            # Compiled now, not during the first request. Processed logits are float32.
            params = self.processors.to_device(np.asarray([(0.5, 1.0, 2, 0.5, 0.5)], np.float64))
            for each in {dtype, torch.float32}:
                self._kernel(torch.zeros(1, vocabulary, dtype=each, device=device), params)

    @staticmethod
    def all_argmax_only(rows: Sequence[SamplingState]) -> bool:
        """Return whether `argmax` alone gives the result of every row."""
        return all(row.argmax_only for row in rows)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingState]) -> SamplerOutput:
        """Sample a token for each row of `logits`, which are left unchanged, and wait for the result."""
        return self.start(logits, rows).read()

    def start(self, logits: torch.Tensor, rows: Sequence[SamplingState]) -> PendingSample:
        """Sample without waiting. Rows with tokens in flight must be ones that `can_run_ahead`."""
        with torch.inference_mode():
            if self.all_argmax_only(rows):
                return PendingSample(argmax_tokens(logits), rows, None)
            if self._separate_rows and len(rows) > 1 and self._adds_by_shape(rows):
                return _SeparateSamples(
                    [self.start(logits[i : i + 1], rows[i : i + 1]) for i in range(len(rows))], rows
                )
            if self._kernel is not None:
                return self._start_on_gpu(self._kernel, logits, rows)
            return self._start(logits, rows)

    def _adds_by_shape(self, rows: Sequence[SamplingState]) -> bool:
        """Return whether sums of a row may be made in another order with another number of rows."""
        return self._kernel is None or any(row.sampling.logprobs is not None for row in rows)

    def _start_on_gpu(self, kernel: Kernel, logits: torch.Tensor, rows: Sequence[SamplingState]) -> PendingSample:
        scores = logits
        if not all(row.unprocessed for row in rows):
            scores = self.processors.apply(logits.float(), rows)
        tokens = kernel(scores, self.processors.to_device(_params(rows)))
        return PendingSample(tokens, rows, self._logprobs(logits, tokens, rows))

    def _start(self, logits: torch.Tensor, rows: Sequence[SamplingState]) -> PendingSample:
        raw = logits.float()
        scores = self.processors.apply(raw, rows)
        random_rows = [index for index, row in enumerate(rows) if not row.greedy]
        if not random_rows:
            tokens = argmax_tokens(scores)
        elif len(random_rows) == len(rows):
            tokens = self._draw(scores, rows)
        else:
            where = self.processors.to_device(np.asarray(random_rows, np.int64))
            drawn = self._draw(scores.index_select(0, where), [rows[index] for index in random_rows])
            tokens = argmax_tokens(scores).index_copy_(0, where, drawn)
        return PendingSample(tokens, rows, self._logprobs(raw, tokens, rows))

    def _draw(self, scores: torch.Tensor, rows: Sequence[SamplingState]) -> torch.Tensor:
        params = _params(rows)
        return draw_tokens(scores, params, self.processors.to_device(params))

    def _logprobs(self, raw: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SamplingState]) -> torch.Tensor | None:
        asking = [(index, row.sampling.logprobs) for index, row in enumerate(rows) if row.sampling.logprobs is not None]
        if not asking:
            return None
        where = self.processors.to_device(np.asarray([index for index, _ in asking], np.int64))
        logprobs = raw.index_select(0, where).float().log_softmax(-1)
        chosen = logprobs.gather(1, tokens.index_select(0, where).unsqueeze(-1))
        most = min(max(count for _, count in asking), raw.shape[1])
        if not most:
            return chosen.double()
        values, ids = logprobs.topk(most, -1)
        return torch.cat([chosen.double(), values.double(), ids.double()], 1)


def _params(rows: Sequence[SamplingState]) -> npt.NDArray[np.float64]:
    """Return a line per row: a random number from 0 to 1, then the columns that `warp` reads. Greedy: temperature 0."""
    return np.asarray(
        [
            (row.uniform(), 0.0 if row.greedy else given.temperature, given.top_k, given.top_p, given.min_p)
            for row in rows
            for given in (row.sampling,)
        ],
        np.float64,
    )


def _gpu_kernel() -> Kernel | None:
    """Return the kernel for GPUs; None without Triton, where PyTorch's own operations do the same, slower."""
    try:
        from headrace.backends.llm.sampling.triton_sampler import sample_tokens
    except ImportError:
        return None
    return sample_tokens


def draw_tokens(scores: torch.Tensor, params: npt.NDArray[Any], device_params: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row.

    `params` has a line per row: a random number from 0 to 1, then the columns that `warp` reads. `device_params` is the same
    on the device.
    """
    limited = (params[:, TOP_K] > 0) | (params[:, TOP_P] < 1.0) | (params[:, MIN_P] > 0.0)
    if not scores.is_cpu or scores.shape[1] <= 2 * _CANDIDATES or not limited.any():
        return _pick(warp(scores, params, device_params), device_params[:, :1])
    tokens = torch.empty(len(scores), dtype=torch.int64)
    limited_rows = np.flatnonzero(limited)
    candidates, settled = _draw_from_candidates(scores[limited_rows], device_params[limited_rows])
    tokens[limited_rows] = candidates
    rest = np.concatenate([np.flatnonzero(~limited), limited_rows[~settled.numpy()]])
    if len(rest):
        tokens[rest] = _pick(warp(scores[rest], params[rest], device_params[rest]), device_params[rest, :1])
    return tokens


def _pick(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    sums = scores.softmax(-1).mul_(_UNITS).long().cumsum(-1)
    threshold = (uniform * sums[:, -1:].double()).long()
    # Clamped in case the logits are NaN: a broken model must not break the engine.
    return torch.searchsorted(sums, threshold, right=True).squeeze(-1).clamp_(max=scores.shape[1] - 1)


def _draw_from_candidates(scores: torch.Tensor, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the likeliest tokens; the second result says for which rows no other token could have been drawn."""
    values, ids = scores.topk(_CANDIDATES, -1)
    temperature = params[:, TEMPERATURE, None].float()
    values = values / temperature
    last = values[:, -1:]
    settled = last == -torch.inf

    top_k = params[:, TOP_K, None].long()
    few = (top_k > 0) & (top_k < _CANDIDATES)
    lowest_top_k = values.gather(1, (top_k - 1).clamp(0, _CANDIDATES - 1)).masked_fill(~few, -torch.inf)
    settled |= last < lowest_top_k
    # With a `top_k` larger than the candidates, the total probability of the other tokens is not known.
    unknown = (top_k > 0) & ~settled
    values = values.masked_fill(values < lowest_top_k, -torch.inf)

    top_p = params[:, TOP_P, None]
    if bool((top_p < 1.0).any()):
        total = torch.where(settled, values.logsumexp(-1, keepdim=True), _log_total(scores, temperature, settled))
        probabilities = (values - total).exp()
        excluded = (probabilities.cumsum(-1) - probabilities >= 1.0 - (1.0 - top_p).float()) & (top_p < 1.0)
        excluded[:, 0] = False
        settled |= excluded[:, -1:]
        values = values.masked_fill(excluded, -torch.inf)

    lowest_min_p = values[:, :1] + params[:, MIN_P, None].log().float()
    settled = (settled | (last < lowest_min_p)) & ~unknown
    values = values.masked_fill(values < lowest_min_p, -torch.inf)

    ids, order = ids.sort(-1)
    picked = _pick(values.gather(1, order), params[:, :1])
    return ids.gather(1, picked.unsqueeze(-1)).squeeze(-1), settled.squeeze(-1)


def _log_total(scores: torch.Tensor, temperature: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the logsumexp of each row, computed only if it is not `known` for all rows."""
    if bool(known.all()):
        return torch.zeros_like(temperature)
    return (scores / temperature).logsumexp(-1, keepdim=True)
