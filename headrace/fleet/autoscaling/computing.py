# SPDX-License-Identifier: Apache-2.0
"""The value of a query over what replicas tell, from look to look. Fed by `local.scaling`; has no clock.

`rate` is the growth between the first and the last look in its window, divided by the time between them, and a counter that
fell has begun anew; `increase` is that for the whole window, or for as long as the series has been known. There is one
difference to Prometheus: a series that is younger than the window is not counted as if it had stood still before.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

from headrace.core.errors import FailedPrecondition
from headrace.fleet.autoscaling.exposition import Labels, Series
from headrace.fleet.autoscaling.queries import Binary, Call, Expression, Matcher, Number, Range, Selector

_POINTS = 60
"""Kept of each series in a window."""
_MOST_SERIES = 10_000

Value = float | Series
_AGGREGATE: dict[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "avg": lambda values: math.fsum(values) / len(values),
    "max": max,
    "min": min,
    "count": lambda values: float(len(values)),
}


class Computation:
    """One query, and what it remembers."""

    def __init__(self, expression: Expression) -> None:
        self._expression = expression
        self._selectors = tuple(_selectors(expression))
        self._known: dict[str, bool] = {}
        self._now: Series = {}
        self._past: dict[Range, dict[Labels, deque[tuple[float, float]]]] = {each: {} for each in _ranges(expression)}

    def wants(self, name: str) -> bool:
        """Whether a metric may count."""
        found = self._known.get(name)
        if found is None:
            found = any(
                all(_matches(each, name) for each in selector.matchers if each.label == "__name__")
                for selector in self._selectors
            )
            if len(self._known) < _MOST_SERIES:
                self._known[name] = found
        return found

    def add(self, now: float, series: Series) -> None:
        """What all replicas told at a time. Raises FailedPrecondition."""
        if len(series) > _MOST_SERIES:
            raise FailedPrecondition(f"the query reads {len(series)} series, more than {_MOST_SERIES}: name fewer")
        self._now = series
        for each, known in self._past.items():
            for labels, value in _selected(each.selector, series).items():
                points = known.setdefault(labels, deque(maxlen=2 * _POINTS))
                # The last point moves until the one before it is old enough: the newest value always counts.
                if len(points) > 1 and points[-1][0] - points[-2][0] < each.seconds / _POINTS:
                    points.pop()
                points.append((now, value))
            for labels in [labels for labels, points in known.items() if points[-1][0] <= now - each.seconds]:
                del known[labels]

    def value(self, now: float) -> float:
        """One number. Raises FailedPrecondition that says why there is none."""
        found = self._of(self._expression, now)
        if isinstance(found, dict):
            if not found:
                raise FailedPrecondition("no replica tells a metric that the query asks for: look at their metrics")
            if len(found) > 1:
                raise FailedPrecondition(f"the query has {len(found)} values, not one: put sum(...) around it")
            (found,) = found.values()
        if not math.isfinite(found):
            raise FailedPrecondition(f"the query gives {found}, which nothing can be scaled by")
        return found

    def _of(self, what: Expression, now: float) -> Value:
        if isinstance(what, Number):
            return what.value
        if isinstance(what, Selector):
            return _selected(what, self._now)
        if isinstance(what, Range):
            return self._grown(what, now)
        if isinstance(what, Binary):
            return _together(what.sign, self._of(what.left, now), self._of(what.right, now))
        first = self._of(what.arguments[0], now)
        if what.function == "vector":
            return {(): _scalar(what.function, first)}
        if not isinstance(first, dict):
            raise FailedPrecondition(f"the query has {what.function}() of a number, not of series")
        if what.function in _AGGREGATE:
            return {(): _AGGREGATE[what.function](list(first.values()))} if first else {}
        bound = _scalar(what.function, self._of(what.arguments[1], now))
        clamp = max if what.function == "clamp_min" else min
        return _nameless({labels: clamp(value, bound) for labels, value in first.items()})

    def _grown(self, what: Range, now: float) -> Series:
        made: Series = {}
        for labels, points in self._past[what].items():
            kept = [each for each in points if each[0] > now - what.seconds]
            if len(kept) < 2:
                continue
            values = [value for _, value in kept]
            grown = math.fsum(after - before if after >= before else after for before, after in pairwise(values))
            passed = kept[-1][0] - kept[0][0]
            whole = min(what.seconds, passed * len(kept) / (len(kept) - 1))
            made[labels] = grown / passed * (whole if what.function == "increase" else 1.0)
        return _nameless(made)


def _together(sign: str, left: Value, right: Value) -> Value:
    if sign == "or":
        if not isinstance(left, dict) or not isinstance(right, dict):
            raise FailedPrecondition("the query has `or` beside a number: write vector(0) for 0")
        return {**_nameless(right), **_nameless(left)}
    if isinstance(left, dict) and isinstance(right, dict):
        left, right = _nameless(left), _nameless(right)
        return {labels: _computed(sign, value, right[labels]) for labels, value in left.items() if labels in right}
    if isinstance(left, dict):
        other = _scalar(sign, right)
        return _nameless({labels: _computed(sign, value, other) for labels, value in left.items()})
    if isinstance(right, dict):
        return _nameless({labels: _computed(sign, left, value) for labels, value in right.items()})
    return _computed(sign, left, right)


def _computed(sign: str, left: float, right: float) -> float:
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    if right:
        return left / right
    return math.nan if not left or math.isnan(left) else math.copysign(math.inf, left) * math.copysign(1.0, right)


def _scalar(where: str, value: Value) -> float:
    if isinstance(value, dict):
        raise FailedPrecondition(f"the query has series where {where} needs a number")
    return value


def _nameless(series: Series) -> Series:
    """Without their names, as after every operation. Raises FailedPrecondition where two become one."""
    made = {tuple(each for each in labels if each[0] != "__name__"): value for labels, value in series.items()}
    if len(made) != len(series):
        raise FailedPrecondition("the query computes with series that differ in their names alone: sum(...) them first")
    return made


def _selected(selector: Selector, series: Series) -> Series:
    made: Series = {}
    for labels, value in series.items():
        told = dict(labels)
        if all(_matches(each, told.get(each.label, "")) for each in selector.matchers):
            made[labels] = value
    return made


def _matches(matcher: Matcher, value: str) -> bool:
    if matcher.sign in ("=", "!="):
        return (matcher.value == value) == (matcher.sign == "=")
    # Patterns that could take long were refused when the query was read.
    return (re.fullmatch(matcher.value, value[:1024]) is not None) == (matcher.sign == "=~")


def _parts(what: Expression) -> Iterator[Expression]:
    yield what
    below: tuple[Expression, ...] = ()
    if isinstance(what, Binary):
        below = (what.left, what.right)
    elif isinstance(what, Call):
        below = what.arguments
    for each in below:
        yield from _parts(each)


def _ranges(what: Expression) -> Iterator[Range]:
    return (each for each in _parts(what) if isinstance(each, Range))


def _selectors(what: Expression) -> Iterator[Selector]:
    for each in _parts(what):
        if isinstance(each, Selector):
            yield each
        elif isinstance(each, Range):
            yield each.selector
