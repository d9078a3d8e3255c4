# SPDX-License-Identifier: Apache-2.0
"""The driver of each platform, created from its name and settings.

A driver is imported when it is needed: users of one platform do not pay for the others.
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
from headrace.core.extras import MissingExtra, extra_of
from headrace.platforms.contract import Driver
from headrace.platforms.registry import DEFAULT_PATH

PROCESS = "process"
PORTS = (8080, 8199)
_PACKAGES: Mapping[str, tuple[str, str]] = {
    "local-docker": ("docker", "Docker"),
    "slurm": ("slurm", "Slurm"),
    "kubernetes": ("kubernetes", "Kubernetes"),
    "lepton": ("lepton", "Lepton"),
    "brev": ("brev", "Brev"),
}
PLATFORMS = (PROCESS, *_PACKAGES)
"""`process` runs without containers; the other names are TAO's."""
_FOLDER_SETTINGS = ("state", "state_dir")
"""Settings that name the driver's folder on this machine."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """What a driver is created with."""

    state_dir: Path
    """For `process`: the folder of the services' files."""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the platform, by the fields of its settings class; texts are parsed to their types."""


def check_platform(text: str) -> str:
    """Return the platform. Raises InvalidArgument if it is unknown."""
    if text not in PLATFORMS:
        raise InvalidArgument(f"unknown platform {text[:64]!a}: use one of {', '.join(PLATFORMS)}")
    return text


def default_state_dir(registry: Path, environ: Mapping[str, str]) -> Path:
    """Return the folder of local services: in the user's state folder for TAO's registry, else beside the registry file."""
    if registry != DEFAULT_PATH:
        return registry.with_name(registry.name + ".services")
    base = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return Path(base) / "headrace" / "services"


def check_owner(folder: Path) -> None:
    """Raise PermissionDenied if another user owns a folder or may write to it, and so could change programs' files."""
    try:
        status = os.lstat(folder)
    except OSError:
        return
    if status.st_uid != os.geteuid() or (status.st_mode & 0o022 and not status.st_mode & 0o1000):
        raise PermissionDenied(
            f"{folder} belongs to another user, or others may write there: name a folder of your own with --state-dir"
        )


def create_driver(platform: str, options: DriverOptions) -> Driver:
    """Return the driver of a platform. Raises InvalidArgument for unknown settings, MissingExtra without its extra."""
    if check_platform(platform) == PROCESS:
        from headrace.platforms.process import ProcessDriver

        check_owner(options.state_dir)
        if options.given:
            raise InvalidArgument(f"the platform process has no setting {min(options.given)[:64]!a}")
        return ProcessDriver(options.state_dir, ports=PORTS, environ=options.environ)
    if platform == "kubernetes":
        from headrace.platforms.kubernetes_client.kubeconfig import import_httpx2

        import_httpx2()  # its preflight would ask for a kubeconfig first
    package, prefix = _PACKAGES[platform]
    kind = _load(f"headrace.platforms.{package}.driver", f"{prefix}Driver", platform)
    return cast("Driver", kind(_settings_of(platform, options)))


def recorded_settings(platform: str, options: DriverOptions) -> dict[str, Any]:
    """Return the settings that differ from their defaults, as JSON: with them the same place is reached without variables.

    Secrets are left out.
    """
    if platform == PROCESS:
        return {}
    settings = _settings_of(platform, options)
    recorded: dict[str, Any] = {}
    for setting in dataclasses.fields(settings):
        value = getattr(settings, setting.name)
        default = setting.default if setting.default_factory is dataclasses.MISSING else setting.default_factory()
        if setting.repr and setting.name not in _FOLDER_SETTINGS and value != default:
            recorded[setting.name] = (
                str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            )
    return recorded


def _settings_of(platform: str, options: DriverOptions) -> Any:
    package, prefix = _PACKAGES[platform]
    settings = _load(f"headrace.platforms.{package}.settings", f"{prefix}Settings", platform)
    given = parse_settings(settings, options.given, platform)
    for setting in dataclasses.fields(settings):
        if setting.name in _FOLDER_SETTINGS:
            # Beside the other files of services, so that the registry entry leads to it.
            given.setdefault(setting.name, options.state_dir / package)
    return settings.from_environment(options.environ, **given)


def parse_settings(settings: type[Any], values: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """Return settings with texts parsed to the types of a settings class."""
    kinds = typing.get_type_hints(settings)
    names = [setting.name for setting in dataclasses.fields(settings)]
    secret = {setting.name for setting in dataclasses.fields(settings) if not setting.repr}
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        key = name.replace("-", "_")
        if key not in names:
            raise InvalidArgument(
                f"the platform {platform} has no setting {name[:64]!a}: it has {', '.join(sorted(names))}"
            )
        if key in secret:
            raise InvalidArgument(f"{name} is secret: set the variable that the platform's own tools read it from")
        parsed[key] = _parse(value, kinds[key], name) if isinstance(value, str) else _as_tuple(value)
    return parsed


def _parse(text: str, kind: Any, name: str) -> Any:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    origins = [typing.get_origin(kind_) or kind_ for kind_ in kinds]
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
        raise InvalidArgument(f"{name}: {text[:64]!a} is not a number") from None


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _load(module: str, name: str, platform: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        extra = extra_of(error)
        if extra is not None:
            raise MissingExtra(f"the platform {platform}", extra) from None
        raise FailedPrecondition(
            f"the platform {platform} cannot be used with this installation: {error.name or module} is missing"
        ) from None
