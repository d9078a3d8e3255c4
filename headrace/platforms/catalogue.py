# SPDX-License-Identifier: Apache-2.0
"""The architectures that can be started and asked, from data files: ours, a user's folder, TAO's `{arch}.config.json`.

Called by the launcher and the command line; read by `images`, `payloads` and `chat_bodies`. An architecture says what is
known about a kind of service and decides nothing. How a file is read is `architecture_files`' business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.platforms.architecture import Architecture, Field, MediaRules, Option
from headrace.platforms.architecture_files import IMAGE_KEY, read_folder

__all__ = ["Architecture", "Field", "MediaRules", "Option", "configured", "find", "image_defaults", "load"]

FALLBACK_KEY = "COSMOS_RL"
"""The image of an architecture that names none."""


def load(extra: Path | None = None) -> Mapping[str, Architecture]:
    """All by name: ours, and those of a folder of *.yaml, *.yml and *.json, which may replace ours.

    Raises InvalidArgument that names a file and the line and key that is wrong in it, NotFound if there is no such folder.
    """
    found = read_folder(Path(str(files("headrace.platforms") / "architectures")))
    if extra is not None:
        found = {**found, **read_folder(extra)}
    defaults = image_defaults(found.values())
    return {name: _with_image(each, defaults) for name, each in sorted(found.items())}


def find(catalogue: Mapping[str, Architecture], name: str) -> Architecture:
    """The architecture of this name. Raises InvalidArgument that lists those there are."""
    found = catalogue.get(name.lower())
    if found is None:
        raise InvalidArgument(
            f"the architecture {name[:64]!a} is not known; these are: {', '.join(catalogue)}. "
            "A file in a folder of architectures adds another"
        )
    return found


def image_defaults(architectures: Iterable[Architecture]) -> dict[str, str]:
    """The default for each image key."""
    return {each.image_key: each.image_default for each in architectures if each.image_key and each.image_default}


def configured(
    arch: Architecture, folders: Iterable[Path], catalogue: Mapping[str, Architecture] | None = None
) -> Architecture:
    """The same by the first `{arch}.config.json` of these folders, where there is one: its image key, its model path.

    A file that names no image means `FALLBACK_KEY`. Raises InvalidArgument that names a file that cannot be read.
    """
    for folder in folders:
        path = folder / f"{arch.name.lower()}.config.json"
        if path.is_file():
            return _by_config(arch, path, image_defaults((load() if catalogue is None else catalogue).values()))
    return arch


def _by_config(arch: Architecture, path: Path, defaults: Mapping[str, str]) -> Architecture:
    document = _config(path)
    image = _at(document, path, "api_params", "image")
    form = _at(document, path, "spec_params", "inference", "model_path")
    if image and not IMAGE_KEY.fullmatch(image):
        raise InvalidArgument(
            f"{path}: api_params.image is {image[:64]!a}: write a key of capitals, digits and '_', such as COSMOS_RL"
        )
    key = image or FALLBACK_KEY
    default = arch.image_default if key == arch.image_key else defaults.get(key, "")
    return replace(
        arch,
        image_key=key,
        image_default=default,
        model_path_form=form or arch.model_path_form,
        source=str(path),
    )


def _config(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise InvalidArgument(
            f"{path}{'' if line is None else f', line {line}'}: not JSON that can be read; correct it or take it away"
        ) from None


def _at(document: Any, path: Path, *keys: str) -> str:
    for number, key in enumerate(keys):
        if not isinstance(document, dict):
            raise InvalidArgument(f"{path}: {'.'.join(keys[:number]) or 'the document'} is no object")
        document = document.get(key)
        if document is None:
            return ""
    if not isinstance(document, str):
        raise InvalidArgument(f"{path}: {'.'.join(keys)} is no string")
    return document


def _with_image(arch: Architecture, defaults: Mapping[str, str]) -> Architecture:
    if arch.image_key:
        return arch if arch.image_default else replace(arch, image_default=defaults.get(arch.image_key, ""))
    return replace(arch, image_key=FALLBACK_KEY, image_default=defaults.get(FALLBACK_KEY, ""))
