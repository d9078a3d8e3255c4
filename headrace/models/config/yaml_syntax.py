# SPDX-License-Identifier: Apache-2.0
"""YAML (`config.yaml`) as a tree.

Called by `drafts`. Built from the parser's events, which keep their lines; plain scalars mean what `yaml.safe_load`
makes of them. Aliases are refused: a few lines of them can stand for more than fits into memory. Knows no field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from headrace.models.config.trees import MAX_DEPTH, MAX_TOKENS, TOO_MANY, Block, Entry, Items, Node, Scalar, SyntaxFault

_ADVICE = {
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
    """The tree of a YAML mapping."""
    events = _bounded(yaml.parse(text, Loader=yaml.SafeLoader))
    try:
        tree = _document(events)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = f"{error.context} {error.problem}"
        advice = next((text for words, text in _ADVICE.items() if words in said), "this is not YAML")
        raise SyntaxFault(None if mark is None else mark.line + 1, advice) from None
    # ValueError: an escape in a quoted text names a code point that does not exist.
    except (yaml.YAMLError, ValueError):
        raise SyntaxFault(None, "the file has characters that YAML does not allow") from None
    return tree


def _bounded(events: Iterable[Any]) -> Iterator[Any]:
    for count, event in enumerate(events):
        # A quarter: YAML takes that much longer.
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
        raise SyntaxFault(line, f"aliases (*{str(event.anchor)[:40]}) are not taken here; write it out")
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event, resolver, line)
    if depth >= MAX_DEPTH:
        raise SyntaxFault(line, f"more than {MAX_DEPTH} levels lie in each other here")
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
    # A date or a number with colons is a text here: nothing in a configuration is one.
    if kind not in ("bool", "int", "float") or ":" in event.value:
        return Scalar(line, "text", event.value)
    node = yaml.ScalarNode(tag, event.value)
    try:
        value = resolver.construct_object(node)
        written = repr(value)
    except ValueError:
        # More digits than Python turns into a number.
        return Scalar(line, "text", event.value)
    if kind == "bool":
        return Scalar(line, "bool", "true" if value else "false")
    return Scalar(line, "number", written)
