# SPDX-License-Identifier: Apache-2.0
"""The parser for all models: finds reasoning and tool calls in a model's output, while it is streamed.

What differs between models is a table (`output_formats`). Every character is read once, and how the text is cut into pieces
does not change the result:

- Text goes out at once. Only what may be the beginning of a marker is held back, and white space before a marker.
- A call is certain when the name of one of the tools and the beginning of its arguments have come. From there on its
  arguments are passed on as they come, and a call that is cut off is still a call.
- What looks like a call and is none, such as one of an unknown tool, is text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.api.openai.call_syntax import Cut, NotACall, Steps, Syntax, read_calls, read_harmony
from headrace.api.openai.output_buffer import Functions, OutputBuffer, find_markers
from headrace.api.openai.output_parser import Piece


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls."""

    begins: tuple[str, ...]
    """Markers that open one or more calls."""
    syntax: Syntax
    alternative: Syntax | None = None
    """Used if the calls begin with "[" or "{"."""
    bare: Literal["", "{", "["] = ""
    """Calls without a marker begin with this character, at the beginning of the answer."""
    ignored: tuple[str, ...] = ()
    """Markers that mean nothing to a reader, and are left out."""
    strips: bool = True
    """Whether white space before a call is left out."""


class HarmonyFormat:
    """The format of gpt-oss: messages with channels. It has both reasoning and calls."""


class FormatParser(OutputBuffer):
    """Parses the output of one choice by the tables of its model."""

    def __init__(
        self, tools: ToolFormat | HarmonyFormat | None, reasoning: ReasoningFormat | None, functions: Functions
    ) -> None:
        super().__init__(functions)
        self._tools = tools if isinstance(tools, ToolFormat) else None
        self._reasoning = reasoning
        self._skips_white = False
        self._is_marked = False
        """Whether a marker began the current calls."""
        self._at_start = True
        """Whether the answer has no text yet: a call without a marker may come."""
        self._reader: Steps | None = read_harmony(self) if isinstance(tools, HarmonyFormat) else None
        opening = self._tools.begins if self._tools is not None else ()
        ignored = self._tools.ignored if self._tools is not None else ()
        begins, ends = (reasoning.begins, reasoning.ends) if reasoning is not None else ((), ())
        self._openings = (*begins, *opening, *ignored)
        self._text_markers = find_markers(*self._openings)
        self._interrupted_markers = find_markers(*self._openings, *ends)
        self._reasoning_markers = find_markers(*ends, *opening)

    def start(self, prompt_end: str) -> None:
        """Begin inside the reasoning if the prompt has opened it."""
        if self._reasoning is not None and prompt_end.rstrip().endswith(self._reasoning.begins):
            self.in_reasoning = self._skips_white = True

    def push(self, text: str) -> list[Piece]:
        """Add output."""
        self.buffer += text
        return self._run()

    def finish(self) -> list[Piece]:
        """Return the rest."""
        self.final = True
        pieces = self._run()
        self.buffer = ""
        return pieces

    def _run(self) -> list[Piece]:
        self.pieces = []
        while self.buffer or (self.final and self._reader is not None):
            if not (self._read_text() if self._reader is None else self._read_calls(self._reader)):
                break
        return self.pieces

    # Text and reasoning. Both methods return whether there may be more to read.

    def _read_text(self) -> bool:
        if self._skips_white:
            self.buffer = self.buffer.lstrip()
            if not self.buffer:
                return False
            self._skips_white = False
        tools = self._tools
        if tools is not None and tools.bare and self._at_start and not self.in_reasoning:
            stripped = self.buffer.lstrip()
            if not self.final and any(marker.startswith(stripped) for marker in ("", *self._openings)):
                return False  # white space only, or the beginning of a marker
            if stripped.startswith(tools.bare) and not stripped.startswith(self._openings):
                self._begin_calls(tools, self.buffer[: len(self.buffer) - len(stripped)], "")
                self.buffer = stripped
                return True
        markers = self._text_markers
        if self.in_reasoning:
            markers = self._reasoning_markers
        elif self.interrupts_reasoning:
            markers = self._interrupted_markers
        place = markers.find(self.buffer)
        if place is not None:
            self._read_marker(*place)
            return True
        if self.final:
            # The white space behind a call or behind reasoning means nothing.
            if not self.buffer.isspace() or not (self.calls or self.in_reasoning):
                self._add_text(self.buffer)
            return False
        end = markers.held_from(self.buffer)
        if self.in_reasoning or tools is None or tools.strips:
            end = len(self.buffer[:end].rstrip())
        text, self.buffer = self.buffer[:end], self.buffer[end:]
        self._add_text(text)
        return False

    def _add_text(self, text: str) -> None:
        if text:
            self.add_plain(text, reasoning=self.in_reasoning)
            self._at_start = self._at_start and self.in_reasoning

    def _read_marker(self, begin: int, end: int) -> None:
        before, marker, self.buffer = self.buffer[:begin], self.buffer[begin:end], self.buffer[end:]
        tools, reasoning = self._tools, self._reasoning
        strips = self.in_reasoning or tools is None or tools.strips
        shown = before.rstrip() if strips else before
        if tools is not None and marker in tools.begins:
            self._add_text(shown)
            self._begin_calls(tools, before[len(shown) :], marker)
        elif tools is not None and marker in tools.ignored:
            self._add_text(before)
            self._skips_white = self._at_start
        else:
            self._add_text(shown)
            self.in_reasoning = not self.in_reasoning and reasoning is not None and marker in reasoning.begins
            self.interrupts_reasoning = False
            self._skips_white = True

    # Calls

    def _begin_calls(self, tools: ToolFormat, white: str, marker: str) -> None:
        self.raw = white + marker
        self._is_marked = bool(marker)
        self.is_certain = False
        self._at_start = False
        self._reader = read_calls(self, tools.syntax, tools.alternative, marker)

    def _read_calls(self, reader: Steps) -> bool:
        failed = False
        try:
            next(reader)
        except StopIteration:
            self.end_arguments()
        except NotACall:
            failed = True
            if self._is_marked and self.raw:
                self.on_malformed_call()
            else:
                self.end_arguments()
        except Cut:
            failed = True
            self.raw, self.buffer = self.raw + self.buffer if not self.is_certain else "", ""
        else:
            return False
        self._reader = None
        raw, self.raw = self.raw, ""
        if failed and raw:
            self.add_plain(raw, reasoning=self.in_reasoning)
        self.is_certain = False
        return True
