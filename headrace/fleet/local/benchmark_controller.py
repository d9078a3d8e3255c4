# SPDX-License-Identifier: Apache-2.0
"""The controller of BenchmarkJobs: each becomes a Job, a process that runs once (`jobs`).

As in a cluster, each edit of a BenchmarkJob is run once, and not repeated; its status has what it waits for, its state and
its result.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from headrace.core.errors import FailedPrecondition
from headrace.core.files import list_folders
from headrace.fleet.benchmarks.job import DIGEST, BenchmarkPlan, digest_of, plan_benchmark, service_of
from headrace.fleet.benchmarks.status import benchmark_status, is_finished, status_event
from headrace.fleet.documents import ClusterFacts, Problem, object_key
from headrace.fleet.local.events import Events
from headrace.fleet.local.jobs import Job, JobInterface, create_job, load_job
from headrace.fleet.local.object_store import DocumentStore
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.names import SERVICE
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_mapping,
    get_str,
    kind_of,
    name_of,
)

log = logging.getLogger("headrace.fleet")

Key = tuple[str, str]
"""Namespace and name of a BenchmarkJob."""
_ROTATE_SECONDS = 30.0
"""Between two rotations of logs."""
BENCHMARK = "BenchmarkJob"


class BenchmarkController:
    """Reconciles BenchmarkJobs. Used from the loop's thread only."""

    def __init__(
        self,
        settings: LocalSettings,
        store: DocumentStore,
        node: JobInterface,
        events: Events,
        facts: Callable[[], ClusterFacts],
    ) -> None:
        self._settings = settings
        self._folder = settings.root / "benchmarks"
        self._store = store
        self._node = node
        self._events = events
        self._facts = facts
        self._jobs: dict[Key, Job] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._queue: set[Key] = set()
        self._queued = asyncio.Event()

    def load(self) -> None:
        """Adopt the Jobs of an earlier daemon."""
        for space in list_folders(self._folder):
            for folder in list_folders(space):
                key = (space.name, folder.name)
                job = load_job(folder, self._settings, self._node, partial(self.enqueue, key))
                if job is None:
                    shutil.rmtree(folder, ignore_errors=True)  # its creation was interrupted
                    continue
                self._jobs[key] = job
                job.start()

    def job_of(self, namespace: str, name: str) -> Job | None:
        """Return the Job of a BenchmarkJob, by its name or that of its pod."""
        for (space, benchmark), job in self._jobs.items():
            if space == namespace and name in (benchmark, *map(name_of, job.pods())):
                return job
        return None

    def enqueue(self, key: Key) -> None:
        """Reconcile a BenchmarkJob soon."""
        self._queue.add(key)
        self._queued.set()

    def document_changed(self, document: Document) -> None:
        """Handle a document that was applied, changed or removed."""
        if kind_of(document) == BENCHMARK:
            self.enqueue(object_key(document))
            return
        for benchmark in self._store.all(BENCHMARK):
            if object_key(benchmark) not in self._jobs and (
                kind_of(document) != SERVICE or service_of(benchmark) == object_key(document)
            ):
                self.enqueue(object_key(benchmark))
        for job in self._jobs.values():
            job.retry()

    async def run(self) -> None:
        """Reconcile queued BenchmarkJobs until cancelled."""
        for key in (*map(object_key, self._store.all(BENCHMARK)), *self._jobs):
            self.enqueue(key)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ROTATE_SECONDS if self._jobs else None):
                    await self._queued.wait()
            self._queued.clear()
            for job in self._jobs.values():
                job.rotate_log()
            queue, self._queue = self._queue, set()
            for key in sorted(queue):
                try:
                    self._reconcile(key)
                except Exception:
                    # A bug in Headrace. It must not affect the other benchmarks.
                    log.exception("Cannot reconcile BenchmarkJob %s/%s", *key)

    async def remove_all(self) -> None:
        """Stop and remove all Jobs."""
        for key in list(self._jobs):
            self._remove_job(key)
        await asyncio.gather(*self._removals, return_exceptions=True)

    async def close(self) -> None:
        """Stop watching; Jobs keep running."""
        await asyncio.gather(*self._removals, return_exceptions=True)
        await asyncio.gather(*(job.detach() for job in self._jobs.values()))

    # One reconciliation

    def _reconcile(self, key: Key) -> None:
        benchmark, job = self._store.get(BENCHMARK, *key), self._jobs.get(key)
        if benchmark is None or get_str(benchmark, "metadata", "deletionTimestamp"):
            if job is not None:
                self._remove_job(key)
            elif benchmark is not None:
                self._store.remove(benchmark)
        elif job is None:
            self._create_job(key, benchmark)
        elif annotations_of(job.job).get(DIGEST) != digest_of(benchmark):
            self._remove_job(key)
            self._update_status(benchmark, BenchmarkPlan(waits="it was edited: its Job is being stopped"), None)
        else:
            self._update_status(benchmark, BenchmarkPlan(), job)

    def _create_job(self, key: Key, benchmark: Document) -> None:
        if is_finished(benchmark):
            return
        service = service_of(benchmark)
        planned = plan_benchmark(benchmark, self._store.get(SERVICE, *service) if service else None, self._facts())
        if planned.job is None:
            self._update_status(benchmark, planned, None)
            return
        folder = self._folder / key[0] / key[1]
        try:
            job = create_job(folder, planned.job, self._settings, self._node, partial(self.enqueue, key))
        except FailedPrecondition as error:
            shutil.rmtree(folder, ignore_errors=True)
            problem = Problem("", error.message, "then apply it again")
            self._update_status(benchmark, BenchmarkPlan(problems=(problem,)), None)
            return
        self._jobs[key] = job
        self._update_status(benchmark, BenchmarkPlan(), job)
        job.start()

    def _remove_job(self, key: Key) -> None:
        job = self._jobs[key]
        if job.removing:
            return
        job.removing = True
        task = asyncio.ensure_future(job.remove())
        self._removals.add(task)

        def removed(done: asyncio.Task[None]) -> None:
            self._removals.discard(task)
            if not done.cancelled() and done.exception() is not None:
                log.error("Cannot remove the Job of BenchmarkJob %s/%s", *key, exc_info=done.exception())
            self._jobs.pop(key, None)
            self.enqueue(key)

        task.add_done_callback(removed)

    def _update_status(self, benchmark: Document, planned: BenchmarkPlan, job: Job | None) -> None:
        """Store the status if it changed, and record an event if it is worth one."""
        before = get_mapping(benchmark, "status")
        document, pods, results = (
            (job.to_document(), job.pods(), job.state.results) if job is not None else (None, [], "")
        )
        after = benchmark_status(benchmark, planned, document, pods, self._node.system.now(), results)
        if before == after:
            return
        self._store.update_status({**benchmark, "status": after})
        event = status_event(planned, before, after)
        if event is not None:
            self._events.record(benchmark, *event)
