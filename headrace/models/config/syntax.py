# SPDX-License-Identifier: Apache-2.0
"""Parse protobuf text, JSON and YAML configurations into a common tree with line numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import yaml

MAX_BYTES = 1 << 20
"""The largest configuration that is read. Typical ones have a few thousand bytes."""

MAX_DEPTH = 32
"""Maximum nesting of blocks and lists. The schema needs eight; the parsers recurse."""

MAX_TOKENS = 200_000
"""Maximum number of names, values and brackets: bounds the time, as MAX_BYTES bounds the memory."""

TOO_MANY = f"there are more than {MAX_TOKENS} names, values and brackets; no configuration needs that"


class SyntaxFault(Exception):
    """Raised for a syntax error. `drafts` turns it into a problem."""

    def __init__(self, line: int | None, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.text = text


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value."""

    line: int
    kind: Literal["text", "word", "number", "bool", "null"]
    """"text" is a quoted string, or a string of YAML; "word" exists only in protobuf text: TYPE_FP32, true."""
    text: str
    start: int = -1
    """Position in the text; only set for protobuf text."""
    end: int = -1


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    line: int
    items: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entry:
    """A name and its value."""

    name: str
    line: int
    value: Node
    start: int = -1
    end: int = -1


@dataclass(frozen=True, slots=True)
class Block:
    """Names with values, in the order of the file, with repeated names."""

    line: int
    entries: list[Entry] = field(default_factory=list)


Node = Scalar | Items | Block


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
    """"text" (quoted), "word", "symbol" or "end"."""
    text: str
    line: int
    start: int
    end: int


def parse_text(text: str) -> Block:
    """Parse protobuf text."""
    return _Parser(text).parse()


def _tokens(text: str) -> Iterator[_Token]:
    line = 1
    for count, match in enumerate(_TOKEN.finditer(text)):
        # Twice the limit, because most tokens follow a space.
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
    """A parser with one token of look-ahead. Keeps the open brackets, to name the one that is not closed."""

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
                    next_text = _shown(self._token)
                    raise self._fault(f"',' or ']' is missing before '{next_text}', in the list of line {opened.line}")
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


_JSON_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    |(?P<text>"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4}))*")
    |(?P<symbol>[{}\[\]:,])
    |(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)(?![0-9A-Za-z_.])
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<wrong>.)""",
    re.VERBOSE | re.DOTALL,
)
_JSON_ERRORS = {
    "'": "texts are in double quotes in JSON: \" instead of '",
    '"': "this text is not closed in its line, or has a '\\' before a character that needs none",
    "#": "JSON has no comments; remove this one",
    "/": "JSON has no comments; remove this one",
}


class _JsonToken(NamedTuple):
    kind: str
    text: str
    line: int


def parse_json(text: str) -> Block:
    """Parse a JSON object."""
    parser = _JsonParser(text)
    if not parser.at("{"):
        raise SyntaxFault(parser.token.line, "a configuration is one JSON object: begin with '{'")
    tree = parser.block(0)
    if parser.token.kind != "end":
        raise SyntaxFault(parser.token.line, f"'{parser.token.text[:40]}' comes after the end of the object; remove it")
    return tree


def _json_tokens(text: str) -> Iterator[_JsonToken]:
    line = 1
    for count, match in enumerate(_JSON_TOKEN.finditer(text)):
        # Twice the limit, because most tokens follow a space.
        if count > 2 * MAX_TOKENS:
            raise SyntaxFault(line, TOO_MANY)
        kind = match.lastgroup or "wrong"
        if kind == "space":
            line += match[0].count("\n")
        elif kind == "wrong":
            raise SyntaxFault(line, _JSON_ERRORS.get(match[0], f"{match[0]!a} cannot stand here"))
        else:
            yield _JsonToken(kind, match[0], line)
    yield _JsonToken("end", "the end of the file", line)


class _JsonParser:
    def __init__(self, text: str) -> None:
        self._tokens = _json_tokens(text)
        self.token = next(self._tokens)

    def at(self, symbol: str) -> bool:
        return self.token.kind == "symbol" and self.token.text == symbol

    def _take(self) -> _JsonToken:
        token = self.token
        if token.kind != "end":
            self.token = next(self._tokens)
        return token

    def _has_next(self, opened: _JsonToken, closing: str) -> bool:
        """After an element: return True after a comma, False after the closing bracket."""
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
            more = self._has_next(opened, "}")
        return block

    def _enter(self, depth: int) -> _JsonToken:
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
            more = self._has_next(opened, "]")
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


def _text(token: _JsonToken) -> str:
    text: str = json.loads(token.text)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SyntaxFault(token.line, "this text has half of a surrogate pair, which no text may have") from None
    return text


_YAML_ERRORS = {
    "mapping values are not allowed": "a ':' too many in this line, or the line before is indented wrongly",
    "found character '\\t'": "there is a tab; indent with spaces",
    "while scanning a quoted scalar": "a quote is not closed",
    "did not find expected ',' or ']'": "',' or ']' is missing",
    "did not find expected ',' or '}'": "',' or '}' is missing",
    "expected ',' or ']'": "',' or ']' is missing",
    "expected ',' or '}'": "',' or '}' is missing",
    "could not find expected ':'": "a ':' is missing after the name",
}


def parse_yaml(text: str) -> Block:
    """Parse a YAML mapping."""
    events = _bounded(yaml.parse(text, Loader=yaml.SafeLoader))
    try:
        tree = _document(events)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        error_text = f"{error.context} {error.problem}"
        advice = next((text for fragment, text in _YAML_ERRORS.items() if fragment in error_text), "this is not YAML")
        raise SyntaxFault(None if mark is None else mark.line + 1, advice) from None
    # ValueError: an escape in a quoted text names a code point that does not exist.
    except (yaml.YAMLError, ValueError):
        raise SyntaxFault(None, "the file has characters that YAML does not allow") from None
    return tree


def _bounded(events: Iterable[Any]) -> Iterator[Any]:
    for count, event in enumerate(events):
        # A quarter of the limit: parsing YAML takes four times as long.
        if count > MAX_TOKENS // 4:
            raise SyntaxFault(_line(event), TOO_MANY)
        yield event


def _document(events: Iterator[Any]) -> Block:
    tree: Node | None = None
    resolver: Any = yaml.SafeLoader("")
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            if tree is not None:
                raise SyntaxFault(_line(event), "a second document begins here; a file has one")
            tree = _node(next(events), events, resolver, 0)
    if tree is None or (isinstance(tree, Scalar) and tree.kind == "null"):
        return Block(1)
    if not isinstance(tree, Block):
        raise SyntaxFault(tree.line, "a configuration is a mapping: write lines like 'name: value'")
    return tree


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _node(event: Any, events: Iterator[Any], resolver: Any, depth: int) -> Node:
    line = _line(event)
    if isinstance(event, yaml.AliasEvent):
        raise SyntaxFault(line, f"aliases (*{str(event.anchor)[:40]}) are not supported here; write it out")
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event, resolver, line)
    if depth >= MAX_DEPTH:
        raise SyntaxFault(line, f"more than {MAX_DEPTH} levels are nested here")
    if isinstance(event, yaml.SequenceStartEvent):
        items = Items(line)
        for inner in events:
            if isinstance(inner, yaml.SequenceEndEvent):
                break
            items.items.append(_node(inner, events, resolver, depth + 1))
        return items
    block = Block(line)
    for inner in events:
        if isinstance(inner, yaml.MappingEndEvent):
            break
        if not isinstance(inner, yaml.ScalarEvent):
            raise SyntaxFault(_line(inner), "a name is missing before this value")
        value = _node(next(events), events, resolver, depth + 1)
        block.entries.append(Entry(inner.value, _line(inner), value))
    return block


def _scalar(event: Any, resolver: Any, line: int) -> Scalar:
    tag = resolver.resolve(yaml.ScalarNode, event.value, event.implicit) if event.tag is None else "text"
    kind = tag.rpartition(":")[2]
    if kind == "null":
        return Scalar(line, "null", "")
    # A date or a number with colons is a text: no field takes one.
    if kind not in ("bool", "int", "float") or ":" in event.value:
        return Scalar(line, "text", event.value)
    node = yaml.ScalarNode(tag, event.value)
    try:
        value = resolver.construct_object(node)
        written = repr(value)
    except ValueError:
        # More digits than Python converts to a number.
        return Scalar(line, "text", event.value)
    if kind == "bool":
        return Scalar(line, "bool", "true" if value else "false")
    return Scalar(line, "number", written)
