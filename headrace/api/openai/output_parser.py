# SPDX-License-Identifier: Apache-2.0
"""The parts of a model's output: text, reasoning and tool calls, and what every parser of outputs can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace.api.openai.response_ids import ResponseIds


class Reasoning(NamedTuple):
    """What a model writes for itself before its answer."""

    text: str


@dataclass(slots=True)  # not frozen: one is created for each token of a call's arguments, and freezing triples that
class ToolCall:
    """A tool call, or (without a name) more of its arguments."""

    index: int
    name: str
    arguments: str
    id: str = ""


Piece = str | Reasoning | ToolCall
"""Text is a str."""


def ignore_malformed_call() -> None:
    """Do nothing: the `on_malformed_call` of a parser without a counter of malformed calls."""


class OutputParser(Protocol):
    """Parses the output of one choice."""

    in_reasoning: bool
    """Whether what was read so far ends in the reasoning."""

    on_malformed_call: Callable[[], None]
    """Called for a call that cannot be read, which is text then, and for arguments that are not JSON."""

    ids: ResponseIds
    """Makes the ids of calls."""

    def start(self, prompt_end: str) -> None:
        """Take the end of the prompt, which may have opened the reasoning. Called before any output is added."""

    def push(self, text: str) -> list[Piece]:
        """Add output; return the pieces that are certain by now."""

    def finish(self) -> list[Piece]:
        """Return the rest."""
