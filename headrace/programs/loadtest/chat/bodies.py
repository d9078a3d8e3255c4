# SPDX-License-Identifier: Apache-2.0
"""From sizes to a request of OpenAI's API. Called by `running` for each request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace.fleet.benchmarks.scenarios import Sizes
from headrace.programs.loadtest.chat.prompts import Prompts

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
_ABOUT_PICTURES = "Describe what is to be seen."


@dataclass
class Bodies:
    """Makes requests for one task of one model."""

    model: str
    task: str
    prompts: Prompts
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The user's own, for every request; they win."""
    ignore_eos: bool = True
    """Ask for answers of the full length. Not OpenAI's own; what does not know it is asked without."""
    usage: bool = True
    """Ask for the numbers of tokens at the end of a stream."""

    @property
    def path(self) -> str:
        """Where they go."""
        return EMBEDDINGS if self.task.endswith("embeddings") else CHAT

    def make(self, sizes: Sizes) -> bytes:
        """One request."""
        if self.path == EMBEDDINGS:
            pictures = [self.prompts.picture(sizes.width, sizes.height) for _ in range(sizes.pictures)]
            given = pictures or [self.prompts.text(sizes.prompt_tokens)]
            return orjson.dumps({"model": self.model, "input": given, **self.parameters})
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": self._content(sizes)}],
            "stream": True,
            "max_tokens": sizes.answer_tokens,
        }
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return orjson.dumps({**body, **self.parameters})

    def _content(self, sizes: Sizes) -> Any:
        if not sizes.pictures:
            return self.prompts.text(sizes.prompt_tokens)
        pictures = [self.prompts.picture(sizes.width, sizes.height) for _ in range(sizes.pictures)]
        shown = [{"type": "image_url", "image_url": {"url": each}} for each in pictures]
        return [{"type": "text", "text": _ABOUT_PICTURES}, *shown]
