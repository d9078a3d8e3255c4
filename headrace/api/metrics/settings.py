# SPDX-License-Identifier: Apache-2.0
"""Settings of the metrics: Triton's `--metrics-config` and related options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.metrics import DEFAULT_QUANTILES, check_quantiles


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Which metrics are reported."""

    counter_latencies: bool = True
    """Counters of the total, queue and compute time of requests."""
    histogram_latencies: bool = True
    """Histograms of these times, which Triton does not have; the cost is not measurable."""
    first_response_histogram: bool = False
    """The histogram of the time to the first response of decoupled models: with `histogram_latencies=true`, as in Triton."""
    summary_latencies: bool = False
    """Quantiles of these times over the last minute; costs about 1 us per request."""
    summary_quantiles: tuple[float, ...] = DEFAULT_QUANTILES
    interval_ms: int = 2000
    """Interval between two samples of the GPUs and CPUs."""
    gpu: bool = True
    cpu: bool = True
    namespaces: bool = False
    """Whether series of models have the label `namespace`, the folder of their repository: `--model-namespacing`."""

    @property
    def engine_quantiles(self) -> tuple[float, ...]:
        """The value for `EngineSettings.summary_quantiles`; empty unless summaries are enabled."""
        return self.summary_quantiles if self.summary_latencies else ()


def metrics_settings(
    entries: Sequence[str] = (),
    *,
    interval_ms: int = 2000,
    gpu: bool = True,
    cpu: bool = True,
    namespaces: bool = False,
) -> MetricsSettings:
    """Parse the `key=value` of each `--metrics-config`; the last one wins for a repeated key."""
    if interval_ms < 1:
        raise InvalidArgument(f"--metrics-interval-ms {interval_ms}: give at least 1 millisecond")
    settings = MetricsSettings(interval_ms=interval_ms, gpu=gpu, cpu=cpu, namespaces=namespaces)
    for entry in entries:
        key, equals, value = entry.partition("=")
        key = key.strip()
        parse = _PARSERS.get(key)
        if parse is None or not equals:
            raise InvalidArgument(
                f"--metrics-config {entry!r}: write key=value, where the key is one of {', '.join(sorted(_PARSERS))}"
            )
        changes: dict[str, Any] = {key: parse(entry, value.strip())}
        if key == "histogram_latencies":
            changes["first_response_histogram"] = changes[key]
        settings = replace(settings, **changes)
    return settings


def _flag(entry: str, text: str) -> bool:
    value = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}.get(text.lower())
    if value is None:
        raise InvalidArgument(f"--metrics-config {entry!r}: the value must be true or false")
    return value


def _quantiles(entry: str, text: str) -> tuple[float, ...]:
    """Parse `0.5:0.05,0.99:0.001`, as leniently as Triton: empty pairs and quantiles that come again are left out.

    The errors have no effect: the error here is always 1% of the value.
    """
    try:
        pairs = [pair.split(":") for pair in text.split(",") if pair.strip()]
        if not pairs or any(
            len(pair) > 2 or not math.isfinite(sum(float(number) for number in pair)) for pair in pairs
        ):
            raise ValueError(text)
        return check_quantiles(list(dict.fromkeys(float(pair[0]) for pair in pairs)))
    except ValueError:
        raise InvalidArgument(
            f"--metrics-config {entry!r}: write quantiles from 0 to 1, with or without an error, as in "
            "summary_quantiles=0.5:0.05,0.99:0.001"
        ) from None


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "counter_latencies": _flag,
    "histogram_latencies": _flag,
    "summary_latencies": _flag,
    "summary_quantiles": _quantiles,
}
