# SPDX-License-Identifier: Apache-2.0
"""Helpers that read a model's configuration: its file in the version folder, and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from headrace.backends.contract import ModelFiles
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig


def model_path(config: ModelConfig, files: ModelFiles, *usual: str) -> Path:
    """Return the model's file or folder: the one the configuration names, or the first existing one of the `usual` names."""
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
    """Return a file that the configuration names; it must exist inside the version folder."""
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


def number_of(parameters: Mapping[str, str], key: str, default: int, highest: int) -> int:
    """Return an integer parameter."""
    text = parameters.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text) <= highest):
        raise InvalidArgument(f"parameter {key} is '{text[:32]}': use a whole number from 0 to {highest}")
    return int(text)
