# SPDX-License-Identifier: Apache-2.0
"""Whether two versions differ by more than chance: in how often they fail, and in how long they take.

Errors: Fisher's exact test where fewer than 5 are expected anywhere, else the two-proportion z-test with pooled variance.
Latencies: the Mann-Whitney U test with its correction for ties, on the histograms (two latencies in one bucket, within 2 %,
are a tie); it asks whether a request at one version tends to take longer than one at the other, and does not mind a few
that took ages. Two-sided; 5 % is called a difference. Each p-value is of one look: who looks every minute until it says
"difference" will sooner or later see one that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from headrace.engine.traffic.histograms import total

LEVEL = 0.05
_FEW = 5
_Z_LEVEL, _Z_POWER = 1.959964, 0.841621
"""Of a test at 5 % that sees a real difference 8 times out of 10."""
_WORTH_SEEING = 0.01
"""Difference of error rates to look for when none was seen at all."""
_LEAST_LATENCIES = 8
"""Below, the normal approximation of U is no good."""


class Verdict(NamedTuple):
    """Of one test."""

    test: str
    p: float | None
    """How likely so large a difference is by chance alone; None when nothing could be tested."""
    effect: float | None
    """Errors: rate of the candidate less that of the baseline. Latencies: chance that a request at the candidate takes
    longer than one at the baseline."""
    words: str


def compare_errors(base: tuple[int, int], candidate: tuple[int, int]) -> Verdict:
    """Errors and requests of two versions."""
    (errors, count), (their_errors, their_count) = base, candidate
    if not count or not their_count:
        return Verdict("", None, None, "nothing to compare yet: one of the two has answered no request")
    rate, their_rate = errors / count, their_errors / their_count
    whole, failed = count + their_count, errors + their_errors
    least = min(count, their_count) * min(failed, whole - failed) / whole
    exact = least < _FEW
    p = (
        _fisher(errors, count, their_errors, their_count)
        if exact
        else _z_test(errors, count, their_errors, their_count)
    )
    test = "Fisher's exact" if exact else "two-proportion z"
    if p < LEVEL:
        words = f"fails {'more' if their_rate > rate else 'less'} often: {their_rate:.2%} against {rate:.2%}"
    else:
        more, seeing = _more_for_errors(rate, their_rate, min(count, their_count))
        words = _not_yet(more, seeing)
    return Verdict(test, p, their_rate - rate, words)


def compare_latencies(base: Mapping[int, int], candidate: Mapping[int, int]) -> Verdict:
    """Histograms of two versions."""
    count, their_count = total(base), total(candidate)
    if min(count, their_count) < _LEAST_LATENCIES:
        missing = _LEAST_LATENCIES - min(count, their_count)
        return Verdict("", None, None, f"too few to compare: {missing} more requests needed")
    slower, variance = _mann_whitney(base, candidate)
    z = (slower - 0.5) / math.sqrt(variance) if variance else 0.0
    p = math.erfc(abs(z) / math.sqrt(2))
    if p < LEVEL:
        words = (
            f"is {'slower' if slower > 0.5 else 'faster'}: {max(slower, 1 - slower):.0%} of pairs of requests say so"
        )
    else:
        words = _not_yet(_more_for_latencies(slower, count, their_count), "the difference seen so far")
    return Verdict("Mann-Whitney U", p, slower, words)


def _z_test(errors: int, count: int, their_errors: int, their_count: int) -> float:
    pooled = (errors + their_errors) / (count + their_count)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / count + 1 / their_count))
    return math.erfc(abs(errors / count - their_errors / their_count) / spread / math.sqrt(2))


def _fisher(errors: int, count: int, their_errors: int, their_count: int) -> float:
    """The chance of all tables with the same sums that are no more likely than this one."""
    failed, whole = errors + their_errors, count + their_count
    # Counting what was rarer keeps the number of tables small, and changes nothing.
    if failed > whole - failed:
        errors, failed = count - errors, whole - failed

    def log_chance(k: int) -> float:
        return _log_choose(count, k) + _log_choose(their_count, failed - k) - _log_choose(whole, failed)

    bound = log_chance(errors) + 1e-7  # rounding must not leave out a table as likely as this one
    chances = (log_chance(k) for k in range(max(0, failed - their_count), min(failed, count) + 1))
    return min(1.0, math.fsum(math.exp(chance) for chance in chances if chance <= bound))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _mann_whitney(base: Mapping[int, int], candidate: Mapping[int, int]) -> tuple[float, float]:
    """The chance that one of the candidate's is larger (a tie is half), and its variance if there is no difference."""
    n, m = total(base), total(candidate)
    below, larger, ties = 0, 0.0, 0
    for bucket in sorted(base.keys() | candidate.keys()):
        mine, theirs = base.get(bucket, 0), candidate.get(bucket, 0)
        larger += theirs * (below + mine / 2)
        below += mine
        ties += (mine + theirs) ** 3 - (mine + theirs)
    whole = n + m
    variance = ((whole + 1) - ties / (whole * (whole - 1))) / (12 * n * m)
    return larger / (n * m), variance


def _more_for_errors(rate: float, their_rate: float, seen: int) -> tuple[int, str]:
    """How many more requests at the version that has fewer, and what difference they would show."""
    apart, seeing = abs(rate - their_rate), "the difference seen so far"
    if not apart:
        apart, seeing = _WORTH_SEEING, f"a difference of {_WORTH_SEEING:.0%}"
        their_rate = rate + apart if rate + apart <= 1 else rate - apart
    middle = (rate + their_rate) / 2
    spread = _Z_LEVEL * math.sqrt(2 * middle * (1 - middle)) + _Z_POWER * math.sqrt(
        rate * (1 - rate) + their_rate * (1 - their_rate)
    )
    return max(0, math.ceil((spread / apart) ** 2) - seen), seeing


def _more_for_latencies(slower: float, count: int, their_count: int) -> int:
    """Noether's sample size, with as many at each."""
    effect = abs(slower - 0.5)
    if effect < 1e-3:  # one in a thousand: nobody would notice
        return 0
    needed = (_Z_LEVEL + _Z_POWER) ** 2 / (12 * 0.25 * effect**2) / 2
    return max(0, math.ceil(needed) - min(count, their_count))


def _not_yet(more: int, seeing: str) -> str:
    if not more:
        return "no difference to be seen, and enough requests to have seen one"
    return f"no difference to be seen yet: about {more:,} more requests needed to tell {seeing} from chance"
