# SPDX-License-Identifier: Apache-2.0
"""The container image of a service: TAO's, by its keys and versions.yaml, or ours.

It reads versions.yaml and nothing else; the platform finds out whether the image can be pulled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.core.yaml_loader import load_yaml, yaml_error_line, yaml_error_reason
from headrace.platforms.catalogue import VERSIONS, Architecture
from headrace.version import __version__

OWN = "headrace"
OWN_VARIABLE = "HEADRACE_IMAGE"
"""Selects our image; its value is the image's name."""
VERSIONS_VARIABLE = "TAO_VERSIONS_FILE"
BANK_VARIABLE = "TAO_SKILL_BANK_PATH"

_DOTTED = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")
# The forms of registries, Enroot (`registry#name`, /path/to.sqsh) and Apptainer (docker://), safe for shells and flags.
_IMAGE = re.compile(r"(/|\./|[a-z]+://)?[A-Za-z0-9][A-Za-z0-9._:/@#+-]{0,510}")
_MAX_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Image:
    """The image to run."""

    name: str
    own: bool
    """Whether it is our image, with the program `headrace`."""


def choose_image(
    arch: Architecture, environ: Mapping[str, str], image: str = "", versions_file: Path | None = None
) -> Image:
    """Return the requested image, by `image` or the variables; else TAO's image of the architecture.

    `image`: "headrace" for ours, a key of versions.yaml, or an image. Raises InvalidArgument, NotFound or FailedPrecondition
    with what to set.
    """
    headrace_image = environ.get(OWN_VARIABLE, "")
    if image == OWN or (not image and headrace_image):
        return Image(_check_name(headrace_image or f"{OWN}:{__version__}", OWN_VARIABLE), True)
    resolved = _resolve(image, environ, versions_file, "the image") if image else ""
    name = resolved or resolve_image(arch, environ, versions_file)
    return Image(name, name == headrace_image or _repository(name) == OWN)


def resolve_image(arch: Architecture, environ: Mapping[str, str], versions_file: Path | None = None) -> str:
    """Return TAO's image of an architecture: `IMAGE_<KEY>`, else the default; keys are looked up in versions.yaml."""
    variable = f"IMAGE_{arch.image_key}"
    value = environ.get(variable) or arch.image_default
    if not value:
        raise FailedPrecondition(f"there is no default image for {arch.name}: set {variable}, or name an image")
    return _resolve(value, environ, versions_file, variable if environ.get(variable) else arch.source or arch.name)


def find_versions(environ: Mapping[str, str], versions_file: Path | None = None, working_folder: Path = Path()) -> Path:
    """Return the versions.yaml in use: the given one, `TAO_VERSIONS_FILE`, this folder's, the skill bank's, ours."""
    configured = versions_file or (Path(environ[VERSIONS_VARIABLE]) if environ.get(VERSIONS_VARIABLE) else None)
    if configured is not None:
        if not configured.is_file():
            raise NotFound(f"{configured} is not a file: name the {VERSIONS} to use, or none")
        return configured
    places = [working_folder / VERSIONS]
    if environ.get(BANK_VARIABLE):
        places.append(Path(environ[BANK_VARIABLE]) / VERSIONS)
    for place in places:
        if place.is_file():
            return place
    return Path(str(files("headrace.platforms") / "architectures" / VERSIONS))


def _resolve(value: str, environ: Mapping[str, str], versions_file: Path | None, origin: str) -> str:
    if not _DOTTED.fullmatch(value):
        return _check_name(value, origin)
    path = find_versions(environ, versions_file)
    entry: Any = _read_yaml(path)
    for key in ("images", *value.split(".")):
        entry = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(entry, str) or not entry:
        raise NotFound(
            f"{path} has no image images.{value}, which {origin} needs: "
            "add it, or name an image, such as registry.example/name:tag"
        )
    return _check_name(entry, f"{path}: images.{value}")


def _read_yaml(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise InvalidArgument(f"{path} has more than {_MAX_BYTES} bytes: it is not a {VERSIONS}")
        return load_yaml(raw.decode())
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        line = yaml_error_line(error)
        location = path if line is None else f"{path}, line {line}"
        raise InvalidArgument(f"{location}: {yaml_error_reason(error, 'not valid YAML')}") from None


def _check_name(name: str, origin: str) -> str:
    if not _IMAGE.fullmatch(name):
        raise InvalidArgument(
            f"{origin}: {name[:100]!a} is not the name of an image, such as registry.example/name:tag"
        )
    return name


def _repository(name: str) -> str:
    """Return the last part of an image's name, without tag and digest."""
    return name.split("@", 1)[0].rsplit("/", 1)[-1].split(":", 1)[0]
