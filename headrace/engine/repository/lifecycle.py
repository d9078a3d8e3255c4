# SPDX-License-Identifier: Apache-2.0
"""The lifecycle of one model: load requests come in one after the other; versions are loaded, swapped in and retired.

`control` creates one for each model. A new copy of a version is loaded first, then swapped in, and only then is the copy
that it replaces retired; if loading fails, the old copy keeps serving. Knows no other model, except that an ensemble uses
`EnsembleDependencies`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from headrace.backends.contract import ModelFiles
from headrace.backends.table import backend_named
from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, InvalidArgument, Unavailable
from headrace.core.telemetry.load_stages import CONFIGURATION, IMPORT, recording, stage
from headrace.engine.repository.directory import LoadedVersion, ServedModel
from headrace.engine.repository.load_context import LoadContext, Override, reportable_error
from headrace.engine.repository.load_plan import LoadPlan
from headrace.engine.repository.scan import Fingerprint, ScannedModel
from headrace.engine.repository.states import UNLOADED, State
from headrace.engine.repository.trial import Trial
from headrace.models.config.types import EnsembleStep, ModelConfig

log = logging.getLogger("headrace.engine.repository")

_NO_FILES = Fingerprint(b"")


@dataclass(frozen=True, eq=False, slots=True)
class DesiredState:
    """The desired state of a model: serve what a folder has, or be unloaded."""

    scanned: ScannedModel | None
    """None: unloaded."""
    config_json: str | None = None
    override: Override | None = None
    plan: LoadPlan | None = None
    """The plan of the folder, if it has been read already."""

    @property
    def should_serve(self) -> bool:
        """Whether the model should serve."""
        return self.scanned is not None


class EnsembleDependencies(Protocol):
    """The models that ensembles use."""

    async def wait_for(self, name: str, steps: tuple[EnsembleStep, ...]) -> None:
        """Return when no model of the steps is being loaded; raise if ensembles wait for each other."""

    def check(self, config: ModelConfig) -> None:
        """Raise `MissingDependency` if a step's model does not serve, `InvalidArgument` if its tensors do not match."""

    def changed(self, name: str) -> None:
        """Update the ensembles that use a model which started or stopped serving."""


class MissingDependency(FailedPrecondition):
    """Raise when an ensemble cannot serve because a model that it uses does not serve at the moment."""

    def __init__(self, message: str, model: str, version: str) -> None:
        super().__init__(message)
        self.model = model
        self.version = version


@dataclass(eq=False, slots=True)
class _LoadedCopy:
    """A loaded version, and what it was loaded from."""

    loaded: LoadedVersion
    source: tuple[object, ...]
    override: Override | None


@dataclass(eq=False, slots=True)
class _LoadRequest:
    desired: DesiredState
    waiters: list[asyncio.Future[HeadraceError | None]] = field(default_factory=list)

    def answer(self, problem: HeadraceError | None) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(problem)


class ModelLifecycle:
    """Loads, reloads and unloads one model."""

    def __init__(self, name: str, context: LoadContext, dependencies: EnsembleDependencies) -> None:
        self.name = name
        self.desired = DesiredState(None)
        """The last requested state, reached or not."""
        self.problem: HeadraceError | None = None
        """Why the last request failed."""
        self.steps: tuple[EnsembleStep, ...] = ()
        """The steps of an ensemble."""
        self._context = context
        self._dependencies = dependencies
        self._served = ServedModel(name)
        self._copies: dict[int, _LoadedCopy] = {}
        self._next: _LoadRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._plan: LoadPlan | None = None
        """The plan of the current or last load."""
        self._attempted = False
        self._last_load_ok = False
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether a load or unload is running or waiting."""
        return self._task is not None

    @property
    def serving(self) -> bool:
        """Whether a version serves."""
        return bool(self._copies)

    @property
    def healthy(self) -> bool:
        """Whether the model is in its desired state.

        A model that serves stays healthy while it is reloaded, and if the reload fails: requests are answered. A model is
        healthy until its first load has been tried.
        """
        return not self.desired.should_serve or not self._attempted or (self._last_load_ok and self.serving)

    def request(self, desired: DesiredState) -> asyncio.Future[HeadraceError | None]:
        """Request a state, to be applied after the current work; it replaces a waiting request.

        The future gets None or the error.
        """
        future: asyncio.Future[HeadraceError | None] = asyncio.get_running_loop().create_future()
        waiters = [future]
        if self._context.closing:
            future.set_result(Unavailable("the server is closing"))
            return future
        if self._next is not None:
            if self._next.desired.should_serve == desired.should_serve:
                waiters = [*self._next.waiters, future]
            else:
                self._next.answer(Cancelled(f"replaced by a newer request for model '{self.name}'"))
        if desired.override is not None:
            desired.override.acquire()
        before, self.desired = self.desired, desired
        self._context.release_override(before.override)
        self._next = _LoadRequest(desired, waiters)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return future

    def retry(self) -> None:
        """Request the last state again, unless a request is running."""
        if self._task is None:
            self.request(self.desired)

    def stop_serving(self, problem: MissingDependency) -> None:
        """Stop serving an ensemble because one of its models stopped."""
        self.problem = problem
        self._remove_versions(list(self._copies), problem.message)

    def evict(self, reason: str) -> None:
        """Stop serving at once; the memory is free when `retired` returns. Not while the lifecycle is busy."""
        self.desired = DesiredState(None)
        self._attempted = self._last_load_ok = False
        self._remove_versions(list(self._copies), reason)
        self.steps = ()
        self._plan = None
        self._dependencies.changed(self.name)

    def abandon(self) -> None:
        """After a failed load, want nothing any more, so that only a new request loads the model."""
        if self._task is None and not self.serving:
            self.desired = DesiredState(None)

    @property
    def planned_steps(self) -> tuple[EnsembleStep, ...]:
        """The steps of an ensemble that serves or is being loaded."""
        return self._plan.steps if self._plan is not None and (self.busy or self.serving) else ()

    async def settled(self) -> None:
        """Return when no load or unload is running."""
        while self._task is not None:
            await asyncio.wait({self._task})

    async def retired(self) -> None:
        """Return when every removed version has freed its memory."""
        while self._retiring:
            await asyncio.wait(self._retiring)

    async def close(self, grace_seconds: float) -> None:
        """Stop the current work and retire all versions."""
        task = self._task
        if task is not None:
            task.cancel()
            if self._plan is not None:
                self._plan.abandon()
            await asyncio.gather(task, return_exceptions=True)
        copies = list(self._copies.items())
        self._copies.clear()
        self._context.directory.put(self._served, {})
        for number, _ in copies:
            self._context.states.put(self.name, number, State.UNLOADING)
        done = await asyncio.gather(*(copy.loaded.retire(grace_seconds) for _, copy in copies), return_exceptions=True)
        for (number, copy), error in zip(copies, done, strict=True):
            if isinstance(error, Exception):
                reportable_error(error, f"retiring model '{self.name}' version {number}")
            self._context.states.put(self.name, number, State.UNAVAILABLE, UNLOADED)
            self._context.release_override(copy.override)
        override = self.desired.override
        self.desired = DesiredState(None)
        self._context.release_override(override)

    async def _run(self) -> None:
        queued = None
        try:
            while self._next is not None:
                queued, self._next = self._next, None
                override = queued.desired.override
                if override is not None:
                    override.acquire()
                try:
                    self.problem = await self._apply(queued.desired)
                finally:
                    self._context.release_override(override)
                self._drop_override(queued.desired)
                queued.answer(self.problem)
        finally:
            self._task = None
            for unanswered in (queued, self._next):
                if unanswered is not None:
                    unanswered.answer(Unavailable("the server is closing"))
            self._next = None
        self._dependencies.changed(self.name)

    def _drop_override(self, desired: DesiredState) -> None:
        """After a failure, release the files that came with the request, unless an ensemble may retry with them."""
        failed = self.problem is not None and not isinstance(self.problem, MissingDependency)
        if failed and desired.override is not None and desired is self.desired:
            self.desired = replace(desired, override=None)
            self._context.release_override(desired.override)

    async def _apply(self, desired: DesiredState) -> HeadraceError | None:
        if desired.scanned is None:
            self._unload()
            return None
        if not self._attempted and not self.serving:
            self._context.states.reset(self.name)
        try:
            problem = await self._serve(desired, desired.scanned)
        except Exception as error:
            problem = reportable_error(error, f"loading model '{self.name}'")
            self._fail_model(problem)
        finally:
            self._attempted = True
        if problem is None:
            self._last_load_ok = True
        else:
            self._last_load_ok = self._last_load_ok and self.serving
            self._set_reload_reason(problem)
        return problem

    async def _serve(self, desired: DesiredState, scanned: ScannedModel) -> HeadraceError | None:
        """Load the wanted versions. Raise an error of the whole model; return the first error of a version."""
        if scanned.problem:
            raise FailedPrecondition(scanned.problem)
        settings = self._context.settings
        plan = desired.plan
        if plan is None:
            plan = await self._context.run_in_loader(
                self._context.read_plan, scanned.folder, desired.config_json, settings.gpus
            )
        self._plan = plan
        # An ensemble needs no version folder: it has no files, and git does not store empty folders.
        present = scanned.versions or ({1: _NO_FILES} if plan.is_ensemble else {})
        if not present:
            self._remove_versions(list(self._copies), UNLOADED)
            raise InvalidArgument(f"no version is available: make a folder {self.name}/1 with the model's file in it")
        chosen = plan.policy.choose(set(present))
        if not chosen:
            raise InvalidArgument(
                f"at least one version must be available under the version policy of model '{self.name}'; "
                f"there are {', '.join(map(str, present))}"
            )
        self._context.states.drop(self.name, None)
        for number in chosen - self._copies.keys():
            self._context.states.put(self.name, number, State.LOADING)
        if plan.is_ensemble:
            await self._dependencies.wait_for(self.name, plan.steps)
        source = {
            number: (present[number].digest, scanned.shared.digest, scanned.folder, desired.config_json)
            for number in chosen
        }
        stale = [n for n in sorted(chosen) if n not in self._copies or self._copies[n].source != source[n]]
        loads = [self._load(n, scanned, plan, source[n], desired) for n in stale]
        problems = [problem for problem in await asyncio.gather(*loads) if problem is not None]
        if problems:
            return problems[0]
        self._remove_versions([number for number in self._copies if number not in chosen], UNLOADED)
        self._clear_reasons(chosen)
        return None

    async def _load(
        self, number: int, scanned: ScannedModel, plan: LoadPlan, source: tuple[object, ...], desired: DesiredState
    ) -> HeadraceError | None:
        """Load one version and swap it in. Return an error instead of raising, so that other versions continue."""
        context, override = self._context, desired.override
        files = ModelFiles(scanned.folder, number, scanned.folder / str(number))
        trial = Trial(
            files, plan.backend, desired.config_json, scanned.fingerprints(number), from_request=override is not None
        )
        try:
            async with context.loading:
                began = context.clock.monotonic()
                with recording() as stages:
                    loading = self._load_copy(trial, plan)
                    loaded = await context.within_load_time(loading, f"'{self.name}' version {number}")
                seconds = context.clock.monotonic() - began
            if plan.is_ensemble:
                self._check_again(loaded)
        except Exception as error:
            problem = reportable_error(error, f"loading model '{self.name}' version {number}")
            if number not in self._copies:
                context.states.put(self.name, number, State.UNAVAILABLE, problem.message)
            return problem
        if override is not None:
            override.acquire()
        before = self._copies.get(number)
        self._copies[number] = _LoadedCopy(loaded, source, override)
        self.steps = plan.steps
        self._publish()
        context.states.put(self.name, number, State.READY, load_seconds=seconds)
        log.info(
            "model '%s' version %d is ready after %.3g s%s",
            self.name,
            number,
            seconds,
            f": {stages}" if str(stages) else "",
        )
        if before is not None:
            self._retire(before)
        return None

    async def _load_copy(self, trial: Trial, plan: LoadPlan) -> LoadedVersion:
        context, files = self._context, trial.files
        with context.reporter(self.name, files.version) as reporter:
            await context.try_first(trial, reporter)
            if plan.backend:
                # Most of the first load of a backend. What is wrong with it, `complete` says.
                with stage(IMPORT), suppress(Exception):
                    await context.run_in_loader(backend_named, plan.backend)
            with stage(CONFIGURATION):
                config = await context.run_in_loader(plan.complete, files)
            if plan.is_ensemble:
                self._dependencies.check(config)
            return await context.load_version(config, files, reporter)

    def _check_again(self, loaded: LoadedVersion) -> None:
        """Check again after loading an ensemble: a model that it uses may have been unloaded meanwhile."""
        try:
            self._dependencies.check(loaded.config)
        except HeadraceError:
            self._context.retire(loaded, None)
            raise

    def _unload(self) -> None:
        self._remove_versions(list(self._copies), UNLOADED)
        self._attempted = self._last_load_ok = False
        self.steps = ()
        self._context.states.drop(self.name, None)
        self._clear_reasons(set())

    def _remove_versions(self, numbers: list[int], reason: str) -> None:
        """Remove versions from the directory and retire them."""
        if not numbers:
            return
        removed = {number: self._copies.pop(number) for number in numbers}
        self._publish()
        states = self._context.states
        for number, copy in removed.items():
            entry = states.put(self.name, number, State.UNLOADING, reason)

            def retired(number: int = number, entry: object = entry) -> None:
                if states.get(self.name, number) is entry:
                    states.put(self.name, number, State.UNAVAILABLE, reason)

            log.info("Unloading model '%s' version %d: %s", self.name, number, reason)
            self._retire(copy, retired)

    def _retire(self, copy: _LoadedCopy, retired: Callable[[], None] | None = None) -> None:
        task = self._context.retire(copy.loaded, copy.override, retired)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _publish(self) -> None:
        self._context.directory.put(self._served, {number: copy.loaded for number, copy in self._copies.items()})

    def _fail_model(self, problem: HeadraceError) -> None:
        """Set the reason of a failed load on the known versions, or else on the model."""
        entries = [
            entry
            for entry in self._context.states.of(self.name)
            if entry.state is State.LOADING or (entry.state is State.UNAVAILABLE and entry.reason != UNLOADED)
        ]
        for entry in entries:
            self._context.states.put(self.name, entry.version, State.UNAVAILABLE, problem.message)
        if not entries and not self.serving:
            self._context.states.put(self.name, None, State.UNAVAILABLE, problem.message)

    def _set_reload_reason(self, problem: HeadraceError) -> None:
        """Set the reason of a failed reload on the versions that keep serving."""
        for number in self._copies:
            entry = self._context.states.get(self.name, number)
            if entry is not None and entry.state is State.READY:
                entry.reason = f"serves as it was loaded before; the last reload failed: {problem.message}"

    def _clear_reasons(self, versions: set[int]) -> None:
        """Clear old reasons and failures after a successful load."""
        for entry in self._context.states.of(self.name):
            if entry.version in self._copies:
                entry.reason = ""
            elif entry.version is not None and entry.version not in versions and entry.state is State.UNAVAILABLE:
                entry.reason = UNLOADED
