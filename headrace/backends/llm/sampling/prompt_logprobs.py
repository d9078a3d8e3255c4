# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the tokens of a prompt, collected chunk by chunk while the prompt is computed.

The model runner calls `add` with the logits of a chunk; the results stay on the device until `to_json`. A chunk that is
computed twice, after a preemption, gives the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import torch

from headrace.backends.llm.sampling.sampler import TokenBytes, logprob_entry


class PromptLogprobs:
    """The log-probabilities of one prompt."""

    __slots__ = ("_alternatives", "_chunks", "_json", "_tokens")

    def __init__(self, tokens: Sequence[int], alternatives: int) -> None:
        self._tokens = tokens
        self._alternatives = alternatives
        self._chunks: dict[int, torch.Tensor] = {}
        """By the index of the first token: a line per token with its log-probability, its rank, the log-probabilities of the
        alternatives and their ids."""
        self._json = ""

    def rows_of(self, start: int, end: int) -> int:
        """Return how many of the rows `start` to `end` are followed by a token of the prompt."""
        return max(0, min(end, len(self._tokens) - 1) - start)

    def add(self, start: int, logits: torch.Tensor) -> None:
        """Add the logits of some rows; the first is that of token `start`, which predicts the token after it."""
        first = start + 1
        logprobs = logits.float().log_softmax(-1)
        tokens = torch.tensor(self._tokens[first : first + len(logits)], device=logits.device).unsqueeze(-1)
        chosen = logprobs.gather(1, tokens)
        ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
        columns = [chosen.double(), ranks.double()]
        if self._alternatives:
            values, ids = logprobs.topk(min(self._alternatives, logits.shape[1]), -1)
            columns += [values.double(), ids.double()]
        self._chunks[first] = torch.cat(columns, 1)

    def to_json(self, tokenizer: TokenBytes) -> str:
        """Return the reply parameter `prompt_logprobs` (`core.generation`), when the prompt is computed."""
        if not self._json:
            self._json = self._create_json(tokenizer)
        return self._json

    def _create_json(self, tokenizer: TokenBytes) -> str:
        lines: list[list[float] | None] = [None] * len(self._tokens)
        for first, chunk in self._chunks.items():
            lines[first : first + len(chunk)] = chunk.tolist()
        entries = [self._entry(tokenizer, token, line) for token, line in zip(self._tokens, lines, strict=True)]
        return orjson.dumps(entries).decode()

    def _entry(self, tokenizer: TokenBytes, token: int, line: list[float] | None) -> dict[str, Any]:
        if line is None:
            entry = _entry(tokenizer, token, 0.0, 0)
            return {**entry, "logprob": None, "rank": None, "top_logprobs": []}
        count = (len(line) - 2) // 2
        top = [
            _entry(tokenizer, int(other), logprob, index + 1)
            for index, (logprob, other) in enumerate(zip(line[2 : 2 + count], line[2 + count :], strict=True))
        ]
        return {**_entry(tokenizer, token, line[0], int(line[1])), "top_logprobs": top}


def _entry(tokenizer: TokenBytes, token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"token_id": token, **logprob_entry(tokenizer, token, logprob), "rank": rank}
