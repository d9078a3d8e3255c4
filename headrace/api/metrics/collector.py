# SPDX-License-Identifier: Apache-2.0
"""Everything a scrape tells, gathered in the loop's thread a little at a time.

Called by `http`. The numbers are the engine's own, so they are read where they change; with a thousand versions that is
tens of milliseconds, during which others must be served: after each millisecond the loop has its turn. The numbers of one
version are of one moment; two versions may be some turns apart.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from time import perf_counter

from headrace.api.metrics.columns import COLUMNS, LOAD_SECONDS, PENDING, Column, Group
from headrace.api.metrics.gpus import GPU
from headrace.api.metrics.ledger import Account, Ledger
from headrace.api.metrics.machine import COLLECTIONS, CPU, PROCESS, process_samples
from headrace.api.metrics.sampler import Sampler
from headrace.api.metrics.settings import MetricsSettings
from headrace.core.clock import Clock
from headrace.core.telemetry.exposition import Format, pieces, read
from headrace.core.telemetry.families import Kind
from headrace.core.telemetry.registry import Registry
from headrace.core.telemetry.samples import Samples, Value, labels_text
from headrace.engine.dataplane import DataPlane
from headrace.models.config.types import ModelConfig

TURN_SECONDS = 0.001

_PINNED = (
    ("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes"),
    ("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes"),
)
_NOT_IN_A_LABEL = re.compile(r"[^a-zA-Z0-9_]")


class Turns:
    """A long piece of work's sense of time."""

    def __init__(self) -> None:
        self._ends = perf_counter() + TURN_SECONDS

    @property
    def over(self) -> bool:
        """Whether it is others' turn."""
        return perf_counter() >= self._ends

    async def rest(self) -> None:
        """Let others have theirs."""
        await asyncio.sleep(0)
        self._ends = perf_counter() + TURN_SECONDS


class Collector:
    """Over one data plane and one registry, of which it keeps the names it uses for itself."""

    def __init__(
        self, plane: DataPlane, registry: Registry, settings: MetricsSettings, clock: Clock, sampler: Sampler
    ) -> None:
        self._plane = plane
        self._registry = registry
        self._ledger = Ledger(clock)
        self._sampler = sampler
        self._groups: set[Group] = {"always"}
        if settings.counter_latencies:
            self._groups.add("counters")
        if settings.histogram_latencies:
            self._groups.add("histograms")
        if settings.summary_latencies:
            self._groups.add("summaries")
        for kind, name in _own_names():
            registry.reserve(kind, name)

    async def collect(self) -> list[Samples]:
        """Every metric as it is now."""
        turns = Turns()
        if not self._sampler.looked:
            await asyncio.to_thread(self._sampler.wait_for_first)
        metrics = await self._versions(turns)
        metrics += [Samples("gauge", name, words, "sum", {"": 0}) for name, words in _PINNED]
        metrics += self._sampler.seen
        metrics += await asyncio.to_thread(process_samples)
        for samples in read(self._registry):
            metrics.append(samples)
            if turns.over:
                await turns.rest()
        return metrics

    async def _versions(self, turns: Turns) -> list[Samples]:
        metrics: dict[str, Samples] = {}
        chosen: list[tuple[int, dict[str, Value], str]] = []
        for place, column in enumerate(COLUMNS):
            if column.group in self._groups:
                series = metrics.setdefault(column.name, _empty(column)).series
                chosen.append((place, series, f",{column.labels}" if column.labels else ""))
        pending, load = _empty(PENDING), _empty(LOAD_SECONDS)
        uuids = self._sampler.gpu_uuids
        for account, version in self._ledger.review(self._plane.statistics()):
            labels = version_labels(account, uuids)
            row = account.row()
            for place, series, more in chosen:
                value = row[place]
                if value is not None:
                    series[labels + more] = value
            if version is not None:
                pending.series[labels] = version.waiting
                load.series[labels] = self._plane.load_seconds(account.name, account.version)
            if turns.over:
                await turns.rest()
        return [*metrics.values(), pending, load]


async def written(metrics: list[Samples], format: Format) -> list[bytes]:
    """Metrics as text, in pieces; others have their turn in between."""
    turns = Turns()
    text = []
    for piece in pieces(metrics, format):
        text.append(piece)
        if turns.over:
            await turns.rest()
    return text


def version_labels(account: Account, gpu_uuids: tuple[str, ...]) -> str:
    """The labels of a version's series.

    `gpu_uuid` where all its GPU instances are on the same one; they are counted together, so with several there is none.
    """
    config = account.config
    labels = [("model", account.name), ("version", account.version_text)]
    gpus = {gpu for group in config.instance_groups if group.kind == "gpu" for gpu in group.gpus}
    if len(gpus) == 1 and max(gpus) < len(gpu_uuids):
        labels.append(("gpu_uuid", gpu_uuids[max(gpus)]))
    return labels_text([*labels, *_tags(config)])


def _tags(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """A configuration's `metric_tags`: Triton's `_<key>`, with what a label's name cannot have made an underscore."""
    known: set[str] = set()
    for key, value in sorted(config.metric_tags.items()):
        # Two underscores in front are Prometheus's own.
        name = "_" + _NOT_IN_A_LABEL.sub("_", key).lstrip("_")
        if len(name) > 1 and name not in known:
            known.add(name)
            yield name, value


def _empty(column: Column) -> Samples:
    return Samples(column.kind, column.name, column.help, column.together)


def _own_names() -> dict[tuple[Kind, str], None]:
    names: dict[tuple[Kind, str], None] = {
        (column.kind, column.name): None for column in (*COLUMNS, PENDING, LOAD_SECONDS)
    }
    names.update(dict.fromkeys((kind, name) for kind, name, _ in GPU))
    names.update(dict.fromkeys((kind, name) for kind, name, _, _ in PROCESS))
    names.update({("gauge", name): None for name in (*(one[0] for one in CPU), *(one[0] for one in _PINNED))})
    names["counter", COLLECTIONS[0]] = None
    return names
