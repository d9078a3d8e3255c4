# SPDX-License-Identifier: Apache-2.0
"""The metrics and labels that a PromQL expression uses, for comparing dashboards and rules with what Headrace emits.

`histogram_quantile(0.9, sum by (le) (rate(x_bucket{job=~"a"}[5m])))` uses the series `x_bucket` and its labels `job` and
`le`. A word that is no function, keyword or operator here counts as a series, so that misspelt ones are found too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

AGGREGATIONS = ("sum", "avg", "min", "max", "count", "topk")
FUNCTIONS = ("rate", "increase", "changes", "deriv", "histogram_quantile", "time", "vector")
OPERATORS = ("and", "or", "unless", "offset", "bool")
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<text>"[^"]*")
    | (?P<range>\[[^\]]*\])
    | (?P<number>[0-9][0-9.]*(?:e[0-9]+|ms|[smhdwy])?)
    | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
    | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/(){},=<>])
    )""",
    re.VERBOSE,
)
_LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_ALERT_LABEL = re.compile(r"\$labels\.(\w+)")
_VARIABLE = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")


@dataclass(frozen=True)
class Use:
    """A series in an expression, and the labels that the expression needs of it."""

    series: str
    labels: frozenset[str]


def uses(expression: str) -> list[Use]:
    """Return every series with the labels of its matchers, and of the aggregations around it."""
    return list(_Reader(expression).read(frozenset()))


def output_labels(expression: str, emitted: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the labels that results can have: those of the aggregations, or of the series if there are none."""
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    if grouped or re.search(r"\b(?:" + "|".join(AGGREGATIONS) + r")\(", expression):
        return frozenset(label.strip() for labels in grouped for label in labels.split(","))
    return frozenset[str]().union(*(emitted[use.series] for use in uses(expression)))


def legend_labels(legend: str) -> set[str]:
    """Return the labels in Grafana's `{{label}}`."""
    return set(_LEGEND_LABEL.findall(legend))


def annotation_labels(text: str) -> set[str]:
    """Return the labels in Prometheus' `{{ $labels.label }}`."""
    return set(_ALERT_LABEL.findall(text))


def variable_use(query: str) -> Use:
    """Return what the query of a dashboard's variable uses."""
    match = _VARIABLE.fullmatch(query)
    assert match, query
    (use,) = uses(match["selector"])
    return Use(use.series, use.labels | {match["label"]})


class _Reader:
    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._tokens = list(self._split())
        self._at = 0

    def _split(self) -> Iterator[tuple[str, str]]:
        at, text = 0, self._expression.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            assert match and match.lastgroup, f"cannot read {text[at:]!r} of {text!r}"
            yield match.lastgroup, match[match.lastgroup]
            at = match.end()

    def read(self, group: frozenset[str]) -> Iterator[Use]:
        """Read to the closing parenthesis. group: the labels of the aggregations around."""
        while self._at < len(self._tokens):
            kind, word = self._tokens[self._at]
            self._at += 1
            if word == ")":
                return
            if word == "(":
                yield from self.read(group)
            elif word in AGGREGATIONS:
                labels = self._labels() if self._next() == "by" else frozenset()
                assert group <= labels, f"{self._expression!r} drops {sorted(group - labels)} before it groups by them"
                self._expect("(")
                yield from self.read(labels)
            elif word in FUNCTIONS:
                self._expect("(")
                yield from self.read(group)
            elif word == "on":
                self._at -= 1
                self._labels()
            elif kind == "name" and word not in OPERATORS:
                yield Use(word, group | self._matchers())

    def _matchers(self) -> frozenset[str]:
        if self._next() != "{":
            return frozenset()
        self._at += 1
        labels = set()
        while (word := self._take()) != "}":
            if word == ",":
                continue
            labels.add(word)
            assert self._take() in ("=", "=~", "!=", "!~"), self._expression
            assert self._take().startswith('"'), self._expression
        return frozenset(labels)

    def _labels(self) -> frozenset[str]:
        """Read `by (a, b)` or `on (a, b)`."""
        self._at += 1
        self._expect("(")
        labels = set()
        while (word := self._take()) != ")":
            if word != ",":
                labels.add(word)
        return frozenset(labels)

    def _next(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        assert self._at < len(self._tokens), f"{self._expression!r} ends too early"
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _expect(self, word: str) -> None:
        result = self._take()
        assert result == word, f"{self._expression!r} has {result!r}, not {word!r}"
