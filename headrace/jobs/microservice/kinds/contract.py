# SPDX-License-Identifier: Apache-2.0
"""What a service asks of its model, whatever kind it is. Implemented by the modules of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from headrace.core.messages import InferResponse
from headrace.jobs.microservice.kinds.parameters import Parameter

Sort = Literal["image", "video", ""]
"""What a URL is said to be; "" when nobody says."""
OnAnswer = Callable[[InferResponse], None]
"""Told each answer of a model that generates, as `core.generation` has it, on the loop."""
Begin = Callable[[int], OnAnswer]
"""Called with the number of choices once a chat is known to be a right one; what it gives hears the answers."""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A picture or video of a request, by its URL."""

    url: str = field(repr=False)
    sort: Sort = ""
    place: str = "media"
    """Where the request has it, for errors."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat request: the first user message and the first system message, and everything beside `messages`."""

    text: str
    system: str
    media: tuple[MediaItem, ...]
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One answer to a chat."""

    content: str
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """All of them, and what they cost where that is counted."""

    choices: Sequence[ChatChoice]
    usage: Mapping[str, int] | None = None


class Kind(Protocol):
    """A loaded model, as requests see it."""

    @property
    def model_type(self) -> str:
        """What results call it."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Of an inference request."""

    async def infer(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The results for the body of an inference request. Raises `InvalidArgument` that names what is wrong."""

    async def chat(self, chat: Chat) -> ChatAnswer:
        """The answer to a chat; raises `InvalidArgument` where the model has nothing to say."""

    async def close(self) -> None:
        """Let go of what is held beside the engine."""


@runtime_checkable
class Streaming(Protocol):
    """A kind whose chats can be answered in pieces."""

    async def stream(self, chat: Chat, begin: Begin) -> None:
        """Answer a chat in pieces; returns after the last of them. Raises as `Kind.chat` does."""
