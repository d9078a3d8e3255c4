# SPDX-License-Identifier: Apache-2.0
"""Containers for the docker command line: arguments of `docker create`, and the state that `docker inspect` reports. No I/O.

The driver `local-docker` and the Docker runtime of the local fleet use it. Each text of a user is one argument or a part of
one, so no shell reads it; what docker itself would misread (options as images, commas in a mount) is quoted or refused.
"""

from __future__ import annotations

import io
import re
import shlex
import signal
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import InvalidArgument, ResourceExhausted
from headrace.platforms.contract import Container, LaunchSpec, Mount, PlatformStatus, check_job_id
from headrace.platforms.docker.settings import DockerSettings

JOB_LABEL = "headrace.job"
"""On every container of the driver: the job id."""
MADE_LABEL = "headrace.made"
"""On a network that a driver created."""
SHELL_LABEL = "headrace.shell"
"""On an image whose entry point does not run shell lines: the shell to use."""
SECRETS_FOLDER = "headrace-secrets"
"""At the root of the container's file system; empty as soon as the container's first line has read it."""

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
_NETWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BUILT_IN_NETWORKS = frozenset({"bridge", "host", "none", "default"})
_SIGNAL_BASE = 128


@dataclass(frozen=True, slots=True)
class Image:
    """An image of the engine."""

    name: str
    shell: str = ""
    """See `SHELL_LABEL`."""


# Arguments


def checked_container(spec: LaunchSpec) -> Container:
    """Return the container of a spec. Raises InvalidArgument for values that would not reach the engine unchanged."""
    check_job_id(spec.job_id)
    container = spec.container
    if container is None:
        raise InvalidArgument("the platform local-docker runs containers: give the service an image and a command")
    check_image(container.image)
    for name in (*spec.environment, *spec.secret_environment):
        if not _VARIABLE.fullmatch(name):
            raise InvalidArgument(f"{name[:200]!a} is not a variable's name: letters, digits and _")
    texts = [container.command, *spec.environment.values(), *spec.secret_environment.values()]
    texts += [text for pair in spec.labels.items() for text in pair]
    if any("\0" in text for text in texts):
        raise InvalidArgument("a zero byte cannot reach a container: take it out of the command, variable or label")
    for mount in container.mounts:
        mount_args(mount)
    return container


def check_image(name: str) -> None:
    """Raise InvalidArgument if this is not the name of an image: docker must not read it as an option."""
    if not _IMAGE.fullmatch(name):
        raise InvalidArgument(f"{name[:200]!a} is not an image's name, such as nvcr.io/nvidia/tao/tao-toolkit:7.0.1")


def is_user_network(name: str) -> bool:
    """Whether this network is created by name, and not built in. Raises InvalidArgument if it is not a name."""
    if not _NETWORK.fullmatch(name):
        raise InvalidArgument(
            f"{name[:200]!a} is not a network's name; change DOCKER_NETWORK: letters, digits, _, . and -"
        )
    return name not in _BUILT_IN_NETWORKS


def create_args(
    spec: LaunchSpec, container: Container, image: Image, settings: DockerSettings, *, tegra: bool
) -> tuple[str, ...]:
    """Return the arguments of `docker create` for a service."""
    args = ["create", "--name", spec.job_id]
    labels = {**{f"headrace.{key}": value for key, value in spec.labels.items()}, "tao-toolkit": "headrace"}
    for key, value in {**labels, "tao-job": spec.job_id, JOB_LABEL: spec.job_id}.items():
        args += ["--label", f"{key}={value}"]
    args += ["--publish", _published(settings.address, spec.host_port, container.port), "--network", settings.network]
    args += ["--shm-size", str(settings.shm_bytes), *log_args(settings.log_bytes // 2)]
    variables = dict(spec.environment)
    if spec.gpus > 0 and settings.gpu_way != "none":
        flags, more = gpu_args(spec.gpus, settings.gpu_ids, tegra=tegra)
        args += flags
        variables = {**more, **variables}
    for name, value in variables.items():
        args += ["--env", f"{name}={value}"]
    for mount in container.mounts:
        args += mount_args(mount)
    command = entry_command(container.command, secret=bool(spec.secret_environment))
    shell = settings.shell_path or image.shell or "/bin/bash"
    if image.shell:
        # The entry point of such an image is a program. Other entry points prepare the machine and run their arguments.
        return (*args, "--entrypoint", shell, image.name, "-c", command)
    return (*args, image.name, shell, "-c", command)


def log_args(max_bytes: int) -> list[str]:
    """Return the options that keep two log files of `max_bytes`: an engine's default may keep all, or not be readable."""
    return ["--log-driver", "json-file", "--log-opt", f"max-size={max(max_bytes, 1024)}", "--log-opt", "max-file=2"]


def gpu_args(count: int, ids: Sequence[str], *, tegra: bool) -> tuple[list[str], dict[str, str]]:
    """Return the options and variables that give GPUs to a container."""
    if ids and len(ids) < count:
        raise ResourceExhausted(f"{count} GPUs are asked for and {len(ids)} may be given: name more, or ask for fewer")
    gpu_ids = list(ids[:count])
    if tegra:
        visible = ",".join(gpu_ids) or "all"
        return ["--runtime", "nvidia"], {"NVIDIA_DRIVER_CAPABILITIES": "all", "NVIDIA_VISIBLE_DEVICES": visible}
    # docker parses the value of the option as a line of CSV.
    return ["--gpus", _csv(f"device={','.join(gpu_ids)}") if gpu_ids else str(count)], {}


def mount_args(mount: Mount, *, read_only: bool = True) -> list[str]:
    """Return the options that mount a folder or file of the engine's machine."""
    for path in (mount.host, mount.inside):
        if not path.startswith("/") or any(ord(letter) < 32 for letter in path):
            raise InvalidArgument(f"{path[:200]!a} cannot be mounted: give an absolute path without control characters")
    fields = ["type=bind", f"source={mount.host}", f"target={mount.inside}", *(["readonly"] if read_only else [])]
    return ["--mount", ",".join(map(_csv, fields))]


def entry_command(command: str, *, secret: bool) -> str:
    """Return the shell line of the container: read the secrets, remove them, run the command."""
    if not secret:
        return command
    file = f"/{SECRETS_FOLDER}/environment"
    return f". {file} && rm -f {file} && {command}"


def secrets_tar(variables: Mapping[str, str]) -> bytes:
    """Return a tar archive for `docker cp` to the container's root: a folder with a file of shell exports."""
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    content = lines.encode("utf-8", "surrogateescape")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        # The user of the image, whoever that is, must be able to read and remove them; the container has no other users. On
        # the engine's machine they are in a folder that only root can read.
        folder = tarfile.TarInfo(SECRETS_FOLDER)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o777
        tar.addfile(folder)
        file = tarfile.TarInfo(f"{SECRETS_FOLDER}/environment")
        file.size, file.mode = len(content), 0o666
        tar.addfile(file, io.BytesIO(content))
    return archive.getvalue()


def _published(address: str, host_port: int | None, port: int) -> str:
    bracketed = f"[{address}]" if ":" in address else address
    return f"{bracketed}:{'' if host_port is None else host_port}:{port}"


def _csv(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if set(text) & set('",') else text


# State


@dataclass(frozen=True, slots=True)
class ContainerState:
    """The `State` of a container, as `docker inspect` reports it."""

    status: str
    """created, running, paused, restarting, removing, exited, dead."""
    exit_code: int | None = None
    error: str = ""
    """The first line of the engine's error."""
    out_of_memory: bool = False
    pid: int | None = None

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> ContainerState:
        """Return the state of an inspected container."""
        state = document.get("State") or {}
        code = state.get("ExitCode")
        lines = str(state.get("Error") or "").strip().splitlines()
        return cls(
            str(state.get("Status") or ""),
            code if isinstance(code, int) else None,
            lines[0][:500] if lines else "",
            state.get("OOMKilled") is True,
            state.get("Pid") or None,
        )


def container_status(document: Mapping[str, Any]) -> PlatformStatus:
    """Return the status of an inspected container."""
    name = str(document.get("Name", "")).lstrip("/")
    state = ContainerState.parse(document)
    code = state.exit_code
    match state.status:
        case "created" if state.error or code:
            # The engine could not start the container, and leaves it as created.
            return PlatformStatus("ended", name, "Failed", code, state.error or "it was never started")
        case "created" | "restarting":
            return PlatformStatus("starting", name, "Pending")
        case "running" | "paused":
            reason = "it is paused" if state.status == "paused" else ""
            return PlatformStatus("running", name, "Running", reason=reason)
        case "removing":
            return PlatformStatus("ended", name, "Terminating", reason="it is being removed")
        case "exited":
            return PlatformStatus("ended", name, "Succeeded" if code == 0 else "Failed", code, _exit_reason(state))
        case "dead":
            return PlatformStatus("ended", name, "Failed", code, "the engine could not remove it: see its log")
    return PlatformStatus("ended", name, "Unknown", reason=f"the engine reports the status {state.status!a}")


def _exit_reason(state: ContainerState) -> str:
    if state.out_of_memory:
        return "the container was killed because it used more memory than it may"
    if state.error:
        return state.error
    if state.exit_code is not None and state.exit_code > _SIGNAL_BASE:
        try:
            return f"the container was ended by {signal.Signals(state.exit_code - _SIGNAL_BASE).name}"
        except ValueError:
            pass
    return f"the container has ended with code {state.exit_code}"


def with_log_tail(status: PlatformStatus, lines: list[str]) -> PlatformStatus:
    """Return the status of a failed container with the last lines of its log in the reason."""
    tail = " | ".join(line.strip()[:200] for line in lines if line.strip())
    if not tail:
        return status
    reason = f"{status.reason}; the log ends with: {tail}"
    return PlatformStatus(status.phase, status.name, status.pod_phase, status.exit_code, reason)


def published_port(document: Mapping[str, Any]) -> int | None:
    """Return the host port of a running container; None if it has none."""
    ports = (document.get("NetworkSettings") or {}).get("Ports") or {}
    for bindings in ports.values():
        for binding in bindings or ():
            if str(binding.get("HostPort", "")).isdigit():
                return int(binding["HostPort"])
    return None


def is_tegra(info: Mapping[str, Any]) -> bool:
    """Whether the engine's machine, by `docker info`, is a Tegra with its GPU on the chip."""
    kernel = str(info.get("KernelVersion", ""))
    return "tegra" in kernel and "nvidia" in (info.get("Runtimes") or {})
