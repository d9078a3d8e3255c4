# SPDX-License-Identifier: Apache-2.0
"""Repository control: load models at the start or on demand, poll the repositories for changes, load and unload on request.

The engine creates it. The protocols call it for load, unload, index, readiness and status; the data plane reads `directory`.
It turns scanned folders into desired states, and one `ModelLifecycle` per model applies them. Everything runs in the event
loop's thread, except file access.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.core.clock import Clock
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound, Unavailable, with_message
from headrace.core.names import check_name
from headrace.core.telemetry.progress import Progress, ProgressEvent, silent
from headrace.engine.repository.directory import Directory, LoadVersion
from headrace.engine.repository.ensemble_dependencies import DependencyTracker
from headrace.engine.repository.lifecycle import DesiredState, MissingDependency, ModelLifecycle
from headrace.engine.repository.load_context import LoadContext, Override, reportable_error
from headrace.engine.repository.load_plan import ON_DEMAND, LoadPlan, ReadLoadPlan, names_residency
from headrace.engine.repository.load_plan import read_load_plan as read_plan_from_files
from headrace.engine.repository.model_sizes import MemoryProbe
from headrace.engine.repository.on_demand import OnDemandModels
from headrace.engine.repository.scan import (
    ChangeDetector,
    Fingerprint,
    ScannedModel,
    model_names,
    open_repositories,
    scan,
    scan_model,
)
from headrace.engine.repository.settings import EVERY_MODEL, RepositorySettings
from headrace.engine.repository.states import State, States, VersionState

log = logging.getLogger("headrace.engine.repository")

NOT_EXPLICIT = "explicit model load / unload is not allowed"
"""Triton's text, by which clients know that a server has another model control mode."""


_SEVERAL_PROCESSES = (
    "its configuration says residency: on-demand, which needs a single process: leave out --workers, or remove the "
    "parameter"
)


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One entry of the repository index."""

    name: str
    version: str = ""
    """ "" for a model without a known version."""
    state: State | None = None
    """None for a model that was never loaded."""
    reason: str = ""
    progress: ProgressEvent | None = None
    """Progress of its load, while it is being loaded."""


class RepositoryControl:
    """Controls the models of one or several repositories. Call `start` first and `close` last."""

    def __init__(
        self,
        repositories: Sequence[str | Path],
        load_version: LoadVersion,
        settings: RepositorySettings,
        clock: Clock,
        progress: Progress = silent,
        *,
        read_plan: ReadLoadPlan | None = None,
        memory: MemoryProbe | None = None,
    ) -> None:
        """`memory` measures models that load on demand."""
        read_plan = read_plan or partial(read_plan_from_files, strict=settings.strict_model_config)
        self._repositories = open_repositories(repositories)
        self._settings = settings
        self._context = LoadContext(load_version, read_plan, settings, clock, progress)
        self._lifecycles: dict[str, ModelLifecycle] = {}
        self._dependencies = DependencyTracker(self._lifecycles, self._context.directory, self._start_load)
        self.on_demand = OnDemandModels(self._context, self, memory)
        """The models that load on demand; none in most modes."""
        self._changes = ChangeDetector(settings.settle_seconds)
        self._polling: asyncio.Task[None] | None = None
        self._started = False

    @property
    def processes(self) -> int:
        """How many processes serve these models, each with a copy of its own."""
        return self._settings.processes

    @property
    def directory(self) -> Directory:
        """The directory of loaded versions."""
        return self._context.directory

    @property
    def started(self) -> bool:
        """Whether the initial load of every model has been tried."""
        return self._started

    @property
    def states(self) -> States:
        """The states of all versions."""
        return self._context.states

    # All models.
    async def start(self) -> None:
        """Load the models that the mode asks for; return when all were tried.

        If any failed, log one error that names them; with `exit_on_error`, raise it as `FailedPrecondition`.
        """
        if self._settings.mode == "explicit":
            problems = await self._start_named()
        else:
            snapshot = await self._context.run_with_files(scan, self._repositories)
            self._changes.accept_all(snapshot.models)
            problems = await self._serve_all(await self._put_on_demand(snapshot.models.values()))
            problems |= await self._start_on_demand()
        self._started = True
        if problems and not self._context.closing:
            reasons = "; ".join(f"{name}: {problem.message}" for name, problem in sorted(problems.items()))
            count = len(self._lifecycles.keys() | set(self.on_demand.names))
            summary = f"{len(problems)} of {count} models failed to load: {reasons}"
            if self._settings.exit_on_error:
                raise FailedPrecondition(summary)
            log.error("%s", summary)
        elif (
            not (self._lifecycles or self.on_demand.names) and self._repositories and self._settings.mode != "explicit"
        ):
            log.warning(
                "no model in %s: a model is a folder with versions, such as NAME/1/model.onnx; `headrace models init FILE` "
                "makes one from a file",
                " and ".join(map(str, self._repositories)),
            )
        follows = self._settings.mode == "poll" or (self._settings.mode == "on-demand" and self._settings.poll_seconds)
        if follows and not self._context.closing:
            self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def close(self, grace_seconds: float) -> None:
        """Stop polling and loading, and retire all versions, also those that are retiring already, within this time."""
        self._context.closing = True
        if self._settings.stop_refresh is not None:
            self._settings.stop_refresh()
        end = self._context.clock.monotonic() + grace_seconds
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
            self._polling = None
        await asyncio.gather(*(lifecycle.close(grace_seconds) for lifecycle in self._lifecycles.values()))
        await self._context.close(max(0.0, end - self._context.clock.monotonic()))

    async def settled(self, *, retired: bool = False) -> None:
        """Return when no model is being loaded or unloaded; with `retired`, when old copies are also freed."""
        while busy := [lifecycle for lifecycle in self._lifecycles.values() if lifecycle.busy]:
            await asyncio.gather(*(lifecycle.settled() for lifecycle in busy))
        if retired:
            await self._context.wait_idle()

    async def poll_once(self) -> bool:
        """Scan the repositories and apply changes; return whether a folder has changes that have not settled yet."""
        await self._context.refresh()
        snapshot = await self._context.run_with_files(scan, self._repositories)
        changes = self._changes.diff(snapshot, self._context.clock.wall())
        if self._context.closing:
            return False
        # Request all states before any load runs: an ensemble must see that its models are being loaded.
        for scanned in await self._put_on_demand(changes.to_load):
            self.lifecycle(scanned.name).request(DesiredState(scanned))
        for name in changes.removed:
            if self.on_demand.knows(name):
                self.on_demand.remove(name)
            else:
                self.lifecycle(name).request(DesiredState(None))
        return changes.unsettled

    async def _put_on_demand(self, models: Iterable[ScannedModel]) -> list[ScannedModel]:
        """Keep the models that load on demand for their first request; return the others."""
        others = []
        for scanned in models:
            is_known = self.on_demand.knows(scanned.name)
            plan, problem = await self._residency_plan(scanned)
            if plan is not None and plan.residency == ON_DEMAND and self._settings.processes > 1:
                others.append(replace(scanned, problem=_SEVERAL_PROCESSES))
                continue
            if self._settings.mode == "on-demand" or (plan is not None and plan.residency == ON_DEMAND):
                lifecycle = self._lifecycles.get(scanned.name)
                if lifecycle is not None and lifecycle.serving and not is_known:
                    await lifecycle.request(DesiredState(None))  # its configuration did not say so before
                await self.on_demand.open()
                self.on_demand.put(scanned, plan, problem)
                continue
            if is_known:
                self.on_demand.remove(scanned.name)
            others.append(scanned)
        return others

    async def _residency_plan(self, scanned: ScannedModel) -> tuple[LoadPlan | None, HeadraceError | None]:
        """Read a model's plan, if it may say that the model loads on demand; or return why it cannot be read."""
        if scanned.problem:
            return None, FailedPrecondition(scanned.problem)
        if self._settings.mode != "on-demand" and not await self._context.run_in_loader(
            names_residency, scanned.folder
        ):
            return None, None
        try:
            plan = await self._context.run_in_loader(self._context.read_plan, scanned.folder, None, self._settings.gpus)
        except Exception as error:
            return None, reportable_error(error, f"reading the configuration of model '{scanned.name}'")
        return plan, None

    async def _start_on_demand(self) -> dict[str, HeadraceError]:
        """Load the on-demand models that are loaded at the start; return the problems, also of names that are not models."""
        problems = await self.on_demand.start()
        if self._settings.mode == "on-demand":
            for name in {*self._settings.load_models, *self._settings.pinned_models} - set(self.on_demand.names):
                problems[name] = NotFound(
                    "no such model in the repository; --load-model and --pin-model name folders of it"
                )
        return problems

    async def _poll(self) -> None:
        wait = self._settings.poll_seconds
        while True:
            await asyncio.sleep(wait)
            wait = self._settings.poll_seconds
            try:
                if await self.poll_once():
                    wait = min(wait, self._settings.settle_seconds)
            except Exception:  # keep polling, whatever is wrong with the folders
                log.exception("Could not scan the repository; trying again in %g s", wait)

    async def _start_named(self) -> dict[str, HeadraceError]:
        names = set(self._settings.load_models)
        if EVERY_MODEL in names:
            models = (await self._context.run_with_files(scan, self._repositories)).models
        else:
            scans = [
                (name, await self._context.run_with_files(scan_model, self._repositories, name))
                for name in sorted(names)
            ]
            models = {name: model for name, model in scans if model is not None}
        problems = await self._serve_all(models.values())
        for name in names - models.keys() - {EVERY_MODEL}:
            problems[name] = NotFound("no such model in the repository; --load-model names a folder of it")
            log.warning("Model %r: %s", name, problems[name].message)
        return problems

    async def _serve_all(self, models: Iterable[ScannedModel]) -> dict[str, HeadraceError]:
        futures = {model.name: self.lifecycle(model.name).request(DesiredState(model)) for model in models}
        outcomes = {name: await future for name, future in futures.items()}
        return {name: problem for name, problem in outcomes.items() if problem is not None}

    # One model, on request.
    async def load(self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model; return when it serves.

        `config_json` replaces the configuration file. `files`, by `file:<version>/<name>`, replace the whole folder.
        """
        check_name(name)
        if self._settings.mode == "on-demand" or self.on_demand.knows(name):
            await self._load_on_demand(name, bool(config_json or files))
            return
        self._check_mode()
        try:
            desired = await self._desired_state(name, config_json or None, files or {})
        except HeadraceError as error:
            raise _failed("load", name, error) from None
        except OSError as error:  # no space left, most likely
            raise _failed(
                "load", name, reportable_error(error, f"writing the files that came with model '{name}'")
            ) from None
        problem = await self.lifecycle(name).request(desired)
        if problem is not None:
            raise _failed("load", name, problem)

    async def _load_on_demand(self, name: str, has_override: bool) -> None:
        """Load a model now that would load at its first request; check its folder for changes first."""
        if self._context.closing:
            raise Unavailable("the server is closing")
        if has_override:
            raise InvalidArgument(
                f"model '{name}' loads on demand from its folder: leave out config and files, or serve with "
                "--model-control-mode explicit"
            )
        await self._context.refresh()
        scanned = await self._context.run_with_files(scan_model, self._repositories, name)
        if scanned is None:
            raise _failed("load", name, NotFound("failed to poll from model repository"))
        if not self.on_demand.knows(name) or self.on_demand.scanned(name) != scanned:
            self._changes.accept(scanned)
            await self._put_on_demand([scanned])
        problem = await self.on_demand.load(name)
        if problem is not None:
            raise _failed("load", name, problem)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model; with `unload_dependents` also the models of an ensemble that no other ensemble uses.

        Return when the memory is free, or after `unload_wait_seconds` while requests in flight still finish. Unloading a
        model that is not loaded is not an error.
        """
        if self.on_demand.knows(name):
            await self.on_demand.unload(name, self._settings.unload_wait_seconds)
            return
        if self._settings.mode != "on-demand":
            self._check_mode()
        names = [name, *self._used_only_by(name)] if unload_dependents else [name]
        lifecycles = [self._lifecycles[model] for model in names if model in self._lifecycles]
        for future in [lifecycle.request(DesiredState(None)) for lifecycle in lifecycles]:
            problem = await future
            if problem is not None:
                raise _failed("unload", name, problem)
        try:
            async with asyncio.timeout(self._settings.unload_wait_seconds):
                await asyncio.gather(*(lifecycle.retired() for lifecycle in lifecycles))
        except TimeoutError:
            log.info("Model '%s' will be unloaded when its requests in flight are done", name)

    def repository_of(self, name: str) -> str:
        """Return the folder of the repository that a model is from; "" for an unknown or unloaded model."""
        lifecycle = self._lifecycles.get(name)
        scanned = lifecycle.desired.scanned if lifecycle is not None else None
        if scanned is None and self.on_demand.knows(name):
            scanned = self.on_demand.scanned(name)
        return str(scanned.folder.parent) if scanned is not None else ""

    def _check_mode(self) -> None:
        if self._context.closing:
            raise Unavailable("the server is closing")
        if self._settings.mode != "explicit":
            polling = " if polling is enabled" if self._settings.mode == "poll" else ""
            # Triton's code, and its message before the colon.
            raise Unavailable(f"{NOT_EXPLICIT}{polling}: restart the server with --model-control-mode explicit")

    async def _desired_state(self, name: str, config_json: str | None, files: Mapping[str, bytes]) -> DesiredState:
        if files and config_json is None:
            raise InvalidArgument(
                "files can only be given together with a config, since the model's folder is not used"
            )
        if files:
            override = await self._context.run_with_files(self._context.write_override, name, files)
            scanned = await self._context.run_with_files(scan_model, (override.folder.parent,), name)
            return DesiredState(scanned or _without_versions(name, override), config_json, override)
        await self._context.refresh()
        scanned = await self._context.run_with_files(scan_model, self._repositories, name)
        if scanned is None:
            raise NotFound("failed to poll from model repository")
        return DesiredState(scanned, config_json)

    async def _start_load(self, name: str) -> None:
        """Load a model that an ensemble uses, unless the mode has loaded it (`ensemble_dependencies.StartLoad`)."""
        if self.on_demand.knows(name):
            problem = await self.on_demand.load(name)
            if problem is not None:
                text = f"an ensemble needs model '{name}': {problem.message}"
                raise MissingDependency(text, name, "") from problem
            return
        if self._settings.mode != "explicit":
            return
        scanned = await self._context.run_with_files(scan_model, self._repositories, name)
        lifecycle = self._lifecycles.get(name)
        if scanned is not None and not (lifecycle is not None and lifecycle.busy):
            self.lifecycle(name).request(DesiredState(scanned))

    def _used_only_by(self, name: str) -> list[str]:
        """Return the models that an ensemble uses, directly or through others, and that no other ensemble uses."""
        models = [name]
        for ensemble in models:
            lifecycle = self._lifecycles.get(ensemble)
            for step in lifecycle.steps if lifecycle is not None else ():
                if step.model_name not in models:
                    models.append(step.model_name)
        users = {
            lifecycle.name: {step.model_name for step in lifecycle.steps}
            for lifecycle in self._lifecycles.values()
            if lifecycle.serving
        }
        shared = set().union(*(used for user, used in users.items() if user not in models))
        return [model for model in models[1:] if model not in shared]

    def lifecycle(self, name: str) -> ModelLifecycle:
        """Return the lifecycle of a model; a new one for an unknown model."""
        lifecycle = self._lifecycles.get(name)
        if lifecycle is None:
            lifecycle = self._lifecycles[name] = ModelLifecycle(name, self._context, self._dependencies)
        return lifecycle

    def lifecycles(self) -> Iterable[ModelLifecycle]:
        """Return the lifecycles of all models that were ever asked to serve."""
        return self._lifecycles.values()

    # Status.
    def ready(self, strict: bool = True) -> bool:
        """Return whether the server is ready: if strict, when all models that should serve do.

        Models that were unloaded do not count, nor do models that are being reloaded: the old copy keeps serving. If not
        strict: as soon as the server answers. A model that loads on demand does not count: it waits for a request.
        """
        if self._context.closing:
            return False
        return not strict or (
            self._started
            and all(
                lifecycle.healthy or self.on_demand.knows(lifecycle.name) for lifecycle in self._lifecycles.values()
            )
        )

    async def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """Return every version of every model; a model that was never loaded has only a name."""
        entries = [
            IndexEntry(entry.name, entry.version_text, entry.state, entry.reason)
            for entry in self.states.all()
            if not ready_only or entry.state is State.READY
        ]
        if not ready_only:
            known = {entry.name for entry in entries}
            names = await self._context.run_with_files(model_names, self._repositories)
            entries += [IndexEntry(name) for name in names if name not in known]
        return sorted(entries, key=lambda entry: (entry.name, int(entry.version or -1)))

    def state_of(self, name: str, version: int | None) -> VersionState | None:
        """Return the state of a version (None: of the model as a whole); None if it is not known."""
        return self.states.get(name, version)

    def versions_of(self, name: str) -> list[VersionState]:
        """Return the states of all known versions of a model."""
        return self.states.of(name)


def _failed(action: str, name: str, problem: HeadraceError) -> HeadraceError:
    return with_message(problem, f"failed to {action} '{name}', {problem.message}")


def _without_versions(name: str, override: Override) -> ScannedModel:
    """Return a folder of files from a load request without a version in it; its configuration came separately."""
    return ScannedModel(name, override.folder, {}, Fingerprint(b""))
