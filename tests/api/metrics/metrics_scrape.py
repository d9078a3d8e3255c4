# SPDX-License-Identifier: Apache-2.0
"""What a scrape says, read with Prometheus's own parsers, which refuse what Prometheus would refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from headrace.api.metrics.http import Metrics
from headrace.api.metrics.settings import MetricsSettings
from headrace.core.clock import SystemClock
from headrace.core.telemetry.exposition import Format
from headrace.core.telemetry.metrics import Registry
from headrace.engine.dataplane import DataPlane

QUIET = MetricsSettings(gpu=False, cpu=False)


class Scraped:
    """One scrape: `scraped("nv_inference_count", model="m")` is a number."""

    def __init__(self, text: bytes, format: Format = Format.TEXT) -> None:
        self.text = text.decode()
        parse = text_families if format is Format.TEXT else openmetrics_families
        self.families = list(parse(self.text))
        self.types = {family.name: family.type for family in self.families}
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in self.families:
            for sample in family.samples:
                # This parser, unlike Prometheus, adds `_total` to the counters that lack it.
                added = family.type == "counter" and f"\n{sample.name}" not in self.text
                name = sample.name.removesuffix("_total") if added else sample.name
                key = (name, frozenset(sample.labels.items()))
                assert key not in self.samples, f"{key} twice"
                self.samples[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        """The one sample of this name that has these labels, among others."""
        (value,) = self.all(name, **labels).values()
        return value

    def all(self, name: str, **labels: str) -> Mapping[frozenset[tuple[str, str]], float]:
        wanted = labels.items()
        return {
            have: value
            for (known, have), value in self.samples.items()
            if known == name and wanted <= dict(have).items()
        }

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(have) for known, have in self.samples if known == name]

    def buckets(self, name: str, **labels: str) -> list[float]:
        """A histogram's counts, each bucket alone."""
        results = {dict(have)["le"]: value for have, value in self.all(f"{name}_bucket", **labels).items()}
        upto = [results[le] for le in sorted(results, key=float)]
        return [high - low for low, high in zip([0.0, *upto], upto, strict=False)]


def metrics_of(plane: DataPlane, settings: MetricsSettings = QUIET, **more: Any) -> Metrics:
    return Metrics(plane, more.pop("registry", None) or Registry(SystemClock()), settings, **more)


async def scrape(metrics: Metrics, format: Format = Format.TEXT) -> Scraped:
    return Scraped(await metrics.text(format), format)
