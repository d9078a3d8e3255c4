# SPDX-License-Identifier: Apache-2.0
"""The docker command line: run it, parse its JSON, pull images, check the engine, translate its errors.

The driver `local-docker` and the Docker runtime of the local fleet use it. DOCKER_HOST, contexts and ssh:// work because the
docker program itself handles them.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

from headrace.core.errors import (
    AlreadyExists,
    FailedPrecondition,
    HeadraceError,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from headrace.platforms.commands import Completed, run_command, stream_command
from headrace.platforms.contract import Check
from headrace.platforms.docker.containers import SHELL_LABEL, Image, gpu_args, is_tegra, is_user_network
from headrace.platforms.docker.settings import DockerSettings

log = logging.getLogger("headrace.launch")

REMOVAL_IN_PROGRESS = "is already in progress"
"""Part of the error of `docker rm` if the engine is removing the container already."""
_LAYER_STARTED = ": Pulling fs layer"
_LAYER_DONE = (": Pull complete", ": Already exists")
_MIN_VERSION = (20, 10)
_INSTALL = "install Docker (https://docs.docker.com/engine/install/, or Debian's docker.io)"
_MISSING = re.compile(
    r"no such (container|object|image|network)|network \S+ not found|not found: manifest", re.IGNORECASE
)
_NO_ENGINE = ("Cannot connect to the Docker daemon", "error during connect", "Is the docker daemon running")
_REFUSED = ("unauthorized", "authentication required", "denied: ", "access denied", "forbidden", "no basic auth")
_PORT_TAKEN = ("port is already allocated", "address already in use", "ports are not available")


class DockerCli:
    """The docker program, connected to one engine."""

    def __init__(self, settings: DockerSettings, program: str = "docker") -> None:
        self._settings = settings
        self._program = program
        self._environment = {"DOCKER_HOST": settings.host} if settings.host else {}

    async def run(
        self,
        *args: str,
        input: bytes = b"",
        seconds: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run it, whatever its exit code. Raises FailedPrecondition if docker is not installed, Unavailable on a timeout."""
        return await run_command(
            (self._program, *args),
            seconds=self._settings.command_seconds if seconds is None else seconds,
            input=input,
            environment={**self._environment, **(environment or {})},
        )

    async def must(self, failure_text: str, *args: str, input: bytes = b"", seconds: float | None = None) -> str:
        """Run it and return its output. Raises an error that starts with `failure_text` if it fails."""
        done = await self.run(*args, input=input, seconds=seconds)
        if done.code != 0:
            raise engine_error(done, failure_text)
        return done.out.strip()

    async def inspect(self, kind: str, *names: str) -> list[dict[str, Any]]:
        """Return the containers, images or networks of these names that exist."""
        done = await self.run(kind, "inspect", *names)
        if done.code != 0 and not is_missing(done):
            raise engine_error(done, f"the {kind} cannot be inspected")
        try:
            documents = json.loads(done.out or "[]")
        except ValueError:
            raise Unavailable(f"docker {kind} inspect printed something that is not JSON; is it Docker's?") from None
        return documents if isinstance(documents, list) else []

    async def inspect_container(self, name: str) -> dict[str, Any] | None:
        """Return a container; None if there is none of this name."""
        documents = await self.inspect("container", name)
        return documents[0] if documents else None

    async def info(self) -> dict[str, Any]:
        """Return the output of `docker info`."""
        output = await self.must("the engine does not answer", "info", "--format", "{{json .}}")
        try:
            document = json.loads(output)
        except ValueError:
            document = {}
        return document if isinstance(document, dict) else {}

    async def stop(self, name: str, grace_seconds: float) -> Completed:
        """Send SIGTERM to a container, and SIGKILL after the grace period."""
        grace = max(0, math.ceil(grace_seconds))
        seconds = grace + self._settings.command_seconds
        return await self.run("stop", "--time", str(grace), name, seconds=seconds)

    async def remove(self, name: str) -> Completed:
        """Kill a container and remove it with its anonymous volumes."""
        return await self.run("rm", "--force", "--volumes", name)

    async def log_tail(self, name: str, tail: int) -> tuple[list[str], str]:
        """Return the last lines of a container's log, and the error; "" if there is none."""
        lines: deque[str] = deque(maxlen=tail + 1)
        async with aclosing(self.stream("logs", "--tail", str(tail), name)) as stream:
            async for line in stream:
                lines.append(line)
        code = lines.pop()
        if code == "code 0":
            return list(lines)[-tail:], ""
        return [], lines[-1] if lines else code

    def stream(
        self, *args: str, seconds: float | None = None, environment: Mapping[str, str] | None = None
    ) -> AsyncGenerator[str, None]:
        """Yield its output line by line; see `commands.stream_command`."""
        return stream_command(
            (self._program, *args),
            seconds=self._settings.command_seconds if seconds is None else seconds,
            environment={**self._environment, **(environment or {})},
        )


# Images


async def ensure_image(docker: DockerCli, name: str, settings: DockerSettings) -> Image:
    """Return an image of the engine; pull it if it is missing. Raises FailedPrecondition or Unavailable.

    The registry key goes to `docker login` through standard input, into a temporary folder that is removed after the pull:
    the user's own logins are neither needed nor changed.
    """
    documents = await docker.inspect("image", name)
    if not documents:
        await _pull(docker, name, settings)
        documents = await docker.inspect("image", name)
        if not documents:
            raise FailedPrecondition(f"the image {name} was pulled and is not there; is it for another platform?")
    labels = (documents[0].get("Config") or {}).get("Labels") or {}
    return Image(name, labels.get(SHELL_LABEL, ""))


async def _pull(docker: DockerCli, name: str, settings: DockerSettings) -> None:
    if not (settings.registry_key and is_in_registry(name, settings.registry)):
        await _run_pull(docker, name, settings, {})
        return
    with tempfile.TemporaryDirectory(prefix="headrace-docker-") as folder:
        # With its own DOCKER_CONFIG the program does not know the user's context, so it gets the engine's address.
        context = await docker.run("context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
        environment = {"DOCKER_CONFIG": folder}
        if not settings.host and context.code == 0 and context.out.strip():
            environment["DOCKER_HOST"] = context.out.strip()
        args = ("login", "--username", settings.registry_user, "--password-stdin", settings.registry)
        done = await docker.run(*args, input=settings.registry_key.encode(), environment=environment)
        if done.code != 0:
            raise FailedPrecondition(
                f"{settings.registry} does not accept the key in NGC_KEY for the image {name}: get a valid one, or "
                f"unset it to use your own `docker login` ({error_line(done)})"
            )
        await _run_pull(docker, name, settings, environment)


async def _run_pull(docker: DockerCli, name: str, settings: DockerSettings, environment: dict[str, str]) -> None:
    log.info("Image %s: pulling", name)
    layers = done = 0
    output: list[str] = []
    async with aclosing(docker.stream("pull", name, seconds=settings.pull_seconds, environment=environment)) as lines:
        async for line in lines:
            output = [*output[-9:], line]
            layers += line.endswith(_LAYER_STARTED)
            if line.endswith(_LAYER_DONE):
                layers += line.endswith(_LAYER_DONE[1])
                done += 1
                log.info("Image %s: %d of %d layers", name, done, layers)
    if output[-1:] != ["code 0"]:
        has_key = bool(settings.registry_key)
        raise pull_error(output[:-1], name, settings.registry, keyed=has_key, user=settings.registry_user)
    log.info("Image %s: pulled", name)


# Preflight


async def run_preflight(docker: DockerCli, settings: DockerSettings) -> list[Check]:
    """Check the engine, in the order in which to fix problems; omits checks that cannot pass because of an earlier one."""
    if shutil.which("docker") is None:
        return [Check("docker", False, f"the program docker is not on the PATH: {_INSTALL}")]
    try:
        done = await docker.run("version", "--format", "{{json .}}")
    except HeadraceError as error:
        return [Check("docker", False, error.message)]
    if done.code != 0:
        return [Check("docker", False, engine_error(done, "the engine does not answer").message)]
    version = parse_version(done.out)
    is_supported = version >= _MIN_VERSION
    message = f"the engine is {'.'.join(map(str, version))}"
    checks = [
        Check("docker", True, "the engine answers"),
        Check("version", is_supported, message if is_supported else f"{message}; 20.10 or newer is needed: {_INSTALL}"),
        await _check_network(docker, settings.network),
    ]
    machine = remote_host(settings.host)
    if machine:
        is_private = settings.address in ("127.0.0.1", "::1", "localhost")
        message = f"services are published on {machine}" + (
            f" for itself alone ({settings.address}): publish them on an address that is reached from here, or forward "
            "their ports with ssh -L"
            if is_private
            else ""
        )
        checks.append(Check("address", not is_private or bool(settings.url_host), message))
    if settings.check_gpus:
        checks.append(await _check_gpus(docker, settings))
    return checks


async def _check_network(docker: DockerCli, name: str) -> Check:
    try:
        exists = not is_user_network(name) or bool(await docker.inspect("network", name))
    except HeadraceError as error:
        return Check("network", False, error.message)
    return Check("network", True, f"{name} exists" if exists else f"{name} is created by the first service")


async def _check_gpus(docker: DockerCli, settings: DockerSettings) -> Check:
    try:
        tegra = settings.gpu_way == "tegra" or (settings.gpu_way == "auto" and is_tegra(await docker.info()))
        flags, variables = gpu_args(max(1, len(settings.gpu_ids)), settings.gpu_ids, tegra=tegra)
        more = [arg for name, value in variables.items() for arg in ("--env", f"{name}={value}")]
        args = ("run", "--rm", *flags, *more, settings.gpu_image, "nvidia-smi", "-L")
        done = await docker.run(*args, seconds=settings.pull_seconds)
    except HeadraceError as error:
        return Check("gpus", False, error.message)
    if done.code != 0:
        return Check("gpus", False, engine_error(done, "a container sees no GPU").message)
    return Check("gpus", True, f"a container sees {len(done.out.splitlines())}")


def parse_version(output: str) -> tuple[int, ...]:
    """Return the engine's version from the output of `docker version`; (0,) if there is none."""
    try:
        server = json.loads(output).get("Server") or {}
    except (ValueError, AttributeError):
        server = {}
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(server.get("Version", "")))
    return tuple(int(part) for part in match.groups() if part is not None) if match else (0,)


def remote_host(docker_host: str) -> str:
    """Return the machine that DOCKER_HOST names; "" if it is this one."""
    parts = urlsplit(docker_host)
    if parts.scheme not in ("ssh", "tcp", "http", "https"):
        return ""
    return "" if parts.hostname in (None, "localhost", "127.0.0.1", "::1") else str(parts.hostname)


# Errors


def error_line(done: Completed) -> str:
    """Return the line with the cause: the docker program repeats itself in the lines after it."""
    lines = [line.strip() for line in done.err.splitlines() if line.strip()]
    for line in lines:
        for start in ("Error response from daemon: ", "Error: ", "docker: "):
            if line.startswith(start):
                return line.removeprefix(start)[:500]
    return lines[0][:500] if lines else done.error_line


def is_missing(done: Completed) -> bool:
    """Whether a command failed because the object does not exist."""
    return done.code != 0 and _MISSING.search(done.err) is not None


def is_name_conflict(done: Completed) -> bool:
    """Whether a command failed because another container has the name."""
    return done.code != 0 and "Conflict. The container name" in done.err


def lost_network(done: Completed) -> bool:
    """Whether another process removed or created the network between two steps."""
    return done.code != 0 and re.search(r"network \S+ (not found|is ambiguous)", done.err) is not None


def engine_error(done: Completed, failure_text: str) -> HeadraceError:
    """Return the error for a failed command. `failure_text`: "the container cannot be created", for example."""
    cause = error_line(done)
    if any(text in done.err for text in _NO_ENGINE):
        return Unavailable(f"no Docker engine answers: start it, or set DOCKER_HOST to where it is ({cause})")
    if "permission denied" in done.err and "connect" in done.err:
        return PermissionDenied(
            f"this user may not use the Docker engine: join the group docker, or set DOCKER_HOST to your own ({cause})"
        )
    if is_name_conflict(done):
        return AlreadyExists(f"{failure_text}: a container of this name was started before")
    if any(text in done.err for text in _PORT_TAKEN):
        return ResourceExhausted(
            f"{failure_text}: its port is taken; stop what listens there, or choose another ({cause})"
        )
    if "could not select device driver" in done.err and "gpu" in done.err:
        return FailedPrecondition(
            f"{failure_text}: the engine has no GPU support; install the NVIDIA container toolkit on its machine, run "
            "`nvidia-ctk runtime configure --runtime=docker` and restart the engine, or do without: gpu_way=none"
        )
    if "unknown or invalid runtime name: nvidia" in done.err or "Unknown runtime specified nvidia" in done.err:
        return FailedPrecondition(
            f"{failure_text}: the engine has no runtime nvidia; install the NVIDIA container runtime"
        )
    if "no space left on device" in done.err:
        return ResourceExhausted(f"{failure_text}: the engine's disk is full; `docker system df` shows with what")
    return FailedPrecondition(f"{failure_text}: {cause}")


def pull_error(lines: list[str], image: str, registry: str, *, keyed: bool, user: str) -> HeadraceError:
    """Return why an image could not be pulled, and which credentials would help."""
    text = "\n".join(lines)
    cause = lines[-1].removeprefix("Error response from daemon: ")[:300] if lines else "docker printed nothing"
    in_registry = is_in_registry(image, registry)
    if any(part in text for part in _REFUSED) or "does not exist or may require" in text:
        if in_registry and keyed:
            fix = f"the key in NGC_KEY, used as {user}, is not valid or may not pull it"
        elif in_registry:
            fix = f"set NGC_KEY to a key of {registry}"
        else:
            fix = f"check the name, and log in with `docker login {_registry_of(image)}` if it is private"
        return FailedPrecondition(f"the image {image} cannot be pulled: {fix} ({cause})")
    if any(part in text for part in ("manifest unknown", "not found", "name unknown")):
        return FailedPrecondition(
            f"the image {image} cannot be pulled: its registry has no such image or tag ({cause})"
        )
    if any(part in text for part in _NO_ENGINE):
        return engine_error(Completed(1, "", text), "the image cannot be pulled")
    if "no space left on device" in text:
        return ResourceExhausted(f"the image {image} cannot be pulled: the engine's disk is full ({cause})")
    return Unavailable(
        f"the image {image} cannot be pulled: its registry cannot be reached; check the name and the network, or load "
        f"the image with `docker load` ({cause})"
    )


def is_in_registry(image: str, registry: str) -> bool:
    """Whether the name of an image names that registry."""
    return _registry_of(image) == registry


def _registry_of(image: str) -> str:
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"
