# SPDX-License-Identifier: Apache-2.0
"""Which image a service runs in: TAO's by its keys and versions.yaml, or ours. Called by the launcher.

Reads versions.yaml and nothing else. Whether an image can be had is the platform's business.
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
from headrace.platforms.architecture_files import VERSIONS
from headrace.platforms.catalogue import Architecture
from headrace.version import __version__

OWN = "headrace"
OWN_VARIABLE = "HEADRACE_IMAGE"
"""Its value is our image under another name, and its presence asks for ours."""
VERSIONS_VARIABLE = "TAO_VERSIONS_FILE"
BANK_VARIABLE = "TAO_SKILL_BANK_PATH"

_DOTTED = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")
# What registries, Enroot (`registry#name`, /path/to.sqsh) and Apptainer (docker://) write, and no shell or flag can misread.
_IMAGE = re.compile(r"(/|\./|[a-z]+://)?[A-Za-z0-9][A-Za-z0-9._:/@#+-]{0,510}")
_MOST_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Image:
    """What is run."""

    name: str
    own: bool
    """Whether the program in it is `headrace`."""


def choose_image(
    arch: Architecture, environ: Mapping[str, str], image: str = "", versions_file: Path | None = None
) -> Image:
    """The image that was asked for, by `image` or by the variables; else TAO's for the architecture.

    `image`: "headrace" for ours, a key of versions.yaml, or an image. Raises InvalidArgument, NotFound or
    FailedPrecondition that says what to set.
    """
    own = environ.get(OWN_VARIABLE, "")
    if image == OWN or (not image and own):
        return Image(_checked(own or f"{OWN}:{__version__}", OWN_VARIABLE), True)
    if not image:
        name = resolve_image(arch, environ, versions_file)
    else:
        name = _resolved(image, environ, versions_file, "the image")
    return Image(name, name == own or _repository(name) == OWN)


def resolve_image(arch: Architecture, environ: Mapping[str, str], versions_file: Path | None = None) -> str:
    """TAO's image for an architecture: `IMAGE_<KEY>`, else the default; keys are looked up in versions.yaml."""
    variable = f"IMAGE_{arch.image_key}"
    value = environ.get(variable) or arch.image_default
    if not value:
        raise FailedPrecondition(f"there is no default image for {arch.name}: set {variable}, or name an image")
    return _resolved(value, environ, versions_file, variable if environ.get(variable) else arch.source or arch.name)


def find_versions(environ: Mapping[str, str], versions_file: Path | None = None, here: Path = Path()) -> Path:
    """The versions.yaml that counts: the given one, `TAO_VERSIONS_FILE`, this folder's, the skill bank's, ours."""
    named = versions_file or (Path(environ[VERSIONS_VARIABLE]) if environ.get(VERSIONS_VARIABLE) else None)
    if named is not None:
        if not named.is_file():
            raise NotFound(f"{named} is no file: name the {VERSIONS} to be used, or none")
        return named
    places = [here / VERSIONS]
    if environ.get(BANK_VARIABLE):
        places.append(Path(environ[BANK_VARIABLE]) / VERSIONS)
    for place in places:
        if place.is_file():
            return place
    return Path(str(files("headrace.platforms") / "architectures" / VERSIONS))


def _resolved(value: str, environ: Mapping[str, str], versions_file: Path | None, origin: str) -> str:
    if not _DOTTED.fullmatch(value):
        return _checked(value, origin)
    path = find_versions(environ, versions_file)
    found: Any = _document(path)
    for key in ("images", *value.split(".")):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, str) or not found:
        raise NotFound(
            f"{path} has no image images.{value}, which {origin} asks for: "
            "add it, or name an image, such as registry.example/name:tag"
        )
    return _checked(found, f"{path}: images.{value}")


def _document(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise InvalidArgument(f"{path} has more than {_MOST_BYTES} bytes: it is no {VERSIONS}")
        return yaml.safe_load(raw)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise InvalidArgument(f"{path}{line}: not YAML that can be read") from None


def _checked(name: str, origin: str) -> str:
    if not _IMAGE.fullmatch(name):
        raise InvalidArgument(f"{origin}: {name[:100]!a} is no name of an image, such as registry.example/name:tag")
    return name


def _repository(name: str) -> str:
    """The last part of an image's name, without tag and digest."""
    return name.split("@", 1)[0].rsplit("/", 1)[-1].split(":", 1)[0]
