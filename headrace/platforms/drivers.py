# SPDX-License-Identifier: Apache-2.0
"""A platform's name and what was told about it, as its driver. Called by `launcher`.

Drivers are imported when they are asked for: none of them should cost those who use another one.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from headrace.core.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from headrace.platforms.contract import Driver
from headrace.platforms.registry import DEFAULT_PATH

PROCESS = "process"
PORTS = (8080, 8199)
_ROOMS: Mapping[str, tuple[str, str]] = {
    "local-docker": ("docker", "Docker"),
    "slurm": ("slurm", "Slurm"),
    "kubernetes": ("kubernetes", "Kubernetes"),
    "lepton": ("lepton", "Lepton"),
    "brev": ("brev", "Brev"),
}
PLATFORMS = (PROCESS, *_ROOMS)
"""`process`: no container at all; the others as the seed names them."""
_FOLDERS = ("state", "state_dir")
"""What drivers call their own folder on this machine."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """What a driver is made with."""

    state_dir: Path
    """For `process`: where the services' files lie."""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the platform, by the names of its settings class; texts are read as its types."""


def check_platform(text: str) -> str:
    """Raises InvalidArgument for a platform that is not known."""
    if text not in PLATFORMS:
        raise InvalidArgument(f"the platform {text[:64]!a} is not known: use one of {', '.join(PLATFORMS)}")
    return text


def default_state_dir(registry: Path, environ: Mapping[str, str]) -> Path:
    """Where the files of services of this machine lie: in the user's state for TAO's registry, else beside the file."""
    if registry != DEFAULT_PATH:
        return registry.with_name(registry.name + ".services")
    base = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return Path(base) / "headrace" / "services"


def check_own(folder: Path) -> None:
    """Raises PermissionDenied for a folder of somebody else's, who could put programs' files there: /tmp is shared."""
    try:
        found = os.lstat(folder)
    except OSError:
        return
    if found.st_uid != os.geteuid() or (found.st_mode & 0o022 and not found.st_mode & 0o1000):
        raise PermissionDenied(
            f"{folder} belongs to another user, or others may write there: name a folder of your own with --state-dir"
        )


def driver_of(platform: str, options: DriverOptions) -> Driver:
    """Raises InvalidArgument for what is not known, FailedPrecondition where the driver cannot be had."""
    if check_platform(platform) == PROCESS:
        from headrace.platforms.process import ProcessDriver

        check_own(options.state_dir)
        if options.given:
            raise InvalidArgument(f"the platform process has no setting {min(options.given)[:64]!a}")
        return ProcessDriver(options.state_dir, ports=PORTS, environ=options.environ)
    room, word = _ROOMS[platform]
    kind = _named(f"headrace.platforms.{room}.driver", f"{word}Driver", platform)
    return cast("Driver", kind(_settings_of(platform, options)))


def recorded_settings(platform: str, options: DriverOptions) -> dict[str, Any]:
    """What a driver is made with and is not its default, as JSON: whoever has it reaches the same place without variables.

    Nothing secret is among it.
    """
    if platform == PROCESS:
        return {}
    settings = _settings_of(platform, options)
    made: dict[str, Any] = {}
    for each in dataclasses.fields(settings):
        value = getattr(settings, each.name)
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if each.repr and each.name not in _FOLDERS and value != default:
            made[each.name] = (
                str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            )
    return made


def _settings_of(platform: str, options: DriverOptions) -> Any:
    room, word = _ROOMS[platform]
    settings = _named(f"headrace.platforms.{room}.settings", f"{word}Settings", platform)
    given = read_settings(settings, options.given, platform)
    for each in dataclasses.fields(settings):
        if each.name in _FOLDERS:
            # Beside the services' other files, so that whoever has the record finds it.
            given.setdefault(each.name, options.state_dir / room)
    return settings.from_environment(options.environ, **given)


def read_settings(settings: type[Any], given: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """Texts as the types of a settings class; what is of its type already is left as it is."""
    kinds = typing.get_type_hints(settings)
    known = [each.name for each in dataclasses.fields(settings)]
    secret = {each.name for each in dataclasses.fields(settings) if not each.repr}
    read: dict[str, Any] = {}
    for name, value in given.items():
        key = name.replace("-", "_")
        if key not in known:
            raise InvalidArgument(
                f"the platform {platform} has no setting {name[:64]!a}: it knows {', '.join(sorted(known))}"
            )
        if key in secret:
            raise InvalidArgument(f"{name} is secret: set the variable that the platform's own tools read it from")
        read[key] = _read(value, kinds[key], name) if isinstance(value, str) else _unlisted(value)
    return read


def _read(text: str, kind: Any, name: str) -> Any:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    origins = [typing.get_origin(each) or each for each in kinds]
    if str in origins or Path in origins or typing.Literal in origins:
        return Path(text) if str not in origins and Path in origins else text
    if bool in origins:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise InvalidArgument(f"{name}: write true or false")
        return text.lower() in _TRUE
    if Mapping in origins:
        return dict(part.partition("=")[::2] for part in text.split(",") if part)
    if tuple in origins:
        return tuple(part for part in text.split(",") if part)
    try:
        return (int if int in origins else float)(text)
    except ValueError:
        raise InvalidArgument(f"{name}: {text[:64]!a} is no number") from None


def _unlisted(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _named(module: str, name: str, platform: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise FailedPrecondition(
            f"the platform {platform} cannot be used with this installation: {error.name or module} is missing"
        ) from None
