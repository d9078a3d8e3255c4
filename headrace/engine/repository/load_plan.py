# SPDX-License-Identifier: Apache-2.0
"""The load plan of a model: its configuration, read from the folder and completed for each version.

`lifecycle` calls it in threads, since it reads files and calls backends. The configuration format is in `models.config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.backends.contract import AbortableBackend, Backend, ModelFiles
from headrace.backends.table import backend_named
from headrace.models.config.completion import complete
from headrace.models.config.drafts import CONFIG_FILES, Draft, draft_from_json, read_draft
from headrace.models.config.problems import ConfigError, Problem
from headrace.models.config.types import EnsembleScheduling, EnsembleStep, ModelConfig, VersionPolicy
from headrace.models.config.validation import check_model_filenames

ENSEMBLE = "ensemble"
RESIDENCY = "residency"
"""The parameter of a configuration that says when the model is in memory."""
ON_DEMAND, PINNED = "on-demand", "pinned"


def _do_nothing() -> None:
    """The `abandon` of plans that cannot be interrupted."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a configuration says before it is completed from the files of a version."""

    policy: VersionPolicy
    complete: Callable[[ModelFiles], ModelConfig]
    """Returns the complete configuration of one version. May block."""
    is_ensemble: bool = False
    steps: tuple[EnsembleStep, ...] = ()
    """The steps of an ensemble."""
    backend: str = ""
    """The backend that loads it; "" for an ensemble, and if the configuration names none."""
    abandon: Callable[[], None] = _do_nothing
    """Make running loads of this plan fail soon, if the backend can. Called in the event loop's thread."""
    residency: str = ""
    """The model's own choice (`RESIDENCY`); "" to follow the model control mode."""
    config: ModelConfig | None = None
    """The configuration as written, not completed from the model's files."""


ReadLoadPlan = Callable[[Path, str | None, int], LoadPlan]
"""Returns the plan for a folder, with a configuration as JSON instead of the file if given, and the number of GPUs."""


def read_load_plan(folder: Path, config_json: str | None, gpus: int, *, strict: bool = False) -> LoadPlan:
    """Return the load plan of a folder; raise `ConfigError` with all mistakes.

    If strict, the configuration file must exist and be complete: no backend is called.
    """
    draft = read_draft(folder) if config_json is None else draft_from_json(folder, config_json)
    if strict and config_json is None and draft.path is None:
        text = "there is no configuration, and --strict-model-config asks for one: write config.pbtxt"
        raise ConfigError([Problem(folder.name, None, "", text)])
    if draft.backend == ENSEMBLE:
        ensemble = complete(draft, None, gpus)
        scheduling = ensemble.scheduling
        steps = scheduling.steps if isinstance(scheduling, EnsembleScheduling) else ()
        residency = _residency(draft, ensemble)
        return LoadPlan(ensemble.version_policy, lambda _: ensemble, True, steps, residency=residency, config=ensemble)
    config = draft.typed()
    backends: list[Backend] = []

    def complete_version(files: ModelFiles) -> ModelConfig:
        if not draft.backend:
            return complete(draft, None, gpus)  # raises an error that says what to write
        backend = backend_named(draft.backend)
        backends.append(backend)
        check_model_filenames(draft)
        completion = None if strict else backend.complete(config, files)
        return complete(draft, completion, gpus_for(draft, backend, gpus))

    def abandon() -> None:
        for backend in backends:
            if isinstance(backend, AbortableBackend):
                backend.abandon(folder)

    return LoadPlan(
        config.version_policy,
        complete_version,
        backend=draft.backend,
        abandon=abandon,
        residency=_residency(draft, config),
        config=config,
    )


def remember_completion(plan: LoadPlan) -> LoadPlan:
    """Return a plan that completes the configuration of a version once; for as long as its files are the same."""
    configs: dict[int, ModelConfig] = {}

    def complete_once(files: ModelFiles) -> ModelConfig:
        if files.version not in configs:
            configs[files.version] = plan.complete(files)
        return configs[files.version]

    return replace(plan, complete=complete_once)


def names_residency(folder: Path) -> bool:
    """Return whether a configuration may choose a residency, without parsing it: most models have none."""
    for name in CONFIG_FILES:
        try:
            if RESIDENCY.encode() in (folder / name).read_bytes():
                return True
        except OSError:
            continue
    return False


def _residency(draft: Draft, config: ModelConfig) -> str:
    chosen = config.parameters.get(RESIDENCY, "")
    if chosen not in ("", ON_DEMAND, PINNED):
        text = f"is {chosen[:64]!a}: write '{ON_DEMAND}' (loaded at its first request) or '{PINNED}' (never evicted)"
        raise ConfigError([draft.problem(f"parameters.{RESIDENCY}", text)])
    return chosen


def gpus_for(draft: Draft, backend: Backend, present: int) -> int:
    """Return the number of GPUs for KIND_AUTO. If a group asks for KIND_GPU, the backend reports why it cannot use one."""
    requested = any(group.kind == group.KIND_GPU for group in draft.message.instance_group)
    return present if requested else backend.usable_gpus(present)
