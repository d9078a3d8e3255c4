# SPDX-License-Identifier: Apache-2.0
"""A model's output while it is parsed: what was not read yet, the pieces that were found, and a search for markers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import orjson

from headrace.api.openai.output_parser import Piece, Reasoning, ToolCall, ignore_malformed_call
from headrace.api.openai.response_ids import RANDOM_IDS, ResponseIds, new_call_id

Functions = Mapping[str, Mapping[str, Any]]
"""The schemas of the tools' arguments, by the tools' names."""


class OutputBuffer:
    """Output that was not read yet, and the pieces that were found in it."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self.buffer = ""
        self.final = False
        """Whether no more output comes."""
        self.in_reasoning = False
        self.is_certain = False
        """Whether the current text belongs to a call that was passed on."""
        self.raw = ""
        """The text of the current call while it is not certain."""
        self.calls = 0
        self.interrupts_reasoning = False
        """Whether a call came before the end of the reasoning."""
        self.pieces: list[Piece] = []
        self.on_malformed_call = ignore_malformed_call
        self.ids: ResponseIds = RANDOM_IDS
        self._arguments: list[str] = []
        """The arguments of the last call, while they come."""

    def take(self, count: int) -> str:
        """Remove text from the buffer; it belongs to the current call."""
        text, self.buffer = self.buffer[:count], self.buffer[count:]
        if not self.is_certain:
            self.raw += text
        return text

    def begin_call(self, name: str, arguments: str = "", call_id: str = "") -> None:
        """Pass a call on, with the beginning of its arguments."""
        self.interrupts_reasoning = self.interrupts_reasoning or self.in_reasoning
        self.in_reasoning = False
        self.raw = ""
        self.is_certain = True
        self._arguments = [arguments]
        self.pieces.append(ToolCall(self.calls, name, arguments, call_id or new_call_id(self.ids)))
        self.calls += 1

    def add_arguments(self, text: str) -> None:
        """Pass more arguments of the last call on."""
        self._arguments.append(text)
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, ToolCall):
            self.pieces[-1] = replace(last, arguments=last.arguments + text)
        elif text:
            self.pieces.append(ToolCall(self.calls - 1, "", text))

    def end_arguments(self) -> None:
        """Check the arguments of the last call, which are complete."""
        arguments, self._arguments = self._arguments, []
        if arguments and not is_json("".join(arguments)):
            self.on_malformed_call()

    def end_call(self) -> None:
        """End a call: what comes next is not certain to be one."""
        self.end_arguments()
        self.is_certain = False
        self.raw = ""

    def add_plain(self, text: str, *, reasoning: bool) -> None:
        """Pass text or reasoning on."""
        last = self.pieces[-1] if self.pieces else None
        if not text:
            return
        if reasoning:
            if isinstance(last, Reasoning):
                self.pieces[-1] = Reasoning(last.text + text)
            else:
                self.pieces.append(Reasoning(text))
        elif isinstance(last, str):
            self.pieces[-1] = last + text
        else:
            self.pieces.append(text)


def is_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


class Markers:
    """Finds markers in a text, and at its end what may be the beginning of one."""

    __slots__ = ("_first_letters", "_longest", "_markers", "_pattern")

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = sorted(set(markers), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._markers))) if self._markers else None
        self._longest = len(self._markers[0]) if self._markers else 0
        first = "".join(sorted({re.escape(marker[0]) for marker in self._markers}))
        self._first_letters = re.compile(f"[{first}]") if first else None

    def find(self, text: str) -> tuple[int, int] | None:
        """Return where the first marker is."""
        match = self._pattern.search(text) if self._pattern is not None else None
        return match.span() if match is not None else None

    def held_from(self, text: str) -> int:
        """Return where the text begins that may become a marker."""
        size = len(text)
        if self._first_letters is None:
            return size
        at = max(0, size - self._longest + 1)
        while (letter := self._first_letters.search(text, at)) is not None:
            end = text[letter.start() :]
            if any(marker.startswith(end) for marker in self._markers):
                return letter.start()
            at = letter.end()
        return size


@lru_cache(maxsize=256)
def find_markers(*markers: str) -> Markers:
    """Return what finds these markers. The formats of a model have few sets of them, so they are kept."""
    return Markers(markers)
