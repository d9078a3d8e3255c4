# SPDX-License-Identifier: Apache-2.0
"""One look at one BenchmarkJob: make its Job, and tell how that is. Called by `reconciling`; remembers nothing.

A Job is made once for each edit of a BenchmarkJob. One that has ended and is deleted stays deleted; one that is deleted
while it runs is made again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from headrace.fleet.benchmarks.planning import DIGEST, Benchmark, digest_of, plan_benchmark, service_of
from headrace.fleet.benchmarks.states import benchmark_status, is_over, news
from headrace.fleet.cluster.api import Api, Refused
from headrace.fleet.cluster.events import Recorder
from headrace.fleet.cluster.leaving import let_go
from headrace.fleet.cluster.queue import Key
from headrace.fleet.cluster.resources import BENCHMARKS, JOBS
from headrace.fleet.cluster.view import View, owner_uid
from headrace.fleet.words import Document, Problem, annotations_of, name_of, part, text

log = logging.getLogger("headrace.operator")

_LONGEST = 400


class Benchmarker:
    """Brings BenchmarkJobs to what they ask for."""

    def __init__(self, api: Api, view: View, recorder: Recorder, now: Callable[[], datetime]) -> None:
        self._api = api
        self._view = view
        self._recorder = recorder
        self._now = now

    async def bring(self, key: Key) -> bool:
        """Look once. False: try again later. Raises what the API says."""
        benchmark = self._view.benchmark(key)
        if benchmark is None:
            return True
        if text(benchmark, "metadata", "deletionTimestamp"):
            await let_go(self._api, self._view, BENCHMARKS, benchmark)
            return True
        seen = self._view.measuring(benchmark)
        if seen is None:
            return False  # to make a Job that is there already would be refused; to tell of it would be wrong
        job, pods = seen
        if job is not None and annotations_of(job).get(DIGEST) != digest_of(benchmark):
            await self._remove(job)
            await self._tell(benchmark, Benchmark(waits="it was edited: its old Job is being deleted"), None, ())
            return True
        if job is not None:
            await self._tell(benchmark, Benchmark(), job, pods)
            return True
        if is_over(benchmark):
            return True
        named = service_of(benchmark)
        planned = plan_benchmark(benchmark, self._view.service(named) if named else None, self._view.facts)
        if planned.job is None:
            await self._tell(benchmark, planned, None, ())
            return True
        problem, job = await self._make(benchmark, planned.job)
        await self._tell(benchmark, Benchmark(problems=(problem,) if problem is not None else ()), job, ())
        return problem is None

    async def _make(self, benchmark: Document, wanted: Document) -> tuple[Problem | None, Document | None]:
        where = self._view.where(JOBS)
        if where is None:
            return Problem("", "this cluster has no Jobs", "install what brings batch/v1"), None
        namespace, name = text(wanted, "metadata", "namespace"), name_of(wanted)
        found = await self._api.get(where, namespace, name)
        if found is not None and owner_uid(found) != text(benchmark, "metadata", "uid"):
            said = f"there is a Job {name} already, and it is not this benchmark's"
            return Problem("metadata.name", said, "give the benchmark another name, or delete that Job"), None
        if found is not None:
            return None, found  # made a moment ago, and not heard of yet
        try:
            made = await self._api.apply(where, wanted)
        except Refused as refused:
            if refused.code in (409, 429) or refused.code >= 500:
                raise
            said = f"the API server refuses its Job: {' '.join(refused.said.split())[:_LONGEST]}"
            return Problem("", said, "change the field named there, or have it allowed"), None
        self._view.put(JOBS, made)
        return None, made

    async def _remove(self, job: Document) -> None:
        where = self._view.where(JOBS)
        if where is None or text(job, "metadata", "deletionTimestamp"):
            return
        metadata = part(job, "metadata")
        await self._api.delete(where, text(metadata, "namespace"), name_of(job), text(metadata, "uid"))

    async def _tell(
        self, benchmark: Document, planned: Benchmark, job: Document | None, pods: Sequence[Document]
    ) -> None:
        """Write the status if it changed, and an event if there is news."""
        before = part(benchmark, "status")
        after = benchmark_status(benchmark, planned, job, pods, self._now())
        where = self._view.where(BENCHMARKS)
        if before == after or where is None:
            return
        change = {
            "metadata": {"resourceVersion": text(benchmark, "metadata", "resourceVersion")},
            "status": {**dict.fromkeys(before), **after},
        }
        try:
            made = await self._api.patch(
                where, text(benchmark, "metadata", "namespace"), name_of(benchmark), change, "status"
            )
        except Refused as refused:
            if refused.code == 404:  # deleted meanwhile
                return
            raise
        self._view.put(BENCHMARKS, made)
        told = news(planned, before, after)
        if told is not None:
            await self._recorder.record(benchmark, *told)
