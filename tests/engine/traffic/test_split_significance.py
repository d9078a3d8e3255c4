# SPDX-License-Identifier: Apache-2.0
"""The tests behind a report, against values worked out otherwise."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import product

import pytest

from headrace.engine.traffic.report import compare_errors, compare_latencies
from headrace.engine.traffic.statistics import (
    ZERO,
    BucketCounts,
    added,
    bucket_of,
    coarse,
    mean,
    quantiles,
    total,
    value_of,
)


def tally_of(values: list[float]) -> BucketCounts:
    return added({bucket_of(value): 1} for value in values)


def exact_p(errors: int, count: int, their_errors: int, their_count: int) -> float:
    """Fisher's test with whole numbers."""
    failed = errors + their_errors

    def chance(k: int) -> Fraction:
        ways = math.comb(count, k) * math.comb(their_count, failed - k)
        return Fraction(ways, math.comb(count + their_count, failed))

    seen = chance(errors)
    tables = range(max(0, failed - their_count), min(failed, count) + 1)
    return float(sum(chance(k) for k in tables if chance(k) <= seen))


@pytest.mark.parametrize("table", [(8, 10, 1, 6), (0, 50, 4, 50), (3, 3, 0, 3), (0, 5, 0, 7), (1, 900, 9, 1000)])
def test_few_errors_are_compared_exactly(table: tuple[int, int, int, int]) -> None:
    errors, count, their_errors, their_count = table
    verdict = compare_errors((errors, count), (their_errors, their_count))
    assert verdict.test == "Fisher's exact"
    assert verdict.p == pytest.approx(exact_p(*table), rel=1e-6)


def test_many_errors_are_compared_by_their_rates() -> None:
    verdict = compare_errors((50, 1000), (80, 1000))
    # z = 0.03 / sqrt(0.065 * 0.935 * 2 / 1000) = 2.7211
    assert verdict.test == "two-proportion z" and verdict.p == pytest.approx(0.006505, rel=1e-3)
    assert verdict.effect == pytest.approx(0.03)
    assert verdict.words == "fails more often: 8.00% against 5.00%"
    assert compare_errors((80, 1000), (50, 1000)).words.startswith("fails less often")
    undecided = compare_errors((50, 1000), (55, 1000))
    assert undecided.p is not None and undecided.p > 0.05
    assert "no difference to be seen yet: about" in undecided.words
    assert compare_errors((0, 0), (1, 2)).p is None


def test_the_number_of_requests_still_needed_shrinks() -> None:
    def more(requests: int) -> int:
        words = compare_errors((requests // 20, requests), (requests // 16, requests)).words
        return int(words.split("about ")[1].split(" ")[0].replace(",", ""))

    assert more(400) - more(800) == pytest.approx(400, abs=150)
    assert "of 1%" in compare_errors((0, 100), (0, 100)).words
    assert "enough requests" in compare_errors((0, 100_000), (0, 100_000)).words


def test_chance_alone_is_called_a_difference_one_time_in_twenty() -> None:
    source = random.Random(3)
    result = 0
    for _ in range(400):
        one, other = ([source.lognormvariate(-6, 0.5) for _ in range(60)] for _ in range(2))
        p = compare_latencies(tally_of(one), tally_of(other)).p
        result += p is not None and p < 0.05
    assert 5 <= result <= 40


def test_latencies_are_compared_as_pairs() -> None:
    source = random.Random(4)
    one = [source.uniform(0.001, 0.1) for _ in range(70)]
    other = [source.uniform(0.01, 0.12) for _ in range(50)]
    verdict = compare_latencies(tally_of(one), tally_of(other))
    pairs = [
        0.5 if bucket_of(mine) == bucket_of(theirs) else float(theirs > mine) for mine, theirs in product(one, other)
    ]
    assert verdict.effect == pytest.approx(sum(pairs) / len(pairs))
    slower = compare_latencies(tally_of([0.001, 0.0011] * 50), tally_of([0.002, 0.0021] * 50))
    assert slower.p is not None and slower.p < 1e-6 and slower.effect == 1
    assert slower.words == "is slower: 100% of pairs of requests say so"
    alike = compare_latencies(tally_of([0.001] * 50), tally_of([0.001] * 50))
    assert alike.p == 1 and alike.effect == 0.5
    assert compare_latencies(tally_of([0.001] * 50), tally_of([0.001] * 3)).words == (
        "too few to compare: 5 more requests needed"
    )


def test_histograms_are_within_one_percent() -> None:
    source = random.Random(5)
    values = [source.lognormvariate(-5, 2) for _ in range(5_000)]
    tally = tally_of(values)
    ordered = sorted(values)
    for wanted, got in zip((0.0, 0.5, 0.99, 1.0), quantiles(tally, (0.0, 0.5, 0.99, 1.0)), strict=True):
        assert got == pytest.approx(ordered[math.floor(wanted * 4_999)], rel=0.0101)
    assert mean(tally) == pytest.approx(sum(values) / 5_000, rel=0.0101)
    drawn = coarse(tally)
    assert sum(count for _, count in drawn) == total(tally) == 5_000
    for bound, _ in drawn[:: len(drawn) // 5]:
        upto = sum(count for upper, count in drawn if upper <= bound)
        assert upto == pytest.approx(sum(value <= bound for value in values), abs=30)


def test_values_that_are_not_usual_numbers() -> None:
    assert bucket_of(0.0) == bucket_of(-1.0) == ZERO and value_of(ZERO) == 0
    assert bucket_of(math.inf) == bucket_of(1e300) == bucket_of(math.nan)
    assert math.isnan(quantiles({}, [0.5])[0]) and math.isnan(mean({})) and coarse({}) == []
    assert quantiles({ZERO: 3}, [0.5]) == [0.0] and coarse({ZERO: 3})[0][1] == 3
