# SPDX-License-Identifier: Apache-2.0
"""Models that load on demand: one is loaded when a request names it, kept while used, and evicted to make room for others.

`control` creates it and tells it what the scans find; the data plane waits here for a model that is not loaded. Loads and
evictions go through the same `ModelLifecycle` as all others. Nothing runs for a request to a loaded model: when it was last
used follows from its statistics. Everything runs in the event loop's thread, except reading files and measuring.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from time import monotonic_ns

from headrace.backends.table import backend_named
from headrace.core.errors import HeadraceError, NotFound, Unavailable, with_message
from headrace.engine.repository.lifecycle import DesiredState, MissingDependency, ModelLifecycle
from headrace.engine.repository.load_context import LoadContext, reportable_error
from headrace.engine.repository.load_plan import PINNED, LoadPlan, remember_completion
from headrace.engine.repository.memory_budget import HOST, NO_MEMORY, MemoryBudget, MemoryUse, add_up, gpu_place
from headrace.engine.repository.model_sizes import MemoryProbe, ModelSize, SizeStore, growth, read_content
from headrace.engine.repository.residency import Done, ModelNotLoaded, OnDemandModel, Residency, Waiter
from headrace.engine.repository.resident_memory import RETRY_SECONDS, Lifecycles, Misfit, NoRoom, ResidentMemory
from headrace.engine.repository.scan import ScannedModel
from headrace.engine.repository.states import State
from headrace.models.config.types import ModelConfig
from headrace.models.storage.errors import readable_bytes

log = logging.getLogger("headrace.engine.repository")

NOT_LOADED = "not loaded: the first request that names it loads it"
UNLOADED_ON_REQUEST = "unloaded on request: the next request that names it loads it"
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_BACKEND_BYTES = 16_000_000
"""More than this is not counted for the first model of a backend if its files do not explain it."""


class OnDemandModels:
    """The models of a repository that load on demand."""

    def __init__(
        self,
        context: LoadContext,
        lifecycles: Lifecycles,
        probe: MemoryProbe | None = None,
    ) -> None:
        settings = context.settings
        self._context = context
        self._lifecycles = lifecycles
        self._models: dict[str, OnDemandModel] = {}
        self.memory = ResidentMemory(context, lifecycles, self._models)
        """What they take; its limits are set by `open`."""
        self._probe = probe
        self._sizes = SizeStore(settings.sizes_folder)
        self._room = asyncio.Lock()
        """Held while a load makes room, so that two loads do not count on the same free memory."""
        # Half of the cores are for requests: to a loaded model they must not become slower than without loads.
        cores = len(os.sched_getaffinity(0))
        self._turns = LoadTurns(max(1, min(settings.model_load_thread_count, cores // 2)))
        self._warm_backends: set[str] = set()
        """Backends that have loaded a model in this process."""
        self._opened = self._started = False

    # What the scans find.

    async def open(self) -> None:
        """Set the limits, once: before the first model is put, since most servers have none that loads on demand."""
        if self._opened:
            return
        self._opened = True
        settings = self._context.settings
        if self._probe is None:
            self._probe = await self._context.run_with_files(MemoryProbe, settings.gpus)
        limits = dict(await self._context.run_with_files(self._probe.free))
        if settings.host_memory_bytes:
            limits[HOST] = settings.host_memory_bytes
        if settings.gpu_memory_bytes:
            limits |= {gpu_place(index): settings.gpu_memory_bytes for index in range(settings.gpus)}
        self.memory.budget = MemoryBudget(limits)
        await self._context.run_with_files(self._sizes.clean)

    async def start(self) -> dict[str, HeadraceError]:
        """Load pinned models and those to load at the start; return the problems."""
        settings = self._context.settings
        self._started = True
        names = [model.name for model in self._models.values() if model.pinned]
        names += [name for name in settings.load_models if name not in names and name in self._models]
        if self._models:
            limits = self.memory.budget.limits.items()
            sums = ", ".join(f"{place} {readable_bytes(limit)}" for place, limit in limits) or "no limit"
            log.info("%d models load on demand, within: %s", len(self._models), sums)
        problems: dict[str, HeadraceError] = {}
        for name in names:
            problem = await self.load(name)
            if problem is not None:
                problems[name] = problem
        return problems

    def knows(self, name: str) -> bool:
        """Return whether a model loads on demand."""
        return name in self._models

    @property
    def names(self) -> list[str]:
        """The names of all models that load on demand, sorted."""
        return sorted(self._models)

    def scanned(self, name: str) -> ScannedModel:
        """Return the folder of a model as it was last accepted."""
        return self._models[name].scanned

    def put(self, scanned: ScannedModel, plan: LoadPlan | None, problem: HeadraceError | None = None) -> None:
        """Add a model, or take over its changes. A loaded one is loaded again beside the old copy, if both fit."""
        settings = self._context.settings
        name = scanned.name
        pinned = name in settings.pinned_models or (plan is not None and plan.residency == PINNED)
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = OnDemandModel(name, scanned, plan, pinned, problem=problem)
        else:
            model.scanned, model.plan, model.pinned, model.problem = scanned, plan, pinned, problem
            model.key, model.size, model.config, model.completed = "", None, None, None
            model.failures, model.retry_at = 0, 0.0
            if model.task is not None:
                model.changed = True
                return
            if self._lifecycle(model).serving:
                self._begin(model)
                return
        self._show_absent(model, problem.message if problem is not None else NOT_LOADED)
        if model.waiters or (pinned and self._started):
            self._begin(model)

    def remove(self, name: str) -> None:
        """Forget a model whose folder is gone, and unload it."""
        model = self._models.pop(name, None)
        if model is None:
            return
        self._answer(model, NotFound(f"Request for unknown model: '{name}' is not found: its folder was removed"))
        if model.task is None:
            self._lifecycle(model).request(DesiredState(None))
            self.memory.free(model)

    # Requests.

    def wait(self, name: str, done: Done) -> Callable[[], None]:
        """Load a model for a request; return the function that gives up waiting, which does not stop the load.

        Raise at once if it cannot fit, or failed so recently that it is not tried again yet.
        """
        model = self._models[name]
        refusal = self._refusal(model)
        if refusal is not None:
            raise refusal
        waiter = Waiter(done)
        waiter.timer = asyncio.get_running_loop().call_later(
            self._context.settings.wait_seconds, self._time_out, model, waiter
        )
        model.waiters.append(waiter)
        self._begin(model)
        return partial(self._drop, model, waiter)

    async def load(self, name: str) -> HeadraceError | None:
        """Load a model and return the problem; return when it serves, however long that takes."""
        model = self._models[name]
        if self._serves(model) and model.task is None:
            return None
        future: asyncio.Future[HeadraceError | None] = asyncio.get_running_loop().create_future()
        waiter = Waiter(lambda problem: None if future.done() else future.set_result(problem))
        model.waiters.append(waiter)
        self._begin(model)
        try:
            return await future
        finally:
            self._drop(model, waiter)

    async def unload(self, name: str, wait_seconds: float) -> None:
        """Evict a model on request, also a pinned one; wait for its memory, but not for ever."""
        model = self._models[name]
        while model.task is not None:
            await asyncio.wait({model.task})
        lifecycle = self._lifecycle(model)
        if lifecycle.serving:
            work = self.memory.evict([model], UNLOADED_ON_REQUEST)
            try:
                async with asyncio.timeout(wait_seconds):
                    await asyncio.shield(self._context.background(work))
            except TimeoutError:
                log.info("Model '%s' will be unloaded when its requests in flight are done", name)

    def can_serve(self, name: str, version: str = "") -> bool:
        """Return whether a request to a model would be answered, as far as that is known without loading it."""
        model = self._models.get(name)
        if model is None or model.problem is not None:
            return False
        return not version or self.has_version(name, version)

    def has_version(self, name: str, version: str) -> bool:
        """Return whether a load would serve this version, as far as the configuration says."""
        model = self._models[name]
        if not version.isdecimal() or model.plan is None:
            return version.isdecimal()
        versions = set(model.scanned.versions) or ({1} if model.plan.is_ensemble else set())
        return int(version) in model.plan.policy.choose(versions)

    def config(self, name: str) -> ModelConfig | None:
        """Return the configuration of a model's last load, or else as it is written; None if it cannot be read."""
        model = self._models.get(name)
        if model is None:
            return None
        return model.config or (model.plan.config if model.plan is not None else None)

    def absence(self, name: str) -> HeadraceError:
        """Return why a model does not serve: it failed, or it waits for a request."""
        return self._refusal(self._models[name]) or ModelNotLoaded(name)

    # Reports.

    def residencies(self) -> list[Residency]:
        """Return what every model takes and why it is, or is not, in memory."""
        return [self._residency(self._models[name]) for name in self.names]

    def _residency(self, model: OnDemandModel) -> Residency:
        entries = self._context.states.of(model.name)
        reason = next((entry.reason for entry in reversed(entries) if entry.reason), "")
        serves = self._serves(model)
        last_ns = self.memory.last_used_ns(model) if serves else 0
        if model.task is not None:
            state, reason = ("resident" if serves else "loading"), model.stage or reason
        elif serves:
            state = "resident"
        elif model.problem is not None:
            state = "failed"
        else:
            state = "evicted" if model.evicted else "not loaded"
        return Residency(
            model.name,
            state,
            reason,
            model.pinned,
            model.charged or model.size or NO_MEMORY,
            bool(model.charged),
            len(model.waiters),
            model.loads,
            model.failed_loads,
            model.evictions,
            max(0.0, (monotonic_ns() - last_ns) / 1e9) if last_ns else None,
            model.load_seconds,
            next((entry.progress for entry in reversed(entries) if entry.state is State.LOADING), None),
        )

    # Waiting.

    def _refusal(self, model: OnDemandModel) -> HeadraceError | None:
        """Return why a request cannot wait for a model; None if it can."""
        if self._context.closing:
            return Unavailable("the server is stopping: send the request to another one")
        if model.task is not None:
            return None
        misfit = self.memory.misfit(model, model.size or model.estimate)
        if misfit is not None:
            return misfit
        seconds_left = model.retry_at - self._context.clock.monotonic()
        if model.problem is not None and seconds_left > 0:
            return Unavailable(
                f"model '{model.name}' could not be loaded: {model.problem.message}; it is tried again by a request in "
                f"{seconds_left:.0f} s or later",
                retry_after_seconds=seconds_left,
            )
        return None

    def _time_out(self, model: OnDemandModel, waiter: Waiter) -> None:
        seconds = self._context.settings.wait_seconds
        seconds_left = RETRY_SECONDS
        if model.load_seconds is not None and model.load_began:
            seconds_left = max(1.0, model.load_seconds - (self._context.clock.monotonic() - model.load_began))
        stage = f": {stage}" if (stage := self.stage(model.name)) else ""
        self._drop(model, waiter)
        waiter.done(
            Unavailable(
                f"model '{model.name}' is not loaded after {seconds:g} s{stage}; the load goes on, send the request again",
                retry_after_seconds=seconds_left,
            )
        )

    def stage(self, name: str) -> str:
        """Return what the load of a model is doing; "" if there is no load."""
        model = self._models.get(name)
        if model is None or model.task is None:
            return ""
        entries = self._context.states.of(name)
        progress = next((entry.progress for entry in reversed(entries) if entry.progress is not None), None)
        if progress is None:
            return model.stage
        total = f", {progress.done:g} of {progress.total:g}" if progress.total else ""
        return f"{progress.message or model.stage}{total}"

    def _drop(self, model: OnDemandModel, waiter: Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        if waiter in model.waiters:
            model.waiters.remove(waiter)

    def _answer(self, model: OnDemandModel, problem: HeadraceError | None) -> None:
        """Answer every request that waits for a model. Each gets an error of its own: protocols add to it."""
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if waiter.timer is not None:
                waiter.timer.cancel()
            try:
                waiter.done(None if problem is None else _own(problem))
            except Exception:  # an error of one request must not keep the others waiting
                log.exception("Could not continue a request that waited for model '%s'", model.name)

    # Loading.

    def _begin(self, model: OnDemandModel) -> None:
        if model.task is None and not self._context.closing:
            model.stage = "waiting for its turn"
            model.load_began = self._context.clock.monotonic()
            model.task = self._context.background(self._run(model))

    async def _run(self, model: OnDemandModel) -> None:
        problem: HeadraceError | None = Unavailable("the server is closing")
        try:
            problem = await self._load(model)
        except Exception as error:
            problem = reportable_error(error, f"loading model '{model.name}' on demand")
        finally:
            model.task, model.stage = None, ""
            self._ended(model, problem)

    def _ended(self, model: OnDemandModel, problem: HeadraceError | None) -> None:
        serves = self._serves(model)
        removed = self._models.get(model.name) is not model
        if removed and not self._context.closing:
            if model.name not in self._models:
                self._lifecycle(model).request(DesiredState(None))
            self.memory.free(model)
            return
        if problem is None or serves:
            model.failures, model.retry_at = 0, 0.0
            model.problem = None
        elif isinstance(problem, Misfit):
            model.problem = problem
        elif not isinstance(problem, NoRoom):
            model.problem = problem
            model.failures += 1
            model.failed_loads += 1
            pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** (model.failures - 1))
            model.retry_at = self._context.clock.monotonic() + pause
        if not serves and problem is not None:
            self._lifecycle(model).abandon()
            self._show_absent(model, problem.message)
        # Requests start here, in this step of the loop, so that a model that was just loaded is in use and stays.
        self._answer(model, None if serves else problem)
        if model.changed:
            model.changed, model.key, model.size = False, "", None
            if serves or model.waiters:
                self._begin(model)

    async def _load(self, model: OnDemandModel) -> HeadraceError | None:
        """Load a model, after making room for it. Return the problem."""
        if self._lifecycle(model).serving and not model.changed and model.key:
            return None
        if model.plan is None:
            gpus = self._context.settings.gpus
            read_plan = self._context.read_plan
            try:
                model.plan = await self._context.run_in_loader(read_plan, model.scanned.folder, None, gpus)
            except Exception:  # the lifecycle reads it again, and reports what is wrong
                return await self._serve(model)
        if model.plan.is_ensemble:
            return await self._serve(model)  # its steps' models take the memory
        if not model.key:
            await self._read_size(model)
        need = model.size if model.size is not None else model.estimate
        misfit = self.memory.misfit(model, need)
        if misfit is not None:
            return misfit
        async with self._room:
            problem = await self.memory.make_room(model, need)
            if problem is not None:
                return problem
            old = model.charged
            model.charged = add_up((old, need))
            if model.size is None and old:
                # The old copy leaves while the new one comes, so that it is measured when it is loaded the next time.
                model.estimate = {place: max(old.get(place, 0), need.get(place, 0)) for place in {*old, *need}}
            elif model.size is None:
                # Nothing else may be loaded or evicted while it is measured.
                async with self._turns.take(alone=True):
                    problem = await self._measure(model)
                return await self._settle(model, old, problem)
        async with self._turns.take(alone=False):
            problem = await self._serve(model)
        return await self._settle(model, old, problem)

    async def _settle(
        self, model: OnDemandModel, old: MemoryUse, problem: HeadraceError | None
    ) -> HeadraceError | None:
        """Count what a model really takes after its load; evict it again if that cannot fit."""
        lifecycle = self._lifecycle(model)
        if not lifecycle.serving:
            model.charged = {}
            return problem
        if problem is not None:
            model.charged = old
            return problem
        size = model.size or model.estimate
        if old:
            # The old copy's memory is free when it has retired.
            self.memory.leave(old, lifecycle)
        model.charged = size
        misfit = self.memory.misfit(model, size)
        if misfit is not None:
            await self.memory.evict([model], misfit.message)
            return misfit
        if self.memory.budget.excess(self.memory.used()):
            self._context.background(self._shrink(model))
        # Only now: until it was loaded, this model might have taken it over.
        await self.memory.free_kept()
        return None

    async def _shrink(self, model: OnDemandModel) -> None:
        """Evict others after a load that took more than was expected of it."""
        async with self._room:
            await self.memory.make_room(model, NO_MEMORY)

    async def _read_size(self, model: OnDemandModel) -> None:
        """Find out how large a model is: as measured earlier, else estimated from its files."""
        plan = model.plan
        versions = plan.policy.choose(set(model.scanned.versions)) if plan is not None else ()
        content = await self._context.run_in_loader(read_content, model.scanned.folder, versions)
        remembered = await self._context.run_in_loader(self._sizes.read, content.key)
        model.key = content.key
        gpus = self._gpus_of(plan)
        model.estimate = {gpu_place(gpu): content.version_bytes for gpu in gpus} or {HOST: content.version_bytes}
        if remembered is not None:
            model.size, model.load_seconds = remembered.use, remembered.load_seconds

    def _gpus_of(self, plan: LoadPlan | None) -> set[int]:
        """Return the GPUs that a model will use, as far as its configuration says."""
        config = plan.config if plan is not None else None
        groups = config.instance_groups if config is not None else ()
        return {gpu for group in groups if group.kind == "gpu" for gpu in group.gpus}

    async def _measure(self, model: OnDemandModel) -> HeadraceError | None:
        if self._probe is None:
            raise RuntimeError("a load before `open`")
        backend = model.plan.backend if model.plan is not None else ""
        with suppress(Exception):  # loading it says what is wrong
            await self._context.run_in_loader(backend_named, backend)
        before = await self._read_memory(self._probe)
        began = self._context.clock.monotonic()
        problem = await self._serve(model)
        seconds = self._context.clock.monotonic() - began
        if problem is not None or not self._serves(model):
            return problem
        after = await self._read_memory(self._probe)
        if model.changed:
            return None  # the size of old files, or of new ones
        on_gpu = any(after.get(place, 0) > size for place, size in before.items() if place != HOST)
        size = ModelSize(growth(before, after, NO_MEMORY if on_gpu else model.estimate), seconds)
        if backend and backend not in self._warm_backends:
            # Some of it is the backend's own: thread pools, kernels, caches. The model is measured at its next load.
            self._warm_backends.add(backend)
            model.estimate = {
                place: min(use, 2 * model.estimate.get(place, 0) + _BACKEND_BYTES) for place, use in size.use.items()
            }
            return None
        model.size = size.use
        await self._context.run_in_loader(self._sizes.write, model.key, model.name, size)
        sums = ", ".join(f"{place} {readable_bytes(use)}" for place, use in size.use.items()) or "nothing measurable"
        log.info("model '%s' takes %s", model.name, sums)
        return None

    async def _read_memory(self, probe: MemoryProbe) -> MemoryUse:
        """Return what is used, without what is kept of evicted models: the model that takes it over counts for it."""
        kept = self.memory.kept()
        use = await self._context.run_in_loader(probe.read)
        return {place: size - kept.get(place, 0) for place, size in use.items()}

    async def _serve(self, model: OnDemandModel) -> HeadraceError | None:
        """Load a model through its lifecycle."""
        model.stage = "loading"
        began = self._context.clock.monotonic()
        lifecycle = self._lifecycle(model)
        if model.plan is not None and model.completed is None:
            model.completed = remember_completion(model.plan)
        problem = await lifecycle.request(DesiredState(model.scanned, plan=model.completed))
        if isinstance(problem, MissingDependency) and isinstance(problem.__cause__, HeadraceError):
            return problem.__cause__
        if problem is None:
            model.load_seconds = self._context.clock.monotonic() - began
            model.loads += 1
            model.loaded_ns = monotonic_ns()
            model.evicted = False
            served = self._context.directory.find(model.name)
            model.config = served.config if served is not None else None
        return problem

    # Models.

    def _lifecycle(self, model: OnDemandModel) -> ModelLifecycle:
        return self._lifecycles.lifecycle(model.name)

    def _serves(self, model: OnDemandModel) -> bool:
        return model.name in self._context.directory.models

    def _show_absent(self, model: OnDemandModel, reason: str) -> None:
        """Set the state of the versions that a load would serve; of the model as a whole, if that is not known."""
        states = self._context.states
        states.reset(model.name)
        versions = model.scanned.versions
        wanted: list[int | None] = [None]
        if model.plan is not None and versions:
            wanted = [*sorted(model.plan.policy.choose(set(versions)))] or wanted
        for number in wanted:
            states.put(model.name, number, State.UNAVAILABLE, reason)


def _own(problem: HeadraceError) -> HeadraceError:
    return with_message(problem, problem.message)


class LoadTurns:
    """Lets loads of known size run together, and a load whose memory is measured alone; first come, first served."""

    def __init__(self, together: int) -> None:
        """At most `together` loads run at once."""
        self._together = together
        self._running = 0
        self._alone = False
        self._queue: deque[tuple[bool, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, *, alone: bool) -> AsyncIterator[None]:
        """Wait for a turn."""
        turn = (alone, asyncio.get_running_loop().create_future())
        self._queue.append(turn)
        self._start()
        try:
            await turn[1]
        except asyncio.CancelledError:
            if turn in self._queue:
                self._queue.remove(turn)
            else:
                self._end()
            raise
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        self._running -= 1
        self._alone = self._alone and self._running > 0
        self._start()

    def _start(self) -> None:
        while self._queue and self._may_start(self._queue[0][0]):
            alone, turn = self._queue.popleft()
            if not turn.cancelled():
                self._running += 1
                self._alone = alone
                turn.set_result(None)

    def _may_start(self, alone: bool) -> bool:
        return not self._alone and self._running < (1 if alone else self._together)
