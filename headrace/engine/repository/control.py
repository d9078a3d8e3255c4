# SPDX-License-Identifier: Apache-2.0
"""All models of the repositories: loaded at the start, followed while they change, loaded and unloaded on request.

Made by a composition root; called by the protocols for load, unload, index, readiness and status, and by the data plane
for `directory`. Turns folders into wishes, one `ModelLife` per model fulfils them. Everything here runs in the loop's
thread; files are looked at in another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.core.clock import Clock
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound, Unavailable, retold
from headrace.core.names import check_name
from headrace.core.telemetry.progress import Progress, ProgressEvent, silent
from headrace.engine.repository.contract import OpenVersion, ReadPlan
from headrace.engine.repository.directory import Directory
from headrace.engine.repository.lifecycle import ModelLife
from headrace.engine.repository.neighbours import Steps
from headrace.engine.repository.overrides import Override
from headrace.engine.repository.plans import read_plan as read_plan_from_files
from headrace.engine.repository.scan import Fingerprint, FoundModel, model_names, open_repositories, scan, scan_model
from headrace.engine.repository.settings import RepositorySettings
from headrace.engine.repository.states import State, States, VersionState
from headrace.engine.repository.watching import Watch
from headrace.engine.repository.wishes import Wish
from headrace.engine.repository.workshop import Workshop, told
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.engine.repository")

EVERY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository's index."""

    name: str
    version: str = ""
    """ "" for a model none of whose versions is known."""
    state: State | None = None
    """None for a model that was never loaded."""
    reason: str = ""
    progress: ProgressEvent | None = None
    """How far its load is, while it is being loaded."""


class RepositoryControl:
    """One or several repositories under one control. `start` it, and `close` it in the end."""

    def __init__(
        self,
        repositories: Sequence[str | Path],
        open_version: OpenVersion,
        settings: RepositorySettings,
        clock: Clock,
        progress: Progress = silent,
        *,
        read_plan: ReadPlan | None = None,
    ) -> None:
        read_plan = read_plan or partial(read_plan_from_files, strict=settings.strict_model_config)
        self._repositories = open_repositories(repositories)
        self._settings = settings
        self._shop = Workshop(open_version, read_plan, settings, clock, progress)
        self._lives: dict[str, ModelLife] = {}
        fetch = self._fetch if settings.mode == "explicit" else None
        self._steps = Steps(self._lives, self._shop.directory, fetch)
        self._watch = Watch(settings.settle_seconds)
        self._polling: asyncio.Task[None] | None = None
        self._started = False

    @property
    def directory(self) -> Directory:
        """What requests look up."""
        return self._shop.directory

    @property
    def started(self) -> bool:
        """Whether everything that is loaded at the start was tried."""
        return self._started

    @property
    def states(self) -> States:
        """Where every version stands."""
        return self._shop.states

    # The way of all models

    async def start(self) -> None:
        """Load what the mode says; returns when all were tried.

        Raises `FailedPrecondition` if `exit_on_error` and one failed; it names each on a line of its own.
        """
        if self._settings.mode == "explicit":
            problems = await self._start_named()
        else:
            snapshot = await self._shop.with_files(scan, self._repositories)
            self._watch.take(snapshot.models)
            problems = await self._serve_all(snapshot.models.values())
        self._started = True
        if problems and self._settings.exit_on_error and not self._shop.closing:
            lines = "\n".join(f"  {name}: {problem.message}" for name, problem in sorted(problems.items()))
            raise FailedPrecondition(f"{len(problems)} of {len(self._lives)} models failed to load:\n{lines}")
        if self._settings.mode == "poll" and not self._shop.closing:
            self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def close(self, grace_seconds: float) -> None:
        """Stop looking and loading, and retire everything, also what is retiring already, in this time."""
        self._shop.closing = True
        if self._settings.stop_refresh is not None:
            self._settings.stop_refresh()
        end = self._shop.clock.monotonic() + grace_seconds
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
            self._polling = None
        await asyncio.gather(*(life.close(grace_seconds) for life in self._lives.values()))
        await self._shop.close(max(0.0, end - self._shop.clock.monotonic()))

    async def settled(self, *, retired: bool = False) -> None:
        """Return when no model is being loaded or unloaded; with `retired`, when old copies are gone too."""
        while busy := [life for life in self._lives.values() if life.busy]:
            await asyncio.gather(*(life.settled() for life in busy))
        if retired:
            await self._shop.quiet()

    async def poll_once(self) -> bool:
        """Look at the folders and begin what has changed; whether something is not yet settled there."""
        await self._shop.refresh()
        snapshot = await self._shop.with_files(scan, self._repositories)
        changes = self._watch.compare(snapshot, self._shop.clock.wall())
        if self._shop.closing:
            return False
        # All wishes first: an ensemble must see that its steps are on their way.
        for found in changes.serve:
            self._life(found.name).want(Wish(found))
        for name in changes.gone:
            self._life(name).want(Wish(None))
        return changes.unsettled

    async def _poll(self) -> None:
        wait = self._settings.poll_seconds
        while True:
            await asyncio.sleep(wait)
            wait = self._settings.poll_seconds
            try:
                if await self.poll_once():
                    wait = min(wait, self._settings.settle_seconds)
            except Exception:  # whatever is wrong with the folders, they are looked at again
                log.exception("cannot look at the repository; trying again in %g s", wait)

    async def _start_named(self) -> dict[str, HeadraceError]:
        names = set(self._settings.load_models)
        if EVERY_MODEL in names:
            found = (await self._shop.with_files(scan, self._repositories)).models
            wanted = list(found.values())
        else:
            looked = [
                (name, await self._shop.with_files(scan_model, self._repositories, name)) for name in sorted(names)
            ]
            found = {name: model for name, model in looked if model is not None}
            wanted = list(found.values())
        problems = await self._serve_all(wanted)
        for name in names - found.keys() - {EVERY_MODEL}:
            problems[name] = NotFound("no such model in the repository; --load-model names a folder of it")
            log.warning("model %r: %s", name, problems[name].message)
        return problems

    async def _serve_all(self, models: Iterable[FoundModel]) -> dict[str, HeadraceError]:
        futures = {found.name: self._life(found.name).want(Wish(found)) for found in models}
        outcomes = {name: await future for name, future in futures.items()}
        return {name: problem for name, problem in outcomes.items() if problem is not None}

    # One model on request

    async def load(self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model; returns when it serves.

        `config_json` stands in for the configuration file. `files`, by `file:<version>/<name>`, stand in for the whole
        folder, which is then not looked at.
        """
        self._check_mode()
        check_name(name)
        try:
            wish = await self._wish(name, config_json or None, files or {})
        except HeadraceError as error:
            raise _failed("load", name, error) from None
        except OSError as error:  # no space left, most likely
            raise _failed("load", name, told(error, f"writing the files that came with model '{name}'")) from None
        problem = await self._life(name).want(wish)
        if problem is not None:
            raise _failed("load", name, problem)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model, and with `unload_dependents` the models an ensemble uses that no other ensemble does.

        Returns when its memory is free, or after `unload_wait_seconds` while requests in flight still finish. A model
        that is not loaded is as it should be: no error.
        """
        self._check_mode()
        names = [name, *self._used_only_by(name)] if unload_dependents else [name]
        lives = [self._lives[each] for each in names if each in self._lives]
        for future in [life.want(Wish(None)) for life in lives]:
            problem = await future
            if problem is not None:
                raise _failed("unload", name, problem)
        try:
            async with asyncio.timeout(self._settings.unload_wait_seconds):
                await asyncio.gather(*(life.retired() for life in lives))
        except TimeoutError:
            log.info("model '%s' is unloaded as soon as its requests in flight are done", name)

    def _check_mode(self) -> None:
        if self._shop.closing:
            raise Unavailable("the server is closing")
        if self._settings.mode == "poll":
            raise FailedPrecondition("explicit model load / unload is not allowed if polling is enabled")
        if self._settings.mode == "none":
            raise FailedPrecondition(
                "explicit model load / unload is not allowed: start the server with --model-control-mode=explicit"
            )

    async def _wish(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> Wish:
        if files and config_json is None:
            raise InvalidArgument(
                "files can only be given together with a config, since the model's folder is not used"
            )
        if files:
            override = await self._shop.with_files(self._shop.write_override, name, files)
            found = await self._shop.with_files(scan_model, (override.folder.parent,), name)
            return Wish(found or _empty(name, override), config_json, override)
        await self._shop.refresh()
        found = await self._shop.with_files(scan_model, self._repositories, name)
        if found is None:
            raise NotFound("failed to poll from model repository")
        return Wish(found, config_json)

    async def _fetch(self, name: str) -> None:
        """See `neighbours.Fetch`: in explicit mode, an ensemble brings in the models it uses."""
        found = await self._shop.with_files(scan_model, self._repositories, name)
        life = self._lives.get(name)
        if found is not None and not (life is not None and life.busy):
            self._life(name).want(Wish(found))

    def _used_only_by(self, name: str) -> list[str]:
        """The models that an ensemble uses, directly or through others, and that nothing else uses."""
        chosen = [name]
        for ensemble in chosen:
            life = self._lives.get(ensemble)
            for step in life.steps if life is not None else ():
                if step.model_name not in chosen:
                    chosen.append(step.model_name)
        users = {life.name: {step.model_name for step in life.steps} for life in self._lives.values() if life.serving}
        shared = set().union(*(used for user, used in users.items() if user not in chosen))
        return [each for each in chosen[1:] if each not in shared]

    def _life(self, name: str) -> ModelLife:
        life = self._lives.get(name)
        if life is None:
            life = self._lives[name] = ModelLife(name, self._shop, self._steps)
        return life

    # What people ask

    def ready(self, strict: bool = True) -> bool:
        """Whether requests can be served: when strict, by all models that are to be served.

        Models that were unloaded do not count, nor does one that is being loaded again or anew: what served goes on
        serving. Not strict: as soon as the server answers at all.
        """
        if self._shop.closing:
            return False
        return not strict or (self._started and all(life.healthy for life in self._lives.values()))

    async def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """Every version of every model; a model that was never loaded is listed by its name alone."""
        entries = [
            IndexEntry(entry.name, entry.version_text, entry.state, entry.reason)
            for entry in self.states.all()
            if not ready_only or entry.state is State.READY
        ]
        if not ready_only:
            known = {entry.name for entry in entries}
            names = await self._shop.with_files(model_names, self._repositories)
            entries += [IndexEntry(name) for name in names if name not in known]
        return sorted(entries, key=lambda entry: (entry.name, int(entry.version or -1)))

    def state_of(self, name: str, version: int | None) -> VersionState | None:
        """Where a version stands; the model as a whole for None; None if it was never heard of."""
        return self.states.get(name, version)

    def versions_of(self, name: str) -> list[VersionState]:
        """All versions of a model that were ever heard of."""
        return self.states.of(name)

    def config_of(self, name: str, version: str = "") -> ModelConfig | None:
        """The configuration of a version that serves, the newest for ""."""
        loaded = self.directory.find(name, version)
        return None if loaded is None else loaded.config


def _failed(doing: str, name: str, problem: HeadraceError) -> HeadraceError:
    return retold(problem, f"failed to {doing} '{name}', {problem.message}")


def _empty(name: str, override: Override) -> FoundModel:
    """A folder of overridden files that has no version in it: its configuration came beside it."""
    return FoundModel(name, override.folder, {}, Fingerprint(b""))
