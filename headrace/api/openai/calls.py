# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the text of a model, as it comes: what is text goes on at once, what may begin a call is held back.

Made by `tools`, one reader for each choice; fed by `streams` and `wholes`. `CALL_FORMATS` are the ways in which models write
calls of their own accord; `NamedCall` and `RequiredCalls` read text that was held to a schema.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from headrace.api.openai.scanning import JsonScanner, values_in


@dataclass(frozen=True, slots=True)
class Call:
    """A call, or (without a name) more of its arguments."""

    index: int
    name: str
    arguments: str
    id: str = ""


Piece = str | Call


class CallReader(Protocol):
    """Reads one choice."""

    def push(self, text: str) -> list[Piece]:
        """What is certain after so much more text."""

    def finish(self) -> list[Piece]:
        """What is left."""


class _Numbered:
    """Numbers calls and gives them ids."""

    def __init__(self) -> None:
        self.count = 0

    def call(self, name: str, arguments: str) -> Call:
        """The next one."""
        made = Call(self.count, name, arguments, f"call_{secrets.token_hex(12)}")
        self.count += 1
        return made


class NamedCall:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> list[Piece]:
        """See `CallReader`."""
        name, self._name = self._name, ""
        return [_Numbered().call(name, text)] if name else [Call(0, "", text)]

    def finish(self) -> list[Piece]:
        """See `CallReader`."""
        return []


class RequiredCalls:
    """A list of `{"name", "arguments"}`. What was cut off before its end is shown as text."""

    def __init__(self) -> None:
        self._calls = _Numbered()
        self._held = ""
        self._scanner: JsonScanner | None = None

    def push(self, text: str) -> list[Piece]:
        """See `CallReader`."""
        pieces: list[Piece] = []
        self._held += text
        while True:
            if self._scanner is None:
                begin = self._held.find("{")
                if begin < 0:
                    return pieces
                self._held = self._held[begin:]
                self._scanner = JsonScanner()
            end = self._scanner.end_in(self._held)
            if end < 0:
                return pieces
            made = _call_of(_parsed(self._held[:end]), None)
            pieces.append(self._calls.call(*made) if made else self._held[:end])
            self._held = self._held[end:]
            self._scanner = None

    def finish(self) -> list[Piece]:
        """See `CallReader`."""
        held, self._held = self._held, ""
        return [held] if self._scanner is not None and held else []


class HermesCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen and many more."""

    _begin, _end = "<tool_call>", "</tool_call>"

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._calls = _Numbered()
        self._held = ""
        self._marked = ""
        """The marker of the call that is being read; "" outside."""

    def push(self, text: str) -> list[Piece]:
        """See `CallReader`."""
        pieces: list[Piece] = []
        held = self._held + text
        while held:
            if self._marked:
                inside, found, rest = held.partition(self._end)
                if not found:
                    break
                pieces += self._read(inside, self._end)
                held = rest
                continue
            text, found, rest = held.partition(self._begin)
            # White space before a call belongs to it.
            shown = len(text.rstrip()) if found else self._maybe_at(held)
            pieces += [held[:shown]] if shown else []
            if not found:
                held = held[shown:]
                break
            self._marked = held[shown : len(text)] + found
            held = rest
        self._held = held
        return pieces

    def finish(self) -> list[Piece]:
        """See `CallReader`. Some models end with a call and leave the closing tag out."""
        held, self._held = self._held, ""
        if self._marked:
            return self._read(held, "")
        return [held] if held and not (self._calls.count and held.isspace()) else []

    def _maybe_at(self, text: str) -> int:
        """Where something begins that the next text may turn into a call."""
        bracket = text.rfind("<", max(0, len(text) - len(self._begin)))
        end = bracket if bracket >= 0 and self._begin.startswith(text[bracket:]) else len(text)
        return len(text[:end].rstrip())

    def _read(self, inside: str, closing: str) -> list[Piece]:
        marked, self._marked = self._marked, ""
        made = _call_of(_parsed(inside), self._names)
        return [self._calls.call(*made) if made else marked + inside + closing]


class LlamaCalls:
    """The answer is `{"name": ..., "parameters": {...}}`, or several with `;` between them: Llama 3."""

    _tag = "<|python_tag|>"
    _opening = re.compile(r"\s*(?:\{\s*(?:\"(?:name|type|function|parameters|arguments)\"|\"[a-z]*\Z|\Z)|\Z)")

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._calls = _Numbered()
        self._held = ""
        self._plain = False
        self._tagged = False
        self._scanner: JsonScanner | None = None

    def push(self, text: str) -> list[Piece]:
        """See `CallReader`."""
        if self._plain:
            return [text] if text else []
        self._held += text
        if self._scanner is None and not self._tagged and self._tag.startswith(self._held.lstrip()[: len(self._tag)]):
            stripped = self._held.lstrip()
            if len(stripped) < len(self._tag):
                return []
            self._held, self._tagged = stripped[len(self._tag) :], True
        return self._objects()

    def _objects(self) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            if self._scanner is None:
                if self._calls.count:
                    self._held = self._held.lstrip("; \t\r\n")
                if not self._opening.match(self._held):
                    return [*pieces, *self._give_up()]
                if "{" not in self._held:
                    return pieces
                self._held = self._held[self._held.index("{") :]
                self._scanner = JsonScanner()
            elif not self._opening.match(self._held):
                return [*pieces, *self._give_up()]
            end = self._scanner.end_in(self._held)
            if end < 0:
                return pieces
            made = _call_of(_parsed(self._held[:end]), self._names)
            if made is None:
                return [*pieces, *self._give_up()]
            pieces.append(self._calls.call(*made))
            self._held, self._scanner = self._held[end:], None

    def _give_up(self) -> list[Piece]:
        self._plain = True
        held, self._held = self._held, ""
        return [held] if held else []

    def finish(self) -> list[Piece]:
        """See `CallReader`."""
        held, self._held = self._held, ""
        return [held] if held and not (self._calls.count and held.isspace()) else []


class MistralCalls:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name{...}`; calls come last.

    The marker is a special token, which may not be in the text: then the list must be all there is.
    """

    _marker = "[TOOL_CALLS]"
    _opening = re.compile(r"\s*(?:\[\s*(?:\{\s*(?:\"(?:name|arguments|id)\"|\"[a-z]*\Z|\Z)|\Z)|\Z)")
    _named = re.compile(r"\s*([A-Za-z0-9_.:\-]{1,128})\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._calls = _Numbered()
        self._held = ""
        self._marked = False
        self._first = True

    def push(self, text: str) -> list[Piece]:
        """See `CallReader`."""
        self._held += text
        if self._marked:
            return []
        at = self._held.find(self._marker)
        if at >= 0:
            self._marked = True
            before, self._held = self._held[:at], self._held[at:]
            return [before] if before else []
        if self._first and self._opening.match(self._held):
            return []
        keep = next(
            (size for size in range(len(self._marker) - 1, 0, -1) if self._held.endswith(self._marker[:size])), 0
        )
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._first = self._first and not shown
        return [shown] if shown else []

    def finish(self) -> list[Piece]:
        """See `CallReader`."""
        held, self._held = self._held, ""
        parts = [part for part in held.split(self._marker) if part.strip()] if self._marked else [held]
        found: list[tuple[str, str]] = []
        for part in parts if self._marked or self._first else []:
            made = self._of_part(part)
            if made is None:
                return [held] if held else []
            found += made
        if not found:
            return [held] if held else []
        return [self._calls.call(*made) for made in found]

    def _of_part(self, part: str) -> list[tuple[str, str]] | None:
        named = self._named.match(part)
        values: list[Any] | None
        if named is not None:
            values = values_in(part[named.end() :])
            if values is None or len(values) != 1 or named[1] not in self._names:
                return None
            return [(named[1], _json(values[0]))]
        values = _parsed(part)
        if not isinstance(values, list) or not values:
            return None
        made = [_call_of(value, self._names) for value in values]
        return [each for each in made if each is not None] if all(made) else None


CALL_FORMATS: dict[str, Callable[[frozenset[str]], CallReader]] = {
    "hermes": HermesCalls,
    "llama3": LlamaCalls,
    "mistral": MistralCalls,
}


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _json(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _call_of(value: Any, names: frozenset[str] | None) -> tuple[str, str] | None:
    """Name and arguments of what a model wrote; None if it is no call, or of something that is no tool."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    if not isinstance(name, str) or (names is not None and name not in names):
        return None
    arguments = value.get("arguments")
    if arguments is None:
        arguments = value.get("parameters")
    try:
        return name, "{}" if arguments is None else _json(arguments)
    except orjson.JSONEncodeError:  # nested more deeply than can be written
        return None
