# SPDX-License-Identifier: Apache-2.0
"""The models that ensembles use: waited for, checked, and followed when they come and go.

Implements `wishes.Neighbours` for `control`. Knows who waits for whom, so that two ensembles that use each other
fail instead of waiting for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from headrace.core.errors import InvalidArgument
from headrace.engine.repository.directory import Directory
from headrace.engine.repository.ensembles import ensemble_problems, step_version
from headrace.engine.repository.lifecycle import ModelLife
from headrace.engine.repository.wishes import MissingStep
from headrace.models.config.types import EnsembleScheduling, EnsembleStep, ModelConfig

Fetch = Callable[[str], Awaitable[None]]
"""Begin to load a model that an ensemble needs, if it can be found."""


class Steps:
    """Every ensemble's steps."""

    def __init__(self, lives: Mapping[str, ModelLife], directory: Directory, fetch: Fetch | None) -> None:
        self._lives = lives
        self._directory = directory
        self._fetch = fetch
        self._waits: dict[str, str] = {}

    async def wait_for(self, name: str, steps: tuple[EnsembleStep, ...]) -> None:
        """See `Neighbours.wait_for`."""
        for step in steps:
            self._refuse_circle(name, step.model_name)
            life = self._lives.get(step.model_name)
            busy = life is not None and life.busy
            if self._fetch is not None and not busy and self._find(step) is None:
                await self._fetch(step.model_name)
        for step in steps:
            life = self._lives.get(step.model_name)
            if life is not None and life.busy:
                self._refuse_circle(name, step.model_name)
                self._waits[name] = step.model_name
                try:
                    await life.settled()
                finally:
                    del self._waits[name]

    def check(self, config: ModelConfig) -> None:
        """See `Neighbours.check`."""
        scheduling = config.scheduling
        if isinstance(scheduling, EnsembleScheduling):
            for step in scheduling.steps:
                problem = self._missing(config.name, step)
                if problem is not None:
                    raise problem
        problems = ensemble_problems(config, self._find)
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise InvalidArgument(problems[0] + more)

    def changed(self, name: str) -> None:
        """See `Neighbours.changed`. Ensembles that use the model follow it."""
        for life in list(self._lives.values()):
            if not life.wish.serves:
                continue
            problem = life.problem
            if isinstance(problem, MissingStep) and self._directory.find(problem.model, problem.version) is not None:
                life.again()
            elif life.serving:
                missing = [p for p in (self._missing(life.name, step) for step in life.steps) if p is not None]
                if missing:
                    life.starve(missing[0])
                    self.changed(life.name)

    def _missing(self, ensemble: str, step: EnsembleStep) -> MissingStep | None:
        if self._find(step) is not None:
            return None
        version = step_version(step)
        which = f"'{step.model_name}' version {version}" if version else f"'{step.model_name}'"
        life = self._lives.get(step.model_name)
        why = f": {life.problem.message}" if life is not None and life.problem is not None else ""
        text = f"ensemble '{ensemble}' depends on {which} which has no loaded version{why}"
        return MissingStep(text, step.model_name, version)

    def _find(self, step: EnsembleStep) -> ModelConfig | None:
        loaded = self._directory.find(step.model_name, step_version(step))
        return None if loaded is None else loaded.config

    def _refuse_circle(self, name: str, other: str) -> None:
        way = [name, other]
        while way[-1] != name and way[-1] in self._waits:
            way.append(self._waits[way[-1]])
        if way[-1] == name:
            raise InvalidArgument(f"ensembles use each other in a circle: {' -> '.join(way)}")
