# SPDX-License-Identifier: Apache-2.0
"""A container as the words of `docker create`, and what `docker inspect` says of its end. Pure; for `docker_driver`.

Containers share the network of the machine, so that 127.0.0.1 is the same place for all of a pod, for the leader of a group,
for routers and for probes; ports are changed as they are for processes. Folders are bound, and paths stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.fleet.local.driving import Box, Ended
from headrace.fleet.local.limits import Limits
from headrace.fleet.local.sight import OOM_KILLED
from headrace.fleet.words import part, text, whole
from headrace.platforms.contract import Mount
from headrace.platforms.docker.settings import DockerSettings
from headrace.platforms.docker.words import check_image, gpu_words, mount_words

FLEET, POD, CONTAINER = "headrace.fleet", "headrace.pod", "headrace.container"
"""Labels: whose fleet, which pod, which container of it."""
_SHARES = 1024
_OF_THE_PROGRAM = ("PATH", "HOME", "LD_", "DOCKER_", "GO", "SSL_", "HTTP_", "HTTPS_", "NO_", "http_", "https_", "no_")


def create_words(
    box: Box, name: str, fleet: str, settings: DockerSettings, log_bytes: int
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The words after `docker`, and variables for that program: the container's own, which no list of processes shows.

    Raises InvalidArgument, ResourceExhausted.
    """
    check_image(box.image)
    words = ["create", "--name", name, "--network", "host"]
    for label, value in ((FLEET, fleet), (POD, box.pod), (CONTAINER, box.name)):
        words += ["--label", f"{label}={value}"]
    words += ["--shm-size", str(box.shared_memory or settings.shm_bytes)]
    words += ["--log-driver", "json-file", "--log-opt", f"max-size={max(log_bytes, 1024)}", "--log-opt", "max-file=2"]
    words += _limit_words(box.limits)
    variables = dict(box.line.variables)
    if box.gpus:
        flags, more = gpu_words(len(box.gpus), box.gpus, tegra=settings.gpu_way == "tegra")
        words += flags
        variables = {**more, **variables}
    passed: dict[str, str] = {}
    for variable, value in variables.items():
        if variable.startswith(_OF_THE_PROGRAM) or "\0" in value or "=" in variable:
            words += ["--env", f"{variable}={value}"]
        else:
            words += ["--env", variable]
            passed[variable] = value
    for each in box.mounts:
        words += mount_words(Mount(each.here, each.inside.rstrip("/")), read_only=each.read_only)
    words += _own_words(box.spec)
    entry, rest = box.line.words[: box.line.entry], box.line.words[box.line.entry :]
    if entry:
        words += ["--entrypoint", entry[0]]
    return (*words, box.image, *entry[1:], *rest), passed


def _limit_words(limits: Limits) -> list[str]:
    words: list[str] = []
    if limits.memory is not None:
        # As much with swap as without: none.
        words += ["--memory", str(max(limits.memory, 6 << 20)), "--memory-swap", str(max(limits.memory, 6 << 20))]
    if limits.cores is not None:
        words += ["--cpus", f"{max(limits.cores, 0.01):.2f}"]
    if limits.share is not None:
        words += ["--cpu-shares", str(min(max(2, int(limits.share * _SHARES)), 262_144))]
    if limits.tasks is not None:
        words += ["--pids-limit", str(limits.tasks)]
    return words


def _own_words(container: Mapping[str, Any]) -> list[str]:
    """Its user and its folder."""
    words: list[str] = []
    user = whole(container, "securityContext", "runAsUser")
    group = whole(container, "securityContext", "runAsGroup")
    if user is not None:
        words += ["--user", f"{user}" if group is None else f"{user}:{group}"]
    if text(container, "workingDir"):
        words += ["--workdir", text(container, "workingDir")]
    return words


def ended_of(shown: Mapping[str, Any] | None) -> Ended | None:
    """How a container has ended; None while it runs."""
    if shown is None:
        return Ended(None)
    state = part(shown, "State")
    word, said = text(state, "Status"), text(state, "Error")
    if word in ("running", "paused", "restarting"):
        return None
    if word == "created":
        return Ended(None, message=said or "it was made, and never started")
    code = whole(state, "ExitCode")
    if state.get("OOMKilled") is True:
        return Ended(137 if code is None else code, OOM_KILLED, "it used more memory than its limit")
    return Ended(code, message=said)
