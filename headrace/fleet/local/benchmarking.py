# SPDX-License-Identifier: Apache-2.0
"""BenchmarkJobs of this machine: what `benchmarks` plans becomes a process that runs once (`jobs`). Made by `program`.

The same as `cluster.benchmarking` does with a Job: one run for each edit of a BenchmarkJob, which is not repeated; what it
waits for, how it runs and how it ended is its status.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from headrace.core.errors import FailedPrecondition
from headrace.fleet.benchmarks.planning import DIGEST, Benchmark, digest_of, plan_benchmark, service_of
from headrace.fleet.benchmarks.states import benchmark_status, is_over, news
from headrace.fleet.local.events import Events
from headrace.fleet.local.jobs import JobRun, Site, found_job, make_job
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.store import Store, each_folder
from headrace.fleet.words import ClusterFacts, Document, Problem, annotations_of, kind_of, name_of, part, text

log = logging.getLogger("headrace.fleet")

Key = tuple[str, str]
"""Namespace and name of a BenchmarkJob."""
_REST_SECONDS = 30.0
"""Between two looks at how long logs are."""
BENCHMARK, SERVICE = "BenchmarkJob", "InferenceService"


class Benchmarks:
    """See the module. Used from the loop's thread only."""

    def __init__(
        self, settings: LocalSettings, store: Store, site: Site, events: Events, facts: Callable[[], ClusterFacts]
    ) -> None:
        self._settings = settings
        self._folder = settings.root / "benchmarks"
        self._store = store
        self._site = site
        self._events = events
        self._facts = facts
        self._runs: dict[Key, JobRun] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._asked: set[Key] = set()
        self._any = asyncio.Event()

    def load(self) -> None:
        """Find the runs of the daemon before, and go on with them."""
        for space in each_folder(self._folder):
            for folder in each_folder(space):
                key = (space.name, folder.name)
                run = found_job(folder, self._settings, self._site, partial(self.ask, key))
                if run is None:
                    shutil.rmtree(folder, ignore_errors=True)  # its making was cut short
                    continue
                self._runs[key] = run
                run.begin()

    def run_of(self, namespace: str, name: str) -> JobRun | None:
        """What runs, or ran, for a BenchmarkJob; also by the name of its pod."""
        for (space, benchmark), each in self._runs.items():
            if space == namespace and name in (benchmark, *map(name_of, each.pods())):
                return each
        return None

    def ask(self, key: Key) -> None:
        """Have a look at a BenchmarkJob, soon."""
        self._asked.add(key)
        self._any.set()

    def changed(self, document: Document) -> None:
        """A document was applied, changed or removed."""
        if kind_of(document) == BENCHMARK:
            self.ask(_key(document))
            return
        for each in self._store.all(BENCHMARK):
            if _key(each) not in self._runs and (kind_of(document) != SERVICE or service_of(each) == _key(document)):
                self.ask(_key(each))
        for run in self._runs.values():
            run.look_again()

    async def run(self) -> None:
        """Until cancelled."""
        for key in (*map(_key, self._store.all(BENCHMARK)), *self._runs):
            self.ask(key)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REST_SECONDS if self._runs else None):
                    await self._any.wait()
            self._any.clear()
            for run in self._runs.values():
                run.rotate()
            asked, self._asked = self._asked, set()
            for key in sorted(asked):
                try:
                    self._look(key)
                except Exception:
                    # A mistake of ours. It must not reach the others.
                    log.exception("BenchmarkJob %s/%s cannot be looked at", *key)

    async def end_all(self) -> None:
        """End all that runs."""
        for key in list(self._runs):
            self._end(key)
        await asyncio.gather(*self._ends, return_exceptions=True)

    async def close(self) -> None:
        """Stop following; what runs goes on."""
        await asyncio.gather(*self._ends, return_exceptions=True)
        await asyncio.gather(*(each.let_go() for each in self._runs.values()))

    # One look

    def _look(self, key: Key) -> None:
        benchmark, run = self._store.get(BENCHMARK, *key), self._runs.get(key)
        if benchmark is None or text(benchmark, "metadata", "deletionTimestamp"):
            if run is not None:
                self._end(key)
            elif benchmark is not None:
                self._store.remove(benchmark)
        elif run is None:
            self._plan(key, benchmark)
        elif annotations_of(run.job).get(DIGEST) != digest_of(benchmark):
            self._end(key)
            self._tell(benchmark, Benchmark(waits="it was edited: what runs is being ended"), None)
        else:
            self._tell(benchmark, Benchmark(), run)

    def _plan(self, key: Key, benchmark: Document) -> None:
        if is_over(benchmark):
            return
        named = service_of(benchmark)
        planned = plan_benchmark(benchmark, self._store.get(SERVICE, *named) if named else None, self._facts())
        if planned.job is None:
            self._tell(benchmark, planned, None)
            return
        folder = self._folder / key[0] / key[1]
        try:
            run = make_job(folder, planned.job, self._settings, self._site, partial(self.ask, key))
        except FailedPrecondition as error:
            shutil.rmtree(folder, ignore_errors=True)
            problem = Problem("", error.message, "then apply it again")
            self._tell(benchmark, Benchmark(problems=(problem,)), None)
            return
        self._runs[key] = run
        self._tell(benchmark, Benchmark(), run)
        run.begin()

    def _end(self, key: Key) -> None:
        run = self._runs[key]
        if run.ending:
            return
        run.ending = True
        task = asyncio.ensure_future(run.remove())
        self._ends.add(task)

        def over(done: asyncio.Task[None]) -> None:
            self._ends.discard(task)
            if not done.cancelled() and done.exception() is not None:
                log.error("BenchmarkJob %s/%s could not be ended", *key, exc_info=done.exception())
            self._runs.pop(key, None)
            self.ask(key)

        task.add_done_callback(over)

    def _tell(self, benchmark: Document, planned: Benchmark, run: JobRun | None) -> None:
        """Write the status if it changed, and an event if there is news."""
        before = part(benchmark, "status")
        job, pods, where = (run.shown(), run.pods(), run.state.results) if run is not None else (None, [], "")
        after = benchmark_status(benchmark, planned, job, pods, self._site.system.now(), where)
        if before == after:
            return
        self._store.told({**benchmark, "status": after})
        told = news(planned, before, after)
        if told is not None:
            self._events.record(benchmark, *told)


def _key(document: Document) -> Key:
    return text(document, "metadata", "namespace"), name_of(document)
