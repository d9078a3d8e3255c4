# SPDX-License-Identifier: Apache-2.0
"""The memory of models that load on demand: what is taken, whether a model can fit, and making room by evicting others.

`on_demand` calls it before and after a load. A model in use, a pinned one and one that an ensemble needs are never evicted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from headrace.core.errors import FailedPrecondition, HeadraceError, Unavailable
from headrace.engine.repository.lifecycle import ModelLifecycle
from headrace.engine.repository.load_context import LoadContext
from headrace.engine.repository.memory_budget import MemoryBudget, MemoryUse, Resident, add_up
from headrace.engine.repository.residency import OnDemandModel

RETRY_SECONDS = 5.0
"""When to try again, where nothing better is known."""
_LOOK_SECONDS = 0.02
"""Interval of the check whether a model in use has become idle."""


class Lifecycles(Protocol):
    """The lifecycles of all models."""

    def lifecycle(self, name: str) -> ModelLifecycle:
        """Return the lifecycle of a model; a new one for an unknown model."""

    def lifecycles(self) -> Iterable[ModelLifecycle]:
        """Return all lifecycles."""


class NoRoom(Unavailable):
    """A load that may succeed as soon as memory is free: no failure of the model."""


class Misfit(FailedPrecondition):
    """A model that cannot fit beside what is never evicted."""


class ResidentMemory:
    """The memory of the models of one repository."""

    def __init__(self, context: LoadContext, lifecycles: Lifecycles, models: Mapping[str, OnDemandModel]) -> None:
        self._context = context
        self._lifecycles = lifecycles
        self._models = models
        self.budget = MemoryBudget({})
        self._leaving: dict[int, MemoryUse] = {}
        """Memory of evicted models that is not free yet."""
        self._numbers = 0

    def used(self) -> MemoryUse:
        """Return the memory that counts against the limits now."""
        return add_up([*(model.charged for model in self._models.values()), *self._leaving.values()])

    def kept(self) -> MemoryUse:
        """Return what backends keep of evicted models, for the next ones of the same shape."""
        kept = self._context.settings.kept_memory
        return kept.bytes if kept is not None else {}

    async def free_kept(self) -> None:
        """Free what is kept of evicted models where it does not fit beside those that are loaded."""
        kept = self._context.settings.kept_memory
        if kept is not None and (excess := self.budget.excess(self.used(), self.kept())):
            await self._context.run_in_loader(kept.free, excess)

    def misfit(self, model: OnDemandModel, need: MemoryUse) -> Misfit | None:
        """Return the error for a model that cannot fit beside what is never evicted; None if it can."""
        others = [other for other in self._models.values() if other.charged and other is not model]
        partners = self._partners(model.name)
        pinned = add_up(other.charged for other in others if other.pinned)
        together = add_up(other.charged for other in others if not other.pinned and other.name in partners)
        excess = self.budget.excess(need, pinned, together)
        if not excess:
            return None
        text = self.budget.sum_text(
            need, (("pinned models", pinned), ("models of the same ensemble", together)), excess
        )
        return Misfit(
            f"model '{model.name}' cannot fit in {text}; raise the limit, unpin a model, or serve it elsewhere"
        )

    def _partners(self, name: str) -> set[str]:
        """Return the models that an ensemble which is being loaded needs together with this one."""
        ensembles = [
            {step.model_name for step in lifecycle.planned_steps} for lifecycle in self._ensembles() if lifecycle.busy
        ]
        return set().union(*(steps for steps in ensembles if name in steps))

    async def make_room(self, model: OnDemandModel, need: MemoryUse) -> HeadraceError | None:
        """Evict models until `need` fits; wait for models in use, within the bound for requests."""
        end = self._context.clock.monotonic() + self._context.settings.wait_seconds
        while excess := self.budget.excess(self.used(), need):
            if self._context.closing:
                return NoRoom("the server is stopping: send the request to another one")
            victims = self.budget.victims(excess, [self._resident(other) for other in self._evictable(model)])
            if victims is not None:
                await self.evict(
                    [self._models[victim.name] for victim in victims], f"evicted to make room for model '{model.name}'"
                )
                continue
            serves = model.charged and need and model.name in self._context.directory.models
            if serves and not self._in_use(model.name, self._ensembles()):
                # Its files changed, and both copies do not fit: the old one goes first.
                await self.evict([model], "evicted: its files changed, and both copies do not fit")
                continue
            if self._context.clock.monotonic() > end:
                text = self.budget.sum_text(need, (("models in use", self.used()),), excess)
                return NoRoom(
                    f"model '{model.name}' finds no room: {text}; send the request again",
                    retry_after_seconds=RETRY_SECONDS,
                )
            model.stage = "waiting for memory"
            await asyncio.sleep(_LOOK_SECONDS)
        return None

    def _evictable(self, loading: OnDemandModel) -> list[OnDemandModel]:
        ensembles = self._ensembles()
        return [
            model
            for model in self._models.values()
            if model.charged
            and model is not loading
            and not (model.pinned or model.task is not None or model.waiters)
            and not self._in_use(model.name, ensembles)
            and not self._held(model.name, ensembles)
        ]

    def _ensembles(self) -> list[ModelLifecycle]:
        """Return the ensembles that serve or are being loaded."""
        return [lifecycle for lifecycle in self._lifecycles.lifecycles() if lifecycle.planned_steps]

    def _resident(self, model: OnDemandModel) -> Resident:
        return Resident(model.name, model.charged, self.last_used_ns(model))

    def last_used_ns(self, model: OnDemandModel) -> int:
        """Return when a model was last used, or else loaded."""
        served = self._context.directory.models.get(model.name)
        versions = served.versions.values() if served is not None else ()
        return max([model.loaded_ns, *(version.last_used_ns for version in versions)])

    def _in_use(self, name: str, ensembles: list[ModelLifecycle]) -> bool:
        """Return whether a model, or an ensemble that uses it, has a request in flight."""
        served = self._context.directory.models.get(name)
        if served is not None and any(version.in_use for version in served.versions.values()):
            return True
        return any(self._in_use(user, ensembles) for user in _users(name, ensembles))

    def _held(self, name: str, ensembles: list[ModelLifecycle]) -> bool:
        """Return whether an ensemble needs a model to stay: one that is being loaded, or that is always loaded."""
        return any(
            lifecycle.busy or lifecycle.name not in self._models or self._held(lifecycle.name, ensembles)
            for lifecycle in ensembles
            if _uses(lifecycle, name)
        )

    async def evict(self, models: list[OnDemandModel], reason: str) -> None:
        """Stop serving models at once, and return when their memory is free."""
        leaving = []
        for model in models:
            for user in _users_in_order(model.name, self._ensembles()):
                if user in self._models:
                    self._take_out(self._models[user], reason)
            leaving.append(self._take_out(model, reason))
        await asyncio.gather(*leaving)

    def _take_out(self, model: OnDemandModel, reason: str) -> asyncio.Task[None]:
        model.evicted = True
        model.evictions += 1
        self._lifecycles.lifecycle(model.name).evict(reason)
        return self.free(model)

    def free(self, model: OnDemandModel) -> asyncio.Task[None]:
        """Count a model's memory until it has retired, whatever becomes of the model meanwhile."""
        use, model.charged = model.charged, {}
        return self.leave(use, self._lifecycles.lifecycle(model.name))

    def leave(self, use: MemoryUse, lifecycle: ModelLifecycle) -> asyncio.Task[None]:
        """Count memory until the copies that a lifecycle has removed are freed."""
        self._numbers += 1
        number = self._numbers
        self._leaving[number] = use

        async def leave() -> None:
            try:
                await lifecycle.settled()
                await lifecycle.retired()
            finally:
                del self._leaving[number]

        return self._context.background(leave())


def _uses(lifecycle: ModelLifecycle, name: str) -> bool:
    return any(step.model_name == name for step in lifecycle.planned_steps)


def _users(name: str, ensembles: list[ModelLifecycle]) -> list[str]:
    """Return the ensembles that use a model."""
    return [lifecycle.name for lifecycle in ensembles if _uses(lifecycle, name)]


def _users_in_order(name: str, ensembles: list[ModelLifecycle]) -> list[str]:
    """Return the ensembles that use a model, also through other ensembles, the outermost first."""
    users: list[str] = []
    for user in _users(name, ensembles):
        users += [*_users_in_order(user, ensembles), user]
    return list(dict.fromkeys(users))
