# SPDX-License-Identifier: Apache-2.0
"""The part of PromQL that is understood without a Prometheus: a text becomes a tree. Computed by `computing`.

    name{label="v"}                 with =, !=, =~, !~, and {__name__=~"a|b"}
    sum, avg, max, min, count       over all series at once
    rate, increase                  over name{...}[5m]
    clamp_min, clamp_max, vector
    + - * / and `or`                between numbers and series

Whatever else is in a text is named in the error, so that nobody has to guess why a service is not scaled.
https://prometheus.io/docs/prometheus/latest/querying/basics/
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import InvalidArgument

AGGREGATIONS = ("sum", "avg", "max", "min", "count")
RANGES = ("rate", "increase")
CLAMPS = ("clamp_min", "clamp_max")
UNDERSTOOD = "name{label=...}, sum, avg, max, min, count, rate, increase, clamp_min, clamp_max, vector, + - * / and or"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_LONGEST_SECONDS = 3600.0
_LONGEST, _DEEPEST = 4096, 32
_MOST_REPEATS = 4
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<duration>(?:[0-9]+(?:ms|[smhdwy]))+)(?![A-Za-z0-9_:])
    | (?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?![A-Za-z0-9_:.])
    | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
    | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^(){}\[\],=<>@])
    )""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass(frozen=True)
class Number:
    """`0.5`."""

    value: float


@dataclass(frozen=True)
class Matcher:
    """`label="v"`."""

    label: str
    sign: Literal["=", "!=", "=~", "!~"]
    value: str


@dataclass(frozen=True)
class Selector:
    """`name{label="v"}`; the name is a matcher of `__name__`."""

    matchers: tuple[Matcher, ...]


@dataclass(frozen=True)
class Range:
    """`rate(name[5m])`."""

    function: str
    selector: Selector
    seconds: float


@dataclass(frozen=True)
class Call:
    """`sum(...)`, `clamp_min(..., 1)`, `vector(0)`."""

    function: str
    arguments: tuple[Expression, ...]


@dataclass(frozen=True)
class Binary:
    """`a / b`."""

    sign: str
    left: Expression
    right: Expression


Expression = Number | Selector | Range | Call | Binary


def read_query(text: str) -> Expression:
    """The tree of a text. Raises InvalidArgument that names what is not understood."""
    if len(text) > _LONGEST:
        raise InvalidArgument(f"the query has {len(text)} characters, and at most {_LONGEST} are read: shorten it")
    reader = _Reader(_tokens(text))
    found = reader.either(0)
    if reader.kind:
        raise reader.unsupported()
    return found


def duration(text: str) -> float | None:
    """`1m30s` in seconds; None for what is none."""
    if re.fullmatch(r"(?:[0-9]+(?:ms|[smhdwy]))+", text) is None:
        return None
    return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"([0-9]+)(ms|[smhdwy])", text))


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None or token.lastgroup is None:
            raise InvalidArgument(f"the query is not understood from {text[place : place + 20].strip()!a} on")
        found.append((token.lastgroup, token[token.lastgroup]))
        place = token.end()
    return found


class _Reader:
    """Reads tokens from the left; each method reads one kind of thing."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._at = 0

    @property
    def kind(self) -> str:
        """Of the next token; "" at the end."""
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    @property
    def word(self) -> str:
        """The next token."""
        return self._tokens[self._at][1] if self.kind else ""

    def unsupported(self, what: str = "") -> InvalidArgument:
        """What is wrong with the next token."""
        said = what or (f"{self.word[:40]!a}" if self.kind else "its end")
        return InvalidArgument(f"the query has {said}, which is not understood here: write it with {UNDERSTOOD}")

    def either(self, depth: int) -> Expression:
        """`a or b`, and all below."""
        if depth > _DEEPEST:
            raise InvalidArgument(f"the query is nested deeper than {_DEEPEST}: make it simpler")
        left = self._sum(depth)
        while self.word == "or" and self.kind == "name":
            self._next()
            left = Binary("or", left, self._sum(depth))
        return left

    def _sum(self, depth: int) -> Expression:
        left = self._product(depth)
        while self.kind == "sign" and self.word in "+-":
            left = Binary(self._next(), left, self._product(depth))
        return left

    def _product(self, depth: int) -> Expression:
        left = self._one(depth)
        while self.kind == "sign" and self.word in "*/":
            left = Binary(self._next(), left, self._one(depth))
        return left

    def _one(self, depth: int) -> Expression:
        if depth > _DEEPEST:
            raise InvalidArgument(f"the query is nested deeper than {_DEEPEST}: make it simpler")
        if self.word in ("-", "+") and self.kind == "sign":
            sign = self._next()
            found = self._one(depth + 1)
            return Binary("*", Number(-1.0), found) if sign == "-" else found
        if self.kind == "number":
            return Number(float(self._next()))
        if self.word == "(":
            self._next()
            found = self.either(depth + 1)
            self._take(")")
            return self._plain(found)
        if self.word == "{":
            return self._plain(self._selector(""))
        if self.kind != "name" or self.word in ("by", "without", "on", "ignoring", "and", "or", "unless", "offset"):
            raise self.unsupported()
        name = self._next()
        if self.word == "(":
            return self._plain(self._call(name, depth))
        if name in AGGREGATIONS and self.word in ("by", "without"):
            raise self.unsupported(f"{name} {self.word}")
        return self._plain(self._selector(name))

    def _call(self, name: str, depth: int) -> Expression:
        if name not in (*AGGREGATIONS, *RANGES, *CLAMPS, "vector"):
            raise self.unsupported(f"{name}()")
        self._take("(")
        if name in RANGES:
            found: Expression = self._range(name)
        elif name in CLAMPS:
            first = self.either(depth + 1)
            self._take(",")
            found = Call(name, (first, self.either(depth + 1)))
        else:
            found = Call(name, (self.either(depth + 1),))
        self._take(")")
        if self.word in ("by", "without") and self.kind == "name":
            raise self.unsupported(f"{name} {self.word}")
        return found

    def _range(self, function: str) -> Range:
        name = self._next() if self.kind == "name" else ""
        if self.word == "(":
            raise self.unsupported(f"{function}({name}(...))")
        selector = self._selector(name)
        self._take("[")
        seconds = duration(self.word) if self.kind == "duration" else None
        if seconds is None or not 0 < seconds <= _LONGEST_SECONDS:
            raise self.unsupported(f"the window [{self.word[:20]}], where one of at most an hour has to stand")
        self._next()
        self._take("]")
        return Range(function, selector, seconds)

    def _selector(self, name: str) -> Selector:
        matchers = [Matcher("__name__", "=", name)] if name else []
        if self.word == "{":
            self._next()
            while self.word != "}":
                matchers.append(self._matcher())
                if self.word != "}":
                    self._take(",")
            self._next()
        if not any(each.sign in ("=", "=~") and each.value for each in matchers):
            raise self.unsupported("a selector that says nothing of what is looked for")
        return Selector(tuple(matchers))

    def _matcher(self) -> Matcher:
        if self.kind != "name":
            raise self.unsupported()
        label, sign = self._next(), self.word
        if sign not in ("=", "!=", "=~", "!~"):
            raise self.unsupported()
        self._next()
        if self.kind != "text":
            raise self.unsupported()
        value = re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), self._next()[1:-1])
        if sign in ("=~", "!~"):
            _check_pattern(value)
        return Matcher(label, sign, value)  # type: ignore[arg-type]  # one of the four, as was looked at above

    def _plain(self, found: Expression) -> Expression:
        """What may not follow a thing that is whole."""
        if self.kind and (self.word in ("[", "@") or self.word == "offset"):
            raise self.unsupported()
        return found

    def _take(self, sign: str) -> None:
        if self.word != sign or self.kind != "sign":
            raise self.unsupported(f"{self.word[:40]!a} where {sign!a} has to stand" if self.kind else "")
        self._next()

    def _next(self) -> str:
        word = self.word
        self._at += 1
        return word


def _check_pattern(pattern: str) -> None:
    """Refuse what could take Python's matcher for ever: it goes back, which Prometheus' own does not."""
    bare = re.sub(r"\\.|\[[^\]]*\]", "x", pattern)
    if (
        re.search(r"\)\s*[*+{]", bare)
        or len(re.findall(r"[*+{]", bare)) > _MOST_REPEATS
        or "(?" in bare.replace("(?:", "")
    ):
        raise InvalidArgument(
            f"the query has the pattern {pattern[:60]!a}, which is not understood here: write alternatives, and at most "
            f"{_MOST_REPEATS} repetitions, none of a group"
        )
    try:
        re.compile(pattern)
    except re.error:
        raise InvalidArgument(f"the query has {pattern[:60]!a}, which is no regular expression") from None
