# SPDX-License-Identifier: Apache-2.0
"""How much OpenAI's protocol takes. Filled by a composition root, given to `http`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpenAiSettings:
    """Bounds on requests, beside those that the wire has for all of them."""

    messages: int = 2048
    """In one conversation."""
    content_items: int = 512
    """In one message."""
    tools: int = 256
    prompts: int = 256
    """Of one request for completions."""
    choices: int = 128
    """In one answer, for all its prompts together."""
    prompt_tokens: int = 1 << 20
    """Where a prompt is given as tokens. The model's own limit comes after this one."""
    texts: int = 2048
    """Of one request for embeddings."""
    texts_at_once: int = 64
    """Texts of one request in the engine at the same time: it must not fill a queue that others wait in."""
    media: int = 32
    """Images and videos in one conversation."""
    media_bytes: int = 1 << 30
    """What they may take in memory, decoded, all together."""
    stream_unread_bytes: int = 16 * 1024 * 1024
    """What may wait for a client that does not read its stream; over it, the stream is broken off."""
