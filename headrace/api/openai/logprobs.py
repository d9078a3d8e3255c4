# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities as the two kinds of answers show them. Used by `streams` and `wholes`.

A model tells them as the JSON text of a list (see `core.generation`), which is what chats show; completions have an older
form of their own.
"""

from __future__ import annotations

from typing import Any

import orjson


def chat_logprobs(told: str) -> bytes:
    """JSON for a chat's choice."""
    return b'{"content":%b,"refusal":null}' % told.encode()


def completion_logprobs(told: str, offset: int) -> tuple[dict[str, Any], int]:
    """For a completion's choice, whose text has come as far as `offset`; and how far it is then."""
    tokens, values, tops, offsets = [], [], [], []
    for each in orjson.loads(told):
        tokens.append(each["token"])
        values.append(each["logprob"])
        tops.append({top["token"]: top["logprob"] for top in each["top_logprobs"]} or None)
        offsets.append(offset)
        offset += len(each["token"])
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset
