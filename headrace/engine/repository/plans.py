# SPDX-License-Identifier: Apache-2.0
"""From a model's folder to what is to be loaded: the configuration read, and completed for each version.

Called by `lifecycle` in threads, since it reads files and asks backends. Knows the order of the steps; what they do is
known to `modelconfig` and to the backends.
"""

from __future__ import annotations

from pathlib import Path

from headrace.backends.contract import Abandoning, Backend, ModelFiles
from headrace.backends.table import backend_named
from headrace.engine.repository.contract import Plan
from headrace.models.config.checking import check_model_filenames
from headrace.models.config.drafts import Draft, draft_from_json, read_draft
from headrace.models.config.finishing import finish
from headrace.models.config.problems import ConfigError, Problem
from headrace.models.config.types import EnsembleScheduling, ModelConfig

ENSEMBLE = "ensemble"


def read_plan(folder: Path, config_json: str | None, gpus: int, *, strict: bool = False) -> Plan:
    """See `ReadPlan`. Raises `ConfigError` with every mistake it sees.

    When strict, the configuration must be there and say everything: no backend is asked.
    """
    draft = read_draft(folder) if config_json is None else draft_from_json(folder, config_json)
    if strict and config_json is None and draft.path is None:
        text = "there is no configuration, and --strict-model-config asks for one: write config.pbtxt"
        raise ConfigError([Problem(folder.name, None, "", text)])
    if draft.backend == ENSEMBLE:
        whole = finish(draft, None, gpus)
        scheduling = whole.scheduling
        steps = scheduling.steps if isinstance(scheduling, EnsembleScheduling) else ()
        return Plan(whole.version_policy, lambda _: whole, True, steps)
    config = draft.typed()
    asked: list[Backend] = []

    def finished(files: ModelFiles) -> ModelConfig:
        if not draft.backend:
            return finish(draft, None, gpus)  # nobody to ask; it says what to write
        backend = backend_named(draft.backend)
        asked.append(backend)
        check_model_filenames(draft)
        told = None if strict else backend.complete(config, files)
        return finish(draft, told, gpus_for(draft, backend, gpus))

    def abandon() -> None:
        for backend in asked:
            if isinstance(backend, Abandoning):
                backend.abandon(folder)

    return Plan(config.version_policy, finished, abandon=abandon)


def gpus_for(draft: Draft, backend: Backend, present: int) -> int:
    """How many GPUs there are for KIND_AUTO. A group that asks for one by name is told by the backend why it has none."""
    asked = any(group.kind == group.KIND_GPU for group in draft.message.instance_group)
    return present if asked else backend.usable_gpus(present)
