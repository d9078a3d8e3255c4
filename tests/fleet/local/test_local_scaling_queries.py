# SPDX-License-Identifier: Apache-2.0
"""The part of PromQL that is understood: what it computes, what it refuses and in which words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.clock import ManualClock
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.telemetry.exposition import render
from headrace.core.telemetry.metrics import Registry
from headrace.fleet.autoscaling.promql import QueryEvaluator, Series, parse_exposition, parse_query


def series(**values: float) -> Series:
    """`a_x=1` is a{queue="x"}."""
    document: Series = {}
    for name, value in values.items():
        metric, _, queue = name.partition("_")
        document[(("__name__", metric), ("queue", queue))] = value
    return document


def value(query: str, *looks: Series, every: float = 1.0) -> float:
    computation = QueryEvaluator(parse_query(query))
    now = 0.0
    for number, item in enumerate(looks):
        now = number * every
        computation.add(now, item)
    return computation.value(now)


_SEEN = series(a_x=1, a_y=5, b_x=4)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ('a{queue="x"}', 1.0),
        ("sum(a)", 6.0),
        ("avg(a)", 3.0),
        ("max(a) - min(a)", 4.0),
        ("count(a)", 2.0),
        ('sum({__name__=~"a|b"})', 10.0),
        ('sum({__name__=~"a|b",queue!="y"})', 5.0),
        ('sum(a{queue!~"y.*"})', 1.0),
        ("sum(a) / sum(b) * 2 + 1", 4.0),
        ("a / b", 0.25),
        ("2 * (sum(a) - 1) / 5", 2.0),
        ("-sum(a) + 10", 4.0),
        ("10 / clamp_min(sum(b), 5)", 2.0),
        ("clamp_max(sum(a), 2)", 2.0),
        ("sum(nobody) or vector(7)", 7.0),
        ("sum(a) or vector(7)", 6.0),
        ("1e3 / 10", 100.0),
    ],
)
def test_the_value_of_one_sample(query: str, expected: float) -> None:
    assert value(query, _SEEN) == pytest.approx(expected)


@given(st.floats(0, 1e6), st.floats(0.1, 1e6), st.floats(0.1, 1e6), st.sampled_from("+-*/"), st.sampled_from("+-*/"))
def test_arithmetic_is_that_of_numbers(a: float, b: float, c: float, one: str, two: str) -> None:
    document = {"a": a, "b": b, "c": c}
    python = {"+": float.__add__, "-": float.__sub__, "*": float.__mul__, "/": float.__truediv__}
    if one in "+-" and two in "*/":
        expected = python[one](document["a"], python[two](document["b"], document["c"]))
    else:
        expected = python[two](python[one](document["a"], document["b"]), document["c"])
    received: Series = {(("__name__", name),): number for name, number in document.items()}
    assert value(f"sum(a) {one} sum(b) {two} sum(c)", received) == pytest.approx(expected)
    assert value(f"{document['a']!r} {one} {document['b']!r} {two} {document['c']!r}", received) == pytest.approx(
        expected
    )


def test_rates_of_counters_that_reset_appear_and_disappear() -> None:
    looks = [series(a_x=10.0 * number) for number in range(31)]
    assert value("rate(a[1m])", *looks) == pytest.approx(10.0)
    assert value("increase(a[10s])", *looks) == pytest.approx(100.0)
    # A restart: what the counter has since is what came.
    assert value("rate(a[1m])", series(a_x=100), series(a_x=110), series(a_x=5)) == pytest.approx(7.5)
    # Older than the window: forgotten. Seen once: nothing yet.
    assert value("sum(rate(a[2s])) or vector(-1)", series(a_x=1), series(), series(), series(a_x=9)) == -1.0
    pair = [series(a_x=1.0 * number, a_y=3.0 * number) for number in range(5)]
    assert value("sum(rate(a[1m])) * 60", *pair) == pytest.approx(240.0)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=300), st.floats(0.5, 20))
def test_a_steady_rate_is_found_whatever_is_kept(steps: list[float], every: float) -> None:
    """As many points as there are looks, or sixty in a window: the whole growth counts."""
    total, looks = 0.0, []
    for step in steps:
        total += step
        looks.append(series(a_x=total))
    computation = QueryEvaluator(parse_query("rate(a[1h])"))
    for number, item in enumerate(looks):
        computation.add(number * every, item)
    last = (len(looks) - 1) * every
    if last < 3600:
        expected = (total - steps[0]) / last
        assert computation.value(last) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("histogram_quantile(0.9, a)", "histogram_quantile()"),
        ("sum by (queue) (a)", "sum by"),
        ("sum(a) by (queue)", "sum by"),
        ("a offset 5m", "offset"),
        ("a > 5", "'>'"),
        ("a and b", "'and'"),
        ("sum(a)[5m:1m]", "5m:1m"),
        ("sum(a)[5m]", "'['"),
        ("rate(sum(a)[5m])", "rate(sum(...))"),
        ("rate(a)", "')'"),
        ("rate(a[2h])", "[2h]"),
        ("a @ 5", "'@'"),
        ("a ^ 2", "'^'"),
        ("{queue!=\"x\"}", "matches every series"),
        ("", "its end"),
        ("sum(a", "its end"),
        ("a $ b", "'$ b'"),
        ("(" * 100 + "a", "deeper"),
        ("-" * 100 + "1", "deeper"),
        ("a" * 5000, "shorten"),
        ('a{queue=~"(a+)+b"}', "(a+)+b"),
        ('a{queue=~"(a"}', "not a regular expression"),
        ("5m", "'5m'"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(query: str, named: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_query(query)
    assert named in refused.value.message


@given(st.text(alphabet="ab{}[]()=~!\"'\\,+-*/ 019.msrateumo\n_:", max_size=40))
def test_any_text_is_read_or_refused(query: str) -> None:
    try:
        result = parse_query(query)
    except InvalidArgument:
        return
    try:
        assert math.isfinite(value(query, _SEEN)) and result is not None
    except FailedPrecondition:
        pass


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("a", "2 values"),
        ("nobody", "no replica exposes"),
        ("sum(a) / 0", "inf"),
        ("0 / 0", "nan"),
        ("sum(1)", "of a number"),
        ("clamp_min(sum(a), sum(b))", "needs a number"),
        ('{__name__=~"a|b"} * 2', "only in their names"),
        ("1 or 2", "vector(0)"),
    ],
)
def test_a_query_without_exactly_one_value_is_an_error(query: str, words: str) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        value(query, _SEEN)
    assert words in refused.value.message


def test_metrics_of_our_server_are_read() -> None:
    registry = Registry(ManualClock())
    registry.gauge("waiting", "Those who wait.", ["queue"]).labels(queue='a "b"\\\n').set(3.5)
    registry.counter("done_total", "Those who are done.").labels().add(2)
    registry.histogram("seconds", "Time.", buckets=(1, 2)).labels().observe(1.5)
    reported = render(registry).decode()
    result = parse_exposition(reported, lambda name: name != "seconds_sum", {"pod": "p", "queue": "ours"})
    plain = {dict(labels)["__name__"]: (dict(labels), number) for labels, number in result.items()}
    labels, number = plain["waiting"]
    assert (
        number == 3.5 and labels["exported_queue"] == 'a "b"\\\n' and (labels["queue"], labels["pod"]) == ("ours", "p")
    )
    assert plain["done_total"][1] == 2 and plain["seconds_count"][1] == 1 and "seconds_sum" not in plain
    assert sum(dict(item)["__name__"] == "seconds_bucket" for item in result) == 3


@given(st.text(max_size=200))
def test_any_page_is_read(page: str) -> None:
    assert all(isinstance(item, float) for item in parse_exposition(page, lambda _: True, {}).values())


def test_only_what_counts_is_kept() -> None:
    computation = QueryEvaluator(parse_query('sum({__name__=~"vllm:.*"}) + rate(b[1m])'))
    assert [computation.wants(item) for item in ("vllm:x", "b", "a", "vllm")] == [True, True, False, False]
    with pytest.raises(FailedPrecondition, match="select fewer"):
        computation.add(0.0, {(("__name__", "b"), ("n", str(number))): 1.0 for number in range(10_001)})
