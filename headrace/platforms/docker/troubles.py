# SPDX-License-Identifier: Apache-2.0
"""What the docker program complains about, as errors that say what to do. Called by `engine` and `driver`; pure."""

from __future__ import annotations

import re

from headrace.core.errors import (
    AlreadyExists,
    FailedPrecondition,
    HeadraceError,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from headrace.platforms.commands import Completed

_MISSING = re.compile(
    r"no such (container|object|image|network)|network \S+ not found|not found: manifest", re.IGNORECASE
)
_NO_ENGINE = ("Cannot connect to the Docker daemon", "error during connect", "Is the docker daemon running")
_REFUSED = ("unauthorized", "authentication required", "denied: ", "access denied", "forbidden", "no basic auth")
_PORT_TAKEN = ("port is already allocated", "address already in use", "ports are not available")


def complaint(done: Completed) -> str:
    """The line that says why: the docker program repeats itself in others after it."""
    lines = [line.strip() for line in done.err.splitlines() if line.strip()]
    for line in lines:
        for start in ("Error response from daemon: ", "Error: ", "docker: "):
            if line.startswith(start):
                return line.removeprefix(start)[:500]
    return lines[0][:500] if lines else done.told


def is_missing(done: Completed) -> bool:
    """Whether what was named is not there."""
    return done.code != 0 and _MISSING.search(done.err) is not None


def is_taken(done: Completed) -> bool:
    """Whether another container has the name."""
    return done.code != 0 and "Conflict. The container name" in done.err


def lost_network(done: Completed) -> bool:
    """Whether another process removed the network, or made it too, between two steps."""
    return done.code != 0 and re.search(r"network \S+ (not found|is ambiguous)", done.err) is not None


def engine_error(done: Completed, what: str) -> HeadraceError:
    """Why `what`, such as "the container cannot be made", is so."""
    said = complaint(done)
    if any(text in done.err for text in _NO_ENGINE):
        return Unavailable(f"no Docker engine answers: start it, or set DOCKER_HOST to where it is ({said})")
    if "permission denied" in done.err and "connect" in done.err:
        return PermissionDenied(
            f"the Docker engine does not let this user in: join the group docker, or set DOCKER_HOST to your own ({said})"
        )
    if is_taken(done):
        return AlreadyExists(f"{what}: a container of this name was started before")
    if any(text in done.err for text in _PORT_TAKEN):
        return ResourceExhausted(f"{what}: its port is taken; stop what listens there, or choose another ({said})")
    if "could not select device driver" in done.err and "gpu" in done.err:
        return FailedPrecondition(
            f"{what}: the engine cannot give GPUs; install the NVIDIA container toolkit on its machine, run "
            "`nvidia-ctk runtime configure --runtime=docker` and start the engine anew, or do without: gpu_way=none"
        )
    if "unknown or invalid runtime name: nvidia" in done.err or "Unknown runtime specified nvidia" in done.err:
        return FailedPrecondition(f"{what}: the engine has no runtime nvidia; install the NVIDIA container runtime")
    if "no space left on device" in done.err:
        return ResourceExhausted(f"{what}: the engine's disk is full; `docker system df` shows with what")
    return FailedPrecondition(f"{what}: {said}")


def pull_error(lines: list[str], image: str, registry: str, *, keyed: bool, user: str) -> HeadraceError:
    """Why an image did not arrive, and which credentials would help."""
    text = "\n".join(lines)
    said = lines[-1].removeprefix("Error response from daemon: ")[:300] if lines else "the program said nothing"
    ours = _registry_of(image) == registry
    if any(part in text for part in _REFUSED) or "does not exist or may require" in text:
        if ours and keyed:
            how = f"the key in NGC_KEY, used as {user}, is not valid or may not pull it"
        elif ours:
            how = f"set NGC_KEY to a key of {registry}"
        else:
            how = f"check the name, and log in with `docker login {_registry_of(image)}` if it is private"
        return FailedPrecondition(f"the image {image} cannot be pulled: {how} ({said})")
    if any(part in text for part in ("manifest unknown", "not found", "name unknown")):
        return FailedPrecondition(f"the image {image} cannot be pulled: its registry has no such image or tag ({said})")
    if any(part in text for part in _NO_ENGINE):
        return engine_error(Completed(1, "", text), "the image cannot be pulled")
    if "no space left on device" in text:
        return ResourceExhausted(f"the image {image} cannot be pulled: the engine's disk is full ({said})")
    return Unavailable(
        f"the image {image} cannot be pulled: its registry cannot be reached; check the name and the network, or load "
        f"the image with `docker load` ({said})"
    )


def _registry_of(image: str) -> str:
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"


def needs_key(image: str, registry: str) -> bool:
    """Whether an image lies in that registry."""
    return _registry_of(image) == registry
