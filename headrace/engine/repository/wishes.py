# SPDX-License-Identifier: Apache-2.0
"""The words between `control`, the lives of models, and the models around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.core.errors import FailedPrecondition
from headrace.engine.repository.overrides import Override
from headrace.engine.repository.scan import FoundModel
from headrace.models.config.types import EnsembleStep, ModelConfig


@dataclass(frozen=True, eq=False, slots=True)
class Wish:
    """What a model is to be."""

    found: FoundModel | None
    """None: gone."""
    config_json: str | None = None
    override: Override | None = None

    @property
    def serves(self) -> bool:
        """Whether the model is to serve at all."""
        return self.found is not None


class Neighbours(Protocol):
    """What an ensemble asks about the models it uses."""

    async def wait_for(self, name: str, steps: tuple[EnsembleStep, ...]) -> None:
        """Return when none of the steps' models is being loaded any more; raises if they wait for each other."""

    def check(self, config: ModelConfig) -> None:
        """Raise `MissingStep` if a step's model does not serve, `InvalidArgument` if it does not fit."""

    def changed(self, name: str) -> None:
        """A model began or ceased to serve."""


class MissingStep(FailedPrecondition):
    """Raise when an ensemble cannot serve because a model that it uses does not; it may later."""

    def __init__(self, message: str, model: str, version: str) -> None:
        super().__init__(message)
        self.model = model
        self.version = version
