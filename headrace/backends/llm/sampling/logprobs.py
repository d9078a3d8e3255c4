# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities as the JSON text of an answer's parameter `logprobs`: see `core.generation`. Called by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from headrace.backends.llm.sampling.sampler import TokenLogprobs

_LEAST = -9999.0
"""JSON has no infinity. OpenAI writes this for what is as good as impossible."""


class Spelling(Protocol):
    """What is needed of a tokenizer: `text.tokenizer.Tokenizer`."""

    def token_bytes(self, id: int) -> bytes:
        """What a token stands for."""


def logprobs_json(tokenizer: Spelling, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> str:
    """The list of these tokens; those that have none are left out."""
    entries = [
        {
            **_entry(tokenizer, token, told.logprob),
            "top_logprobs": [_entry(tokenizer, other, logprob) for other, logprob in told.top],
        }
        for token, told in zip(tokens, logprobs, strict=True)
        if told is not None
    ]
    return orjson.dumps(entries).decode()


def _entry(tokenizer: Spelling, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    # Not a number compares as less than nothing, too.
    shown = logprob if logprob > _LEAST else _LEAST
    return {"token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": shown}
