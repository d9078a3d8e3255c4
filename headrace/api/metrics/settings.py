# SPDX-License-Identifier: Apache-2.0
"""What is measured: Triton's `--metrics-config` and its neighbours, read by the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.summaries import DEFAULT_QUANTILES, check_quantiles


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """All of it."""

    counter_latencies: bool = True
    """Counters of the time that requests took, waited and were computed."""
    histogram_latencies: bool = True
    """The same as histograms, and the time to the first response of decoupled models. Off in Triton unless asked for;
    here they cost nothing that can be measured."""
    summary_latencies: bool = False
    """The same as quantiles over the last minute, about 1 us for each request."""
    summary_quantiles: tuple[float, ...] = DEFAULT_QUANTILES
    interval_ms: int = 2000
    """From one look at the GPUs and CPUs to the next."""
    gpu: bool = True
    cpu: bool = True

    @property
    def engine_quantiles(self) -> tuple[float, ...]:
        """For `EngineSettings.summary_quantiles`: the engine keeps summaries only where they are asked for."""
        return self.summary_quantiles if self.summary_latencies else ()


def metrics_settings(
    entries: Sequence[str] = (), *, interval_ms: int = 2000, gpu: bool = True, cpu: bool = True
) -> MetricsSettings:
    """The settings from the `key=value` of each `--metrics-config`; of a key that comes twice the last counts."""
    if interval_ms < 1:
        raise InvalidArgument(f"--metrics-interval-ms {interval_ms}: give a number of milliseconds from 1 on")
    settings = MetricsSettings(interval_ms=interval_ms, gpu=gpu, cpu=cpu)
    for entry in entries:
        key, equals, value = entry.partition("=")
        key = key.strip()
        read = _READERS.get(key)
        if read is None or not equals:
            raise InvalidArgument(
                f"--metrics-config {entry!r}: write key=value, where the key is one of {', '.join(sorted(_READERS))}"
            )
        changes: dict[str, Any] = {key: read(entry, value.strip())}
        settings = replace(settings, **changes)
    return settings


def _flag(entry: str, text: str) -> bool:
    known = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}.get(text.lower())
    if known is None:
        raise InvalidArgument(f"--metrics-config {entry!r}: the value is true or false")
    return known


def _quantiles(entry: str, text: str) -> tuple[float, ...]:
    """`0.5:0.05,0.99:0.001`: each with the error Triton may make, which is always 1% of the value here."""
    try:
        pairs = [pair.split(":") for pair in text.split(",")]
        if any(len(pair) > 2 or not all(0 <= float(number) <= 1 for number in pair) for pair in pairs):
            raise ValueError(text)
        return check_quantiles([float(pair[0]) for pair in pairs])
    except ValueError:
        raise InvalidArgument(
            f"--metrics-config {entry!r}: write quantiles from 0 to 1, each once and with or without an error, as in "
            "summary_quantiles=0.5:0.05,0.99:0.001"
        ) from None


_READERS: dict[str, Callable[[str, str], Any]] = {
    "counter_latencies": _flag,
    "histogram_latencies": _flag,
    "summary_latencies": _flag,
    "summary_quantiles": _quantiles,
}
