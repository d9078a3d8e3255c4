# SPDX-License-Identifier: Apache-2.0
"""What local-docker needs before anything is started. Called by `driver.preflight`."""

from __future__ import annotations

import json
import re
import shutil
from urllib.parse import urlsplit

from headrace.core.errors import HeadraceError
from headrace.platforms.contract import Check
from headrace.platforms.docker.engine import Engine
from headrace.platforms.docker.looking import is_tegra
from headrace.platforms.docker.settings import DockerSettings
from headrace.platforms.docker.troubles import engine_error
from headrace.platforms.docker.words import gpu_words, network_to_make

_LEAST = (20, 10)
_INSTALL = "install Docker (https://docs.docker.com/engine/install/, or Debian's docker.io)"


async def checks_of(engine: Engine, settings: DockerSettings) -> list[Check]:
    """In the order in which they have to be mended; none that cannot pass because of an earlier one."""
    if shutil.which("docker") is None:
        return [Check("docker", False, f"the program docker is not on the PATH: {_INSTALL}")]
    try:
        done = await engine.run("version", "--format", "{{json .}}")
    except HeadraceError as error:
        return [Check("docker", False, error.message)]
    if done.code != 0:
        return [Check("docker", False, engine_error(done, "the engine does not answer").message)]
    version = version_of(done.out)
    text = ".".join(map(str, version))
    checks = [Check("docker", True, "the engine answers")]
    enough = version >= _LEAST
    said = f"the engine is {text}" + ("" if enough else f"; 20.10 or newer is needed: {_INSTALL}")
    checks.append(Check("version", enough, said))
    checks.append(await _network(engine, settings.network))
    machine = machine_of(settings.host)
    if machine:
        inside = settings.address in ("127.0.0.1", "::1", "localhost")
        said = f"services are published on {machine}" + (
            f" for itself alone ({settings.address}): publish them on an address that is reached from here, or forward "
            "their ports with ssh -L"
            if inside
            else ""
        )
        checks.append(Check("address", not inside or bool(settings.url_host), said))
    if settings.check_gpus:
        checks.append(await _gpus(engine, settings))
    return checks


async def _network(engine: Engine, name: str) -> Check:
    try:
        there = not network_to_make(name) or bool(await engine.inspect("network", name))
    except HeadraceError as error:
        return Check("network", False, error.message)
    return Check("network", True, f"{name} is there" if there else f"{name} is made by the first service")


async def _gpus(engine: Engine, settings: DockerSettings) -> Check:
    try:
        tegra = settings.gpu_way == "tegra" or (settings.gpu_way == "auto" and is_tegra(await engine.info()))
        flags, variables = gpu_words(max(1, len(settings.gpu_ids)), settings.gpu_ids, tegra=tegra)
        more = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        words = ("run", "--rm", *flags, *more, settings.gpu_image, "nvidia-smi", "-L")
        done = await engine.run(*words, seconds=settings.pull_seconds)
    except HeadraceError as error:
        return Check("gpus", False, error.message)
    if done.code != 0:
        return Check("gpus", False, engine_error(done, "a container sees no GPU").message)
    return Check("gpus", True, f"a container sees {len(done.out.splitlines())}")


def version_of(told: str) -> tuple[int, ...]:
    """The engine's version out of `docker version`; (0,) where it tells none."""
    try:
        server = json.loads(told).get("Server") or {}
    except (ValueError, AttributeError):
        server = {}
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(server.get("Version", "")))
    return tuple(int(part) for part in found.groups() if part is not None) if found else (0,)


def machine_of(docker_host: str) -> str:
    """The machine that DOCKER_HOST names; "" where that is this one."""
    parts = urlsplit(docker_host)
    if parts.scheme not in ("ssh", "tcp", "http", "https"):
        return ""
    return "" if parts.hostname in (None, "localhost", "127.0.0.1", "::1") else str(parts.hostname)
