# SPDX-License-Identifier: Apache-2.0
"""From a model's folder to what is to be loaded: the configuration read, and completed for each version.

Called by `lifecycle` in threads, since it reads files and asks backends. Knows the order of the steps; what they do is
known to `modelconfig` and to the backends.
"""

from __future__ import annotations

from pathlib import Path

from headrace.backends.contract import ModelFiles
from headrace.backends.table import backend_named
from headrace.engine.repository.contract import Plan
from headrace.modelconfig.drafts import draft_from_json, read_draft
from headrace.modelconfig.finishing import finish
from headrace.modelconfig.problems import ConfigError, Problem
from headrace.modelconfig.types import EnsembleScheduling, ModelConfig

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

    def finished(files: ModelFiles) -> ModelConfig:
        # Without a backend there is nobody to ask; `finish` then says what to write.
        told = backend_named(draft.backend).complete(config, files) if draft.backend and not strict else None
        return finish(draft, told, gpus)

    return Plan(config.version_policy, finished)
