# SPDX-License-Identifier: Apache-2.0
"""The life of one model: wishes come in one after the other, versions are opened, swapped in, and retired.

Made by `control`, one for each model. Turns a wish (serve what this folder has, or be gone) into the versions that
serve: a copy is opened first, then swapped in, and only then does the one it replaces retire; when opening fails, what
served goes on serving. Knows no other model, except that an ensemble asks `Neighbours` for the models it uses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from headrace.backends.contract import ModelFiles
from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, InvalidArgument, Unavailable
from headrace.engine.repository.contract import LoadedVersion, Plan
from headrace.engine.repository.directory import ServedModel
from headrace.engine.repository.overrides import Override
from headrace.engine.repository.scan import Fingerprint, FoundModel
from headrace.engine.repository.states import UNLOADED, State
from headrace.engine.repository.wishes import MissingStep, Neighbours, Wish
from headrace.engine.repository.workshop import Workshop, told
from headrace.models.config.types import EnsembleStep, ModelConfig

log = logging.getLogger("headrace.engine.repository")

_NO_FILES = Fingerprint(b"")


@dataclass(eq=False, slots=True)
class _Copy:
    """A loaded version, and what it was made from."""

    loaded: LoadedVersion
    made_from: tuple[object, ...]
    override: Override | None


@dataclass(eq=False, slots=True)
class _Queued:
    wish: Wish
    waiters: list[asyncio.Future[HeadraceError | None]] = field(default_factory=list)

    def answer(self, problem: HeadraceError | None) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(problem)


class ModelLife:
    """One model, from its first wish on."""

    def __init__(self, name: str, workshop: Workshop, neighbours: Neighbours) -> None:
        self.name = name
        self.wish = Wish(None)
        """The last one, fulfilled or not."""
        self.problem: HeadraceError | None = None
        """Why the last wish could not be fulfilled."""
        self.steps: tuple[EnsembleStep, ...] = ()
        """Of an ensemble: the models it uses."""
        self._shop = workshop
        self._neighbours = neighbours
        self._served = ServedModel(name)
        self._copies: dict[int, _Copy] = {}
        self._next: _Queued | None = None
        self._task: asyncio.Task[None] | None = None
        self._plan: Plan | None = None
        """By which versions are being opened, or were the last time."""
        self._tried = False
        self._well = False
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether a wish is being fulfilled or waits."""
        return self._task is not None

    @property
    def serving(self) -> bool:
        """Whether a version serves."""
        return bool(self._copies)

    @property
    def healthy(self) -> bool:
        """Whether the model is what it was wished to be.

        A model that serves stays healthy while it is loaded again, and also if that fails: requests are answered. One
        that loads for the first time is not counted until that has been tried.
        """
        return not self.wish.serves or not self._tried or (self._well and self.serving)

    def want(self, wish: Wish) -> asyncio.Future[HeadraceError | None]:
        """Make it so, after what is being done now; what waited is overtaken. The future has None or the problem."""
        future: asyncio.Future[HeadraceError | None] = asyncio.get_running_loop().create_future()
        waiters = [future]
        if self._shop.closing:
            future.set_result(Unavailable("the server is closing"))
            return future
        if self._next is not None:
            if self._next.wish.serves == wish.serves:
                waiters = [*self._next.waiters, future]
            else:
                self._next.answer(Cancelled(f"overtaken by a newer request for model '{self.name}'"))
        if wish.override is not None:
            wish.override.acquire()
        before, self.wish = self.wish, wish
        self._shop.let_go(before.override)
        self._next = _Queued(wish, waiters)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        return future

    def again(self) -> None:
        """Try the last wish once more, if nothing newer is under way."""
        if self._task is None:
            self.want(self.wish)

    def starve(self, problem: MissingStep) -> None:
        """Cease to serve because a model that this one uses has."""
        self.problem = problem
        self._leave(list(self._copies), problem.message)

    async def settled(self) -> None:
        """Return when no wish is being fulfilled."""
        while self._task is not None:
            await asyncio.wait({self._task})

    async def retired(self) -> None:
        """Return when every version that was taken out has freed its memory."""
        while self._retiring:
            await asyncio.wait(self._retiring)

    async def close(self, grace_seconds: float) -> None:
        """Stop what is being done and retire everything."""
        task = self._task
        if task is not None:
            task.cancel()
            if self._plan is not None:
                self._plan.abandon()
            await asyncio.gather(task, return_exceptions=True)
        copies = list(self._copies.items())
        self._copies.clear()
        self._shop.directory.put(self._served, {})
        for number, _ in copies:
            self._shop.states.put(self.name, number, State.UNLOADING)
        done = await asyncio.gather(*(copy.loaded.retire(grace_seconds) for _, copy in copies), return_exceptions=True)
        for (number, copy), error in zip(copies, done, strict=True):
            if isinstance(error, Exception):
                told(error, f"retiring model '{self.name}' version {number}")
            self._shop.states.put(self.name, number, State.UNAVAILABLE, UNLOADED)
            self._shop.let_go(copy.override)
        override = self.wish.override
        self.wish = Wish(None)
        self._shop.let_go(override)

    async def _work(self) -> None:
        queued = None
        try:
            while self._next is not None:
                queued, self._next = self._next, None
                override = queued.wish.override
                if override is not None:
                    override.acquire()
                try:
                    self.problem = await self._fulfil(queued.wish)
                finally:
                    self._shop.let_go(override)
                self._drop_override(queued.wish)
                queued.answer(self.problem)
        finally:
            self._task = None
            for unanswered in (queued, self._next):
                if unanswered is not None:
                    unanswered.answer(Unavailable("the server is closing"))
            self._next = None
        self._neighbours.changed(self.name)

    def _drop_override(self, wish: Wish) -> None:
        """After a failure: files that came with the request are of no use, unless an ensemble tries again with them."""
        failed = self.problem is not None and not isinstance(self.problem, MissingStep)
        if failed and wish.override is not None and wish is self.wish:
            self.wish = replace(wish, override=None)
            self._shop.let_go(wish.override)

    async def _fulfil(self, wish: Wish) -> HeadraceError | None:
        if wish.found is None:
            self._go()
            return None
        if not self._tried and not self.serving:
            self._shop.states.reset(self.name)
        try:
            problem = await self._serve(wish, wish.found)
        except Exception as error:
            problem = told(error, f"loading model '{self.name}'")
            self._fail_whole(problem)
        finally:
            self._tried = True
        if problem is None:
            self._well = True
        else:
            self._well = self._well and self.serving
            self._explain(problem)
        return problem

    async def _serve(self, wish: Wish, found: FoundModel) -> HeadraceError | None:
        """Raises what concerns the whole model; returns the first problem of a version."""
        if found.problem:
            raise FailedPrecondition(found.problem)
        settings = self._shop.settings
        plan = await self._shop.in_loader(self._shop.read_plan, found.folder, wish.config_json, settings.gpus)
        self._plan = plan
        # An ensemble has no files, and an empty folder is easily lost: git does not keep it.
        present = found.versions or ({1: _NO_FILES} if plan.is_ensemble else {})
        if not present:
            self._leave(list(self._copies), UNLOADED)
            raise InvalidArgument(f"no version is available: make a folder {self.name}/1 with the model's file in it")
        wanted = plan.policy.choose(set(present))
        if not wanted:
            raise InvalidArgument(
                f"at least one version must be available under the version policy of model '{self.name}'; "
                f"there are {', '.join(map(str, present))}"
            )
        self._shop.states.drop(self.name, None)
        for number in wanted - self._copies.keys():
            self._shop.states.put(self.name, number, State.LOADING)
        if plan.is_ensemble:
            await self._neighbours.wait_for(self.name, plan.steps)
        made_from = {
            number: (present[number].digest, found.beside.digest, found.folder, wish.config_json) for number in wanted
        }
        stale = [n for n in sorted(wanted) if n not in self._copies or self._copies[n].made_from != made_from[n]]
        opened = [self._open(n, found, plan, made_from[n], wish.override) for n in stale]
        problems = [problem for problem in await asyncio.gather(*opened) if problem is not None]
        if problems:
            return problems[0]
        self._leave([number for number in self._copies if number not in wanted], UNLOADED)
        self._tidy(wanted)
        return None

    async def _open(
        self, number: int, found: FoundModel, plan: Plan, made_from: tuple[object, ...], override: Override | None
    ) -> HeadraceError | None:
        """Open one version and swap it in. Problems are returned, so that the other versions go on."""
        shop = self._shop
        files = ModelFiles(found.folder, number, found.folder / str(number))
        try:
            async with shop.loading:
                began = shop.clock.monotonic()
                with shop.reporter(self.name, number) as reporter:
                    config = await shop.in_loader(plan.finish, files)
                    if plan.is_ensemble:
                        self._neighbours.check(config)
                    loaded = await shop.open_version(config, files, reporter)
                seconds = shop.clock.monotonic() - began
            if plan.is_ensemble:
                self._check_again(config, loaded)
        except Exception as error:
            problem = told(error, f"loading model '{self.name}' version {number}")
            if number not in self._copies:
                shop.states.put(self.name, number, State.UNAVAILABLE, problem.message)
            return problem
        if override is not None:
            override.acquire()
        before = self._copies.get(number)
        self._copies[number] = _Copy(loaded, made_from, override)
        self.steps = plan.steps
        self._publish()
        shop.states.put(self.name, number, State.READY, load_seconds=seconds)
        log.info("model '%s' version %d is ready after %.3g s", self.name, number, seconds)
        if before is not None:
            self._retire(before)
        return None

    def _check_again(self, config: ModelConfig, loaded: LoadedVersion) -> None:
        """A model that an ensemble uses may have gone while the ensemble was opened."""
        try:
            self._neighbours.check(config)
        except HeadraceError:
            self._shop.retire(loaded, None)
            raise

    def _go(self) -> None:
        self._leave(list(self._copies), UNLOADED)
        self._tried = self._well = False
        self.steps = ()
        self._shop.states.drop(self.name, None)
        self._tidy(set())

    def _leave(self, numbers: list[int], reason: str) -> None:
        """Take versions out of the directory and let them retire."""
        if not numbers:
            return
        leaving = {number: self._copies.pop(number) for number in numbers}
        self._publish()
        states = self._shop.states
        for number, copy in leaving.items():
            entry = states.put(self.name, number, State.UNLOADING, reason)

            def retired(number: int = number, entry: object = entry) -> None:
                if states.get(self.name, number) is entry:
                    states.put(self.name, number, State.UNAVAILABLE, reason)

            log.info("model '%s' version %d leaves: %s", self.name, number, reason)
            self._retire(copy, retired)

    def _retire(self, copy: _Copy, retired: Callable[[], None] | None = None) -> None:
        task = self._shop.retire(copy.loaded, copy.override, retired)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _publish(self) -> None:
        self._shop.directory.put(self._served, {number: copy.loaded for number, copy in self._copies.items()})

    def _fail_whole(self, problem: HeadraceError) -> None:
        """Say why nothing could be loaded at the versions that are known, or else at the model."""
        entries = [
            entry
            for entry in self._shop.states.of(self.name)
            if entry.state is State.LOADING or (entry.state is State.UNAVAILABLE and entry.reason != UNLOADED)
        ]
        for entry in entries:
            self._shop.states.put(self.name, entry.version, State.UNAVAILABLE, problem.message)
        if not entries and not self.serving:
            self._shop.states.put(self.name, None, State.UNAVAILABLE, problem.message)

    def _explain(self, problem: HeadraceError) -> None:
        """Say at the versions that go on serving why they were not replaced."""
        for number in self._copies:
            entry = self._shop.states.get(self.name, number)
            if entry is not None and entry.state is State.READY:
                entry.reason = f"serves as it was loaded before; the last reload failed: {problem.message}"

    def _tidy(self, wanted: set[int]) -> None:
        """After a success: old failures of versions that are not wanted any more, and old reasons, are history."""
        for entry in self._shop.states.of(self.name):
            if entry.version in self._copies:
                entry.reason = ""
            elif entry.version is not None and entry.version not in wanted and entry.state is State.UNAVAILABLE:
                entry.reason = UNLOADED
