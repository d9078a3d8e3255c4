# SPDX-License-Identifier: Apache-2.0
"""What a split has done so far, for people and programs: the counts of all workers, percentiles, agreement, tests.

Called by `traffic`. Plain values, as JSON has them; what is not known is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from headrace.engine.traffic.accounts import Numbers
from headrace.engine.traffic.entry import SplitEntry
from headrace.engine.traffic.histograms import Tally, added, coarse, mean, quantiles, total
from headrace.engine.traffic.lanes import Lane
from headrace.engine.traffic.parsing import split_tree
from headrace.engine.traffic.shadowing import Shadow
from headrace.engine.traffic.significance import Verdict, compare_errors, compare_latencies

_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}


def state_of(entry: SplitEntry) -> dict[str, Any]:
    """A split as it was written, and where the traffic really goes."""
    stand_in = entry.stand_in()
    out = math.fsum(lane.share for lane in entry.lanes if lane.out)
    return {
        "model": entry.model,
        "split": split_tree(entry.split),
        "baseline": entry.baseline.name,
        "since": _time(entry.since),
        "versions": [
            {
                **_named(entry, lane),
                "weight": lane.share,
                "effective_weight": (0.0 if lane.out else lane.share) + (out if lane is stand_in else 0.0),
                "state": lane.out or "serving",
                "reason": lane.rolled_back or ("not loaded" if lane.out else ""),
            }
            for lane in (*entry.lanes, *([stand_in] if stand_in is entry.newest and out else ()))
        ],
        "shadows": [
            {**_named(entry, shadow), "share": shadow.share, "state": "serving" if shadow.version else "missing"}
            for shadow in entry.shadows
        ],
        "events": list(entry.events),
    }


def report_of(entry: SplitEntry, others: Iterable[Numbers], now: float) -> dict[str, Any]:
    """`state_of`, with the counts of this process and of `others`, and what they tell."""
    told = [entry.numbers(), *others]
    made = state_of(entry)
    made["seconds"] = round(now - entry.since, 3)
    latencies: dict[str, Tally] = {}
    for version in made["versions"]:
        name = version["version"]
        counts = _counts(numbers["lanes"].get(name, {}) for numbers in told)
        latencies[name] = _tally((numbers["lanes"].get(name, {}) for numbers in told), "latencies")
        version.update(_served(counts, latencies[name]))
    for shadow in made["shadows"]:
        of_it = [numbers["shadows"].get(shadow["version"], {}) for numbers in told]
        shadow.update(_shadowed(_counts(of_it), _tally(of_it, "latencies"), _tally(of_it, "differences")))
    made["comparisons"] = _comparisons(made, latencies)
    return made


def _comparisons(made: dict[str, Any], latencies: Mapping[str, Tally]) -> list[dict[str, Any]]:
    by_name = {version["version"]: version for version in made["versions"]}
    base = by_name[made["baseline"]]
    return [
        {
            "version": name,
            "against": made["baseline"],
            "errors": _verdict(compare_errors(_errors(base), _errors(version))),
            "latency": _verdict(compare_latencies(latencies[made["baseline"]], latencies[name])),
        }
        for name, version in by_name.items()
        if name not in (made["baseline"], "newest")
    ]


def _served(counts: Numbers, latencies: Tally) -> dict[str, Any]:
    judged = counts.get("answered", 0) + counts.get("errors", 0)
    return {
        **{
            name: counts.get(name, 0) for name in ("requests", "answered", "errors", "refused", "cancelled", "diverted")
        },
        "error_rate": counts["errors"] / judged if judged else None,
        "latency_ms": _percentiles(latencies, 1000),
        "histogram": [[bound * 1000, count] for bound, count in coarse(latencies)],
    }


def _shadowed(counts: Numbers, latencies: Tally, differences: Tally) -> dict[str, Any]:
    compared, choices = counts.get("compared", 0), counts.get("choices_compared", 0)
    return {
        **_served(counts, latencies),
        "dropped": counts.get("dropped", 0),
        "compared": compared,
        "agreement": counts["agreed"] / compared if compared else None,
        "argmax_compared": choices,
        "argmax_agreement": counts["choices_agreed"] / choices if choices else None,
        "difference": _percentiles(differences, 1),
    }


def _percentiles(tally: Tally, scale: float) -> dict[str, float | None]:
    if not total(tally):
        return dict.fromkeys((*_PERCENTILES, "mean"))
    values = (*quantiles(tally, list(_PERCENTILES.values())), mean(tally))
    return {name: value * scale for name, value in zip((*_PERCENTILES, "mean"), values, strict=True)}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"test": verdict.test, "p": verdict.p, "effect": verdict.effect, "verdict": verdict.words}


def _errors(version: Mapping[str, Any]) -> tuple[int, int]:
    return version["errors"], version["errors"] + version["answered"]


def _counts(numbers: Iterable[Numbers]) -> Numbers:
    made: Numbers = {}
    for each in numbers:
        for name, value in each.items():
            if not isinstance(value, dict):
                made[name] = made.get(name, 0) + value
    return made


def _tally(numbers: Iterable[Numbers], what: str) -> Tally:
    return added({int(bucket): times for bucket, times in each.get(what, {}).items()} for each in numbers)


def _named(entry: SplitEntry, one: Lane | Shadow) -> dict[str, Any]:
    label = entry.labels.get(one.number, "")
    return {"version": one.name, "number": one.number, "label": label}


def _time(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds")
