# SPDX-License-Identifier: Apache-2.0
"""The platform that services are started on: its driver, and what `jobs` has to know of it. Called by `app`.

Without a word about it, services are processes of this machine, and `jobs` makes their driver itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.jobs.settings import ContainerSettings, JobSettings
from headrace.platforms.contract import Driver
from headrace.platforms.drivers import PROCESS, DriverOptions, driver_of
from headrace.programs.gateway.settings import PlatformSettings

log = logging.getLogger("headrace.gateway")

PLATFORMS = (PROCESS, "local-docker", "kubernetes", "slurm")
_KUBERNETES = {
    "workload": "statefulset",
    "service_type": "ClusterIP",
    # The gateway asks a service itself how far it is, so one that loads must be reached already.
    "readiness_path": "/api/v1/health/liveness",
}
"""As TAO's API makes its services; each can be set otherwise."""


def check_platform(platform: PlatformSettings) -> None:
    """Raises InvalidArgument for what does not fit together."""
    if platform.name not in PLATFORMS:
        raise InvalidArgument(f"--platform {platform.name[:64]!a} is not known: use one of {', '.join(PLATFORMS)}")
    if platform.name == PROCESS:
        for flag, given in (
            ("--platform-setting", platform.given),
            ("--image", platform.image),
            ("--callback-url", platform.callback_url),
            ("--no-gpus", not platform.gpus),
        ):
            if given:
                raise InvalidArgument(f"{flag} is for services elsewhere: name their --platform too")
    if platform.callback_url and not _is_web(platform.callback_url):
        raise InvalidArgument("--callback-url is written http://HOST:PORT, as services reach the gateway")


def on_platform(settings: JobSettings, platform: PlatformSettings, environ: Mapping[str, str]) -> JobSettings:
    """What `jobs` is told, with where its services run."""
    check_platform(platform)
    if platform.name == PROCESS:
        return settings
    mode = platform.given.get("mode") or environ.get("SLURM_CONTAINER_MODE", "")
    bare = platform.name == "slurm" and mode == "bare"
    if bare and platform.image:
        raise InvalidArgument("--image: with the mode bare there is no container; leave it out")
    made = ContainerSettings(platform.name, platform.image or "headrace", environ, bare, platform.gpus)
    return replace(settings, containers=made, callback_url=platform.callback_url)


def driver_for(platform: PlatformSettings, data_dir: Path, environ: Mapping[str, str]) -> Driver | None:
    """The platform's driver; None for processes. Raises InvalidArgument for a setting that it does not have."""
    check_platform(platform)
    if platform.name == PROCESS:
        return None
    given: dict[str, str] = dict(platform.given)
    if platform.name == "kubernetes":
        given = {**_KUBERNETES, **given}
    return driver_of(platform.name, DriverOptions(data_dir / "platform", environ, given))


async def warn(driver: Driver) -> None:
    """Say what services will miss there. Records can be asked for without it, so it is no reason not to start."""
    try:
        missing = [check for check in await driver.preflight() if not check.passed]
    except HeadraceError as error:
        log.warning("%s: %s", driver.name, error.message)
        return
    for check in missing:
        log.warning("%s is not ready for services: %s: %s", driver.name, check.name, check.message)


def _is_web(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
