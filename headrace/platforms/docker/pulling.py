# SPDX-License-Identifier: Apache-2.0
"""An image is made present: looked for, else pulled, with the registry's key where there is one. Called by `driver`.

The key goes to `docker login` by its standard input and into a folder that is removed at once after the pull: the user's
own logins are neither needed nor changed.
"""

from __future__ import annotations

import logging
import tempfile
from contextlib import aclosing
from pathlib import Path

from headrace.core.errors import FailedPrecondition
from headrace.platforms.docker.engine import Engine
from headrace.platforms.docker.settings import DockerSettings
from headrace.platforms.docker.troubles import complaint, needs_key, pull_error
from headrace.platforms.docker.words import SHELL_LABEL, Image

log = logging.getLogger("headrace.launch")

_LAYER_BEGUN = ": Pulling fs layer"
_LAYER_DONE = (": Pull complete", ": Already exists")


async def present_image(engine: Engine, name: str, settings: DockerSettings) -> Image:
    """The image, as the engine has it; raises FailedPrecondition or Unavailable where it cannot be pulled."""
    found = await engine.inspect("image", name)
    if not found:
        await _pull(engine, name, settings)
        found = await engine.inspect("image", name)
        if not found:
            raise FailedPrecondition(f"the image {name} was pulled and is not there; is it for another platform?")
    labels = (found[0].get("Config") or {}).get("Labels") or {}
    return Image(name, labels.get(SHELL_LABEL, ""))


async def _pull(engine: Engine, name: str, settings: DockerSettings) -> None:
    if not (settings.registry_key and needs_key(name, settings.registry)):
        await _fetch(engine, name, settings, {})
        return
    with tempfile.TemporaryDirectory(prefix="headrace-docker-") as folder:
        # With a folder of its own the program no longer knows the user's context, so it is told the engine.
        told = await engine.run("context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
        environment = {"DOCKER_CONFIG": str(Path(folder))}
        if not settings.host and told.code == 0 and told.out.strip():
            environment["DOCKER_HOST"] = told.out.strip()
        words = ("login", "--username", settings.registry_user, "--password-stdin", settings.registry)
        done = await engine.run(*words, input=settings.registry_key.encode(), environment=environment)
        if done.code != 0:
            raise FailedPrecondition(
                f"{settings.registry} does not accept the key in NGC_KEY for the image {name}: get a valid one, or "
                f"unset it to use your own `docker login` ({complaint(done)})"
            )
        await _fetch(engine, name, settings, environment)


async def _fetch(engine: Engine, name: str, settings: DockerSettings, environment: dict[str, str]) -> None:
    log.info("image %s: pulling", name)
    layers = done = 0
    said: list[str] = []
    words = ("pull", name)
    async with aclosing(engine.lines(*words, seconds=settings.pull_seconds, environment=environment)) as lines:
        async for line in lines:
            said = [*said[-9:], line]
            layers += line.endswith(_LAYER_BEGUN)
            if line.endswith(_LAYER_DONE):
                layers += line.endswith(_LAYER_DONE[1])
                done += 1
                log.info("image %s: %d of %d layers", name, done, layers)
    if said[-1:] != ["code 0"]:
        keyed = bool(settings.registry_key)
        raise pull_error(said[:-1], name, settings.registry, keyed=keyed, user=settings.registry_user)
    log.info("image %s: pulled", name)
