# SPDX-License-Identifier: Apache-2.0
"""Where a version keeps its model. Called by every backend that reads a file or a folder; opens nothing.

A configuration may name the file, so what it names is held inside the version's folder.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from headrace.backends.contract import ModelFiles
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig


def model_path(config: ModelConfig, files: ModelFiles, *usual: str) -> Path:
    """The file or folder that is the model: what the configuration names, or the first of the `usual` ones that is there."""
    if config.default_model_filename:
        return named_path(config, files, config.default_model_filename, "default_model_filename")
    for name in usual:
        if (files.version_folder / name).exists():
            return files.version_folder / name
    wanted = " or ".join(f"'{_shown(files.version_folder / name, files)}'" for name in usual)
    raise FailedPrecondition(
        f"model '{config.name}' version {files.version} has no file {wanted}: put the model there, "
        "or name it in default_model_filename"
    )


def named_path(config: ModelConfig, files: ModelFiles, name: str, setting: str) -> Path:
    """A file that a setting of the configuration names, which must be there and stay inside the version's folder."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise InvalidArgument(
            f"{setting} '{name[:128]}' of model '{config.name}' leaves the version's folder: name a file inside it"
        )
    path = files.version_folder / relative
    if not path.exists():
        raise FailedPrecondition(
            f"model '{config.name}' version {files.version} has no file '{_shown(path, files)}': put the model there, "
            f"or name it in {setting}"
        )
    return path


def _shown(path: Path, files: ModelFiles) -> str:
    return str(path.relative_to(files.model_folder.parent))
