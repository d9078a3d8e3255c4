# SPDX-License-Identifier: Apache-2.0
"""Protobuf text (`config.pbtxt`) as a tree, and what people get wrong in it.

Called by `drafts`, before protobuf's own parser reads the same text: that one decides what the text means, this one
knows lines and says what to write instead. Takes all that protobuf takes for our schema. Knows no field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.models.config.trees import MAX_DEPTH, MAX_TOKENS, TOO_MANY, Block, Entry, Items, Node, Scalar, SyntaxFault

_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<text>"(?:[^"\n\\]|\\.)*"|'(?:[^'\n\\]|\\.)*')
    |(?P<symbol>[{}\[\]<>:,;])
    |(?P<word>[^\s{}\[\]<>:,;"'\#]+)
    |(?P<open>["'])""",
    re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[-+]?\.?[0-9]")
_CLOSING = {"{": "}", "<": ">", "[": "]"}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """"text" in quotes, "word", "symbol" or "end"."""
    text: str
    line: int
    start: int
    end: int


def parse_text(text: str) -> Block:
    """The tree of a protobuf text."""
    return _Parser(text).parse()


def _tokens(text: str) -> Iterator[_Token]:
    line = 1
    for count, match in enumerate(_TOKEN.finditer(text)):
        # Twice, because there is a space before most of them.
        if count > 2 * MAX_TOKENS:
            raise SyntaxFault(line, TOO_MANY)
        kind = match.lastgroup
        if kind == "open":
            raise SyntaxFault(
                line, f"the quote {match[0]} is not closed in this line; add {match[0]} where the text ends"
            )
        if kind == "space":
            line += match[0].count("\n")
        elif kind is not None:
            yield _Token(kind, match[0], line, match.start(), match.end())
    yield _Token("end", "the end of the file", line, len(text), len(text))


class _Parser:
    """Reads tokens one ahead. Keeps the brackets that are open, to name the one that somebody forgot."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._open: list[_Token] = []
        self._token = next(self._tokens)

    def parse(self) -> Block:
        block = Block(1)
        while self._token.kind != "end":
            block.entries.append(self._entry())
        return block

    def _take(self) -> _Token:
        token = self._token
        if token.kind != "end":
            self._token = next(self._tokens)
        return token

    def _at(self, symbols: str) -> bool:
        return self._token.kind == "symbol" and self._token.text in symbols

    def _fault(self, text: str) -> SyntaxFault:
        return SyntaxFault(self._token.line, text)

    def _entry(self) -> Entry:
        name = self._name()
        value = self._value(name)
        if self._at(",;"):
            self._take()
        return Entry(name.text, name.line, value, name.start, name.end)

    def _name(self) -> _Token:
        token = self._token
        if token.kind == "text":
            raise self._fault(f"{_shown(token)} stands where a field's name should; names have no quotes")
        if token.kind == "symbol":
            raise self._misplaced()
        if token.text.startswith(("//", "/*")):
            raise self._fault("comments begin with '#'")
        if _NUMBER.match(token.text):
            raise self._fault(f"{_shown(token)} stands where a field's name should; several values go into [ ]")
        if not _NAME.fullmatch(token.text):
            raise self._fault(f"{_shown(token)} is not the name of a field")
        return self._take()

    def _misplaced(self) -> SyntaxFault:
        token = self._token
        if self._open and token.text in "}>]":
            opened = self._open[-1]
            closing = _CLOSING[opened.text]
            return self._fault(
                f"'{token.text}' comes before the '{opened.text}' of line {opened.line} is closed; add '{closing}'"
            )
        if token.text in "}>]":
            return self._fault(f"'{token.text}' closes nothing; remove it, or add the bracket that opens")
        if token.text == ",":
            return self._fault("there is a comma too many here; remove it")
        return self._fault(f"'{token.text}' stands where a field's name should")

    def _value(self, name: _Token) -> Node:
        if self._at(":"):
            self._take()
            if self._at("["):
                return self._items(name)
            return self._block() if self._at("{<") else self._scalar(name)
        if self._at("{<"):
            return self._block()
        if self._at("["):
            items = self._items(name)
            if any(isinstance(item, Scalar) for item in items.items):
                raise SyntaxFault(name.line, f"after '{_shown(name)}' a ':' is missing")
            return items
        if self._token.text.startswith("="):
            raise self._fault(f"write '{name.text}:' instead of '{name.text} ='")
        raise SyntaxFault(name.line, f"after '{_shown(name)}' a ':' is missing")

    def _scalar(self, name: _Token) -> Scalar:
        token = self._token
        if token.kind == "text":
            pieces = [self._take()]
            while self._token.kind == "text":
                pieces.append(self._take())
            content = "".join(piece.text[1:-1] for piece in pieces)
            return Scalar(token.line, "text", content, token.start, pieces[-1].end)
        if token.kind != "word":
            raise SyntaxFault(name.line, f"after '{_shown(name)}:' the value is missing")
        if token.text.startswith("("):
            raise self._fault(f"several values go into [ ]: write {name.text}: [ ... ]")
        self._take()
        if self._at(":"):
            if token.line != name.line:
                raise SyntaxFault(name.line, f"after '{_shown(name)}:' the value is missing")
            raise self._fault(f"a text with ':' in it needs quotes, and a field before '{_shown(token)}:' a value")
        kind: Literal["number", "word"] = "number" if _NUMBER.match(token.text) else "word"
        return Scalar(token.line, kind, token.text, token.start, token.end)

    def _enter(self) -> _Token:
        if len(self._open) >= MAX_DEPTH:
            raise self._fault(f"more than {MAX_DEPTH} brackets are open here; no configuration needs that")
        self._open.append(self._take())
        return self._open[-1]

    def _unclosed(self, opened: _Token) -> SyntaxFault:
        return SyntaxFault(opened.line, f"'{opened.text}' is never closed; add '{_CLOSING[opened.text]}'")

    def _block(self) -> Block:
        opened = self._enter()
        block = Block(opened.line)
        while not self._at(_CLOSING[opened.text]):
            if self._token.kind == "end":
                raise self._unclosed(opened)
            block.entries.append(self._entry())
        self._take()
        self._open.pop()
        return block

    def _items(self, name: _Token) -> Items:
        opened = self._enter()
        items = Items(opened.line)
        if not self._at("]"):
            while True:
                if self._token.kind == "end":
                    raise self._unclosed(opened)
                items.items.append(self._block() if self._at("{<") else self._element(name))
                if self._at("]"):
                    break
                if self._token.kind == "end":
                    raise self._unclosed(opened)
                if not self._at(","):
                    found = _shown(self._token)
                    raise self._fault(f"',' or ']' is missing before '{found}', in the list of line {opened.line}")
                self._take()
                if self._at("]"):
                    raise self._fault(f"the list of '{name.text}' has a comma before its ']'; remove that comma")
        self._take()
        self._open.pop()
        return items

    def _element(self, name: _Token) -> Scalar:
        if self._at("["):
            raise self._fault(f"'{name.text}' has a list in its list; write all values in one [ ]")
        if self._at("]}>,;:"):
            raise self._misplaced()
        return self._scalar(name)


def _shown(token: _Token) -> str:
    return token.text if len(token.text) <= 40 else token.text[:40] + "..."
