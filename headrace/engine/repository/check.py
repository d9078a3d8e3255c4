# SPDX-License-Identifier: Apache-2.0
"""Check a repository without serving it, and report all problems at once.

`headrace models check` calls it, and so can a user's tests. Each problem names file, line and remedy. Backends that can run
here read the model files. Models without a problem are then loaded, one after the other, if the caller says how.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.backends.contract import Backend, ModelFiles
from headrace.backends.devices import visible_gpus
from headrace.backends.signature import SignatureMismatch
from headrace.backends.table import backend_named
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.engine.repository.ensemble_dependencies import ENSEMBLE_CACHE, ensemble_problems
from headrace.engine.repository.load_plan import ENSEMBLE, gpus_for
from headrace.engine.repository.scan import IgnoredPath, ScannedModel, open_repositories, scan
from headrace.models.config.completion import complete
from headrace.models.config.drafts import Draft, read_draft
from headrace.models.config.formats import FORMATS, misnamed_file
from headrace.models.config.problems import ConfigError, Problem
from headrace.models.config.types import EnsembleScheduling, EnsembleStep, ModelConfig
from headrace.models.config.validation import check_model_filenames

log = logging.getLogger("headrace.engine.repository")


@dataclass(frozen=True, slots=True)
class RepositoryReport:
    """The result of a check."""

    models: tuple[str, ...]
    problems: tuple[Problem, ...]
    """Problems that prevent a model from being served."""
    warnings: tuple[Problem, ...]
    """What is ignored, or could not be checked here."""


@dataclass(slots=True)
class _Notes:
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A model whose configuration could be read."""

    draft: Draft
    wanted: frozenset[int]
    configs: dict[int, ModelConfig]
    """By version, if it could be completed."""
    has_backend: bool
    """Whether its backend can be used here; an ensemble has none."""


TryLoad = Callable[[ModelConfig, ModelFiles], None]
"""Load a version and free it again; raise what loading raises (`engine.try_load`)."""


def check_repository(*paths: str | Path, gpus: int = 0, load: TryLoad | None = None) -> RepositoryReport:
    """Check every model of one or several repositories. Raise only if a repository does not exist.

    `load` loads each version that has no problem so far.
    """
    repositories = open_repositories(paths)
    snapshot = scan(repositories)
    notes = _Notes()
    notes.warnings += [_ignored_path(path, repositories) for path in snapshot.ignored]
    notes.problems += [Problem(str(path), None, "", "cannot be read") for path in snapshot.unreadable]
    checked: dict[str, _Checked] = {}
    for scanned in snapshot.models.values():
        try:
            model = _check_model(scanned, gpus, notes)
        except OSError as error:
            text = f"cannot be read: {error.strerror}; check the permissions of everything in the folder"
            notes.problems.append(Problem(scanned.name, None, "", text))
            continue
        if model is not None:
            checked[scanned.name] = model
    for name in sorted(checked):
        _check_steps(name, checked, snapshot.models.keys(), notes)
    if load is not None:
        for model in checked.values():
            _load_versions(model, load, notes)
    # A mistake in the configuration appears for every version; report it once.
    return RepositoryReport(
        tuple(sorted(snapshot.models)), tuple(dict.fromkeys(notes.problems)), tuple(dict.fromkeys(notes.warnings))
    )


def _ignored_path(ignored: IgnoredPath, repositories: Sequence[Path]) -> Problem:
    path = ignored.path
    shown = next((path.relative_to(folder) for folder in repositories if path.is_relative_to(folder)), path)
    return Problem(str(shown), None, "", ignored.text)


def _check_model(scanned: ScannedModel, gpus: int, notes: _Notes) -> _Checked | None:
    if scanned.problem:
        notes.problems.append(Problem(scanned.name, None, "", scanned.problem))
        return None
    try:
        draft = read_draft(scanned.folder)
    except ConfigError as error:
        notes.problems += error.problems
        return None
    present = set(scanned.versions) or ({1} if draft.backend == ENSEMBLE else set())
    if not present:
        text = f"model '{scanned.name}' has no version: make a folder {scanned.name}/1 with the model file"
        notes.problems.append(Problem(scanned.name, None, "", text))
    policy = draft.typed().version_policy
    chosen = policy.choose(present)
    if present and not chosen:
        listed = ", ".join(map(str, sorted(present)))
        notes.problems.append(draft.problem("version_policy", f"chooses none of the versions that are there: {listed}"))
    backend = _backend(draft, notes)
    configs: dict[int, ModelConfig] = {}
    # Check the configuration even if there is no version.
    versions: list[int | None] = [*sorted(chosen)] or [None]
    for version in versions:
        config = _complete(draft, version, backend, gpus, notes)
        if config is not None and version is not None:
            configs[version] = config
    if draft.backend == ENSEMBLE and draft.message.response_cache.enable:
        notes.warnings.append(draft.problem("response_cache.enable", ENSEMBLE_CACHE))
    return _Checked(draft, frozenset(chosen), configs, backend is not None)


def _load_versions(model: _Checked, load: TryLoad, notes: _Notes) -> None:
    """Load the versions of a model, one after the other."""
    name = model.draft.model_folder.name
    if not model.has_backend:
        return
    for version, config in model.configs.items():
        where = f"{name}/{version}"
        if any(problem.path in (name, where) or problem.path == model.draft.shown_path for problem in notes.problems):
            return
        missing = sorted({gpu for group in config.instance_groups for gpu in group.gpus if gpu >= visible_gpus()})
        if missing:
            listed = ", ".join(map(str, missing))
            notes.warnings.append(Problem(where, None, "", f"was not loaded: this machine has no GPU {listed}"))
            return
        try:
            load(config, ModelFiles(model.draft.model_folder, version, model.draft.model_folder / str(version)))
        except Exception as error:  # a model may raise anything
            notes.problems += _load_problems(model.draft, where, error)


def _load_problems(draft: Draft, where: str, error: Exception) -> Sequence[Problem]:
    """Return an error of loading as problems, with the line of the configuration if it is about a tensor there."""
    if isinstance(error, ConfigError):
        return error.problems
    if isinstance(error, SignatureMismatch):
        tensors = getattr(draft.message, error.side)
        index = next((index for index, tensor in enumerate(tensors) if tensor.name == error.tensor), None)
        place = error.side if index is None else f"{error.side}[{index}].{error.field}"
        return [draft.problem(place, error.message)]
    if isinstance(error, HeadraceError):
        return [Problem(where, None, "", error.message)]
    log.debug("%s cannot be loaded", where, exc_info=error)
    return [Problem(where, None, "", f"cannot be loaded: {error!r:.300}")]


def _backend(draft: Draft, notes: _Notes) -> Backend | None:
    if draft.backend in {"", ENSEMBLE}:
        return None
    try:
        return backend_named(draft.backend)
    except InvalidArgument as error:
        notes.problems.append(draft.problem("backend" if draft.message.backend else "platform", error.message))
    except Exception as error:  # a package that is missing or broken here may work where the models will run
        log.debug("backend %s cannot be used", draft.backend, exc_info=error)
        text = error.message if isinstance(error, HeadraceError) else f"its backend cannot be used here: {error!r:.200}"
        notes.warnings.append(draft.problem("", f"{text}; the model's files were not checked"))
    return None


def _complete(
    draft: Draft, version: int | None, backend: Backend | None, gpus: int, notes: _Notes
) -> ModelConfig | None:
    """Return the complete configuration of one version; None, and problems in the notes, if it cannot be completed."""
    completion, file_was_read = None, draft.backend in {"", ENSEMBLE}
    if version is not None and _stays_inside(draft) and _has_file(draft, version, notes) and backend is not None:
        files = ModelFiles(draft.model_folder, version, draft.model_folder / str(version))
        where = f"{draft.model_folder.name}/{version}"
        try:
            completion, file_was_read = backend.complete(draft.typed(), files), True
        except ConfigError as error:
            notes.problems += error.problems
        except HeadraceError as error:
            notes.problems.append(Problem(where, None, "", error.message))
        except Exception as error:  # a model's file may be anything
            log.debug("%s cannot be read", where, exc_info=error)
            notes.problems.append(Problem(where, None, "", f"the model cannot be read: {error!r:.300}"))
    try:
        return complete(draft, completion, gpus if backend is None else gpus_for(draft, backend, gpus))
    except ConfigError as error:
        # Missing inputs and outputs are not a problem if the model's file, which may define them, could not be read.
        known = file_was_read or (draft.message.input and draft.message.output)
        notes.problems += [
            problem for problem in error.problems if known or not problem.field.startswith(("input", "output"))
        ]
    return None


def _stays_inside(draft: Draft) -> bool:
    """Return whether the model's file may be read; `complete` reports why not."""
    try:
        check_model_filenames(draft)
    except ConfigError:
        return False
    return True


def _has_file(draft: Draft, version: int, notes: _Notes) -> bool:
    """Return whether the configured model file is in the version's folder."""
    formats = [file_format for file_format in FORMATS if file_format.backend == draft.backend]
    of_platform = [file_format for file_format in formats if file_format.platform == draft.message.platform != ""]
    names = [file_format.filename for file_format in of_platform or formats]
    if draft.message.default_model_filename:
        names = [draft.message.default_model_filename]
    folder = draft.model_folder / str(version)
    if not names or "" in names or any((folder / name).exists() for name in names):
        return True
    present = (
        ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing" if folder.is_dir() else "nothing"
    )
    misnamed = misnamed_file(folder, names)
    text = misnamed or (
        f"has no {' or '.join(names)}, but {present}: put the model's file there, or name it with default_model_filename"
    )
    notes.problems.append(Problem(f"{draft.model_folder.name}/{version}", None, "", text))
    return False


def _check_steps(name: str, checked: dict[str, _Checked], present: Collection[str], notes: _Notes) -> None:
    model = checked[name]
    for config in model.configs.values():
        scheduling = config.scheduling
        if not isinstance(scheduling, EnsembleScheduling):
            continue
        for index, step in enumerate(scheduling.steps):
            text = _step_problem(step, checked, present)
            if text:
                notes.problems.append(model.draft.problem(f"ensemble_scheduling.step[{index}].model_name", text))
        texts = ensemble_problems(config, lambda step: _config_of(step, checked))
        texts += _cycle(name, checked)
        notes.problems += [model.draft.problem("ensemble_scheduling", text) for text in texts]


def _step_problem(step: EnsembleStep, checked: dict[str, _Checked], present: Collection[str]) -> str:
    model = checked.get(step.model_name)
    if model is None:
        known = step.model_name in present
        others = ", ".join(sorted(checked)) or "none"
        return "" if known else f"model '{step.model_name}' is not in the repository; there are {others}"
    if step.model_version >= 0 and step.model_version not in model.wanted:
        return f"version {step.model_version} of '{step.model_name}' is not served: not there, or not in its policy"
    return ""


def _config_of(step: EnsembleStep, checked: dict[str, _Checked]) -> ModelConfig | None:
    model = checked.get(step.model_name)
    if model is None or not model.configs:
        return None
    return model.configs.get(step.model_version if step.model_version >= 0 else max(model.configs))


def _cycle(name: str, checked: dict[str, _Checked]) -> list[str]:
    """Report the path from an ensemble through its steps back to itself, if there is one."""
    paths = [[name]]
    seen: set[str] = set()
    while paths:
        path = paths.pop()
        model = checked.get(path[-1])
        for config in model.configs.values() if model is not None else ():
            scheduling = config.scheduling
            for step in scheduling.steps if isinstance(scheduling, EnsembleScheduling) else ():
                if step.model_name == name:
                    return [f"ensembles use each other in a circle: {' -> '.join([*path, name])}"]
                if step.model_name not in seen:
                    seen.add(step.model_name)
                    paths.append([*path, step.model_name])
    return []
