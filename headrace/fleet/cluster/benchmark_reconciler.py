# SPDX-License-Identifier: Apache-2.0
"""Reconcile one BenchmarkJob: create its Job, and write its status.

A Job is created once for each edit of a BenchmarkJob. A finished Job that is deleted stays deleted; a running one is created
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from headrace.fleet.benchmarks.job import DIGEST, BenchmarkPlan, digest_of, plan_benchmark, service_of
from headrace.fleet.benchmarks.status import benchmark_status, is_finished, status_event
from headrace.fleet.cluster.apply import ServerErrors, refusal_problem, remove_finalizer
from headrace.fleet.cluster.events import EventRecorder
from headrace.fleet.cluster.resources import BENCHMARKS, JOBS
from headrace.fleet.cluster.view import ClusterView
from headrace.fleet.documents import Problem
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError
from headrace.platforms.kubernetes_client.objects import (
    Document,
    Key,
    annotations_of,
    controller_uid,
    get_mapping,
    get_str,
    name_of,
)

log = logging.getLogger("headrace.operator")


class BenchmarkReconciler:
    """Reconciles BenchmarkJobs."""

    def __init__(self, api: ApiClient, view: ClusterView, recorder: EventRecorder, now: Callable[[], datetime]) -> None:
        self._api = api
        self._view = view
        self._recorder = recorder
        self._now = now
        self._errors = ServerErrors()

    async def reconcile(self, key: Key) -> bool:
        """Reconcile a BenchmarkJob once. Return False to retry. Raises ApiError, Unreachable."""
        benchmark = self._view.benchmark(key)
        if benchmark is None:
            return True
        if get_str(benchmark, "metadata", "deletionTimestamp"):
            await remove_finalizer(self._api, self._view, BENCHMARKS, benchmark)
            return True
        observed = self._view.benchmark_job(benchmark)
        if observed is None:
            return False  # the cache is not complete: the Job may exist
        job, pods = observed
        if job is not None and annotations_of(job).get(DIGEST) != digest_of(benchmark):
            await self._remove(job)
            await self._write_status(
                benchmark, BenchmarkPlan(waits="it was edited: its old Job is being deleted"), None, ()
            )
            return True
        if job is not None:
            await self._write_status(benchmark, BenchmarkPlan(), job, pods)
            return True
        if is_finished(benchmark):
            return True
        named = service_of(benchmark)
        planned = plan_benchmark(benchmark, self._view.service(named) if named else None, self._view.facts)
        if planned.job is None:
            await self._write_status(benchmark, planned, None, ())
            return True
        problem, job = await self._create(benchmark, planned.job)
        await self._write_status(benchmark, BenchmarkPlan(problems=(problem,) if problem is not None else ()), job, ())
        return problem is None

    async def _create(self, benchmark: Document, planned: Document) -> tuple[Problem | None, Document | None]:
        served = self._view.served(JOBS)
        if served is None:
            return Problem("", "this cluster has no Jobs", "enable the API group batch/v1"), None
        namespace, name = get_str(planned, "metadata", "namespace"), name_of(planned)
        live = await self._api.get(served, namespace, name)
        if live is not None and controller_uid(live) != get_str(benchmark, "metadata", "uid"):
            message = f"a Job {name} exists and does not belong to this benchmark"
            return Problem("metadata.name", message, "give the benchmark another name, or delete that Job"), None
        if live is not None:
            return None, live  # just created, and not in the cache yet
        try:
            applied = await self._api.apply(served, planned)
        except ApiError as error:
            if self._errors.is_temporary(planned, error):
                raise
            return refusal_problem(planned, error), None
        self._errors.succeeded(planned)
        self._view.put(JOBS, applied)
        return None, applied

    async def _remove(self, job: Document) -> None:
        served = self._view.served(JOBS)
        if served is None or get_str(job, "metadata", "deletionTimestamp"):
            return
        metadata = get_mapping(job, "metadata")
        await self._api.delete(served, get_str(metadata, "namespace"), name_of(job), get_str(metadata, "uid"))

    async def _write_status(
        self, benchmark: Document, planned: BenchmarkPlan, job: Document | None, pods: Sequence[Document]
    ) -> None:
        """Write the status if it changed, and an event if the change needs one."""
        before = get_mapping(benchmark, "status")
        after = benchmark_status(benchmark, planned, job, pods, self._now())
        served = self._view.served(BENCHMARKS)
        if before == after or served is None:
            return
        change = {
            "metadata": {"resourceVersion": get_str(benchmark, "metadata", "resourceVersion")},
            "status": {**dict.fromkeys(before), **after},
        }
        try:
            patched = await self._api.patch(
                served, get_str(benchmark, "metadata", "namespace"), name_of(benchmark), change, "status"
            )
        except ApiError as error:
            if error.code == 404:  # deleted meanwhile
                return
            raise
        self._view.put(BENCHMARKS, patched)
        event = status_event(planned, before, after)
        if event is not None:
            await self._recorder.record(benchmark, *event)
