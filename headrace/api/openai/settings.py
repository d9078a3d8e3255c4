# SPDX-License-Identifier: Apache-2.0
"""Limits of OpenAI's protocol. A module of its own, so that the command line need not import the handlers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.limits import BatchLimits


@dataclass(frozen=True, slots=True)
class OpenAiSettings:
    """Limits on requests, besides those of `net.http`."""

    messages: int = 2048
    """Messages in one conversation."""
    content_items: int = 512
    """Content items in one message."""
    tools: int = 256
    prompts: int = 256
    """Prompts of one completions request."""
    choices: int = 128
    """Choices in one response, for all prompts together."""
    prompt_tokens: int = 1 << 20
    """Length of a prompt that is given as tokens. The model's own limit applies as well."""
    texts: int = 2048
    """Inputs of one embeddings request."""
    texts_at_once: int = 64
    """Inputs of one request in the engine at the same time: it must not fill a queue that other requests share."""
    continuation_key: bytes = field(default=b"", repr=False)
    """The key of routers that may continue here what another server began (`core.continuation`); empty: this machine's."""
    media: int = 32
    """Images and videos in one conversation."""
    media_bytes: int = 1 << 30
    """Memory of all images and videos of a conversation, decoded."""
    audio_seconds: float = 3600.0
    """Length of an audio file."""
    audio_files_at_once: int = 32
    """Audio files that are transcribed at the same time: each takes 115 MB for an hour."""
    prompt_logprobs_bytes: int = 64 * 1024 * 1024
    """Log-probabilities of all prompts of a completions request, as JSON."""
    stream_unread_bytes: int = 16 * 1024 * 1024
    """Unread bytes of a streamed response, above which the stream is aborted."""
    background_responses: int = 64
    """Background responses that one process computes at the same time."""
    state_folder: Path | None = None
    """Folder of what clients ask to keep; made at first use. None: nothing is kept."""
    stored_responses_bytes: int = 1 << 30
    """Size of all stored responses; those not used for the longest time are removed above it. 0: none are stored."""
    stored_responses_seconds: float = 30 * 86_400.0
    """How long a response is kept after it was stored or last continued."""
    batch_folder: Path | None = None
    """Folder of files and batches; made at first use. None: `/v1/files` and `/v1/batches` are not served."""
    batch_lines: int = 16
    """Lines of batches that one process computes at the same time."""
    batch_limits: BatchLimits = field(default_factory=BatchLimits)
