# SPDX-License-Identifier: Apache-2.0
"""A subset of PromQL, evaluated over the metrics that replicas expose, without a Prometheus server. Pure: no clock.

    name{label="v"}                 with =, !=, =~, !~, and {__name__=~"a|b"}
    sum, avg, max, min, count       over all series at once
    rate, increase                  over name{...}[5m]
    clamp_min, clamp_max, vector
    + - * / and `or`                between numbers and series

Anything else in a query is named in the error. `rate` is the growth between the first and the last sample in its window,
divided by the time between them; a counter that fell was reset. `increase` is that for the whole window, or for as long as
the series is known. One difference to Prometheus: a series that is younger than the window does not count as constant
before. https://prometheus.io/docs/prometheus/latest/querying/basics/
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from headrace.core.errors import FailedPrecondition, InvalidArgument

AGGREGATIONS = ("sum", "avg", "max", "min", "count")
RANGES = ("rate", "increase")
CLAMPS = ("clamp_min", "clamp_max")
SUPPORTED = "name{label=...}, sum, avg, max, min, count, rate, increase, clamp_min, clamp_max, vector, + - * / and or"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_MAX_RANGE_SECONDS = 3600.0
_MAX_CHARACTERS, _MAX_DEPTH = 4096, 32
_MAX_REPEATS = 4
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
Labels = tuple[tuple[str, str], ...]
"""Label names and values, sorted by name; the name of the metric is `__name__`."""
Series = dict[Labels, float]
Value = float | Series
_POINTS = 60
"""Samples that are kept of each series in a window."""
_MAX_SERIES = 10_000
_AGGREGATE: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "avg": lambda values: math.fsum(values) / len(values),
    "max": max,
    "min": min,
    "count": lambda values: float(len(values)),
}
_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+\S+)?(?: # .*)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_LABEL_ESCAPES = {"n": "\n"}


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
class FunctionCall:
    """`sum(...)`, `clamp_min(..., 1)`, `vector(0)`."""

    function: str
    arguments: tuple[Expression, ...]


@dataclass(frozen=True)
class Binary:
    """`a / b`."""

    sign: str
    left: Expression
    right: Expression


Expression = Number | Selector | Range | FunctionCall | Binary


def parse_query(text: str) -> Expression:
    """Parse a query. Raises InvalidArgument that names what is not supported."""
    if len(text) > _MAX_CHARACTERS:
        raise InvalidArgument(f"the query has {len(text)} characters, more than {_MAX_CHARACTERS}: shorten it")
    parser = _Parser(_tokens(text))
    expression = parser.parse_or(0)
    if parser.kind:
        raise parser.unsupported()
    return expression


def parse_duration(text: str) -> float | None:
    """Return a duration such as `1m30s` in seconds; None if the text is not a duration."""
    if re.fullmatch(r"(?:[0-9]+(?:ms|[smhdwy]))+", text) is None:
        return None
    return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"([0-9]+)(ms|[smhdwy])", text))


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None or token.lastgroup is None:
            raise InvalidArgument(f"the query cannot be parsed from {text[position : position + 20].strip()!a} on")
        tokens.append((token.lastgroup, token[token.lastgroup]))
        position = token.end()
    return tokens


class _Parser:
    """A recursive-descent parser."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._position = 0

    @property
    def kind(self) -> str:
        """Kind of the next token; "" at the end."""
        return self._tokens[self._position][0] if self._position < len(self._tokens) else ""

    @property
    def text(self) -> str:
        """Text of the next token; "" at the end."""
        return self._tokens[self._position][1] if self.kind else ""

    def unsupported(self, part: str = "") -> InvalidArgument:
        """Return the error for the next token."""
        text = part or (f"{self.text[:40]!a}" if self.kind else "its end")
        return InvalidArgument(f"the query has {text}, which is not supported: use {SUPPORTED}")

    def parse_or(self, depth: int) -> Expression:
        """Parse `a or b`, and all operators that bind more tightly."""
        if depth > _MAX_DEPTH:
            raise InvalidArgument(f"the query is nested deeper than {_MAX_DEPTH}: make it simpler")
        left = self._parse_sum(depth)
        while self.text == "or" and self.kind == "name":
            self._next()
            left = Binary("or", left, self._parse_sum(depth))
        return left

    def _parse_sum(self, depth: int) -> Expression:
        left = self._parse_product(depth)
        while self.kind == "sign" and self.text in "+-":
            left = Binary(self._next(), left, self._parse_product(depth))
        return left

    def _parse_product(self, depth: int) -> Expression:
        left = self._parse_unary(depth)
        while self.kind == "sign" and self.text in "*/":
            left = Binary(self._next(), left, self._parse_unary(depth))
        return left

    def _parse_unary(self, depth: int) -> Expression:
        if depth > _MAX_DEPTH:
            raise InvalidArgument(f"the query is nested deeper than {_MAX_DEPTH}: make it simpler")
        if self.text in ("-", "+") and self.kind == "sign":
            sign = self._next()
            operand = self._parse_unary(depth + 1)
            return Binary("*", Number(-1.0), operand) if sign == "-" else operand
        if self.kind == "number":
            return Number(float(self._next()))
        if self.text == "(":
            self._next()
            inner = self.parse_or(depth + 1)
            self._expect(")")
            return self._check_end(inner)
        if self.text == "{":
            return self._check_end(self._parse_selector(""))
        if self.kind != "name" or self.text in ("by", "without", "on", "ignoring", "and", "or", "unless", "offset"):
            raise self.unsupported()
        name = self._next()
        if self.text == "(":
            return self._check_end(self._parse_call(name, depth))
        if name in AGGREGATIONS and self.text in ("by", "without"):
            raise self.unsupported(f"{name} {self.text}")
        return self._check_end(self._parse_selector(name))

    def _parse_call(self, name: str, depth: int) -> Expression:
        if name not in (*AGGREGATIONS, *RANGES, *CLAMPS, "vector"):
            raise self.unsupported(f"{name}()")
        self._expect("(")
        if name in RANGES:
            call: Expression = self._parse_range(name)
        elif name in CLAMPS:
            first = self.parse_or(depth + 1)
            self._expect(",")
            call = FunctionCall(name, (first, self.parse_or(depth + 1)))
        else:
            call = FunctionCall(name, (self.parse_or(depth + 1),))
        self._expect(")")
        if self.text in ("by", "without") and self.kind == "name":
            raise self.unsupported(f"{name} {self.text}")
        return call

    def _parse_range(self, function: str) -> Range:
        name = self._next() if self.kind == "name" else ""
        if self.text == "(":
            raise self.unsupported(f"{function}({name}(...))")
        selector = self._parse_selector(name)
        self._expect("[")
        seconds = parse_duration(self.text) if self.kind == "duration" else None
        if seconds is None or not 0 < seconds <= _MAX_RANGE_SECONDS:
            raise self.unsupported(f"the window [{self.text[:20]}], where one of at most an hour is expected")
        self._next()
        self._expect("]")
        return Range(function, selector, seconds)

    def _parse_selector(self, name: str) -> Selector:
        matchers = [Matcher("__name__", "=", name)] if name else []
        if self.text == "{":
            self._next()
            while self.text != "}":
                matchers.append(self._parse_matcher())
                if self.text != "}":
                    self._expect(",")
            self._next()
        if not any(matcher.sign in ("=", "=~") and matcher.value for matcher in matchers):
            raise self.unsupported("a selector that matches every series")
        return Selector(tuple(matchers))

    def _parse_matcher(self) -> Matcher:
        if self.kind != "name":
            raise self.unsupported()
        label, sign = self._next(), self.text
        if sign not in ("=", "!=", "=~", "!~"):
            raise self.unsupported()
        self._next()
        if self.kind != "text":
            raise self.unsupported()
        value = re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), self._next()[1:-1])
        if sign in ("=~", "!~"):
            _check_pattern(value)
        return Matcher(label, sign, value)  # type: ignore[arg-type]  # one of the four, checked above

    def _check_end(self, expression: Expression) -> Expression:
        """Reject what may not follow an expression."""
        if self.kind and (self.text in ("[", "@") or self.text == "offset"):
            raise self.unsupported()
        return expression

    def _expect(self, sign: str) -> None:
        if self.text != sign or self.kind != "sign":
            raise self.unsupported(f"{self.text[:40]!a} where {sign!a} is expected" if self.kind else "")
        self._next()

    def _next(self) -> str:
        text = self.text
        self._position += 1
        return text


def _check_pattern(pattern: str) -> None:
    """Reject patterns that could take exponential time: Python's matcher backtracks, that of Prometheus does not."""
    bare = re.sub(r"\\.|\[[^\]]*\]", "x", pattern)
    if (
        re.search(r"\)\s*[*+{]", bare)
        or len(re.findall(r"[*+{]", bare)) > _MAX_REPEATS
        or "(?" in bare.replace("(?:", "")
    ):
        raise InvalidArgument(
            f"the query has the pattern {pattern[:60]!a}, which is not supported: use alternatives, and at most "
            f"{_MAX_REPEATS} repetitions, none of a group"
        )
    try:
        re.compile(pattern)
    except re.error:
        raise InvalidArgument(f"the query has {pattern[:60]!a}, which is not a regular expression") from None


class QueryEvaluator:
    """Evaluates one query, and keeps the samples that it needs."""

    def __init__(self, expression: Expression) -> None:
        self._expression = expression
        self._selectors = tuple(_selectors(expression))
        self._wanted_names: dict[str, bool] = {}
        self._now: Series = {}
        self._samples: dict[Range, dict[Labels, deque[tuple[float, float]]]] = {
            range_: {} for range_ in _ranges(expression)
        }

    def wants(self, name: str) -> bool:
        """Return whether the query uses a metric."""
        wanted = self._wanted_names.get(name)
        if wanted is None:
            wanted = any(
                all(_matches(matcher, name) for matcher in selector.matchers if matcher.label == "__name__")
                for selector in self._selectors
            )
            if len(self._wanted_names) < _MAX_SERIES:
                self._wanted_names[name] = wanted
        return wanted

    def add(self, now: float, series: Series) -> None:
        """Add the series of all replicas at a time. Raises FailedPrecondition."""
        if len(series) > _MAX_SERIES:
            raise FailedPrecondition(f"the query reads {len(series)} series, more than {_MAX_SERIES}: select fewer")
        self._now = series
        for range_, known in self._samples.items():
            for labels, value in _selected(range_.selector, series).items():
                points = known.setdefault(labels, deque(maxlen=2 * _POINTS))
                # The last sample is replaced until the one before it is old enough: the newest value always counts.
                if len(points) > 1 and points[-1][0] - points[-2][0] < range_.seconds / _POINTS:
                    points.pop()
                points.append((now, value))
            for labels in [labels for labels, points in known.items() if points[-1][0] <= now - range_.seconds]:
                del known[labels]

    def value(self, now: float) -> float:
        """Return the value of the query. Raises FailedPrecondition that says why there is none."""
        value = self._evaluate(self._expression, now)
        if isinstance(value, dict):
            if not value:
                raise FailedPrecondition("no replica exposes a metric of the query: look at their metrics")
            if len(value) > 1:
                raise FailedPrecondition(f"the query has {len(value)} values, not one: put sum(...) around it")
            (value,) = value.values()
        if not math.isfinite(value):
            raise FailedPrecondition(f"the value of the query is {value}, which cannot be used for scaling")
        return value

    def _evaluate(self, expression: Expression, now: float) -> Value:
        if isinstance(expression, Number):
            return expression.value
        if isinstance(expression, Selector):
            return _selected(expression, self._now)
        if isinstance(expression, Range):
            return self._growth(expression, now)
        if isinstance(expression, Binary):
            return _apply_operator(
                expression.sign, self._evaluate(expression.left, now), self._evaluate(expression.right, now)
            )
        first = self._evaluate(expression.arguments[0], now)
        if expression.function == "vector":
            return {(): _scalar(expression.function, first)}
        if not isinstance(first, dict):
            raise FailedPrecondition(f"the query has {expression.function}() of a number, not of series")
        if expression.function in _AGGREGATE:
            return {(): _AGGREGATE[expression.function](list(first.values()))} if first else {}
        bound = _scalar(expression.function, self._evaluate(expression.arguments[1], now))
        clamp = max if expression.function == "clamp_min" else min
        return _nameless({labels: clamp(value, bound) for labels, value in first.items()})

    def _growth(self, expression: Range, now: float) -> Series:
        result: Series = {}
        for labels, points in self._samples[expression].items():
            kept = [point for point in points if point[0] > now - expression.seconds]
            if len(kept) < 2:
                continue
            values = [value for _, value in kept]
            grown = math.fsum(after - before if after >= before else after for before, after in pairwise(values))
            passed = kept[-1][0] - kept[0][0]
            extrapolated = min(expression.seconds, passed * len(kept) / (len(kept) - 1))
            result[labels] = grown / passed * (extrapolated if expression.function == "increase" else 1.0)
        return _nameless(result)


def _apply_operator(sign: str, left: Value, right: Value) -> Value:
    if sign == "or":
        if not isinstance(left, dict) or not isinstance(right, dict):
            raise FailedPrecondition("the query has `or` with a number: write vector(0) for 0")
        return {**_nameless(right), **_nameless(left)}
    if isinstance(left, dict) and isinstance(right, dict):
        left, right = _nameless(left), _nameless(right)
        return {
            labels: _apply_arithmetic(sign, value, right[labels]) for labels, value in left.items() if labels in right
        }
    if isinstance(left, dict):
        other = _scalar(sign, right)
        return _nameless({labels: _apply_arithmetic(sign, value, other) for labels, value in left.items()})
    if isinstance(right, dict):
        return _nameless({labels: _apply_arithmetic(sign, left, value) for labels, value in right.items()})
    return _apply_arithmetic(sign, left, right)


def _apply_arithmetic(sign: str, left: float, right: float) -> float:
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    if right:
        return left / right
    return math.nan if not left or math.isnan(left) else math.copysign(math.inf, left) * math.copysign(1.0, right)


def _scalar(operator: str, value: Value) -> float:
    if isinstance(value, dict):
        raise FailedPrecondition(f"the query has series where {operator} needs a number")
    return value


def _nameless(series: Series) -> Series:
    """Drop the names of metrics, as every operation does. Raises FailedPrecondition if two series become equal."""
    result = {tuple(label for label in labels if label[0] != "__name__"): value for labels, value in series.items()}
    if len(result) != len(series):
        raise FailedPrecondition("the query combines series that differ only in their names: sum(...) them first")
    return result


def _selected(selector: Selector, series: Series) -> Series:
    result: Series = {}
    for labels, value in series.items():
        values = dict(labels)
        if all(_matches(matcher, values.get(matcher.label, "")) for matcher in selector.matchers):
            result[labels] = value
    return result


def _matches(matcher: Matcher, value: str) -> bool:
    if matcher.sign in ("=", "!="):
        return (matcher.value == value) == (matcher.sign == "=")
    # Patterns that could take long are rejected when the query is parsed.
    return (re.fullmatch(matcher.value, value[:1024]) is not None) == (matcher.sign == "=~")


def _walk(expression: Expression) -> Iterator[Expression]:
    yield expression
    below: tuple[Expression, ...] = ()
    if isinstance(expression, Binary):
        below = (expression.left, expression.right)
    elif isinstance(expression, FunctionCall):
        below = expression.arguments
    for part in below:
        yield from _walk(part)


def _ranges(expression: Expression) -> Iterator[Range]:
    return (part for part in _walk(expression) if isinstance(part, Range))


def _selectors(expression: Expression) -> Iterator[Selector]:
    for part in _walk(expression):
        if isinstance(part, Selector):
            yield part
        elif isinstance(part, Range):
            yield part.selector


def parse_exposition(text: str, is_wanted: Callable[[str], bool], target: Mapping[str, str]) -> Series:
    """Parse Prometheus text: series whose name `is_wanted` accepts, with labels of their replica. Skips invalid lines."""
    series: Series = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if not name or name.startswith("#") or not is_wanted(name):
            continue
        parts = _LINE.fullmatch(line.rstrip())
        if parts is None:
            continue
        try:
            value = float(parts[3])
        except ValueError:
            continue
        labels = {label: _unescape(label_value) for label, label_value in _LABEL.findall(parts[2] or "")}
        # As in Prometheus: a label of the replica that conflicts with a target label gets another name.
        own = {f"exported_{label}" if label in target else label: label_value for label, label_value in labels.items()}
        series[tuple(sorted({**own, **target, "__name__": name}.items()))] = value
    return series


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _LABEL_ESCAPES.get(match[1], match[1]), text) if "\\" in text else text
