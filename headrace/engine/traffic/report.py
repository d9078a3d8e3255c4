# SPDX-License-Identifier: Apache-2.0
"""The report of a traffic split: counts of all workers, percentiles, agreement of shadows, and significance tests.

`splits` calls it. The report has plain JSON values; unknown values are None.

The tests say whether two versions differ by more than chance. Errors: Fisher's exact test if fewer than 5 are expected in
any cell, otherwise the two-proportion z-test with pooled variance. Latencies: the Mann-Whitney U test with tie correction on
the histograms (two latencies in one bucket, within 2 %, are a tie); it tests whether a request at one version tends to take
longer than one at the other, and is robust against outliers. Tests are two-sided at the 5 % level. Each p-value is for one
look: checking every minute until a difference appears will sooner or later show one by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from headrace.engine.traffic.settings import split_tree
from headrace.engine.traffic.shadow import Shadow
from headrace.engine.traffic.split import TrafficSplit
from headrace.engine.traffic.split_version import SplitVersion
from headrace.engine.traffic.statistics import BucketCounts, Numbers, added, coarse, mean, quantiles, total

_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}


def state_of(split: TrafficSplit) -> dict[str, Any]:
    """Return a split as configured, and where its traffic actually goes."""
    stand_in = split.stand_in()
    out = math.fsum(version.share for version in split.versions if version.out)
    return {
        "model": split.model,
        "split": split_tree(split.split),
        "baseline": split.baseline.name,
        "since": _time(split.since),
        "versions": [
            {
                **_named(split, version),
                "weight": version.share,
                "effective_weight": (0.0 if version.out else version.share) + (out if version is stand_in else 0.0),
                "state": version.out or "serving",
                "reason": version.rolled_back or ("not loaded" if version.out else ""),
            }
            for version in (*split.versions, *([stand_in] if stand_in is split.newest and out else ()))
        ],
        "shadows": [
            {**_named(split, shadow), "share": shadow.share, "state": "serving" if shadow.target else "missing"}
            for shadow in split.shadows
        ],
        "events": list(split.events),
    }


def report_of(split: TrafficSplit, others: Iterable[Numbers], now: float) -> dict[str, Any]:
    """Return `state_of` with the counts of this process and of `others`, and the comparison of the versions."""
    workers = [split.numbers(), *others]
    report = state_of(split)
    report["seconds"] = round(now - split.since, 3)
    latencies: dict[str, BucketCounts] = {}
    for version in report["versions"]:
        name = version["version"]
        version_numbers = [numbers["versions"].get(name, {}) for numbers in workers]
        latencies[name] = _sum_buckets(version_numbers, "latencies")
        version.update(_version_report(_sum_counts(version_numbers), latencies[name]))
    for shadow in report["shadows"]:
        shadow_numbers = [numbers["shadows"].get(shadow["version"], {}) for numbers in workers]
        shadow.update(
            _shadow_report(
                _sum_counts(shadow_numbers),
                _sum_buckets(shadow_numbers, "latencies"),
                _sum_buckets(shadow_numbers, "differences"),
            )
        )
    report["comparisons"] = _comparisons(report, latencies)
    return report


def _comparisons(report: dict[str, Any], latencies: Mapping[str, BucketCounts]) -> list[dict[str, Any]]:
    by_name = {version["version"]: version for version in report["versions"]}
    baseline = report["baseline"]
    return [
        {
            "version": name,
            "against": baseline,
            "errors": _verdict(compare_errors(_errors(by_name[baseline]), _errors(version))),
            "latency": _verdict(compare_latencies(latencies[baseline], latencies[name])),
        }
        for name, version in by_name.items()
        if name not in (baseline, "newest")
    ]


def _version_report(counts: Numbers, latencies: BucketCounts) -> dict[str, Any]:
    judged = counts.get("answered", 0) + counts.get("errors", 0)
    return {
        **{
            name: counts.get(name, 0) for name in ("requests", "answered", "errors", "refused", "cancelled", "diverted")
        },
        "error_rate": counts["errors"] / judged if judged else None,
        "latency_ms": _percentiles(latencies, 1000),
        "histogram": [[bound * 1000, count] for bound, count in coarse(latencies)],
    }


def _shadow_report(counts: Numbers, latencies: BucketCounts, differences: BucketCounts) -> dict[str, Any]:
    compared, choices = counts.get("compared", 0), counts.get("choices_compared", 0)
    return {
        **_version_report(counts, latencies),
        "dropped": counts.get("dropped", 0),
        "compared": compared,
        "agreement": counts["agreed"] / compared if compared else None,
        "argmax_compared": choices,
        "argmax_agreement": counts["choices_agreed"] / choices if choices else None,
        "difference": _percentiles(differences, 1),
    }


def _percentiles(tally: BucketCounts, scale: float) -> dict[str, float | None]:
    if not total(tally):
        return dict.fromkeys((*_PERCENTILES, "mean"))
    values = (*quantiles(tally, list(_PERCENTILES.values())), mean(tally))
    return {name: value * scale for name, value in zip((*_PERCENTILES, "mean"), values, strict=True)}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"test": verdict.test, "p": verdict.p, "effect": verdict.effect, "verdict": verdict.words}


def _errors(version: Mapping[str, Any]) -> tuple[int, int]:
    return version["errors"], version["errors"] + version["answered"]


def _sum_counts(workers: Iterable[Numbers]) -> Numbers:
    sums: Numbers = {}
    for numbers in workers:
        for name, value in numbers.items():
            if not isinstance(value, dict):
                sums[name] = sums.get(name, 0) + value
    return sums


def _sum_buckets(workers: Iterable[Numbers], name: str) -> BucketCounts:
    return added({int(bucket): count for bucket, count in numbers.get(name, {}).items()} for numbers in workers)


def _named(split: TrafficSplit, member: SplitVersion | Shadow) -> dict[str, Any]:
    label = split.labels.get(member.number, "")
    return {"version": member.name, "number": member.number, "label": label}


def _time(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")


LEVEL = 0.05
_MIN_EXPECTED = 5
_Z_LEVEL, _Z_POWER = 1.959964, 0.841621
"""For a test at the 5 % level with a power of 80 %."""
_RELEVANT_DIFFERENCE = 0.01
"""Difference of error rates to detect if both rates are equal so far."""
_MIN_LATENCIES = 8
"""With fewer latencies the normal approximation of U is not valid."""


class Verdict(NamedTuple):
    """The result of one test."""

    test: str
    p: float | None
    """The p-value; None if nothing could be tested."""
    effect: float | None
    """Errors: rate of the candidate minus that of the baseline. Latencies: probability that a request at the candidate
    takes longer than one at the baseline."""
    words: str


def compare_errors(base: tuple[int, int], candidate: tuple[int, int]) -> Verdict:
    """Compare errors and requests of two versions."""
    (errors, count), (their_errors, their_count) = base, candidate
    if not count or not their_count:
        return Verdict("", None, None, "nothing to compare yet: one of the two has answered no request")
    rate, their_rate = errors / count, their_errors / their_count
    total_count, failed = count + their_count, errors + their_errors
    expected = min(count, their_count) * min(failed, total_count - failed) / total_count
    exact = expected < _MIN_EXPECTED
    p = (
        _fisher(errors, count, their_errors, their_count)
        if exact
        else _z_test(errors, count, their_errors, their_count)
    )
    test = "Fisher's exact" if exact else "two-proportion z"
    if p < LEVEL:
        words = f"fails {'more' if their_rate > rate else 'less'} often: {their_rate:.2%} against {rate:.2%}"
    else:
        more, effect = _more_for_errors(rate, their_rate, min(count, their_count))
        words = _not_yet(more, effect)
    return Verdict(test, p, their_rate - rate, words)


def compare_latencies(base: Mapping[int, int], candidate: Mapping[int, int]) -> Verdict:
    """Compare the latency histograms of two versions."""
    count, their_count = total(base), total(candidate)
    if min(count, their_count) < _MIN_LATENCIES:
        missing = _MIN_LATENCIES - min(count, their_count)
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
    """Return the probability of all tables with the same sums that are no more likely than this one."""
    failed, total_count = errors + their_errors, count + their_count
    # Counting the rarer outcome keeps the number of tables small and gives the same result.
    if failed > total_count - failed:
        errors, failed = count - errors, total_count - failed

    def log_chance(k: int) -> float:
        return _log_choose(count, k) + _log_choose(their_count, failed - k) - _log_choose(total_count, failed)

    bound = log_chance(errors) + 1e-7  # rounding must not leave out a table as likely as this one
    chances = (log_chance(k) for k in range(max(0, failed - their_count), min(failed, count) + 1))
    return min(1.0, math.fsum(math.exp(chance) for chance in chances if chance <= bound))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _mann_whitney(base: Mapping[int, int], candidate: Mapping[int, int]) -> tuple[float, float]:
    """Return the probability that the candidate's value is larger (a tie is half), and its variance without a difference."""
    n, m = total(base), total(candidate)
    below, larger, ties = 0, 0.0, 0
    for bucket in sorted(base.keys() | candidate.keys()):
        mine, theirs = base.get(bucket, 0), candidate.get(bucket, 0)
        larger += theirs * (below + mine / 2)
        below += mine
        ties += (mine + theirs) ** 3 - (mine + theirs)
    total_count = n + m
    variance = ((total_count + 1) - ties / (total_count * (total_count - 1))) / (12 * n * m)
    return larger / (n * m), variance


def _more_for_errors(rate: float, their_rate: float, answers: int) -> tuple[int, str]:
    """Return how many more requests the version with fewer needs, and which difference they would show."""
    apart, effect = abs(rate - their_rate), "the difference seen so far"
    if not apart:
        apart, effect = _RELEVANT_DIFFERENCE, f"a difference of {_RELEVANT_DIFFERENCE:.0%}"
        their_rate = rate + apart if rate + apart <= 1 else rate - apart
    middle = (rate + their_rate) / 2
    spread = _Z_LEVEL * math.sqrt(2 * middle * (1 - middle)) + _Z_POWER * math.sqrt(
        rate * (1 - rate) + their_rate * (1 - their_rate)
    )
    return max(0, math.ceil((spread / apart) ** 2) - answers), effect


def _more_for_latencies(slower: float, count: int, their_count: int) -> int:
    """Return Noether's sample size, with equal numbers at both versions, minus the requests so far."""
    effect = abs(slower - 0.5)
    if effect < 1e-3:  # too small to matter
        return 0
    needed = (_Z_LEVEL + _Z_POWER) ** 2 / (12 * 0.25 * effect**2) / 2
    return max(0, math.ceil(needed) - min(count, their_count))


def _not_yet(more: int, seeing: str) -> str:
    if not more:
        return "no difference to be seen, and enough requests to have seen one"
    return f"no difference to be seen yet: about {more:,} more requests needed to tell {seeing} from chance"
