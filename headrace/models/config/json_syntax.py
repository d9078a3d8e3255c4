# SPDX-License-Identifier: Apache-2.0
"""JSON (`config.json`, and configurations that come with a load) as a tree.

Called by `drafts`. A parser of our own because the library's gives no lines for what it could read, and recurses as
deep as it is told to. Knows no field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from headrace.models.config.trees import MAX_DEPTH, MAX_TOKENS, TOO_MANY, Block, Entry, Items, Node, Scalar, SyntaxFault

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    |(?P<text>"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4}))*")
    |(?P<symbol>[{}\[\]:,])
    |(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)(?![0-9A-Za-z_.])
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<wrong>.)""",
    re.VERBOSE | re.DOTALL,
)
_WRONG = {
    "'": "texts are in double quotes in JSON: \" instead of '",
    '"': "this text is not closed in its line, or has a '\\' before a character that needs none",
    "#": "JSON has no comments; remove this one",
    "/": "JSON has no comments; remove this one",
}


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def parse_json(text: str) -> Block:
    """The tree of a JSON object."""
    parser = _Parser(text)
    if not parser.at("{"):
        raise SyntaxFault(parser.token.line, "a configuration is one JSON object: begin with '{'")
    tree = parser.block(0)
    if parser.token.kind != "end":
        raise SyntaxFault(parser.token.line, f"'{parser.token.text[:40]}' comes after the end of the object; remove it")
    return tree


def _lex(text: str) -> Iterator[_Token]:
    line = 1
    for count, match in enumerate(_TOKEN.finditer(text)):
        # Twice, because there is a space before most of them.
        if count > 2 * MAX_TOKENS:
            raise SyntaxFault(line, TOO_MANY)
        kind = match.lastgroup or "wrong"
        if kind == "space":
            line += match[0].count("\n")
        elif kind == "wrong":
            raise SyntaxFault(line, _WRONG.get(match[0], f"{match[0]!a} cannot stand here"))
        else:
            yield _Token(kind, match[0], line)
    yield _Token("end", "the end of the file", line)


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = _lex(text)
        self.token = next(self._tokens)

    def at(self, symbol: str) -> bool:
        return self.token.kind == "symbol" and self.token.text == symbol

    def _take(self) -> _Token:
        token = self.token
        if token.kind != "end":
            self.token = next(self._tokens)
        return token

    def _separated(self, opened: _Token, closing: str) -> bool:
        """After an element: take the comma and say True, or the bracket and say False."""
        if self.at(closing):
            self._take()
            return False
        if self.token.kind == "end":
            raise SyntaxFault(opened.line, f"'{opened.text}' is never closed; add '{closing}'")
        if not self.at(","):
            raise SyntaxFault(self.token.line, f"',' or '{closing}' is missing before {self.token.text[:40]}")
        self._take()
        if self.at(closing):
            raise SyntaxFault(self.token.line, f"there is a comma before '{closing}'; remove it")
        return True

    def block(self, depth: int) -> Block:
        opened = self._enter(depth)
        block = Block(opened.line)
        more = not self.at("}")
        if not more:
            self._take()
        while more:
            name = self._take()
            if name.kind == "end":
                raise SyntaxFault(opened.line, "'{' is never closed; add '}'")
            if name.kind != "text":
                raise SyntaxFault(name.line, f"{name.text[:40]} stands where a name in double quotes should")
            if not self.at(":"):
                raise SyntaxFault(name.line, f"after {name.text[:40]} a ':' is missing")
            self._take()
            block.entries.append(Entry(_text(name), name.line, self._value(depth)))
            more = self._separated(opened, "}")
        return block

    def _enter(self, depth: int) -> _Token:
        if depth >= MAX_DEPTH:
            raise SyntaxFault(self.token.line, f"more than {MAX_DEPTH} brackets are open here")
        return self._take()

    def _items(self, depth: int) -> Items:
        opened = self._enter(depth)
        items = Items(opened.line)
        more = not self.at("]")
        if not more:
            self._take()
        while more:
            items.items.append(self._value(depth))
            more = self._separated(opened, "]")
        return items

    def _value(self, depth: int) -> Node:
        if self.at("{"):
            return self.block(depth + 1)
        if self.at("["):
            return self._items(depth + 1)
        token = self._take()
        if token.kind == "text":
            return Scalar(token.line, "text", _text(token))
        if token.kind == "number":
            return Scalar(token.line, "number", token.text)
        if token.text in ("true", "false"):
            return Scalar(token.line, "bool", token.text)
        if token.text == "null":
            return Scalar(token.line, "null", "null")
        if token.kind == "word":
            raise SyntaxFault(token.line, f'write "{token.text[:40]}" in double quotes')
        raise SyntaxFault(token.line, f"a value is missing before {token.text[:40]}")


def _text(token: _Token) -> str:
    text: str = json.loads(token.text)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SyntaxFault(token.line, "this text has half of a surrogate pair, which no text may have") from None
    return text
