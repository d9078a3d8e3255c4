# SPDX-License-Identifier: Apache-2.0
"""Helpers that read a model's configuration: its files in the version folder, and its parameters."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from headrace.backends.contract import ModelFiles
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.models.config.formats import misnamed_file
from headrace.models.config.types import ModelConfig

Default = TypeVar("Default")

_MAX_JSON_BYTES = 16 << 20


def model_path(config: ModelConfig, files: ModelFiles, *usual: str) -> Path:
    """Return the model's file or folder: the one the configuration names, or the first existing one of the `usual` names."""
    if config.default_model_filename:
        return named_path(config, files, config.default_model_filename, "default_model_filename")
    for name in usual:
        if (files.version_folder / name).exists():
            return files.version_folder / name
    wanted = " or ".join(f"'{_shown(files.version_folder / name, files)}'" for name in usual)
    remedy = misnamed_file(files.version_folder, usual) or "put the model there, or name it in default_model_filename"
    raise FailedPrecondition(f"model '{config.name}' version {files.version} has no file {wanted}: {remedy}")


def named_path(config: ModelConfig, files: ModelFiles, name: str, setting: str) -> Path:
    """Return a file that the configuration names; it must exist inside the version folder."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise InvalidArgument(
            f"{setting} '{name[:128]}' of model '{config.name}' leaves the version's folder: name a file inside it"
        )
    path = files.version_folder / relative
    if not path.exists():
        misnamed = misnamed_file(path.parent, [path.name]) if setting == "default_model_filename" else ""
        raise FailedPrecondition(
            f"model '{config.name}' version {files.version} has no file '{_shown(path, files)}': "
            + (misnamed or f"put the model there, or name it in {setting}")
        )
    return path


def _shown(path: Path, files: ModelFiles) -> str:
    return str(path.relative_to(files.model_folder.parent))


def parse_int(
    parameters: Mapping[str, str], key: str, default: Default, highest: int, lowest: int = 0
) -> int | Default:
    """Return an integer parameter."""
    text = parameters.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 17 and lowest <= int(text) <= highest):
        raise InvalidArgument(f"parameter {key} is '{text[:32]}': use a whole number from {lowest} to {highest}")
    return int(text)


def parse_bool(parameters: Mapping[str, str], key: str, default: Default) -> bool | Default:
    """Return a boolean parameter."""
    text = parameters.get(key)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidArgument(f"parameter {key} is '{text[:32]}': use true or false")
    return text.lower() in ("true", "1")


def parse_choice(parameters: Mapping[str, str], key: str, default: Default, choices: Collection[str]) -> str | Default:
    """Return a parameter that has a few allowed values, in upper or lower case."""
    text = parameters.get(key)
    if text is None:
        return default
    chosen = next((choice for choice in choices if choice.lower() == text.lower()), None)
    if chosen is None:
        raise InvalidArgument(f"parameter {key} is '{text[:32]}': use one of {', '.join(choices)}")
    return chosen


def read_json_object(
    path: Path, name: str, missing: str, error: type[HeadraceError] = FailedPrecondition
) -> dict[str, Any]:
    """Read a JSON object from a file of a model folder. `name` is the file's name in errors."""
    content = read_json(path, name, missing, error)
    if not isinstance(content, dict):
        raise error(f"{name} is not a JSON object: copy or save it again")
    return content


def read_json(path: Path, name: str, missing: str, error: type[HeadraceError] = FailedPrecondition) -> Any:
    """Read a JSON file of a model folder; `missing` is the message if it cannot be read."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise error(f"{name} has over {_MAX_JSON_BYTES} bytes: copy or save it again")
        return json.loads(path.read_bytes())
    except OSError:
        raise FailedPrecondition(missing) from None
    except (ValueError, RecursionError):
        raise error(f"{name} is not JSON: copy or save it again") from None
