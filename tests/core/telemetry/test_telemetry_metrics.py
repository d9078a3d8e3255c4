# SPDX-License-Identifier: Apache-2.0
"""Counters, gauges, histograms, and the registry that declares them."""

import math
from collections import Counter as Tally

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.clock import ManualClock
from headrace.core.telemetry.metrics import Registry

KINDS = ["counter", "gauge", "histogram", "summary"]


@pytest.fixture
def registry():
    return Registry(ManualClock())


def test_a_counter_adds(registry):
    requests = registry.counter("requests_total", "Requests.", ["model"])
    series = requests.labels(model="m")
    series.add()
    series.add(2)
    series.value += 1
    assert series.value == 4
    assert type(series.value) is int
    assert requests.labels(model="n").value == 0


def test_a_gauge_increases_and_decreases(registry):
    gauge = registry.gauge("in_flight", "In flight.").labels()
    gauge.set(5)
    gauge.add(-2)
    gauge.add()
    assert gauge.value == 4


@given(st.lists(st.floats(-10, 1000)), st.lists(st.integers(0, 900), min_size=1, unique=True).map(sorted))
def test_a_histogram_counts_each_value_in_the_first_bucket_that_contains_it(values, bounds):
    histogram = Registry(ManualClock()).histogram("h", "H.", buckets=bounds).labels()
    for value in values:
        histogram.observe(value)
    expected = Tally(next((bound for bound in bounds if value <= bound), math.inf) for value in values)
    assert histogram.counts == [expected[bound] for bound in [*bounds, math.inf]]
    assert histogram.sum == sum(values)


def test_a_value_on_a_bound_belongs_to_it(registry):
    histogram = registry.histogram("h", "H.", buckets=[1, 2]).labels()
    histogram.observe(1)
    histogram.observe(2.0000001)
    assert histogram.counts == [1, 0, 1]


def test_series_do_not_share_their_buckets(registry):
    family = registry.histogram("h", "H.", ["model"], buckets=[1])
    family.labels(model="a").observe(0)
    assert family.labels(model="b").counts == [0, 0]


def test_a_series_is_the_same_one_each_time(registry):
    family = registry.counter("c_total", "C.", ["model", "version"])
    assert family.labels(model="m", version="1") is family.labels(version="1", model="m")
    assert family.labels(model="m", version="1") is not family.labels(model="1", version="m")


def test_a_family_without_labels_has_its_series_from_the_start(registry):
    family = registry.counter("c_total", "C.")
    assert family.collect() == [((), family.labels())]


def test_a_removed_series_may_return_at_zero(registry):
    family = registry.counter("c_total", "C.", ["model"])
    old = family.labels(model="m")
    old.add(5)
    family.remove(model="m")
    family.remove(model="never there")
    old.add()
    assert family.collect() == []
    assert family.labels(model="m").value == 0


@pytest.mark.parametrize("values", [{}, {"model": "m", "extra": "x"}, {"other": "m"}])
def test_labels_must_be_the_declared_ones(registry, values):
    family = registry.counter("c_total", "C.", ["model"])
    with pytest.raises(ValueError, match=r"metric c_total has labels \['model'\]"):
        family.labels(**values)
    with pytest.raises(ValueError, match="metric c_total has labels"):
        family.remove(**values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "a.b", "a\n", "é", "a{", "a\0"])
def test_bad_names_are_refused(registry, kind, name):
    with pytest.raises(ValueError, match="metric name .* is not allowed"):
        getattr(registry, kind)(name, "Help.")
    assert not registry.families


def test_a_counter_needs_a_name_before_total(registry):
    with pytest.raises(ValueError, match="metric name '_total' is not allowed"):
        registry.counter("_total", "Help.")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", ["", "1a", "a-b", "a:b", "__name__", "__a", "é", "a\n"])
def test_bad_labels_are_refused(registry, kind, label):
    with pytest.raises(ValueError, match="label .* is not allowed"):
        getattr(registry, kind)("name", "Help.", ["fine", label])
    assert not registry.families


def test_labels_that_the_format_uses_itself_are_refused(registry):
    with pytest.raises(ValueError, match="label 'le'"):
        registry.histogram("h", "H.", ["le"])
    with pytest.raises(ValueError, match="label 'quantile'"):
        registry.summary("s", "S.", ["quantile"])
    registry.gauge("g", "G.", ["le", "quantile"])


def test_a_label_twice_is_refused(registry):
    with pytest.raises(ValueError, match="label twice"):
        registry.gauge("g", "G.", ["a", "a"])


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", [*KINDS, "callback"])
def test_a_name_is_declared_once(registry, first, second):
    getattr(registry, first)("taken", "Help.")
    more = [lambda: 1] if second == "callback" else []
    with pytest.raises(ValueError, match="metric taken clashes with taken"):
        getattr(registry, second)("taken", "Help.", *more)
    assert len(registry.families) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("histogram", "h"), ("counter", "h_count")),
        (("histogram", "h"), ("gauge", "h_sum")),
        (("histogram", "h"), ("gauge", "h_bucket")),
        (("summary", "s"), ("gauge", "s_count")),
        (("summary", "s"), ("histogram", "s_sum")),
        (("counter", "c_total"), ("gauge", "c")),
        (("counter", "c_total"), ("gauge", "c_created")),
        (("histogram", "h"), ("gauge", "h_created")),
    ],
)
def test_names_that_would_write_the_same_sample_clash(first, second):
    for order in ((first, second), (second, first)):
        registry = Registry(ManualClock())
        (kind, name), (other_kind, other_name) = order
        getattr(registry, kind)(name, "Help.")
        with pytest.raises(ValueError, match="clashes with"):
            getattr(registry, other_kind)(other_name, "Help.")


def test_registries_are_independent():
    Registry(ManualClock()).counter("c_total", "C.").labels().add()
    assert Registry(ManualClock()).counter("c_total", "C.").labels().value == 0


@pytest.mark.parametrize("buckets", [[], [math.inf], [1, 1], [2, 1], [math.nan], [-math.inf, 1], [-1, 1]])
def test_bad_buckets_are_refused(registry, buckets):
    with pytest.raises(ValueError, match="histogram buckets .* are not allowed"):
        registry.histogram("h", "H.", buckets=buckets)


def test_infinity_may_be_given_and_is_not_doubled(registry):
    assert registry.histogram("h", "H.", buckets=[1, math.inf]).labels().bounds == (1.0,)


def test_a_callback_is_called_at_each_collection(registry):
    answers = iter([1, 2])
    registry.callback("free_bytes", "Free.", lambda: next(answers))
    (family,) = registry.families
    assert [family.collect(), family.collect()] == [[((), 1)], [((), 2)]]


def test_a_callback_may_answer_for_many_series(registry):
    registry.callback("used", "Used.", lambda: {("a", "0"): 1.5, ("b", "1"): 2}, ["model", "gpu"])
    (family,) = registry.families
    assert family.collect() == [(("a", "0"), 1.5), (("b", "1"), 2)]


@pytest.mark.parametrize("answer", [5, {("a", "b"): 1}, {(): 1}])
def test_a_callback_must_answer_with_its_labels(registry, answer):
    registry.callback("used", "Used.", lambda: answer, ["model"])
    (family,) = registry.families
    with pytest.raises(ValueError, match=r"metric used has labels \['model'\], but was read as"):
        family.collect()
